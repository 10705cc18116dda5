"""Damages uploaded losses at random, and watches what the server does with them."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import random
import resource
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers.traced_losses import optional
from tinker_lightning import losses
from tinker_lightning.lossgraph.functions import FUNCTIONS, METHODS
from tinker_lightning.lossgraph.trace import trace_batch_loss, trace_datum_loss

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tests.helpers.api import Api

EXT = "http://embedded/ext/v1"
NUMBERS = [0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e-30, 1e30, 2**31, 2**40, -(2**63), 2**63 - 1, 10**30, 1e308]
NAMES = ["__class__", "__dict__", "os.system", "builtins.eval", "torch.load", "", "x" * 300, "\0", "é", "exec"]
VALUES: list[Any] = [
    None,
    True,
    "mean",
    "none",
    "nuc",
    "sum",
    [],
    [[]],
    {},
    {"tuple": []},
    {"tuple": [1, -1]},
    {"tuple": [2**20, 2**20]},
    {"slice": [None, None, -1]},
    {"slice": [0, 10**12, 1]},
    {"ellipsis": True},
    {"float": "nan"},
    {"float": "-inf"},
    {"dtype": "int64"},
    {"dtype": "bool"},
    {"dtype": "float16"},
    {"device": "cuda"},
    {"layout": "strided"},
    {"ref": "nobody"},
]
# What a fuzzer must never see happen, by the names that Python gives such events.
FORBIDDEN = ("exec", "os.", "subprocess.", "socket.connect", "pickle.", "ctypes.dlopen", "shutil.", "marshal.")


def seeds() -> list[tuple[str, dict[str, Any]]]:
    """Valid uploads to start from: of one datum, and of a batch."""

    def clipped(logprobs: Any, advantages: Any, old: Any) -> Any:
        ratio = (logprobs - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[advantages != 0].sum()
        return loss / logprobs.shape[0], {"custom/ratio:mean": ratio.max(0).values}

    def shaped(logprobs: Any, advantages: Any, old: Any) -> Any:
        table = torch.stack([logprobs, advantages, old]).softmax(-1)
        pairs = torch.einsum("it,jt->ij", table, table) + torch.eye(3) * torch.arange(3.0)
        kept = table.clone()
        kept[table > 0.5] = 0.0
        padded = torch.nn.functional.pad(kept.reshape(-1), (1, 2)).cumsum(0)
        top, _ = padded.topk(3)
        return pairs.sum() + top.sum() + torch.cat([old, logprobs]).sort().values.sum() + kept.norm(), {}

    ranks = {"logprobs": 1, "advantages": 1, "old": 1}
    bodies: list[tuple[str, dict[str, Any]]] = []
    for fn in (clipped, shaped):
        loss = trace_datum_loss(fn, ranks)
        inputs = [{"name": name, "rank": rank} for name, rank in loss.inputs.items()]
        graph = loss.program.graph.encode()
        bodies.append(("create_custom_loss", {"name": fn.__name__, "inputs": inputs, "graph": graph}))
    bodies += [
        (f"{EXT}/losses", {"loss": trace_batch_loss(optional, "fuzzed", "logits", present=present).encode()})
        for present in ((), None)
    ]
    bodies.append((f"{EXT}/losses", {"loss": trace_batch_loss(losses.gspo, "fuzzed", "logprobs").encode()}))
    return bodies


class Fuzzer:
    """Damages uploads, the same way for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311
        self.seeds = seeds()
        self.functions, self.methods = sorted(FUNCTIONS), sorted(METHODS)

    def upload(self) -> tuple[str, dict[str, Any]]:
        path, body = self.rng.choice(self.seeds)
        body = copy.deepcopy(body)
        graph = body["graph"] if "graph" in body else body["loss"]["graph"]
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            how = self.rng.random()
            with contextlib.suppress(AttributeError, KeyError, TypeError, IndexError, ValueError):  # broken already
                if how < 0.1:
                    self.damage(body)
                elif how < 0.6:
                    self.change_call(graph["nodes"])
                else:
                    self.change_nodes(graph["nodes"])
        return path, body

    def change_call(self, nodes: list[dict[str, Any]]) -> None:
        """Another function of the list, or other arguments: it stays plausible, so that it gets further."""
        node = self.rng.choice([each for each in nodes if each["op"].startswith("call")] or nodes)
        names = [each["name"] for each in nodes[: nodes.index(node)]] or ["logprobs"]
        how = self.rng.randrange(7)
        if how == 0:
            node["target"] = self.rng.choice(self.functions if node["op"] == "call_function" else self.methods)
        elif how == 1:
            node["op"] = self.rng.choice(["call_function", "call_method"])
            node["target"] = self.rng.choice(self.functions if node["op"] == "call_function" else self.methods)
        elif how == 2 and node["args"]:
            node["args"][self.rng.randrange(len(node["args"]))] = self.argument(names)
        elif how == 3:
            node["args"].append(self.argument(names))
        elif how == 4 and node["args"]:
            del node["args"][self.rng.randrange(len(node["args"]))]
        elif how == 5:
            key = self.rng.choice(["dim", "dtype", "keepdim", "out", "device", "reduction", "rounding_mode", "n", "p"])
            node["kwargs"][key] = self.argument(names)
        else:
            node["args"] = [self.argument(names) for _ in range(self.rng.randrange(4))]

    def argument(self, names: list[str], depth: int = 0) -> Any:
        how = self.rng.random()
        if how < 0.1 and depth < 10:  # deeper than is taken
            kind = self.rng.choice(["tuple", "tuple", "list", "slice"])
            parts = [self.argument(names, depth + 1) for _ in range(3 if kind == "slice" else self.rng.randrange(4))]
            parts *= 1 if kind == "slice" else self.rng.choice([1, 1, 1, 200])
            return parts if kind == "list" else {kind: parts}
        if how < 0.5:
            return {"ref": self.rng.choice(names)}
        if how < 0.8:
            return self.rng.choice(NUMBERS)
        return copy.deepcopy(self.rng.choice(VALUES))

    def change_nodes(self, nodes: list[dict[str, Any]]) -> None:
        at, other = self.rng.randrange(len(nodes)), self.rng.randrange(len(nodes))
        how = self.rng.randrange(9)
        if how == 8:
            self.nest(nodes, at)
        elif how == 0:
            nodes[at], nodes[other] = nodes[other], nodes[at]
        elif how == 1:
            del nodes[at]
        elif how == 2:
            nodes.insert(other, copy.deepcopy(nodes[at]))
        elif how == 3:
            nodes[at]["name"] = self.rng.choice([*NAMES, nodes[other]["name"]])
        elif how == 4:
            nodes[at]["target"] = self.rng.choice(NAMES)
        elif how == 5:
            nodes[at]["op"] = self.rng.choice(["get_attr", "call_module", "output", "placeholder", "x", 3])
        elif how == 6:  # the same call again and again, on its own result
            name = nodes[at]["name"]
            for i in range(self.rng.choice([3, 40])):
                extra = copy.deepcopy(nodes[at])
                extra["name"] = f"{name}_{i}"[:100]
                extra["args"] = json.loads(json.dumps(extra["args"]).replace(f'"{name}"', f'"{name}"'))
                nodes.insert(at + 1, extra)
        else:
            self.damage(nodes[at])

    def nest(self, nodes: list[dict[str, Any]], at: int) -> None:
        """Sequences that hold the one before several times, in a call that takes them; the next calls may read them."""
        inner, width = {"ref": nodes[max(0, at - 1)]["name"]}, self.rng.choice([1, 2, 2, 500])
        for i in range(self.rng.choice([1, 2, 30])):
            name, parts = f"nested_{len(nodes)}_{i}", {"tuple": [inner] * width}
            target, args = self.rng.choice(
                [
                    ("operator.add", [parts, {"tuple": []}]),
                    ("operator.getitem", [parts, {"slice": [None, None, None]}]),
                    ("operator.getitem", [{"tuple": [parts]}, 0]),
                    ("torch.broadcast_tensors", [inner] * width),
                ]
            )
            nodes.insert(at, {"op": "call_function", "name": name, "target": target, "args": args, "kwargs": {}})
            inner, at = {"ref": name}, at + 1

    def damage(self, tree: Any) -> None:
        places = list(self.places(tree))
        if not places:
            return
        parent, key = self.rng.choice(places)
        how = self.rng.randrange(4)
        if how == 0:
            del parent[key]
        elif how == 1:
            parent[key] = self.rng.choice(NUMBERS)
        elif how == 2:
            parent[key] = copy.deepcopy(self.rng.choice(VALUES))
        else:
            other, source = self.rng.choice(places)
            parent[key] = copy.deepcopy(other[source])

    def places(self, node: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
        keys: Any = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in list(keys)[:20]:
            yield node, key
            if depth < 6:
                yield from self.places(node[key], depth + 1)


class Audit:
    """Notes what Python itself is made to do, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.events: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: Any) -> None:
        if self.on and event.startswith(FORBIDDEN) and not is_import_by_torch() and not _is_by_the_sdk():
            self.events.append(f"{event} {args!r:.200}")


def is_import_by_torch() -> bool:
    """Whether what runs is an import that torch makes, of a module that it loads when it first needs it."""
    frame: FrameType | None = sys._getframe()
    importing = False
    while frame is not None:
        name = frame.f_code.co_filename
        if importing and not name.startswith("<frozen importlib"):
            return name.startswith(torch.__path__[0])
        importing = importing or name.startswith("<frozen importlib")
        frame = frame.f_back
    return False


_SPEC = importlib.util.find_spec("tinker")
_SDK = "" if _SPEC is None or _SPEC.origin is None else os.path.dirname(_SPEC.origin) + os.sep


def _is_by_the_sdk() -> bool:
    """Whether a thread is one of the official SDK, whose clients send heartbeats until the process ends."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _SDK and frame.f_code.co_filename.startswith(_SDK):
            return True
        frame = frame.f_back
    return False


AUDIT = Audit()


def train(api: Api, model: str, seq: int, taken: dict[str, Any]) -> dict[str, Any]:
    """A pass with a loss that was taken."""
    loss, config = taken.get("loss_id"), {}
    if loss is None:
        loss, config = "custom", {"loss_id": taken["request_id"].removesuffix(":create")}
    body = api.train(model, seq)
    inputs = body["forward_backward_input"]["data"][0]["loss_fn_inputs"]
    for name in ("advantages", "old", "logprobs", "reference", "sequence_ratio_mask"):
        inputs[name] = inputs["weights"]
    body["forward_backward_input"] |= {"loss_fn": loss, "loss_fn_config": config}
    return body


def fuzz(api: Api, seed: int, count: int) -> Counter[str]:
    """Sends damaged uploads, and trains with those that are taken."""
    fuzzer, counts = Fuzzer(seed), Counter[str]()
    session = api.session()
    model, seq = api.model(session), 0
    # What a pass needs of Python and torch at its first run is not of the fuzzer's making.
    for path, body in fuzzer.seeds:
        taken = api.post(path, {"session_id": session, "custom_loss_seq_id": 10**9 + seq, **copy.deepcopy(body)})
        seq += 1
        api.run("forward_backward", train(api, model, seq, taken.json()))
    AUDIT.events.clear()
    try:
        AUDIT.on = True
        for number in range(count):
            path, body = fuzzer.upload()
            started = time.perf_counter()
            taken = api.post(path, {"session_id": session, "custom_loss_seq_id": number, **body})
            assert taken.status_code < 500, (body, taken.text)
            counts[f"upload {taken.status_code}"] += 1
            if taken.status_code != 200:
                assert taken.json()["detail"]
                continue
            before, seq = api.state(model), seq + 1
            result = api.run("forward_backward", train(api, model, seq, taken.json()))
            counts["failed" if "error" in result else "trained"] += 1
            if "error" in result:
                assert result["category"] == "user", (body, result)
                assert api.state(model) == before
            assert time.perf_counter() - started < 20, body
    finally:
        AUDIT.on = False
    assert AUDIT.events == []
    return counts


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
