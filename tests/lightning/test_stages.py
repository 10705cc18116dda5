"""fit, validate, test, predict and export on one module: always the trained weights, and one model on the server."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests.helpers.reference import bits
from tests.helpers.soaking import first_only, mostly_soak
from tests.helpers.trainers import DATA, SMALL, loader, quiet
from tinker_lightning import AdamParams, ModelInput, RemoteModule, SamplingParams, collate, connect
from tinker_lightning.errors import InvalidInput
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    import lightning.pytorch as pl
    from torch import Tensor

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer

    Running = Callable[[Any], AbstractContextManager[str]]

pytestmark = SMALL

PROMPT = "text 3: "
LENGTH = 5


class Greedy(RemoteModule):
    def loss(self, _: list[Any], logprobs: list[Tensor]) -> Tensor:
        return -torch.cat(logprobs).mean()

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=LENGTH, temperature=0.0)


@pytest.fixture
def url(trainer: EmbeddedTrainer, running: Running) -> Iterator[str]:
    with running(create_app(trainer)) as url:
        yield url


def new(url: str) -> Greedy:
    """A module that makes its model at the first use, the same each time."""
    return Greedy("tiny", rank=4, seed=1, learning_rate=3e-3, base_url=url)


class Judge:
    """Another program, with an adapter that was exported."""

    def __init__(self, trainer: EmbeddedTrainer, folder: Path | None) -> None:
        base = AutoModelForCausalLM.from_pretrained(trainer.catalog.get("tiny").tokenizer_id)
        self._model = base.eval() if folder is None else peft.PeftModel.from_pretrained(base, str(folder)).eval()

    @torch.no_grad()
    def loss(self) -> float:
        """The negative log-likelihood of a token of the data."""
        found = []
        for datum in DATA:
            ids = torch.from_numpy(datum.model_input.tokens().astype("int64"))
            targets = datum.loss_fn_inputs["target_tokens"].to_torch()
            logits = self._model(input_ids=ids[None]).logits[0]
            found.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
        return -torch.cat(found).mean().item()

    @torch.no_grad()
    def continuation(self) -> list[int]:
        """The likeliest tokens behind the prompt."""
        ids = list(PROMPT.encode())
        for _ in range(LENGTH):
            ids.append(int(self._model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[-LENGTH:]


def assert_sees(trainer: pl.Trainer, module: RemoteModule, judge: Judge) -> None:
    """Validation, test and prediction say what the other program says."""
    (validated,) = trainer.validate(module, loader(), verbose=False)
    (tested,) = trainer.test(module, loader(3), verbose=False)
    prompts: Any = DataLoader([PROMPT], collate_fn=list)  # type: ignore[arg-type]
    ((predicted,),) = trainer.predict(module, prompts)  # type: ignore[misc]
    assert validated["val_loss"] == pytest.approx(judge.loss())
    assert tested["test_loss"] == pytest.approx(judge.loss())
    assert predicted["tokens"] == judge.continuation()


@pytest.mark.parametrize("strategy", mostly_soak(["tinker", "auto"], but=["auto"]))
def test_every_stage_sees_the_trained_weights_of_one_model(
    strategy: str, trainer: EmbeddedTrainer, url: str, tmp_path: Path
) -> None:  # R0.2, R5.3
    def fit(lightning: pl.Trainer, module: RemoteModule, epochs: int, *validation: Any) -> None:
        lightning.fit_loop.max_epochs = epochs
        lightning.fit(module, loader(), *validation)

    options: dict[str, Any] = {
        "strategy": strategy,
        "accelerator": "cpu",
        "max_epochs": 4,
        "accumulate_grad_batches": 2,
    }
    module, lightning = new(url), quiet(**options)
    judges = [Judge(trainer, None)]
    assert_sees(lightning, module, judges[0])
    for epochs in (4, 8):
        fit(lightning, module, epochs, loader(2, 4))
        judges.append(Judge(trainer, module.export_adapter(tmp_path / f"adapter-{epochs}")))
        assert_sees(lightning, module, judges[-1])
    losses = [judge.loss() for judge in judges]
    assert losses[2] < 0.9 * losses[1]
    assert losses[1] < 0.9 * losses[0]
    assert judges[2].continuation() != judges[0].continuation()
    (model,) = trainer.registry.models()

    undisturbed, lightning = new(url), quiet(**options)
    for epochs in (4, 8):
        fit(lightning, undisturbed, epochs)
    (_, other) = trainer.registry.models()
    assert bits(trainer, other.model_id) == bits(trainer, model.model_id)
    module.close()
    undisturbed.close()


@pytest.mark.parametrize("batched", first_only([True, False]))
def test_prompts_are_texts_and_rows_of_tokens(batched: bool, url: str) -> None:
    def predict(module: RemoteModule, data: list[Any], **options: Any) -> list[list[int]]:
        size: dict[str, Any] = {"batch_size": 2, **options} if batched else {"batch_size": None}
        loader: Any = DataLoader(data, **size)  # type: ignore[arg-type]
        return [one["tokens"] for batch in quiet().predict(module, loader) or [] for one in batch]

    texts = ["hello", "world"]
    rows = [list(text.encode()) for text in texts]
    with new(url) as module:
        expected = predict(module, texts)
        assert len(expected) == 2
        assert predict(module, [torch.tensor(row) for row in rows]) == expected
        assert predict(module, rows, collate_fn=collate) == expected
        if batched:
            with pytest.raises(InvalidInput, match=r"transposes.*collate_fn=tinker_lightning\.collate"):
                predict(module, rows)
        several = quiet().predict(module, [DataLoader(texts, 2), DataLoader(texts[:1], 1)])  # type: ignore[arg-type]
        found = [[one["tokens"] for batch in each for one in batch] for each in several or []]
        assert found == [expected, expected[:1]]


def freshly_sampled(module: RemoteModule) -> list[int]:
    """The likeliest tokens behind the prompt, by a sampler of this moment."""
    sampler = module.lm.backend.save_weights_and_get_sampling_client()
    answer = sampler.sample(ModelInput.from_ints(list(PROMPT.encode())), 1, module.sampling_params()).result()
    tokens: list[int] = answer.sequences[0].tokens
    return tokens


class Shows(Greedy):
    """Samples twice in each validation step, and once more from a sampler of that moment."""

    seen: list[tuple[list[int], list[int], list[int]]]
    made: list[bool]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        before = self._prompt_sampler._client
        first, again = (self.predict_step([PROMPT], 0)[0]["tokens"] for _ in range(2))
        self.seen.append((first, again, freshly_sampled(self)))
        self.made.append(self._prompt_sampler._client is not before)


def test_samples_of_a_validation_come_from_the_weights_of_its_step(url: str) -> None:
    with Shows("tiny", rank=4, seed=1, learning_rate=3e-3, base_url=url) as module:
        module.seen, module.made = [], []
        quiet(max_epochs=4, num_sanity_val_steps=0).fit(module, loader(), loader(4))
        assert len(module.seen) == 8
        assert all(first == again == fresh for first, again, fresh in module.seen)
        assert len({tuple(first) for first, _, _ in module.seen}) > 1
        assert module.made == [True, False] * 4  # one sampler for the two batches, for no step lies between


def test_samples_are_taken_without_a_trainer_and_after_further_training(url: str) -> None:
    with new(url) as module:
        untrained = module.predict_step([PROMPT], 0)[0]
        assert untrained["tokens"] == freshly_sampled(module)
        assert untrained["text"] == module.lm.backend.get_tokenizer().decode(untrained["tokens"])
        prompts: Any = DataLoader([PROMPT], collate_fn=list)  # type: ignore[arg-type]
        assert quiet().predict(module, prompts) == [[untrained]]
        quiet(max_epochs=8).fit(module, loader())
        trained = module.predict_step([PROMPT], 0)[0]["tokens"]
        assert trained == freshly_sampled(module) != untrained["tokens"]


def test_predict_sees_what_others_have_trained_with_its_client(url: str) -> None:
    with connect(url) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1)
        module = Greedy(client)
        prompts: Any = DataLoader([PROMPT], collate_fn=list)  # type: ignore[arg-type]
        ((before,),) = quiet().predict(module, prompts)  # type: ignore[misc]
        for _ in range(16):
            client.forward_backward(DATA, "cross_entropy")
            client.optim_step(AdamParams(learning_rate=1e-2))
        ((after,),) = quiet().predict(module, prompts)  # type: ignore[misc]
        assert after["tokens"] == freshly_sampled(module) != before["tokens"]


def test_each_stage_may_have_a_trainer_of_its_own(trainer: EmbeddedTrainer, url: str, tmp_path: Path) -> None:
    with new(url) as module:
        for strategy in ("tinker", "auto"):
            quiet(strategy=strategy, accelerator="cpu", max_epochs=2).fit(module, loader())
            assert_sees(quiet(), module, Judge(trainer, module.export_adapter(tmp_path / strategy)))
        assert len(trainer.registry.models()) == 1


def test_a_fit_that_has_ended_does_not_hold_ctrl_c_at_later_steps(service: ServiceClient) -> None:
    module = RemoteModule(service.create_lora_training_client("tiny", rank=4, seed=1))
    quiet().fit(module, loader())
    before = signal.getsignal(signal.SIGINT)
    optimizer: Any = module.configure_optimizers()
    torch.cat(module.lm(DATA[:2])).mean().backward()
    optimizer.step()
    assert module.lm.handle.remote.steps == 4
    assert signal.getsignal(signal.SIGINT) is before
