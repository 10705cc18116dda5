"""The accumulation window of a remote model: gradients that are kept locally until the optimizer steps.

The protocol has no `zero_grad`, so nothing is sent before the step.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from tinker_lightning.client.backend import TrainingBackend
from tinker_lightning.client.futures import UnreadFailures
from tinker_lightning.client.sdk.adapters import as_backend
from tinker_lightning.errors import InvalidInput, LossNotFinite, ResultTimeout, TinkerLightningError
from tinker_lightning.losses import custom
from tinker_lightning.losses.builtin import LINEAR_ONLY
from tinker_lightning.remote.calls import Call, ServerCall, Step, TokenCount, tokens_of
from tinker_lightning.remote.saved_state import SavedState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.transport.retries import Pause
    from tinker_lightning.remote.calls import Pass, PreparedCall
    from tinker_lightning.remote.gradient import Clip
    from tinker_lightning.types import ForwardBackwardOutput
    from tinker_lightning.types.params import OptimParams

T = TypeVar("T")

# How often waiting calls `while_waiting`, in seconds.
_CALLBACK_SECONDS = 0.5

# How long to wait for related failures before one is raised, in seconds.
_SETTLE_SECONDS = 5.0

_DROPPED = (
    "Nothing was sent, the accumulated gradients were dropped, and the model is unchanged. Local parameters may have "
    "received such a gradient: call zero_grad() before you continue."
)


def _check_remote(backend: Any) -> None:
    """Raises `InvalidInput` for a model in this process, which can be called like a function that creates a client."""
    if isinstance(backend, nn.Module) or (isinstance(backend, type) and issubclass(backend, nn.Module)):
        name = backend.__name__ if isinstance(backend, type) else type(backend).__name__
        raise InvalidInput(
            f"{name} is a model in this process, but a model on a server is trained here. Pass the name of a base "
            "model, for example SFT('tiny'), or the folder or hub id of a Hugging Face model as a string."
        )


class RemoteModel:
    """A remote model: the backend behind a handle, and the accumulation window for the next step.

    Args:
        backend: A training client of this library or of the official SDK, or a function that creates one on first use.
        max_steps_in_flight: The maximum number of steps in flight; server-side losses have no other limit.
    """

    def __init__(self, backend: Any, max_steps_in_flight: int = 8) -> None:
        self.window: list[Call | ServerCall] = []
        self.clip: Clip | None = None  # what clip_grad_norm_ has asked for the window
        self.steps = 0
        self.tokens = TokenCount()  # sent and sampled since this object was created
        self.expected: Pass | None = None  # the forward pass that look-ahead sent for the next call
        self.missed = False  # whether the next call was for other datums or weights
        self.max_steps_in_flight = max_steps_in_flight
        _check_remote(backend)
        self.loss_name = "of this model"  # the name of the local loss in warnings
        self.received = 0  # the number of gradients received
        self.version = 0  # of the weights; incremented by a step or a load
        # Called after a step was sent, while SIGINT is held; must not block.
        self.on_step: Callable[[Step], None] | None = None
        self.while_waiting: Callable[[], None] | None = None  # called periodically; an exception ends the wait
        self._in_flight: deque[Step] = deque()
        # Replaces loading by the backend, which may not exist yet.
        self.load_state: Callable[[SavedState], None] | None = None
        self.saved: SavedState | None = None  # a saved state of the current weights, shared by state dicts
        self.save_options: dict[str, Any] = {}  # of what is saved, where the server lets it expire
        self._was_loaded = False
        self.optimizer_kind: str | None = None  # the optimizer that steps the model, by the protocol's name
        self.given = backend  # the backend, or what creates it
        self._backend: TrainingBackend | None = None

    @property
    def backend(self) -> TrainingBackend:
        """The training backend, created on first use."""
        if self._backend is None:
            creates_it = callable(self.given) and not isinstance(self.given, TrainingBackend)
            self._backend = as_backend(self.given() if creates_it else self.given)
            if self.optimizer_kind is not None:
                self.use_optimizer(self.optimizer_kind)
        return self._backend

    @property
    def unread(self) -> UnreadFailures:
        """The futures of the backend with unhandled failures; empty before there is a backend."""
        return UnreadFailures() if self._backend is None else self._backend.unread

    @property
    def pause(self) -> Pause | None:
        """What the requests of the model wait for, if they do."""
        return None if self._backend is None else self._backend.pause

    @property
    def is_created(self) -> bool:
        """Whether the backend exists."""
        return self._backend is not None

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to save: a model exists, or will be created from a state."""
        return self.is_created or self._was_loaded

    def use_optimizer(self, kind: str) -> None:
        """Notes the optimizer for which the model is created; raises `InvalidInput` if it exists for another one."""
        existing = self._backend.optimizer_kind if self._backend is not None else None
        if existing is not None and existing != kind:
            raise InvalidInput(
                f"the optimizer is {kind}, but the model was created for {existing}, which is fixed for its life. "
                f"Create it with optimizer={kind!r}, or use the optimizer of the model."
            )
        self.optimizer_kind = kind

    def point_to(self, backend: Any) -> None:
        """Switches to another backend and drops the window."""
        self.drop()
        self.version += 1
        self.saved = None
        self.given, self._backend, self._was_loaded = backend, None, False

    def load(self, state: SavedState) -> None:
        """Loads a state that was saved on the server, and drops the window."""
        if self.load_state is not None:
            self.load_state(state)
        else:
            self.backend.load_state_with_optimizer(state.path).result()
        self.drop()
        self.version += 1
        self.steps = state.steps
        self.saved = None  # the loaded state belongs to a checkpoint file and may be deleted with it
        self._was_loaded = True

    def take(self, data: Sequence[Any]) -> Pass | None:
        """Returns the forward pass that look-ahead sent, if it is for these datums and the current weights."""
        if self.expected is None or self.expected.version != self.version or not self.expected.is_of(data):
            self.missed = self.expected is not None
            return None
        expected, self.expected = self.expected, None
        return expected

    def wait(self, future: TinkerFuture[T]) -> T:
        """Waits for a result and returns it; `while_waiting` can end the wait."""
        self.wait_for_end(future)
        return future.result()

    def wait_for_end(self, future: TinkerFuture[Any]) -> None:
        """Waits for a result or failure without raising it; `while_waiting` can end the wait."""
        while True:
            with contextlib.suppress(ResultTimeout):
                return future.wait(_CALLBACK_SECONDS)
            if self.while_waiting is not None:
                self.while_waiting()

    def wait_for_all(self) -> None:
        """Waits until all requests are done; `while_waiting` can end the wait."""
        while not self.unread.wait(_CALLBACK_SECONDS):
            if self.while_waiting is not None:
                self.while_waiting()

    def receive(self, call: Call | ServerCall, gradients: Sequence[Tensor]) -> None:
        """Adds the gradient of a call to the window; drops the window and raises if it is not finite."""
        if isinstance(call, Call):
            self.check_version(call.version)
        try:
            for i, gradient in enumerate(gradients):
                if isinstance(call, ServerCall):
                    where = f"the server-side loss {call.name!r}: "
                    custom.check_gradient(None, gradient, where, f"{_DROPPED} {LINEAR_ONLY}")
                else:
                    custom.check_gradient(None, gradient, f"datum {i}: ", _DROPPED)
        except LossNotFinite:
            self.drop()
            raise
        if call.gradients is None:
            self.window.append(call)
        call.add(gradients)
        self.received += 1

    def check_version(self, version: int | None) -> None:
        """Raises `InvalidInput` for log-probabilities of earlier weights, as torch does for modified tensors."""
        if version is not None and version != self.version:
            raise InvalidInput(
                "the weights have changed since these log-probabilities were computed, by a step or a load, so their "
                "gradient can no longer be computed. Call the model again, or detach() them to use them as constants."
            )

    def drop(self) -> None:
        """Drops the window."""
        for call in self.window:
            call.gradients = None
        self.window = []
        self.clip = None

    def request_clip(self, clip: Clip, limit: float) -> None:
        """Makes the server clip the gradient of the next step to a norm."""
        if limit <= 0:
            raise InvalidInput(f"clip_grad_norm_: max_norm must be positive for a remote model, got {limit}")
        self._check_clip()
        clip.limit = limit if self.clip is None or self.clip.limit is None else min(limit, self.clip.limit)
        self.clip = clip

    def _check_clip(self) -> None:
        if self.clip is not None and self.clip.received != self.received:
            raise InvalidInput(
                "gradients were accumulated after clip_grad_norm_, but the server clips the gradient of the whole "
                "window. Clip once, right before optimizer.step(): in Accelerate, `if accelerator.sync_gradients:`."
            )

    def prepare(self, params: OptimParams) -> list[PreparedCall]:
        """Validates and converts the window, or drops it if a call is invalid; waits while too many steps run.

        Settings of the step that the server does not support raise before that, and keep the window.
        """
        self.unread.raise_first(_SETTLE_SECONDS)
        if not self.window:
            return []
        self._check_clip()
        backend = self.backend
        backend.prepare_step(params)
        try:
            prepared: list[PreparedCall] = [(copy.copy(call), call.prepare(backend)) for call in self.window]
            if own := [call.gradients or [] for call in self.window if isinstance(call, Call)]:
                custom.warn_if_zero(list(itertools.chain(*own)), self.loss_name)
        except TinkerLightningError:
            self.drop()
            raise
        self._make_room()
        return prepared

    def step(self, prepared: Sequence[PreparedCall], params: OptimParams) -> Step:
        """Sends the window and an optimizer step, without waiting.

        Call it while interrupts and failures are held: a partially sent window would become part of the next step.
        """
        step = self._send(prepared, params)
        if self.clip is not None:
            self.clip.step = step
        self.drop()
        self.steps += 1
        self.version += 1
        self.saved = None
        self._in_flight.append(step)
        self.unread.add(*step.backwards, step.optim)  # which a backend that wraps another may not have done
        if self.on_step is not None:
            self.on_step(step)
        return step

    def save(self) -> SavedState:
        """Saves weights and optimizer state on the server, unless the current weights are already saved."""
        if self.saved is None:
            self.wait_for_all()  # otherwise the state could silently miss a failed step
            self.unread.raise_first(_SETTLE_SECONDS)
            options = self.save_options if self.save_options and self.backend.can_expire else {}
            name = f"step-{self.steps:06d}-{uuid.uuid4().hex[:8]}"
            path = self.wait(self.backend.save_state(name, **options)).path
            info = self.backend.get_info()
            self.saved = SavedState(path, info.model_data.model_name, info.lora_rank, self.steps, self.backend.storage)
        return self.saved

    def _send(self, prepared: Sequence[PreparedCall], params: OptimParams) -> Step:
        backend = self.backend
        backwards: list[TinkerFuture[ForwardBackwardOutput]] = []
        try:
            for _, request in prepared:
                backwards.append(backend.send(request))
            optim = backend.optim_step(params)
        except Exception as error:
            if sent := backend.drop_unsent("dropped, because its step could not be sent"):
                self.drop()
                error.add_note(
                    f"The gradient of {sent} sequences was sent before this error, but no step, so it would become "
                    "part of the next one. Continue with a new model from a state that was saved before."
                )
            raise
        calls = [call for call, _ in prepared]
        self.tokens.trained += tokens_of([datum for call in calls for datum in call.datums])
        pairs = zip(backwards, calls, strict=True)
        return Step(backwards, optim, [(backward, call) for backward, call in pairs if isinstance(call, ServerCall)])

    def _make_room(self) -> None:
        while self._in_flight and self._in_flight[0].optim.done():
            self._in_flight.popleft()
        while len(self._in_flight) >= self.max_steps_in_flight:
            self.wait_for_end(self._in_flight.popleft().optim)
        self.unread.raise_first(_SETTLE_SECONDS)
