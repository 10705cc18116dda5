"""A loss of a whole batch that is a Python function of this process, run as it is and without bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tinker_lightning.errors import InvalidInput, InvalidLoss, TinkerLightningError
from tinker_lightning.lossgraph.batch_loss import Hyperparameter, LossFnOutput, Setting, Source, check_name, settings
from tinker_lightning.lossgraph.tracing.batch import read_hyperparameters, takes_others

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinker_lightning.lossgraph.graphs.limits import Limits


@dataclass(frozen=True, slots=True)
class PythonLoss:
    """A function with the signature of its source, under a name."""

    name: str
    source: Source
    function: Callable[..., Any]
    defaults: Mapping[str, Setting]
    description: str

    @classmethod
    def of(cls, name: str, source: Source, function: Any) -> PythonLoss:
        """A function that was looked at.

        Raises:
            InvalidLoss: If it has not the parameters of a loss.
        """
        check_name(name)
        if not callable(function):
            raise InvalidLoss(f"{name} must be a function, got {type(function).__name__}")
        description = (inspect.getdoc(function) or "").partition("\n")[0]
        return cls(name, source, function, read_hyperparameters(function, source), description[:200])

    def settings(self, given: Mapping[str, Any]) -> dict[str, Setting]:
        """Returns all settings, with those of a call; none is fixed, because Python runs at each call.

        Raises:
            InvalidInput: If one is unknown, or has an invalid value.
        """
        known = {name: Hyperparameter(default) for name, default in self.defaults.items()}
        return settings(self.name, known, given, takes_others=takes_others(self.function))

    @property
    def reads(self) -> None:
        """Only the function knows."""

    def select(self, present: Iterable[str]) -> tuple[str, ...]:
        """All inputs that are there: only the function knows which it reads."""
        return tuple(present)

    def check(self, *_: Any) -> None:
        """Nothing can be told before it runs."""

    def __call__(
        self,
        sources: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        hyperparameters: Mapping[str, Setting],
        limits: Limits,
    ) -> LossFnOutput:
        """What the function returns.

        Raises:
            InvalidLoss: If it raises, or returns something else than a loss.
        """
        del limits
        # Copies: the function may write to them, and the model's backward needs what it has returned.
        sources = {name: tensor.clone() for name, tensor in sources.items()}
        try:
            if self.source == "logits":
                given = (sources["model_outputs"], dict(inputs), sources["attention_mask"])
                returned = self.function(*given, **hyperparameters)
            else:
                returned = self.function(dict(inputs), sources["logprobs"], **hyperparameters)
        except KeyError as error:
            raise InvalidInput(f"loss_fn_inputs: {error.args[0]}: missing; {self.name} reads it") from error
        except TinkerLightningError:
            raise
        except Exception as error:
            raise InvalidLoss(f"it raised {type(error).__name__}: {error}") from error
        if self.source == "logprobs" and isinstance(returned, Tensor):
            returned = returned, {}
        if self.source == "logprobs" and isinstance(returned, tuple) and len(returned) == 2:
            loss, logprobs, diagnostics = returned[0], None, returned[1]
        # By its fields, for a function that was pickled elsewhere may return a class of its own.
        elif all(hasattr(returned, field) for field in ("loss", "logprobs", "diagnostics")):
            loss, logprobs, diagnostics = returned.loss, returned.logprobs, returned.diagnostics
            diagnostics = {} if diagnostics is None else diagnostics
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
