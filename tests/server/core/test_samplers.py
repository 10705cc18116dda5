"""Sampling jobs: what unseeded requests draw, and what a request does not depend on."""

from __future__ import annotations

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
