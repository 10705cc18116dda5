"""The public test seam: a trainer in the process, and transports that record requests or make the network fail."""

from __future__ import annotations

import asyncio
import contextlib
import re
import textwrap
from typing import TYPE_CHECKING, Any, get_args

import httpx
import pytest

from tinker_lightning import Datum, testing
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.errors import TrainerClosed
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import Fault, FaultyTransport, RecordingTransport, embedded_service
from tinker_lightning.types.requests import ForwardBackwardRequest

if TYPE_CHECKING:
    from pathlib import Path

DATA = [Datum.from_tokens(list(b"hello world"))]
pytest_plugins = ["pytester"]


def test_a_service_trains_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with embedded_service() as service:
        model = service.create_lora_training_client("tiny", rank=4)
        model.forward_backward(DATA, "cross_entropy")
        model.optim_step()
        model.save_state("kept").result()
        assert list(tmp_path.rglob("adapter_model.safetensors"))
    assert not list(tmp_path.rglob("adapter_model.safetensors"))


def test_the_callers_trainer_stays_open(tmp_path: Path) -> None:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    with embedded_service(trainer) as service:
        path = service.create_lora_training_client("tiny", rank=4).save_state("kept").result().path
    trainer.finish_session(trainer.open_session().session_id)  # raises TrainerClosed on a closed trainer
    with embedded_service(trainer) as service:
        assert service.create_training_client_from_state(path).forward(DATA, "cross_entropy").result().metrics
    trainer.close()
    with pytest.raises(TrainerClosed):
        trainer.finish_session(trainer.open_session().session_id)


def test_requests_are_recorded_and_understood(tmp_path: Path) -> None:
    records: list[RecordingTransport] = []

    def wrap(inner: httpx.AsyncBaseTransport) -> RecordingTransport:
        records.append(RecordingTransport(inner))
        return records[0]

    with embedded_service(wrap=wrap) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        model.forward(DATA, "cross_entropy").result()
        model.optim_step().result()
    by_name = {each.path.rsplit("/", 1)[1]: each for each in records[0].requests}
    passed = by_name["forward_backward"].message
    assert isinstance(passed, ForwardBackwardRequest)
    assert (passed.model_id, passed.seq_id, passed.forward_only, passed.data) == (model.model_id, 1, True, DATA)
    assert by_name["optim_step"].message["adam_params"]["learning_rate"] == 1e-4
    assert by_name["get_server_capabilities"].method == "GET"
    assert by_name["get_server_capabilities"].message is None
    assert by_name["optim_step"].headers["content-type"] == "application/json"


class Counter(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        self.arrived = 0
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert await request.aread() == b"body"
        self.arrived += 1
        return httpx.Response(200, json={"n": self.arrived})

    async def aclose(self) -> None:
        self.closed = True


# What the caller meets, and how often the request arrived.
OUTCOMES: dict[Fault, tuple[Any, int]] = {
    "reset": (httpx.ConnectError, 0),
    "500": (500, 0),
    "429": (429, 0),
    "408": (408, 0),
    "lost answer": (httpx.ReadError, 1),
    "duplicate": (200, 2),
}


def test_there_is_an_outcome_for_each_fault() -> None:
    assert set(OUTCOMES) == set(get_args(Fault))


@pytest.mark.parametrize("fault", OUTCOMES)
def test_each_fault_is_what_it_says(fault: Fault) -> None:
    outcome, arrived = OUTCOMES[fault]
    counter = Counter()

    async def post() -> int:
        async with httpx.AsyncClient(transport=FaultyTransport(counter, rate=1.0, faults=[fault])) as client:
            return (await client.post("http://a/b", content=b"body")).status_code

    if isinstance(outcome, int):
        assert asyncio.run(post()) == outcome
    else:
        with pytest.raises(outcome, match="injected"):
            asyncio.run(post())
    assert counter.arrived == arrived
    assert counter.closed


def _injected(seed: int, rate: float = 0.3) -> list[tuple[int, Fault]]:
    async def post() -> list[tuple[int, Fault]]:
        transport = FaultyTransport(Counter(), rate=rate, seed=seed)
        found: list[tuple[int, Fault]] = []
        async with httpx.AsyncClient(transport=transport) as client:
            for i in range(200):
                before = len(transport.injected)
                with contextlib.suppress(httpx.TransportError):
                    await client.post("http://a/b", content=b"body")
                found += [(i, fault) for fault, _ in transport.injected[before:]]
        return found

    return asyncio.run(post())


def test_the_same_seed_meets_the_same_faults() -> None:
    assert _injected(1) == _injected(1) != _injected(2)
    assert 40 <= len(_injected(1)) <= 80
    assert _injected(1, rate=0.0) == []
    assert {fault for _, fault in _injected(1)} == set(get_args(Fault))


def test_a_client_survives_them_and_trains_the_same_bits() -> None:
    def train(rate: float) -> tuple[list[float], set[Fault]]:
        transports: list[FaultyTransport] = []

        def wrap(inner: httpx.AsyncBaseTransport) -> FaultyTransport:
            transports.append(FaultyTransport(inner, rate=rate, seed=3))
            return transports[0]

        retry_policy = RetryPolicy(20.0, first_delay=0.01, longest_delay=0.02)
        with embedded_service(wrap=wrap, retry_policy=retry_policy) as service:
            model = service.create_lora_training_client("tiny", rank=4, seed=1)
            for _ in range(10):
                model.forward_backward(DATA, "cross_entropy")
                model.optim_step().result()
            logprobs = model.forward(DATA, "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        return logprobs.to_numpy().tolist(), {fault for fault, _ in transports[0].injected}

    calm, none = train(0.0)
    disturbed, faults = train(0.3)
    assert not none
    assert {"lost answer", "duplicate"} <= faults  # the two that would double a gradient
    assert disturbed == calm


def test_the_example_of_the_docstring_works(pytester: pytest.Pytester) -> None:
    example = re.search(r"@pytest\.fixture\n.*", testing.__doc__ or "", re.DOTALL)
    assert example is not None
    pytester.makepyfile(
        textwrap.dedent(
            """
            import pytest
            import tinker_lightning.testing

            {example}

            def test_it(service):
                assert service.create_lora_training_client("tiny", rank=2).model_id
            """
        ).format(example=example.group())
    )
    pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider").assert_outcomes(passed=1)
