"""Promises of a `RemoteModule` that hold for everything that a user overrides, loads or resumes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.helpers.soaking import first_only, mostly_soak
from tinker_lightning import Datum, RemoteAdamW, RemoteDiMuon, RemoteModule
from tinker_lightning.errors import InvalidDatum, InvalidInput, LossWithoutGradient
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

DATA = [Datum.from_tokens(list(f"text {i}: {'hello world, ' * (i % 3 + 1)}".encode())) for i in range(8)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]


class Mean(RemoteModule):
    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        return -torch.cat(logprobs).mean(), {}


@pytest.fixture
def service() -> Iterator[ServiceClient]:
    with embedded_service() as service:
        yield service


def quiet(**kwargs: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "strategy": "tinker",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **kwargs})


def loader(data: list[Datum] = DATA, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(data, **{"batch_size": 1, **kwargs})  # type: ignore[arg-type]


def made(service: ServiceClient, kind: type[RemoteModule] = Mean, **kwargs: Any) -> RemoteModule:
    return kind(service.create_lora_training_client("tiny", rank=4, seed=1), **{"learning_rate": 1e-2, **kwargs})


def counted(module: RemoteModule) -> Counter[str]:
    """How many forward passes and backward passes are sent."""
    calls: Counter[str] = Counter()
    backend: Any = module.lm.backend
    logprobs, send = backend.logprobs, backend.send

    def forward(data: Any, *, retain: bool = False) -> Any:
        calls["forward"] += 1
        return logprobs(data, retain=retain)

    def backward(request: Any) -> Any:
        calls["backward"] += 1
        return send(request)

    backend.logprobs, backend.send = forward, backward
    return calls


class BuildsItsOwn(Mean):
    def training_step(self, *_: Any) -> torch.Tensor:
        data = [Datum.from_tokens(list(b"other words"))]
        return -torch.cat(self.lm(data)).mean()


def test_a_step_that_asks_for_other_datums_ends_look_ahead(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    module = made(service, BuildsItsOwn)
    calls = counted(module)
    quiet(accumulate_grad_batches=4).fit(module, loader())
    assert calls["forward"] == len(DATA) + 4  # the first window's, which nobody used
    assert "without look-ahead: its training_step uses other datums" in caplog.text


class Skips(Mean):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_skips_its_batch_does_not_end_look_ahead(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    module = made(service, Skips)
    quiet(accumulate_grad_batches=4).fit(module, loader())
    assert module.lm.handle.remote.steps > 0
    assert "without look-ahead" not in caplog.text


class Drawing:
    """A mixin that makes new datums at each call."""

    def datums(self, batch: Any) -> list[Datum]:
        return [Datum.from_tokens(list(bytes([65 + int(torch.randint(20, ()))]) * 8)) for _ in batch]


class DrawingMean(Drawing, Mean):
    pass


def test_datums_are_made_once_also_by_a_mixin(service: ServiceClient) -> None:
    module = made(service, DrawingMean)
    calls = counted(module)
    quiet(accumulate_grad_batches=4).fit(module, loader())
    assert calls["forward"] == len(DATA)


class Decorated(Mean):
    @torch.no_grad()
    def datums(self, batch: Any) -> Any:
        return Drawing.datums(self, batch)  # type: ignore[arg-type]


class DecoratedAgain(Decorated):
    datums = torch.no_grad()(Decorated.datums)


class GivesATuple(Mean):
    def datums(self, batch: Any) -> Any:
        return tuple(Drawing.datums(self, batch))  # type: ignore[arg-type]


class Generates(Mean):
    def datums(self, batch: Any) -> Any:
        yield from Drawing.datums(self, batch)  # type: ignore[arg-type]


class GivesOne(Mean):
    def datums(self, batch: Any) -> Any:
        return Drawing.datums(self, batch)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind", mostly_soak([Decorated, DecoratedAgain, GivesATuple, Generates, GivesOne], but=[DecoratedAgain, Generates])
)
def test_datums_may_be_decorated_and_come_in_any_iterable(
    service: ServiceClient, caplog: pytest.LogCaptureFixture, kind: type[RemoteModule]
) -> None:
    module, plain = made(service, kind), made(service, DrawingMean)
    calls = counted(module)
    for each in (module, plain):
        torch.manual_seed(3)
        quiet(accumulate_grad_batches=4).fit(each, loader())
    assert calls["forward"] == len(DATA)
    assert "without look-ahead" not in caplog.text
    with torch.no_grad():
        assert torch.equal(torch.cat(module.lm(DATA)), torch.cat(plain.lm(DATA)))


def test_datums_that_return_nothing_raise(service: ServiceClient) -> None:
    class Forgets(Mean):
        def datums(self, _: Any) -> Any:
            pass

    with pytest.raises(InvalidDatum, match=r"datums\(batch\) must return a list of datums, but returned NoneType"):
        quiet().fit(made(service, Forgets), loader())


class SavesInTheMiddle(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batch_idx}.ckpt")


def test_datums_that_draw_random_numbers_resume_exactly(service: ServiceClient, tmp_path: Path) -> None:
    whole, resumed = made(service, DrawingMean), made(service, DrawingMean)
    torch.manual_seed(3)
    quiet(accumulate_grad_batches=4, callbacks=[SavesInTheMiddle(tmp_path)]).fit(whole, loader())
    torch.manual_seed(4)
    quiet(accumulate_grad_batches=4).fit(resumed, loader(), ckpt_path=tmp_path / "1.ckpt")
    with torch.no_grad():
        assert torch.equal(torch.cat(whole.lm(DATA)), torch.cat(resumed.lm(DATA)))


class ChangesItsMind(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.accumulate_grad_batches = 2


class Watching(Mean):
    worst = 0.0

    def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        with torch.no_grad():
            now = torch.cat(self.lm(data))
        self.worst = max(self.worst, float((now - torch.cat(logprobs).detach()).abs().max()))
        return super().loss(data, logprobs)


def test_log_probabilities_of_other_weights_are_not_used(service: ServiceClient) -> None:
    module = made(service, Watching)
    quiet(accumulate_grad_batches=4, callbacks=[ChangesItsMind()]).fit(module, loader())
    assert isinstance(module, Watching)
    assert module.worst == 0.0


def test_stages_follow_each_other_with_lightnings_defaults(service: ServiceClient) -> None:
    module, trainer = made(service, learning_rate=1e-3), quiet()
    scores = trainer.validate(module, loader(), verbose=False)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, loader(), loader())
        assert (trainer.global_step, trainer.current_epoch) == (epochs * len(DATA), epochs)
        scores += trainer.validate(module, loader(), verbose=False)
    untrained, once, twice = (score["val_loss"] for score in scores)
    assert twice < once < untrained  # each stage sees what those before it trained


def test_several_loaders_are_scored_one_by_one(service: ServiceClient) -> None:
    module, trainer = made(service), quiet()
    scores = trainer.validate(module, [loader(DATA[:2]), loader(DATA[2:5])], verbose=False)
    alone = [quiet().validate(module, each, verbose=False)[0] for each in (loader(DATA[:2]), loader(DATA[2:5]))]
    for i, (both, one) in enumerate(zip(scores, alone, strict=True)):
        assert both[f"val_loss/dataloader_idx_{i}"] == pytest.approx(one["val_loss"])


class WithoutSuper(Mean):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == 1

    def on_train_start(self) -> None:
        pass


def test_hooks_without_super_lose_nothing(service: ServiceClient, tmp_path: Path) -> None:
    module, trainer = made(service, WithoutSuper), quiet()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    other = made(service, WithoutSuper)
    quiet(max_epochs=1).validate(other, loader(), ckpt_path=tmp_path / "mine.ckpt", verbose=False)
    with torch.no_grad():
        assert torch.equal(torch.cat(module.lm(DATA)), torch.cat(other.lm(DATA)))


class Keeps:
    """A mixin, which knows of no remote model."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == 1


class WithMixin(Keeps, Mean):
    pass


class OfBoth(Keeps, WithoutSuper):
    pass


@pytest.mark.parametrize("kind", first_only([WithMixin, OfBoth]))
def test_hooks_of_mixins_lose_nothing(kind: type[RemoteModule], service: ServiceClient, tmp_path: Path) -> None:
    module, trainer = made(service, kind), quiet()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    other = made(service, kind)
    quiet(max_epochs=1).validate(other, loader(), ckpt_path=tmp_path / "mine.ckpt", verbose=False)
    with torch.no_grad():
        assert torch.equal(torch.cat(module.lm(DATA)), torch.cat(other.lm(DATA)))


class Hybrid(Mean):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        return super().loss(data, [self.temperature * each for each in logprobs])


def test_a_joint_norm_cannot_be_clipped(service: ServiceClient) -> None:
    with pytest.raises(InvalidInput, match=r"norm over all parameters.*set grad_clip_norm for the group"):
        quiet(gradient_clip_val=0.1).fit(made(service, Hybrid), loader())

    class AsTheErrorSays(Hybrid):
        def configure_optimizers(self) -> Any:
            remote = {"params": self.lm.parameters(), "grad_clip_norm": 0.1}
            return RemoteAdamW([remote, {"params": [self.temperature]}])

    module = made(service, AsTheErrorSays)
    quiet().fit(module, loader())
    assert module.lm.handle.remote.steps > 0


class ByHand(Mean):
    """Optimizes by hand, and clips as Lightning's documentation says."""

    norm = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.head = torch.nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return [RemoteAdamW(self.lm.parameters(), lr=1e-2), torch.optim.SGD(self.head.parameters(), lr=0.1)]

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        nll = -torch.cat(self.lm(self.datums(batch))).mean()
        self.manual_backward(nll + 100 * self.head(nll.detach().reshape(1, 1)).square().mean())
        for optimizer in optimizers:
            if self.norm:
                self.clip_gradients(optimizer, gradient_clip_val=self.norm, gradient_clip_algorithm="norm")
        self.local_norm = torch.cat([p.grad.flatten() for p in self.head.parameters() if p.grad is not None]).norm()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_clipping_by_hand_is_done_where_the_gradients_are(service: ServiceClient) -> None:
    class Clips(ByHand):
        norm = 0.01

    plain, clips = made(service, ByHand), made(service, Clips)
    sent: list[float] = []
    for module in (plain, clips):
        step = module.lm.backend.optim_step
        module.lm.backend.optim_step = lambda params, step=step: sent.append(params.grad_clip_norm) or step(params)  # type: ignore
        quiet(max_epochs=1).fit(module, loader(DATA[:1]))
    assert sent == [0.0, 0.01]
    assert float(clips.local_norm) == pytest.approx(0.01, rel=1e-3)  # type: ignore[arg-type]
    assert float(plain.local_norm) > 1  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.filterwarnings("ignore:Found . module.* in eval mode")
@pytest.mark.parametrize("optimizer", [None, "of the head"])
def test_a_remote_model_that_no_optimizer_holds_raises(optimizer: str | None, service: ServiceClient) -> None:
    class Forgets(Hybrid):
        def configure_optimizers(self) -> Any:
            return optimizer and torch.optim.SGD([self.temperature], lr=0.1)

    module = made(service, Forgets)
    with pytest.raises(InvalidInput, match=r"no optimizer of this Forgets.*RemoteAdamW.*requires_grad_\(False\)"):
        quiet().fit(module, loader())
    if optimizer:
        module.lm.requires_grad_(False)
        quiet().fit(module, loader())
        assert module.lm.handle.remote.window == []
    else:
        module.freeze()
        with pytest.raises(InvalidInput, match=r"all parameters of this Forgets are frozen.*unfreeze\(\)"):
            quiet().fit(module, loader())


def test_names_that_users_choose_are_free(service: ServiceClient) -> None:
    names = (
        "scores",
        "client",
        "history",
        "metrics",
        "outputs",
        "reference",
        "batch",
        "state",
        "policy",
        "temperature",
    )
    taken = object()

    class Taken(Mean):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name in names:
                setattr(self, name, taken)

    results = []
    for kind in (Mean, Taken):
        module, trainer = made(service, kind), quiet()
        trainer.fit(module, loader(DATA[:2]))
        results.append(trainer.validate(module, loader(DATA[:2]), verbose=False))
    assert results[0] == results[1]
    assert all(getattr(module, name) is taken for name in names)


def test_a_trainers_clipping_ends_with_it(service: ServiceClient) -> None:
    module, trainer = made(service), quiet(gradient_clip_val=0.001)
    trainer.fit(module, loader())
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, RemoteAdamW)
    assert [group["grad_clip_norm"] for group in optimizer.param_groups] == [0.0]


def test_a_micro_batch_without_a_gradient_raises_wherever_it_stands(service: ServiceClient) -> None:
    class Second(Mean):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx == 0 else torch.zeros((), requires_grad=True) * 1

    with pytest.raises(LossWithoutGradient):
        quiet(accumulate_grad_batches=2).fit(made(service, Second), loader())


def test_a_batch_without_weights_is_named(service: ServiceClient) -> None:
    unweighted = [Datum.from_tokens(list(b"hello"), [0.0] * 5)]
    with pytest.raises(InvalidDatum, match=r'the weights of these 1 datums sum to 0, .* reduction = "sum"'):
        quiet().fit(made(service, RemoteModule), loader(unweighted))


def test_a_file_saved_by_the_user_keeps_its_state(service: ServiceClient, tmp_path: Path) -> None:
    """`last.ckpt` is overwritten by a later run, which does not know of `final.ckpt`."""
    first = made(service)
    trainer = quiet(callbacks=[ModelCheckpoint(tmp_path / "runs", save_last=True)], enable_checkpointing=True)
    trainer.fit(first, loader())
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    second = made(service)
    again = quiet(
        callbacks=[ModelCheckpoint(tmp_path / "runs", save_last=True)], enable_checkpointing=True, max_epochs=2
    )
    again.fit(second, loader(), ckpt_path=tmp_path / "runs" / "last.ckpt")
    third = made(service)
    quiet().validate(third, loader(), ckpt_path=tmp_path / "final.ckpt", verbose=False)
    with torch.no_grad():
        assert torch.equal(torch.cat(first.lm(DATA)), torch.cat(third.lm(DATA)))


def test_a_state_that_was_resumed_from_stays_with_its_file(service: ServiceClient, tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(made(service), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = quiet(
        callbacks=[ModelCheckpoint(tmp_path / "b", monitor="val_loss", save_top_k=1)],
        enable_checkpointing=True,
        max_epochs=3,
    )
    again.fit(made(service), loader(), loader(), ckpt_path=tmp_path / "a.ckpt")
    quiet().validate(made(service), loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)


def test_a_number_of_steps_is_at_least_one() -> None:
    with pytest.raises(InvalidInput, match="max_steps_in_flight must be at least 1, got 0"):
        RemoteModule("tiny", max_steps_in_flight=0)


@pytest.mark.parametrize("setting", [{"eps": 1e-3}, {"weight_decay": 0.1}, {"betas": (0.9, 0.5)}])
def test_settings_of_adamw_are_not_ignored_by_another_optimizer(setting: Any) -> None:
    name = "betas\\[1\\]" if "betas" in setting else next(iter(setting))
    with pytest.raises(InvalidInput, match=f"{name} is a setting of AdamW. Leave it out: dimuon does not have it"):
        RemoteModule("tiny", optimizer="dimuon", **setting)
    RemoteModule("tiny", optimizer="dimuon", betas=(0.5, 0.95))
    RemoteModule("tiny", **setting)


def test_a_module_creates_its_model_for_its_optimizer(service: ServiceClient) -> None:
    """The embedded trainer has AdamW only, and refuses other optimizers by name."""
    with RemoteModule("tiny", rank=4, optimizer="dimuon") as module:
        assert isinstance(module.configure_optimizers(), RemoteDiMuon)
        with pytest.raises(InvalidInput, match="only adamw is supported, not 'dimuon'"):
            quiet().fit(module, loader())
    with RemoteModule("tiny", rank=4) as module:
        assert isinstance(module.configure_optimizers(), RemoteAdamW)
        assert module.lm.backend.optimizer_kind == "adamw"
        with pytest.raises(InvalidInput, match="the optimizer is dimuon, but the model was created for adamw"):
            RemoteDiMuon(module.parameters())
    module = RemoteModule(service.create_lora_training_client("tiny", rank=4), optimizer="dimuon")
    with pytest.raises(InvalidInput, match="the optimizer is dimuon, but the model was created for adamw"):
        quiet().fit(module, loader())
