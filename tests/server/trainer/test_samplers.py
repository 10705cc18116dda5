"""Sampling jobs: what unseeded requests draw, and what a request does not depend on."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.api import Api
from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def make_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int | None], Api]]:
    """Creates servers with a sampling seed."""
    made: list[Api] = []

    def make(seed: int | None) -> Api:
        folder: Path = tmp_path_factory.mktemp("seeded")
        made.append(Api(EmbeddedTrainer(["tiny"], data_dir=folder, sampling_seed=seed)))
        return made[-1]

    yield make
    for api in made:
        api.close()
        api.trainer.close()


def tokens(result: Any) -> list[list[int]]:
    return [sequence["tokens"] for sequence in result["sequences"]]


def a_run(api: Api) -> list[list[list[int]]]:
    """Samples twice from each of two base samplers and from a model in training."""
    session = api.session()
    model = api.model(session)
    save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 2}
    live = str(api.run("save_weights_for_sampler", save)["sampling_session_id"])
    samplers = [api.sampler(session, 0), api.sampler(session, 1), live]
    bodies = [{**api.sample(sampler, seq, max_tokens=8), "num_samples": 2} for sampler in samplers for seq in (0, 1)]
    return [tokens(api.run("asample", body)) for body in bodies]


def test_a_sampling_seed_makes_runs_repeat(make_api: Callable[[int | None], Api]) -> None:
    first = make_api(7)
    drawn = a_run(first)
    assert drawn == a_run(first) == a_run(make_api(7))
    assert drawn != a_run(make_api(8))
    # Every sampler, request and sample draws its own tokens.
    assert len({tuple(sequence) for request in drawn for sequence in request}) == 12


def test_without_a_sampling_seed_runs_differ(make_api: Callable[[int | None], Api]) -> None:
    api = make_api(None)
    assert a_run(api) != a_run(api)


@pytest.mark.parametrize("sampling_seed", [None, 7])
def test_a_seeded_request_draws_the_same_next_to_any_other(
    make_api: Callable[[int | None], Api], sampling_seed: int | None
) -> None:
    api = make_api(sampling_seed)
    session = api.session()
    sampler, other = api.sampler(session, 0), api.sampler(session, 1)
    alone = tokens(api.run("asample", api.sample(sampler, 0, seed=5, max_tokens=8)))
    bodies = [api.sample(other, n, max_tokens=3 + n) for n in range(4)]
    bodies.insert(2, api.sample(sampler, 1, seed=5, max_tokens=8))
    receipts = api.together(*(("asample", body) for body in bodies))
    assert tokens(api.result(receipts[2].json()["request_id"])) == alone


@pytest.fixture(scope="module")
def plain(make_api: Callable[[int | None], Api]) -> Api:
    return make_api(None)


def test_all_options_of_sampling_in_json(plain: Api) -> None:
    target = {"data": [5, -1], "dtype": "int64", "shape": [2, 1]}
    options = {
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 3,
        "target_prompt_logprobs": target,
        "prompt_alt_tokens_k": 4,
    }
    result = plain.run("asample", {**plain.sample(plain.sampler(), 0), **options})
    assert result["prompt_logprobs"][:2] == result["topk_prompt_logprobs"][:2] == [None, None]
    assert [len(pair) for pair in result["topk_prompt_logprobs"][2]] == [2, 2]
    assert [len(row) for row in result["sequences"][0]["topk_logprobs"]] == [3, 3, 3, 3]
    assert result["target_prompt_logprobs"]["shape"] == [2, 1]
    assert result["target_prompt_logprobs"]["data"][1] == 0.0
    assert result["prompt_alt_tokens"]["tokens"]["shape"] == [2, 4]


def test_a_loss_without_a_published_formula_is_refused_at_sampling_and_in_passes(plain: Api) -> None:  # R5.17
    advice = 'formula is not published.*AsyncConfig\\(loss_fn="ppo"\\)'
    body = {**plain.sample(plain.sampler(), 0), "record_stability_info": True}
    refused = plain.post("asample", body)
    assert refused.status_code == 400
    assert re.search(f"record_stability_info: .*{advice}", refused.json()["detail"])
    model = plain.model()
    body = plain.train(model, 1)
    body["forward_backward_input"]["loss_fn"] = "stable_reinforce"
    assert re.search(f"loss_fn: .*{advice}", plain.run("forward_backward", body)["error"])


def test_one_poll_returns_all_finished_requests_of_one_client(plain: Api) -> None:
    sampler = plain.sampler()
    clone = plain.post("join_sampling_session", {"sampling_session_id": sampler}).json()["client_counter"]
    assert clone == 1
    assert plain.post("join_sampling_session", {"sampling_session_id": sampler}).json() == {"client_counter": 2}
    assert plain.post("join_sampling_session", {"sampling_session_id": "nobody"}).status_code == 404
    ids = [plain.submit("asample", plain.sample(sampler, seq)) for seq in (0, 1, clone * 10**9)]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [999]}]}
    ids.append(plain.submit("asample", {**plain.sample(sampler, 2), "prompt": prompt}))
    for request_id in ids:
        plain.result(request_id)
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    found = plain.post("retrieve_futures", {"target": target, "prev_cursor": 0}).json()
    finished = [{"state": "finished", "request_id": each} for each in ids[:2]]
    assert found["completions"] == [*finished, {"state": "failed", "request_id": ids[3]}]
    of_clone = plain.post("retrieve_futures", {"target": {**target, "cloned_sampler_id": clone}}).json()
    assert [each["request_id"] for each in of_clone["completions"]] == [ids[2]]
    # The next poll waits for what comes after the cursor.
    later = {"target": target, "prev_cursor": found["cursor"]}
    responses = plain.together(("retrieve_futures", later), ("asample", plain.sample(sampler, 3)))
    assert [each["request_id"] for each in responses[0].json()["completions"]] == [responses[1].json()["request_id"]]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.2])
def test_a_poll_is_answered_within_its_timeout(plain: Api, seconds: float) -> None:  # R5.17
    """With 0.0, the SDK only reports what it has fetched, and gives up after five seconds."""
    target = {"type": "sampling_session", "sampling_session_id": plain.sampler(), "cloned_sampler_id": 0}
    started = time.monotonic()
    found = plain.post("retrieve_futures", {"target": target, "prev_cursor": 7, "timeout": seconds}).json()
    assert found == {"completions": [], "cursor": 7}
    assert seconds <= time.monotonic() - started < 5


def test_weights_that_later_saves_replace_are_refused_by_name(plain: Api) -> None:  # R5.17
    model = plain.model()
    body = {"model_id": model, "sampling_session_seq_id": 0}
    refused = plain.post("save_weights_for_sampler", {**body, "seq_id": 1, "kind": "inflight"})
    assert (refused.status_code, refused.json()["category"]) == (400, "user")
    assert "kind: only 'snapshot' is supported, not 'inflight'" in refused.json()["detail"]
    sampler = plain.run("save_weights_for_sampler", {**body, "seq_id": 2, "kind": "snapshot"})["sampling_session_id"]
    assert "error" not in plain.run("asample", plain.sample(sampler, 0))  # the number of the first was freed


def test_cancelled_requests_fail_and_training_cannot_be_cancelled(plain: Api) -> None:
    sampler, model = plain.sampler(), plain.model()
    bodies = [plain.sample(sampler, seq, max_tokens=2000) for seq in (0, 1)]
    running, queued = (plain.submit("asample", body) for body in bodies)
    for request_id in (running, queued):
        assert plain.post("cancel_future", {"request_id": request_id}).status_code == 200
    for request_id in (running, queued):
        assert "cancelled by the client" in plain.result(request_id)["error"]
    step = plain.submit("optim_step", plain.step(model, 1))
    response = plain.post("cancel_future", {"request_id": step})
    assert (response.status_code, "only sampling" in response.text) == (400, True)
    assert plain.post("cancel_future", {"request_id": "nobody"}).status_code == 404
