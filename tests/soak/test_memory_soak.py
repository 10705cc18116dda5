"""The memory limit on a real model: what once had the server killed by the kernel."""  # R5.11

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.limited_server import limited_server, training

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.soak
LIMIT = 6 << 30


def test_256_samples_of_a_long_prompt_on_a_real_model(tmp_path: Path) -> None:
    options = ("--memory-limit", "6G")
    with limited_server(tmp_path, *options, model="smollm2-135m", data=2 * LIMIT) as server:
        session = server.session()
        model, sampler = server.model(session, "smollm2-135m"), server.sampler(session, "smollm2-135m")
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1 + i % 1000 for i in range(2000)]}]}
        parameters = {"max_tokens": 2, "seed": 7, "stop": []}
        body = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": parameters}
        many = server.run("asample", {**body, "seq_id": 0, "num_samples": 256})["sequences"]
        few = server.run("asample", {**body, "seq_id": 1, "num_samples": 2})["sequences"]
        assert len(many) == 256
        assert [each["tokens"] for each in many[:2]] == [each["tokens"] for each in few]
        for number, length in ((1, 512), (2, 1000)):
            tokens = [1 + i % 1000 for i in range(length)]
            assert "metrics" in server.run("forward_backward", training(model, number, tokens))
        print(f"peak {server.peak / 2**30:.2f} GiB")
        assert server.peak < 1.1 * LIMIT
