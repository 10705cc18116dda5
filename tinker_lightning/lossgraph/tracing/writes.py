"""Finds out which of a recording's `x += y` must be written as such: those that another tensor would show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from tinker_lightning.lossgraph.tracing.writer import target_name

if TYPE_CHECKING:
    from collections.abc import Sequence

# Calls whose result never shares memory with what they are given. Any other may.
_FRESH = """
abs add amax amin cat clamp clone cos cumsum div eq exp expm1 full full_like gather ge gt invert le log log1p log2
log_softmax logsigmoid logsumexp lt matmul maximum mean minimum mod mul ne neg ones ones_like pow prod relu rsqrt
sigmoid sin softmax softplus sqrt square stack std sub sum tanh truediv var where zeros zeros_like
"""
FRESH = frozenset(_FRESH.split())


def seen_writes(nodes: Sequence[fx.Node], output: Any) -> set[fx.Node]:
    """Those of the in-place operators that cannot be written as a new tensor.

    What shares memory with the tensor is used afterwards, or there are gradients that the write must not touch.
    """
    if not any(node.meta.get("in_place") for node in nodes):
        return set()
    place = {node: i for i, node in enumerate(nodes)}
    last_use = {}
    for i, node in enumerate(nodes):
        last_use.update(dict.fromkeys(node.all_input_nodes, i))
    map_arg(output, lambda node: last_use.__setitem__(node, len(nodes)))
    shared = _shared(nodes)
    seen = set()
    for node in nodes:
        if not node.meta.get("in_place"):
            continue
        at = place[node]
        others = shared[node]
        if node.meta["no_grad"] or any(place[each] < at and last_use.get(each, -1) > at for each in others):
            seen.add(node)
    return seen


def _shared(nodes: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """For each node those that may share memory with it."""
    groups = {node: {node} for node in nodes}
    for node in nodes:
        if node.meta["kind"] not in (Tensor, tuple):
            continue
        name = str(node.target) if node.op == "call_method" else target_name(node.target).rpartition(".")[2]
        if node.meta.get("in_place"):
            sources = node.all_input_nodes[:1]
        else:
            sources = [] if name in FRESH else node.all_input_nodes
        for source in sources:
            if source.meta["kind"] in (Tensor, tuple) and groups[source] is not groups[node]:
                merged = groups[source] | groups[node]
                for each in merged:
                    groups[each] = merged
    return groups
