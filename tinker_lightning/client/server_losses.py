"""An uploaded per-datum loss, which is also computed locally where the server does not run it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import torch
from torch import Tensor

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.transport.operations import operate
from tinker_lightning.errors import InvalidInput, InvalidLoss
from tinker_lightning.losses import custom
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.lossgraph.graph import find_lines
from tinker_lightning.lossgraph.graph_loss import (
    GraphLoss,
    combine_metrics,
    dense_tensors,
    scale_by_input,
    select_inputs,
)
from tinker_lightning.lossgraph.trace import trace_datum_loss
from tinker_lightning.types import requests as rq
from tinker_lightning.types import responses as rs
from tinker_lightning.types.datum import to_datum

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinker_lightning.client.transport.channel import Channel
    from tinker_lightning.lossgraph.graph import Graph
    from tinker_lightning.lossgraph.graph_loss import Source
    from tinker_lightning.lossgraph.server_loss import ServerLoss
    from tinker_lightning.types import Datum, ForwardBackwardOutput


@dataclass(frozen=True, slots=True)
class LossHandle:
    """A per-datum loss that `create_custom_loss` returned: `forward_backward(data, handle)` trains with it.

    Call it with datums and their log-probabilities to compute it locally, as for servers that do not run such losses.
    """

    name: str
    session_id: str
    loss: GraphLoss = field(repr=False)
    loss_id: str | None = None
    number: int = 0  # of the upload in the session, by which the server recognizes a repeated one
    by_input: bool = False  # whether the scale is sent as an input of each datum, for servers without a scale

    def __call__(self, data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Returns the sum of the datums' losses, and their metrics."""
        terms: list[Tensor] = []
        sums: dict[str, float] = {}
        for i, (datum, each) in enumerate(zip(data, logprobs, strict=True)):
            try:
                selected = select_inputs(self.loss, to_datum(datum).loss_fn_inputs)
                output = self.loss({"logprobs": each}, dense_tensors(selected, each.dtype))
                custom.check_scalar(output.loss)
            except InvalidInput as error:
                raise located(type(error)(f"datum {i}: {self.name}: {error}"), [self.loss.program.graph]) from error
            terms.append(output.loss)
            for name, value in output.diagnostics.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        return torch.stack(terms).sum(), combine_metrics(sums, len(terms))


def located(error: BaseException, graphs: Sequence[Graph]) -> BaseException:
    """Adds the line of the user's function to an error that names a node of a graph."""
    lines = find_lines(str(error), graphs) if isinstance(error, InvalidInput) else []
    if not lines:
        return error
    explained = type(error)(f"{error}\n    at {' or '.join(lines)}")
    explained.__dict__.update(error.__dict__)  # the operation and request id
    explained.__cause__ = error.__cause__
    return explained


def with_loss(output: ForwardBackwardOutput, data: list[Datum], handle: LossHandle) -> ForwardBackwardOutput:
    """Adds the locally computed loss to the result of a forward pass."""
    with torch.no_grad():
        loss, metrics = handle(data, [leaf.detach() for leaf in custom.logprob_leaves(output, data)])
    own = {**output.metrics, "loss:sum": float(loss)}
    metrics = {**custom.prefix_clashes(metrics, own, "loss"), **own}
    return replace(output, metrics=metrics)


def times(handle: LossHandle, scale: float) -> custom.LossFn:
    """Returns a loss with the same value and `scale` times the gradient."""
    if scale == 1:
        return handle

    def scaled_loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = handle(data, logprobs)
        return loss + (scale - 1) * (loss - loss.detach()), metrics

    return scaled_loss


# A script may create a new function at each step; one that was dropped here is uploaded again when it is used.
_KEPT_HANDLES = 256


class Losses:
    """Uploads losses, and keeps track of those that were uploaded.

    `in_process` registers a Python function as a loss of a session if the trainer runs in this process.
    """

    def __init__(
        self,
        channel: Channel,
        in_process: Callable[[str, Callable[..., Any], Source, str], str] | None = None,
    ) -> None:
        self.by_name: dict[str, ServerLoss] = {}  # registered by custom_loss
        self._channel = channel
        self._in_process = in_process
        self._handles: OrderedDict[str, TinkerFuture[LossHandle]] = OrderedDict()
        self._evicted: set[str] = set()  # ids that the server may have dropped

    def create(self, fn: Callable[..., Any], input_ranks: Mapping[str, int]) -> TinkerFuture[LossHandle]:
        """Traces a per-datum loss and uploads it once; a failed upload is retried at the next call.

        Raises:
            LossNotTraceable: If the function cannot be traced; names the line.
        """
        loss, session = trace_datum_loss(fn, input_ranks), self._channel.session
        key = loss.digest
        made = self._handles.get(key)
        if made is not None and not made.failed:
            self._handles.move_to_end(key)
            return made
        handle = LossHandle(loss.name, session.session_id, loss)
        if not session.config.custom_loss_server_side:
            made = TinkerFuture.from_result(handle, f"create_custom_loss {loss.name}")
        else:
            by_input = not session.extensions.server_losses
            handle = replace(handle, number=self._channel.count("custom loss"), by_input=by_input)
            made = self._upload(handle).then(lambda created: replace(handle, loss_id=created.loss_id))
        self._handles[key] = made
        while len(self._handles) > _KEPT_HANDLES:
            self._handles.popitem(last=False)
        return made

    def renew(self, handle: LossHandle) -> None:
        """Uploads a per-datum loss again if the server may have dropped it."""
        if handle.loss_id in self._evicted:
            self._upload(handle).result()
            self._evicted.discard(handle.loss_id)

    def lose(self, handle: LossHandle) -> None:
        """Notes that a pass with this loss failed, possibly because the server had to make room."""
        if handle.loss_id is not None:
            self._evicted.add(handle.loss_id)

    def _upload(self, handle: LossHandle) -> TinkerFuture[rs.CreateCustomLossResponse]:
        session = self._channel.session
        sent = scale_by_input(handle.loss) if handle.by_input else handle.loss
        request = rq.CreateCustomLossRequest(
            session.session_id,
            handle.number,
            handle.name,
            [rq.CustomLossInput(name, rank or 0) for name, rank in sent.inputs.items()],
            sent.program.graph.encode(),
        )
        uploaded = operate(session, "create_custom_loss", request, rs.CreateCustomLossResponse)
        return TinkerFuture(self._channel.run(uploaded), f"create_custom_loss {handle.name}")

    @property
    def accepts_batch_losses(self) -> bool:
        """Whether the server accepts whole-batch losses."""
        return self._channel.session.extensions.server_losses

    def register(self, loss: GraphLoss) -> str:
        """Uploads the graphs of a whole-batch loss; returns its id."""
        return self._register(loss.name, rq.RegisterLossRequest(self._channel.session.session_id, loss.encode()))

    def register_function(self, name: str, function: Callable[..., Any], source: Source) -> str:
        """Registers a function without tracing it: in this process, or pickled; returns the loss's id.

        Raises:
            InvalidLoss: If it cannot be pickled, or the server accepts no pickled functions.
        """
        self._channel.check_usable()
        if self._in_process is not None:
            return self._in_process(name, function, source, self._channel.session.session_id)
        try:
            import cloudpickle
        except ImportError as error:
            raise InvalidLoss(
                f"{name}: trace=False needs cloudpickle, here and on the server. Install it with: python -m pip "
                "install cloudpickle. A loss that can be traced does not need it."
            ) from error
        try:
            pickled: bytes = cloudpickle.dumps(function)
        except Exception as error:
            raise InvalidLoss(
                f"{name} cannot be pickled: {error}. Use objects that pickle supports only, or trace it."
            ) from error
        message = {"name": name, "source": source}
        return self._register(name, rq.RegisterLossRequest(self._channel.session.session_id, message, pickled))

    def listing(self) -> dict[str, Any]:
        """Returns the names of the losses that passes can use, and their descriptions."""
        session = self._channel.session
        if not session.extensions.server_losses:
            # Those of the protocol; a server may have fewer.
            return {
                "available_loss_functions": list(LOSSES),
                "descriptions": {name: loss.description for name, loss in LOSSES.items()},
            }
        query = urlencode({"session_id": session.session_id})
        listed = self._channel.fetch(f"/ext/v1/losses?{query}", rs.LossListing)
        return {"available_loss_functions": listed.available_loss_functions, "descriptions": listed.descriptions}

    def _register(self, name: str, request: rq.RegisterLossRequest) -> str:
        if not self.accepts_batch_losses:
            raise InvalidLoss(
                f"the server at {self._channel.url} does not accept whole-batch losses, so {name} cannot run there. "
                "Use a per-datum loss (create_custom_loss), or run it locally: forward_backward_custom takes any "
                "Python function."
            )
        return self._channel.call("/ext/v1/losses", request, rs.CreateCustomLossResponse).loss_id
