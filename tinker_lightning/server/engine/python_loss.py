"""A batch-level loss that is a Python function in this process and runs without limits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tinker_lightning.errors import InvalidInput, InvalidLoss, TinkerLightningError
from tinker_lightning.lossgraph.graph_loss import BATCH_SOURCES, LossFnOutput, Source, check_name
from tinker_lightning.lossgraph.settings import Hyperparameter, Setting, check_settings
from tinker_lightning.lossgraph.tracing.trace import accepts_any_setting, read_hyperparameters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinker_lightning.lossgraph.graphs.limits import Limits


@dataclass(frozen=True, slots=True)
class PythonLoss:
    """A named Python function with the signature that its source requires."""

    name: str
    source: Source
    function: Callable[..., Any]
    defaults: Mapping[str, Setting]
    description: str

    @classmethod
    def of(cls, name: str, source: Source, function: Any) -> PythonLoss:
        """Creates a loss; raises `InvalidLoss` if the function does not have the parameters of a loss."""
        check_name(name)
        if source not in BATCH_SOURCES:
            raise InvalidLoss(f"source must be one of {', '.join(BATCH_SOURCES)}, got {source!r:.40}")
        if not callable(function):
            raise InvalidLoss(f"{name} must be a function, got {type(function).__name__}")
        description = (inspect.getdoc(function) or "").partition("\n")[0]
        return cls(name, source, function, read_hyperparameters(function, source), description[:200])

    def settings(self, given: Mapping[str, Any]) -> dict[str, Setting]:
        """Returns all settings: the defaults, overridden by `given`; raises `InvalidInput` if one is invalid."""
        known = {name: Hyperparameter(default) for name, default in self.defaults.items()}
        return check_settings(self.name, known, given, accepts_any_setting=accepts_any_setting(self.function))

    @property
    def reads(self) -> None:
        """Always None, because only the function itself determines its inputs."""

    def select(self, present: Iterable[str]) -> tuple[str, ...]:
        """Returns all inputs, because any of them could be read."""
        return tuple(present)

    def check(self, *_: Any) -> None:
        """Does nothing, because a Python function can only be checked by running it."""

    def __call__(
        self,
        outputs: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        settings: Mapping[str, Setting],
        limits: Limits,
    ) -> LossFnOutput:
        """Calls the function; raises `InvalidLoss` if it fails, and `InvalidInput` if an input is missing."""
        del limits
        # Copied because the function may modify its arguments, and the model's backward needs the originals.
        outputs = {name: tensor.clone() for name, tensor in outputs.items()}
        try:
            if self.source == "logits":
                given = (outputs["model_outputs"], dict(inputs), outputs["attention_mask"])
                returned = self.function(*given, **settings)
            else:
                returned = self.function(dict(inputs), outputs["logprobs"], **settings)
        except KeyError as error:
            raise InvalidInput(f"loss_fn_inputs: {error.args[0]}: missing; {self.name} reads it") from error
        except TinkerLightningError:
            raise
        except Exception as error:
            raise InvalidLoss(f"it raised {type(error).__name__}: {error}") from error
        if self.source == "logprobs" and isinstance(returned, Tensor):
            return LossFnOutput(returned)
        diagnostics: Any
        if isinstance(returned, LossFnOutput):
            loss, logprobs = returned.loss, returned.logprobs
            diagnostics = {} if returned.diagnostics is None else returned.diagnostics
        elif self.source == "logprobs" and isinstance(returned, tuple) and len(returned) == 2:
            loss, logprobs, diagnostics = returned[0], None, returned[1]
        else:
            wanted = "a LossFnOutput" if self.source == "logits" else "(loss, metrics)"
            raise InvalidLoss(f"it must return {wanted}, but returned {type(returned).__name__}")
        if not isinstance(diagnostics, Mapping):
            what = "diagnostics" if self.source == "logits" else "metrics"
            raise InvalidLoss(
                f"it must return its {what} as a dict, but returned {type(diagnostics).__name__}; return {{}} if there "
                "are none"
            )
        return LossFnOutput(loss, logprobs, diagnostics)
