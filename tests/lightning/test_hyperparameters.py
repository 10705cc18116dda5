"""Arguments of a module: unknown ones, and all of them in its checkpoint files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.helpers.trainers import SMALL, loader, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.hyperparameters import Secret
from tinker_lightning.recipes import Distill

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = SMALL


class Fixes(RemoteModule):
    """Passes some arguments on by itself, and others as they come."""

    def __init__(self, alpha: float = 0.5, **kwargs: Any) -> None:
        super().__init__("tiny", rank=4, base_url="embedded", **kwargs)
        self.alpha = alpha


class FixesMore(Fixes):
    def __init__(self, beta: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, learning_rate=2e-2, **kwargs)
        self.beta = beta
        self.save_hyperparameters()


class PassesOn(RemoteModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"rank": 4, **kwargs})


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: Fixes(), {"alpha": 0.5}),
        (lambda: Fixes(0.7, seed=3), {"alpha": 0.7, "seed": 3}),
        (lambda: FixesMore(0.1, 0.7, seed=3), {"beta": 0.1, "alpha": 0.7, "seed": 3}),
        (lambda: FixesMore(beta=0.1), {"beta": 0.1}),
        (lambda: PassesOn("tiny", base_url="embedded"), {"model": "tiny", "base_url": "embedded"}),
    ],
)
def test_a_file_keeps_what_the_outermost_constructor_was_given(
    make: Callable[[], RemoteModule], kept: dict[str, Any], tmp_path: Path
) -> None:
    with make() as module:
        trainer = quiet(max_steps=1)
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert module.hparams["rank"] == 4  # loggers see all of them
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"] == kept
    with type(module).load_from_checkpoint(tmp_path / "a.ckpt", seed=5) as loaded:
        assert loaded.hparams == {**module.hparams, "seed": 5}


def test_files_of_plain_save_hyperparameters_would_pass_fixed_arguments_twice(tmp_path: Path) -> None:
    """Shows why constructor calls are inspected: Lightning's own file of this module cannot be loaded."""
    with Fixes() as module:
        trainer = quiet(max_steps=1)
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    torch.save({**content, "hyper_parameters": dict(module.hparams)}, tmp_path / "plain.ckpt")
    with pytest.raises(TypeError, match="multiple values for keyword argument"):
        Fixes.load_from_checkpoint(tmp_path / "plain.ckpt")


class TakesKeys(RemoteModule):
    """Takes the API key in a dict, and under another name, and keys of two other servers."""

    def __init__(self, model: Any, server: dict[str, Any], token: str, judge_api_key: str, other: Secret) -> None:
        self.save_hyperparameters()  # before the module knows its key
        super().__init__(model, api_key=server["api_key"], base_url=server["url"])
        assert token == server["api_key"]
        assert {judge_api_key, other} == {"very-secret-judge", "very-secret-other"}


def test_an_api_key_in_a_dict_or_under_another_name_reaches_no_file(tmp_path: Path) -> None:
    server = {"url": "embedded", "api_key": "tml-very-secret"}
    with TakesKeys("tiny", server, "tml-very-secret", "very-secret-judge", Secret("very-secret-other")) as module:
        trainer = quiet(max_steps=1, logger=CSVLogger(tmp_path))
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} >= {".yaml", ".ckpt"}
    assert [file for file in files if b"very-secret" in file.read_bytes()] == []
    assert module.hparams["server"] == {"url": "embedded", "api_key": ""}
    assert module._session._api_key == server["api_key"] == "tml-very-secret"
    assert not {"judge_api_key", "other"} & set(module.hparams)


def test_the_key_of_a_teacher_is_no_hyperparameter() -> None:
    module = Distill("tiny", teacher="tiny", teacher_url="embedded", teacher_api_key="very-secret")
    assert module.hparams["teacher_url"] == "embedded"
    assert "very-secret" not in repr(vars(module)) + repr(module.hparams)


class Keyed(RemoteModule):
    def __init__(self, model: Any, api_key: str, helper: Any = None, depth: int = 3) -> None:
        super().__init__(model, api_key=api_key)
        self.helper, self.depth = helper, depth
        self.save_hyperparameters()


def test_keys_and_objects_stay_out_of_files() -> None:
    module = Keyed("tiny", "secret", helper=object())
    assert module.hparams["depth"] == 3
    assert not {"api_key", "helper"} & set(module.hparams)


def test_a_dict_among_the_arguments_is_kept_or_left_out_as_a_whole() -> None:
    class Takes(RemoteModule):
        def __init__(self, model: Any, options: Any, plain: Any, **kwargs: Any) -> None:  # noqa: ARG002
            super().__init__(model, **kwargs)
            self.save_hyperparameters()

    module = Takes("tiny", {"rank": print}, {"n": 1}, rank=4, seed=3)
    assert (module.hparams["rank"], module.hparams["seed"], module.hparams["plain"]) == (4, 3, {"n": 1})
    assert "options" not in module.hparams


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lora_alpha",
            "RemoteModule has no argument 'lora_alpha'. The server fixes the alpha of LoRA: it is 32 on the",
        ),
        ("target_modules", "Choose the layers that get an adapter by train_mlp, train_attn and train_unembed."),
        ("dropout", "The Tinker API has no dropout."),
        ("lr", "Pass it as learning_rate."),
        ("temperature", "Pass it within predict, for example predict={'max_tokens': 32}"),
        ("rnak", "Did you mean 'rank'?"),
        ("colour", "The docstring of RemoteModule.__init__ lists those of all modules."),
    ],
)
def test_an_unknown_argument_raises_with_what_to_use(name: str, message: str) -> None:
    unknown: Any = {name: 1}
    with pytest.raises(InvalidInput, match=re.escape(message)):
        RemoteModule("tiny", **unknown)


def test_an_argument_of_a_subclass_may_have_any_name() -> None:
    class Own(RemoteModule):
        def __init__(self, lr: float, **settings: Any) -> None:
            super().__init__(learning_rate=lr, **settings)

    assert Own(1e-3).learning_rate == 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_token": 3}, "predict has no option 'max_token'. Did you mean 'max_tokens'?"),
        ({"num_samples": 0}, "predict: num_samples must be at least 1, got 0"),
        ({"top_p": 2.0}, "top_p must lie in (0, 1], got 2.0"),
    ],
)
def test_wrong_options_of_predict_raise(options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        RemoteModule("tiny", predict=options)
