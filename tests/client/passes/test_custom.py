"""When a custom loss runs, where, and what it costs on the network."""

from __future__ import annotations

import asyncio
import threading
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.client_data import DATA, nll
from tests.helpers.reference import bits
from tinker_lightning import AdamParams, Datum, LossFnOutput, ModelInput, custom_loss
from tinker_lightning.errors import InvalidInput, InvalidLoss, LossNotScalar, OperationFailed

if TYPE_CHECKING:
    from torch import Tensor

    from tests.helpers.backends import Recorded
    from tinker_lightning.client import TrainingClient
    from tinker_lightning.server import EmbeddedTrainer

FAST = AdamParams(learning_rate=1e-2)


def vector(_: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    return logprobs[0], {}


@pytest.fixture
def model(recorded: Recorded) -> TrainingClient:
    return recorded.service.create_lora_training_client("tiny", rank=4, seed=1)


def passes(recorded: Recorded) -> list[str]:
    """The requests to the model, in the order of their numbers."""
    found: dict[int, str] = {}
    for request in recorded.record.requests:
        message = request.message
        endpoint = request.path.rsplit("/", 1)[1]
        if request.is_pass:
            found[message.seq_id] = "forward" if message.forward_only else "backward"
        elif endpoint in ("optim_step", "save_weights"):
            found[message["seq_id"]] = endpoint
    assert sorted(found) == list(range(1, len(found) + 1))
    return [found[number] for number in sorted(found)]


def test_calls_in_a_row_and_a_step_wait_once(recorded: Recorded, model: TrainingClient) -> None:  # R5.6
    sent_when_run: list[list[str]] = []

    def loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        while len(passes(recorded)) < 3:  # the forwards are sent without any loss being done
            threading.Event().wait(0.01)
        sent_when_run.append(passes(recorded))
        return nll(data, logprobs)

    futures = [model.forward_backward_custom([datum], loss) for datum in DATA]
    assert sent_when_run == []
    assert not any(future.done() for future in futures)
    step = model.optim_step(FAST)
    # No backward is sent before all losses have run.
    assert sent_when_run == [["forward"] * 3] * 3
    step.result()
    assert passes(recorded) == ["forward"] * 3 + ["backward"] * 3 + ["optim_step"]
    assert all(future.result().metrics["loss:sum"] > 0 for future in futures)
    assert len(sent_when_run) == 3


def test_a_save_also_flushes(recorded: Recorded, model: TrainingClient) -> None:
    model.forward_backward_custom(DATA, nll)
    model.save_state("flushed").result()
    model.optim_step(FAST).result()
    assert passes(recorded) == ["forward", "backward", "save_weights", "optim_step"]


def test_reading_one_result_sends_only_its_own_backward(recorded: Recorded, model: TrainingClient) -> None:
    first, second = (model.forward_backward_custom(DATA, nll) for _ in range(2))
    second.result()
    assert passes(recorded) == ["forward", "forward", "backward"]
    model.optim_step(FAST).result()
    assert passes(recorded) == ["forward", "forward", "backward", "backward", "optim_step"]
    assert first.result().metrics["nll"] == second.result().metrics["nll"]


def test_the_loss_runs_on_the_callers_thread(model: TrainingClient) -> None:
    threads: list[int] = []

    def loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        threads.append(threading.get_ident())
        return nll(data, logprobs)

    async def awaited() -> None:
        await model.forward_backward_custom(DATA, loss)

    model.forward_backward_custom(DATA, loss).result()
    model.forward_backward_custom(DATA, loss)
    model.optim_step(FAST).result()
    asyncio.run(awaited())
    assert threads == [threading.get_ident()] * 3


def test_an_error_in_the_loss_shows_the_users_own_line(model: TrainingClient) -> None:
    def loss(_: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        return logprobs["first"].sum(), {}  # type: ignore[call-overload]

    future = model.forward_backward_custom(DATA, loss)
    with pytest.raises(TypeError, match="indices must be integers") as caught:
        future.result()
    assert 'logprobs["first"].sum()' in "".join(traceback.format_exception(caught.value))
    assert future.exception() is caught.value
    model.optim_step(FAST).result()  # it was read, so it is not raised again


def test_a_loss_with_other_arguments_raises_before_anything_is_sent(recorded: Recorded, model: TrainingClient) -> None:
    def on_logits(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> Any:
        del loss_fn_inputs, attention_mask
        return LossFnOutput(model_outputs.sum(), None, {})

    sent = len(recorded.paths())
    with pytest.raises(InvalidLoss, match=r"of \(data, logprobs\), but takes \(model_outputs.*: missing a required"):
        model.forward_backward_custom(DATA, on_logits)  # type: ignore[arg-type]
    with pytest.raises(InvalidLoss, match=r"but takes \(\): too many positional"):
        model.forward_backward_custom(DATA, lambda: 0)  # type: ignore[arg-type,misc]
    registered = custom_loss(recorded.service, name="on_logits")(on_logits)
    with pytest.raises(InvalidLoss, match=r"stay on the server\. Call forward_backward\(data, 'on_logits'\)"):
        model.forward_backward_custom(DATA, registered)
    assert "forward_backward" not in recorded.paths()[sent:]


def test_a_failing_loss_stops_its_step_and_nothing_else(
    recorded: Recorded, model: TrainingClient, shared: EmbeddedTrainer
) -> None:
    model.forward_backward(DATA, "cross_entropy").result()
    before = bits(shared, model.model_id)
    good, bad = model.forward_backward_custom(DATA, nll), model.forward_backward_custom(DATA, vector)
    with pytest.raises(LossNotScalar) as caught:
        model.optim_step(FAST)
    assert (caught.value.operation, caught.value.model_id) == ("forward_backward_custom", model.model_id)
    assert bad.exception() is caught.value
    with pytest.raises(OperationFailed, match=r"not sent, because another loss .* failed\. Fix that one"):
        good.result()
    model.get_info()
    assert passes(recorded) == ["backward", "forward", "forward"]
    assert bits(shared, model.model_id) == before
    model.forward_backward_custom(DATA, nll)
    model.optim_step(FAST).result()
    assert passes(recorded)[3:] == ["forward", "backward", "optim_step"]


def test_a_failing_loss_that_was_read_is_left_out_of_the_step(recorded: Recorded, model: TrainingClient) -> None:
    good, bad = model.forward_backward_custom(DATA, nll), model.forward_backward_custom(DATA, vector)
    with pytest.raises(LossNotScalar):
        bad.result()
    model.optim_step(FAST).result()
    assert passes(recorded) == ["forward", "forward", "backward", "optim_step"]
    assert good.done()


def _unknown_token() -> list[Datum]:
    return [Datum(ModelInput.from_ints([1]), {"target_tokens": [9999], "weights": [1.0]})]


def test_a_forward_that_fails_is_raised_once(recorded: Recorded, model: TrainingClient) -> None:
    failed = model.forward_backward_custom(_unknown_token(), nll)
    while not failed.done():
        threading.Event().wait(0.01)
    with pytest.raises(InvalidInput, match=r"9999.*forward 1 of") as caught:
        model.forward_backward_custom(DATA, nll)
    assert failed.exception() is caught.value
    model.forward_backward_custom(DATA, nll)
    model.optim_step(FAST).result()
    assert passes(recorded) == ["forward", "forward", "backward", "optim_step"]


def test_a_forward_that_fails_stops_the_step(recorded: Recorded, model: TrainingClient) -> None:
    model.forward_backward_custom(DATA, nll)
    model.forward_backward_custom(_unknown_token(), nll)
    with pytest.raises(InvalidInput, match=r"9999.*forward 2 of"):
        model.optim_step(FAST)
    model.optim_step(FAST).result()
    assert passes(recorded) == ["forward", "forward", "optim_step"]


def test_an_interrupted_step_can_be_taken_again(recorded: Recorded, model: TrainingClient) -> None:
    calls: list[int] = []

    def interrupted(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return nll(data, logprobs)

    model.forward_backward_custom(DATA, nll)
    model.forward_backward_custom(DATA, interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.optim_step(FAST)
    assert passes(recorded) == ["forward", "forward"]
    model.optim_step(FAST).result()
    assert passes(recorded) == ["forward", "forward", "backward", "backward", "optim_step"]


def test_an_interrupt_while_a_backward_is_sent_loses_no_gradient(
    recorded: Recorded, model: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> list[Datum]:
        raise KeyboardInterrupt

    future = model.forward_backward_custom(DATA, nll)
    with monkeypatch.context() as patch:
        patch.setattr("tinker_lightning.client.passes.queue.surrogate_pass", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.optim_step(FAST)
    assert passes(recorded) == ["forward"]
    model.optim_step(FAST).result()
    assert passes(recorded) == ["forward", "backward", "optim_step"]
    assert future.result().metrics["nll"] > 0


def test_a_step_is_not_sent_without_all_its_backwards(
    recorded: Recorded, model: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> list[Datum]:
        raise MemoryError("no room for the gradient")

    model.forward_backward_custom(DATA, nll)
    with monkeypatch.context() as patch:
        patch.setattr("tinker_lightning.client.passes.queue.surrogate_pass", full)
        with pytest.raises(MemoryError, match="no room"):
            model.optim_step(FAST)
    assert passes(recorded) == ["forward"]


def test_a_loss_that_times_out_has_failed(model: TrainingClient) -> None:
    def slow(_: list[Any], __: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        raise TimeoutError("the reward model did not answer")

    model.forward_backward_custom(DATA, slow)
    with pytest.raises(TimeoutError, match="the reward model"):
        model.optim_step(FAST)
    model.optim_step(FAST).result()


def test_a_loss_may_use_the_client(recorded: Recorded, model: TrainingClient) -> None:
    def loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        before = model.forward(data, "cross_entropy").result().metrics["loss:sum"]
        return nll(data, logprobs)[0], {"before": before}

    model.forward_backward_custom(DATA, loss)
    model.optim_step(FAST).result()
    assert passes(recorded) == ["forward", "forward", "backward", "optim_step"]


def test_local_parameters_train_with_the_model(model: TrainingClient) -> None:  # R5.2
    temperature = torch.nn.Parameter(torch.tensor(1.0))
    for _ in range(2):
        model.forward_backward_custom(DATA, lambda _, lp: (-(torch.cat(lp) * temperature).mean(), {}))
    model.optim_step(FAST).result()
    assert temperature.grad is not None
    assert temperature.grad.item() > 1


def test_many_threads_share_a_model(recorded: Recorded, model: TrainingClient) -> None:  # R1.8
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                future = model.forward_backward_custom([DATA[1]], nll)
                model.optim_step(FAST).result()
                assert future.result().metrics["nll"] > 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    kinds = passes(recorded)
    assert sorted(kinds) == ["backward"] * 20 + ["forward"] * 20 + ["optim_step"] * 20
