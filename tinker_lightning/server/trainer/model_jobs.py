"""The numbered jobs of models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.server.trainer.sizes import result_bytes as measure_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.server.engine.adapter import Adapter
    from tinker_lightning.server.engine.base import BaseModel
    from tinker_lightning.server.trainer.registry import Registry
    from tinker_lightning.server.trainer.scheduler import Scheduler


class ModelJobs:
    """Submits jobs that run in the order of their numbers, one line per model."""

    def __init__(self, registry: Registry, scheduler: Scheduler) -> None:
        self._registry = registry
        self._scheduler = scheduler

    def submit(
        self,
        request: Any,
        kind: str,
        run: Callable[[BaseModel, Adapter], Any],
        *,
        request_bytes: int = 0,
        result_bytes: int = 0,
        **labels: object,
    ) -> Job:
        """Queues a job under the number of its request. `run` gets the model when it is its turn.

        Args:
            request: The request, with the model and the number.
            kind: The operation.
            run: The work.
            request_bytes: The memory of the request.
            result_bytes: The most memory that the result takes.
            **labels: Fields for the log.
        """
        model = self._registry.model(request.model_id)
        model.last_request_time = datetime.now(UTC)
        job = Job(
            f"{model.model_id}:{request.seq_id}",
            kind,
            lambda: run(*model.ready()),
            owner=model.session_id,
            can_pause=False,
            request_bytes=request_bytes,
            result_bytes=result_bytes,
            measure=measure_result,
            model=model.model_id,
            seq=request.seq_id,
            **labels,
        )
        return self._scheduler.submit(job, line=model.model_id, number=request.seq_id)

    def known(self, model_id: str, number: int) -> Job | None:
        """Returns the job that was submitted with this number, if its result is still kept."""
        return self._scheduler.known(f"{model_id}:{number}")

    def skip(self, model_id: str, number: int) -> None:
        """Marks the number of a rejected request as skipped, because the client continues with the next one."""
        if self._registry.has_model(model_id):
            self._scheduler.free(model_id, number)
