"""Logging of a remote module: metrics of a step over its accumulation window, and those that arrive after the step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tinker_lightning.errors import TinkerLightningError
from tinker_lightning.lightning import _compat
from tinker_lightning.lightning.deferred_metrics import LOSS, DeferredMetrics
from tinker_lightning.lightning.session import LAST_WAIT, SessionModule
from tinker_lightning.remote import group
from tinker_lightning.rows.batches import count_datums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinker_lightning.lightning.deferred_metrics import FinishedPass


class LoggingModule(SessionModule):
    """A module that logs what its remote model returns; the arguments are those of `SessionModule`."""

    def __init__(self, model: Any, adapter: dict[str, Any], base_url: str | None, api_key: str | None) -> None:
        super().__init__(model, adapter, base_url, api_key)
        self._deferred = DeferredMetrics(self.lm.handle.remote.wait_for_end, self.server_metrics)
        # The metrics of the micro-batches whose gradients are in the window, and of the current one.
        self._window_metrics: list[tuple[dict[str, float], int]] = []
        self._batch_metrics: tuple[dict[str, float], int] = ({}, 0)
        self._logged: set[str] = set()

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        """Logs a value as `LightningModule.log` does, with the number of datums as the default batch size."""
        if kwargs.get("batch_size") is None and self.has_trainer:
            _compat.set_default_batch_size(self.trainer, count_datums)
        super().log(*args, **kwargs)

    def server_metrics(self, passes: Sequence[FinishedPass]) -> Mapping[str, float]:
        """Returns metrics of losses that ran on the server, in addition to their own; none by default."""
        del passes
        return {}

    def drain(self) -> None:
        """Waits for all requests of the module's remote models, logs them, and raises unread failures as one error."""
        if self.has_trainer and self.trainer.received_sigterm:
            group.wait_for_all(self, LAST_WAIT)
            self._deferred.log(wait=False)
        else:
            self._deferred.log(wait=True)
            group.wait_for_all(self)
        group.raise_first(self)

    def settle(self, timeout: float, error: BaseException) -> None:
        """Waits a while for requests sent before an error, logs them, and adds their failures to the error as notes."""
        group.settle(self, timeout, error)
        with contextlib.suppress(TinkerLightningError):
            self._deferred.log(wait=False)

    def _log_present(self, metrics: Mapping[str, float], batch_size: int) -> None:
        """Logs the metrics of a step and drops those it lacks, whose last values Lightning would repeat."""
        if missing := self._logged - metrics.keys():
            _compat.drop_logged(self.trainer, "training_step", missing)
        self._logged = set(metrics)
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name == LOSS, batch_size=batch_size)
