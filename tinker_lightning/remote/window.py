"""Gradients that wait here for the next step: the window of a remote model.

The protocol has no `zero_grad`: a gradient which has reached the server can no longer be dropped. So nothing is sent
before the optimizer steps.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tinker_lightning.client.adapters import as_backend
from tinker_lightning.client.futures import UnreadFailures
from tinker_lightning.errors import InvalidInput, LossNotFinite, ResultTimeout, TinkerLightningError
from tinker_lightning.losses import surrogate
from tinker_lightning.remote.calls import Call, ServerCall, Step
from tinker_lightning.remote.deferred_loss import LINEAR_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from torch import Tensor

    from tinker_lightning.client.backend import TrainingBackend
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.remote.calls import Pass, PendingBackward
    from tinker_lightning.types import AdamParams, ForwardBackwardOutput

T = TypeVar("T")

# How often somebody who waits is asked whether it is still worth it, in seconds.
_LOOK_UP = 0.5

# How long a failure waits for those that may have come with it, in seconds.
_PATIENCE = 5.0


class Remote:
    """Where a handle leads: a backend, and the window of gradients that waits for the next step.

    Args:
        backend: A training client, ours or the official SDK's, or a function that makes one at the first use.
        max_steps_in_flight: How many steps may be under way at once; a loss that runs on the server waits for none.
    """

    def __init__(self, backend: Any, max_steps_in_flight: int = 8) -> None:
        self.window: list[Call | ServerCall] = []
        self.unread = UnreadFailures(_PATIENCE)
        self.steps = 0
        self.expected: Pass | None = None  # a forward that was asked for ahead, for the call that comes next
        self.missed = False  # whether another one came
        self.max_steps_in_flight = max_steps_in_flight
        self.loss_name = "of this model"  # what warnings call the loss that is computed locally
        self.received = 0  # how many gradients have come back
        self.version = 0  # of the weights: a step or a load makes another
        # Told of every step that was sent, while a Ctrl-C is held; must not wait.
        self.on_step: Callable[[Step], None] | None = None
        self.on_sent: Callable[[], None] | None = None
        self.while_waiting: Callable[[], None] | None = None  # called now and then; what it raises ends the wait
        self._under_way: deque[Step] = deque()
        self.resumes = False  # whether the backend, once it is made, goes on from a state
        self.for_file = False  # whether what is saved now will be deleted with the file that names it
        self._saved: dict[bool, tuple[int, str]] = {}  # the last state for such files, and the last for all else
        self._given = backend
        self._backend: TrainingBackend | None = None

    @property
    def backend(self) -> TrainingBackend:
        """What is trained, made at the first use."""
        if self._backend is None:
            is_maker = callable(self._given) and not hasattr(self._given, "forward_backward")
            self._backend = as_backend(self._given() if is_maker else self._given)
        return self._backend

    @property
    def is_made(self) -> bool:
        """Whether there is a backend already."""
        return self._backend is not None

    @property
    def has_weights(self) -> bool:
        """Whether there is something to save: a model, or a state from which it will be made."""
        return self.is_made or self.resumes

    def point_to(self, backend: Any) -> None:
        """Leads elsewhere from now on; what waits for the old backend is dropped."""
        self.drop()
        self.version += 1
        self._saved = {}
        self._given, self._backend, self.resumes = backend, None, False

    def load(self, state: str, steps: int | None = None) -> None:
        """Goes on from a state that was saved on the server; what waits is dropped."""
        self.backend.load_state_with_optimizer(state).result()
        self.goes_on(steps)

    def goes_on(self, steps: int | None = None) -> None:
        """The weights are others now, so many steps old."""
        self.drop()
        self.version += 1
        self.steps = self.steps if steps is None else steps
        self._saved = {}  # what was loaded belongs to those who name it, and may go with them

    def take(self, data: Sequence[Any]) -> Pass | None:
        """The forward that was asked for ahead, if it is of these datums and of the weights as they are."""
        if self.expected is None or self.expected.version != self.version or not self.expected.is_of(data):
            self.missed = self.expected is not None
            return None
        expected, self.expected = self.expected, None
        return expected

    def wait(self, future: TinkerFuture[T]) -> T:
        """A result, waited for in a way that can be ended."""
        self.wait_for_end(future)
        return future.result()

    def wait_for_end(self, future: TinkerFuture[Any]) -> None:
        """Waits in the same way, until a result or a failure is there."""
        while not future.done():
            if self.while_waiting is not None:
                self.while_waiting()
            with contextlib.suppress(ResultTimeout):
                future.wait(_LOOK_UP)

    def wait_for_all(self) -> None:
        """Waits in the same way, until everything that was sent is done."""
        while not self.unread.wait(_LOOK_UP):
            if self.while_waiting is not None:
                self.while_waiting()

    def receive(self, call: Call | ServerCall, gradients: Sequence[Tensor]) -> None:
        """A gradient has come back to a call.

        Raises:
            InvalidInput: If the weights have changed since the call.
            LossNotFinite: If it is NaN or infinite; the window is dropped, for it could not be stepped on.
        """
        if isinstance(call, Call):
            self.check_version(call.version)
        for i, gradient in enumerate(gradients):
            if not torch.isfinite(gradient).all():
                self.drop()
                where = f"the server's loss {call.name!r}" if isinstance(call, ServerCall) else f"datum {i}"
                raise LossNotFinite(
                    f"{where}: the gradient of the loss has NaN or infinite entries. Nothing was sent, and the "
                    "gradients that waited for the next step were dropped; the model is as it was. Local parameters "
                    "may have got such a gradient: call zero_grad() before you go on."
                    + (f" {LINEAR_ONLY}" if isinstance(call, ServerCall) else "")
                )
        if call.gradients is None:
            self.window.append(call)
        call.add(gradients)
        self.received += 1

    def check_version(self, version: int | None) -> None:
        """Refuses a gradient by log-probabilities of other weights, as torch does: it would be of neither.

        Raises:
            InvalidInput: If a step was taken, or a state loaded, since those weights.
        """
        if version is not None and version != self.version:
            raise InvalidInput(
                "these log-probabilities are of weights that have changed since, by a step or a load, so that their "
                "gradient can no longer be had. Call the model again, or detach() them to use them as numbers."
            )

    def drop(self) -> None:
        """Forgets the window; nothing of it has left this machine."""
        for call in self.window:
            call.gradients = None
        self.window = []

    def prepare(self) -> list[PendingBackward]:
        """The window, ready to be sent; waits while too many steps are under way.

        Raises:
            TinkerLightningError: If something that was sent before has failed and nobody has read it; then the window
                waits on. Or if a call of the window cannot be sent; then the window is dropped.
        """
        self.unread.raise_first()
        if not self.window:
            return []
        try:
            prepared = [call.prepare(self.backend) for call in self.window]
            for call in self.window:
                if isinstance(call, Call):
                    surrogate.warn_if_zero(call.gradients or [], self.loss_name)
        except TinkerLightningError:
            self.drop()
            raise
        self._make_room()
        return prepared

    def step(self, prepared: Sequence[PendingBackward], params: AdamParams) -> Step:
        """Sends the window and a step on it; waits for nothing.

        Half of them would stay on the server, and be part of the next step: call it while interrupts and failures are
        held.
        """
        step = self._send(prepared, params)
        self.drop()
        self.steps += 1
        self.version += 1
        self._under_way.append(step)
        for backward in step.backwards:
            self.unread.add(backward)
        self.unread.add(step.optim)
        if self.on_step is not None:
            self.on_step(step)
        if self.on_sent is not None:
            self.on_sent()
        return step

    def save(self, *, anew: bool = False) -> str:
        """Saves weights and optimizer on the server, unless nothing was trained since the last time; their path.

        Args:
            anew: Save them even then, for a file that is to have a state of its own.

        Raises:
            TinkerLightningError: If something that was sent before has failed and nobody has read it.
        """
        saved = self._saved.get(self.for_file)
        if anew or saved is None or saved[0] != self.steps:
            self.wait_for_all()  # a state without a step that has failed would pass for one with it
            self.unread.raise_first()
            name = f"step-{self.steps:06d}-{uuid.uuid4().hex[:8]}"
            saved = self._saved[self.for_file] = (self.steps, self.wait(self.backend.save_state(name)).path)
        return saved[1]

    def forget(self, state: str) -> None:
        """A state was deleted, or is another's from now on."""
        self._saved = {key: saved for key, saved in self._saved.items() if saved[1] != state}

    def forget_for_files(self, kept: Container[str]) -> None:
        """States that were saved for files are theirs from now on, but for these."""
        self._saved = {for_file: saved for for_file, saved in self._saved.items() if not for_file or saved[1] in kept}

    def _send(self, prepared: Sequence[PendingBackward], params: AdamParams) -> Step:
        backwards: list[TinkerFuture[ForwardBackwardOutput]] = []
        try:
            for each in prepared:
                backwards.append(self.backend.send(each.request))
            optim = self.backend.optim_step(params)
        except Exception as error:
            if backwards:
                self.drop()
                error.add_note(
                    f"{len(backwards)} of the window's {len(prepared)} backwards were sent before this, without a "
                    "step: they would be part of the next one. Load a state that was saved before."
                )
            raise
        pairs = zip(backwards, prepared, strict=True)
        losses = [(backward, each) for backward, each in pairs if each.by_server]
        return Step(backwards, optim, losses)

    def failures_held(self) -> contextlib.AbstractContextManager[None]:
        """Failures of earlier requests are raised before those that are sent inside, or after them; never by one."""
        return self.backend.unread.held()

    def _make_room(self) -> None:
        while self._under_way and self._under_way[0].optim.done():
            self._under_way.popleft()
        while len(self._under_way) >= self.max_steps_in_flight:
            self.wait_for_end(self._under_way.popleft().optim)
        self.unread.raise_first()
