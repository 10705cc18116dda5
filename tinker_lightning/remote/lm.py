"""A remote model as a node of the local autograd graph.

`RemoteLM(backend)(data)` returns one tensor of log-probabilities per datum. Gradients with respect to them accumulate
in the local accumulation window; nothing is sent before the optimizer steps. The functions at the end act on all
remote models of a module.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tinker_lightning.client.futures import note_failures, raise_together
from tinker_lightning.errors import InvalidInput, InvalidLoss
from tinker_lightning.losses import custom
from tinker_lightning.losses.builtin import LINEAR_ONLY
from tinker_lightning.remote.calls import Call, Pass, ServerCall, tokens_of
from tinker_lightning.remote.gradient import RemoteGradient
from tinker_lightning.remote.saved_state import SavedState
from tinker_lightning.remote.window import RemoteModel
from tinker_lightning.types import TensorData
from tinker_lightning.types.datum import to_datums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tinker_lightning.client.backend import TrainingBackend
    from tinker_lightning.types.responses import Checkpoint

# The names of functions and methods, without the underscores of operators and in-place variants.
_SUMS = "add iadd isub mean neg negative pos positive radd rsub sub subtract sum"
_COPIES = """
bfloat16 broadcast_to cat clone concat contiguous cpu cuda detach double expand expand_as flatten float getitem half
hstack index_select movedim narrow permute ravel repeat requires_grad reshape select split squeeze stack t to transpose
type type_as unbind unsqueeze view view_as vstack where
"""
# Attributes and the properties that a tensor has before its value is known.
_PROPERTIES = "get is_complex is_contiguous is_floating_point is_inference is_same_size isfinite isinf isnan"
_AFFINE = frozenset(f"{_SUMS} {_COPIES} {_PROPERTIES}".split())
_PRODUCTS = frozenset(["dot", "imul", "inner", "matmul", "mul", "multiply", "rmul"])
_QUOTIENTS = frozenset(["div", "divide", "idiv", "itruediv", "true_divide", "truediv"])


class RemoteHandle(nn.Parameter):
    """The only parameter of a remote model: it holds no weights, but connects an optimizer to them.

    Its `.grad` is set while the window holds a gradient; setting it to None, as every `zero_grad` does, drops the
    window.
    """

    remote: RemoteModel

    def __new__(cls, remote: RemoteModel) -> Self:
        """Creates a scalar that autograd treats as a parameter."""
        handle = super().__new__(cls, torch.zeros(()), True)
        handle.remote = remote
        return handle

    @property
    def grad(self) -> Tensor | None:
        """A placeholder while the window holds a gradient, else None."""
        if not self.remote.window:
            return None
        gradient = torch.zeros(()).as_subclass(RemoteGradient)
        gradient.remote = self.remote
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise InvalidInput("the gradient of a remote model cannot be set; call backward() on a loss")
        self.remote.drop()

    def register_hook(self, hook: Any) -> Any:
        """Raises an error, because no gradient would ever reach the hook."""
        del hook
        raise InvalidInput(
            "a hook on the gradient of a remote model would never be called: that gradient is on the server. Its norm "
            "is logged as grad_norm. To watch local layers with W&B, pass only those: logger.watch(module.head)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteHandle:
        raise InvalidInput(
            "a remote model cannot be copied: a copy would share the weights on the server. Averaging and EMA "
            "callbacks copy the module, so they are not supported."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput(
            "a remote model cannot be pickled; save its state on the server and keep the path: RemoteLM.save()"
        )


class RemoteLM(nn.Module):
    """A remote language model as a module: `model(data)` returns one tensor of log-probabilities per datum.

    Under `torch.no_grad()`, a call is a plain forward pass. Otherwise the tensors take part in autograd, and
    `RemoteAdamW(model.parameters())` trains the model.

    Args:
        backend: A training client of this library or of the official SDK, or a function that creates one on first use.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.handle = RemoteHandle(RemoteModel(backend))
        self.retain = True  # whether a server that can keeps a forward for its gradient, instead of running it twice

    @property
    def backend(self) -> TrainingBackend:
        """The training backend. Setting it also redirects optimizers that hold this model's parameter."""
        return self.handle.remote.backend

    @backend.setter
    def backend(self, backend: Any) -> None:
        self.handle.remote.point_to(backend)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Does nothing: device and dtype do not apply to weights on a server."""
        del fn, recurse
        return self

    def save(self) -> str:
        """Saves weights and optimizer state on the server, unless they are already saved; returns the path."""
        return self.handle.remote.save().path

    def get_extra_state(self) -> Tensor:
        """Saves the model on the server and returns the record of its state; empty if there is no model yet."""
        remote = self.handle.remote
        return remote.save().to_tensor() if remote.has_weights else torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Loads the state that a record names; None means that it is already loaded."""
        if state is None:
            return
        if state.numel():
            self.handle.remote.load(SavedState.from_tensor(state))
        elif self.handle.remote.has_weights:
            raise InvalidInput(
                "this state dict names no state on the server: it was taken before its model was first used. Create a "
                "new RemoteLM to start from the beginning."
            )

    def send(self, data: Sequence[Any]) -> Pass:
        """Sends a forward pass without waiting, so that several can be in flight; `model(result)` waits for it."""
        datums = to_datums(data)
        sent = self.backend.logprobs(datums, retain=self.retain and torch.is_grad_enabled())
        self.handle.remote.tokens.prefilled += tokens_of(datums)
        return Pass(data, datums, sent, self.handle.remote.version)

    def forward(self, data: Sequence[Any] | Pass) -> list[Tensor]:
        """Returns one tensor of log-probabilities per datum, shaped like its targets."""
        remote = self.handle.remote
        sent = data if isinstance(data, Pass) else remote.take(data) or self.send(data)
        if torch.is_grad_enabled():
            remote.check_version(sent.version)
        output = remote.wait(sent.future)
        logprobs = [leaf.detach() for leaf in custom.logprob_leaves(output, sent.datums)]
        if not torch.is_grad_enabled():
            return logprobs
        call = Call(sent.datums, version=sent.version, logprobs=logprobs, retained=output.retained)
        return list(_Join.apply(self.handle, call, *logprobs))  # type: ignore[no-untyped-call]

    def server_loss(
        self,
        data: Sequence[Any],
        loss: Any,
        config: Mapping[str, float | str] | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        added: float | None = None,
        about: Any = None,
    ) -> Tensor:
        """Returns a loss that runs on the server, in a single pass that also computes its gradient.

        The pass is sent with the next step, so the value is not known yet: it is NaN. The loss can be scaled and added
        to other losses; other operations raise.

        Args:
            data: The datums.
            loss: The name of the loss, or the result of `custom_loss` or `create_custom_loss`.
            config: The settings of the loss.
            inputs: Inputs of the loss for the whole batch.
            added: The value of local terms added to the loss, so that a `RemoteModule` can log the total.
            about: Anything; it is kept with the call, to compute further metrics when the result arrives.
        """
        given = {name: TensorData.from_data(value) for name, value in (inputs or {}).items()}
        call = ServerCall(to_datums(data), loss, dict(config or {}), added=added, inputs=given, about=about)
        (value,) = _Join.apply(self.handle, call, torch.tensor(torch.nan))  # type: ignore[no-untyped-call]
        assert isinstance(value, Tensor)  # noqa: S101 for the type checker
        return value.as_subclass(DeferredLoss)


class DeferredLoss(Tensor):
    """NaN, connected to the autograd graph.

    A `relu`, a `where` or an `if` of NaN would silently train one of its branches. So only the functions listed in this
    module, which are affine, may return a tensor with a gradient, a bool or integers.
    """

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function; raises `InvalidLoss` if it is not affine."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if any(map(_matters, tree_leaves(result))) and not _is_affine(func, args, kwargs):
                name = getattr(func, "__name__", str(func))
                raise InvalidLoss(f"{name} is not a linear function of a loss that runs on the server. {LINEAR_ONLY}")
            return tree_map_only(Tensor, lambda one: one.as_subclass(cls) if one.requires_grad else one, result)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def __format__(self, spec: str) -> str:
        """Formats the value as a number, which torch does only for `Tensor` itself."""
        return format(self.detach(), spec)


def _matters(result: Any) -> bool:
    """Returns whether a result takes part in training or is a decision, such as a bool."""
    if isinstance(result, Tensor):
        return result.requires_grad or not (result.is_floating_point() or result.is_complex())
    return isinstance(result, bool)


def _is_affine(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "").strip("_")
    if name in _PRODUCTS:
        return _count([args, kwargs]) == 1
    if name in _QUOTIENTS:
        return "rounding_mode" not in kwargs and not _count([args[1:], kwargs.get("other")])
    return name in _AFFINE


def _count(arguments: Any) -> int:
    """Returns how many arguments are deferred."""
    return sum(isinstance(leaf, DeferredLoss) for leaf in tree_leaves(arguments))


def holds_server_loss(loss: Tensor) -> bool:
    """Returns whether a loss includes a server-side loss, whose value is deferred."""
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(getattr(node, "call", None), ServerCall):
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


class _Join(torch.autograd.Function):
    """Connects log-probabilities to the autograd graph and adds their gradients to the window."""

    @staticmethod
    def forward(ctx: Any, handle: RemoteHandle, call: Call | ServerCall, *logprobs: Tensor) -> tuple[Tensor, ...]:
        ctx.remote, ctx.call = handle.remote, call
        return tuple(tensor.view_as(tensor) for tensor in logprobs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        _check_accumulates(ctx.next_functions[0][0])
        ctx.remote.receive(ctx.call, gradients)
        return (None, None, *(None for _ in gradients))


def _check_accumulates(handle: Any) -> None:
    """Raises `InvalidInput` in a `torch.autograd.grad` that would return the handle's gradient, not accumulate it."""
    try:
        torch._C._will_engine_execute_node(handle)  # raises if a leaf's gradient would be returned
    except AttributeError as error:  # there is no public API; register_multi_grad_hook uses it too
        raise RuntimeError(
            f"torch {torch.__version__} has no torch._C._will_engine_execute_node, by which RemoteLM recognizes "
            "torch.autograd.grad. Install a torch version that tinker-lightning supports."
        ) from error
    except RuntimeError as error:
        raise InvalidInput(
            "torch.autograd.grad with respect to the parameter of a remote model: that gradient is on the server and "
            "cannot be returned. Differentiate with respect to the log-probabilities, leave the remote model's "
            "parameter out, or call backward()."
        ) from error


def handles_of(module: nn.Module) -> dict[str, RemoteHandle]:
    """Returns the handles among a module's parameters, by name."""
    return {name: one for name, one in module.named_parameters() if isinstance(one, RemoteHandle)}


def remotes_of(module: nn.Module) -> list[RemoteModel]:
    """Returns the remote models of a module."""
    return [handle.remote for handle in handles_of(module).values()]


def wait_for_all(module: nn.Module, timeout: float | None = None) -> None:
    """Waits until all requests are done, at most `timeout` seconds."""
    end = None if timeout is None else time.monotonic() + timeout
    for remote in remotes_of(module):
        if end is None:
            remote.wait_for_all()
        else:
            remote.unread.wait(max(0.0, end - time.monotonic()))


def raise_first(module: nn.Module) -> None:
    """Raises the first unread failure, with the others as its notes."""
    raise_together([failure for remote in remotes_of(module) for failure in remote.unread.take_failures()])


def is_silent(module: nn.Module) -> bool:
    """Returns whether requests wait for a server that is silent or refuses them."""
    return any(remote.pause is not None and remote.pause.is_fault for remote in remotes_of(module))


def settle(module: nn.Module, timeout: float, error: BaseException) -> None:
    """Waits for requests sent before an error, and adds their failures as notes, so that no later fit raises them.

    A `KeyboardInterrupt` or `SystemExit` gets no notes; the next use of the models raises the failures.
    """
    wait_for_all(module, 0.0 if is_silent(module) else timeout)
    if isinstance(error, Exception):
        for remote in remotes_of(module):
            note_failures(error, remote.unread.take_failures())


@contextmanager
def dropping(module: nn.Module) -> Iterator[None]:
    """Drops the accumulation windows of a module if a loss inside the `with` block is rejected."""
    try:
        yield
    except InvalidLoss:
        for remote in remotes_of(module):
            remote.drop()
        raise


@contextmanager
def fresh_states(module: nn.Module, **options: Any) -> Iterator[None]:
    """Makes saves inside the `with` block create new states, which no state dict outside of it names.

    On servers where states can expire, they are saved with the `options` of `TrainingBackend.save_state`.
    """
    shared = [(remote, remote.saved) for remote in remotes_of(module)]
    for remote, _ in shared:
        remote.saved, remote.save_options = None, options
    try:
        yield
    finally:
        for remote, saved in shared:
            remote.saved, remote.save_options = saved, {}


def delete_state(module: nn.Module, path: str) -> None:
    """Deletes a state on whichever server holds it; a state that does not exist is not an error."""
    failures: list[Exception] = []
    for backend in _backends_of(module):
        try:
            backend.delete_checkpoint(path, missing_ok=True)
        except Exception as error:  # another backend may hold it
            failures.append(error)
    for remote in remotes_of(module):
        if remote.saved is not None and remote.saved.path == path:
            remote.saved = None
    if failures:
        raise failures[0]


def set_expiry(module: nn.Module, path: str, ttl_seconds: int | None) -> None:
    """Sets when the server that holds a state deletes it; None means never. Does nothing where states do not expire."""
    failures: list[Exception] = []
    for backend in (each for each in _backends_of(module) if each.can_expire):
        try:
            backend.set_checkpoint_ttl(path, ttl_seconds)
        except Exception as error:  # another backend may hold it
            failures.append(error)
        else:
            return
    if failures:
        raise failures[0]


def list_states(module: nn.Module) -> list[Checkpoint]:
    """Returns what the user has saved on the servers where states can expire."""
    return [each for backend in _backends_of(module) if backend.can_expire for each in backend.list_checkpoints()]


def _backends_of(module: nn.Module) -> Iterable[TrainingBackend]:
    """Returns the backends of a module's remote models that exist, or else creates the first one."""
    remotes = remotes_of(module)
    made = [remote for remote in remotes if remote.is_created] or remotes[:1]
    return {id(remote.backend): remote.backend for remote in made}.values()
