"""A thousand damaged requests: none is answered with a 5xx or never, or touches a model it does not name.

One that is refused, at once or by a failed result, touches none at all.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.helpers.damaged_requests import REFUSALS, Fuzzer
from tests.helpers.soaking import mostly_soak

if TYPE_CHECKING:
    from tests.helpers.api import Api


@pytest.mark.parametrize("seed", mostly_soak(range(4), but=[0]))
def test_damaged_requests_harm_nobody(api: Api, seed: int) -> None:
    api.trainer.scheduler.gap_timeout = 0.01
    bystander = api.model()
    api.run("forward_backward", api.train(bystander, 1))
    api.run("optim_step", api.step(bystander, 2))
    api.run("forward_backward", api.train(bystander, 3))
    before = api.state(bystander)
    fuzzer = Fuzzer(api, seed)
    counts: Counter[str] = Counter()
    for _ in range(250):
        method, path, content, headers = fuzzer.damaged()
        named = api.state(fuzzer.model)
        response = api.request(method, path, content=content, headers=headers)
        assert response.status_code < 500, (method, path, content[:500], response.text)
        counts[f"{response.status_code // 100}xx"] += 1
        refused = response.status_code >= 400
        if response.status_code >= 400:
            assert response.status_code in REFUSALS
            assert response.json()["detail"]
        elif response.status_code == 200 and b'"request_id"' in response.content and path != "retrieve_future":
            result = api.result(response.json()["request_id"])
            refused = "error" in result
            counts["failed" if refused else "done"] += 1
            assert result.get("category") != "server", (method, path, content[:500], result)
        if refused:
            assert api.state(fuzzer.model) == named, (method, path, content[:500])
    assert counts["4xx"] > 50, counts  # most are damaged beyond use
    assert counts["done"] > 3, counts  # and some are not
    assert api.state(bystander) == before
    assert "metrics" in api.run("optim_step", api.step(bystander, 4))
    assert api.state(bystander) != before
