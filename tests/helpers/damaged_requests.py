"""Valid requests to each endpoint of a server, and damages to them."""

from __future__ import annotations

import copy
import json
import random
from typing import TYPE_CHECKING, Any

from tinker_lightning.wire import compression, protobuf, tinker_pb2
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.api import Calls

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
# By which damaged requests are refused.
REFUSALS = (400, 403, 404, 405, 408, 409, 410, 413, 415)
NUMBERS = [0, -1, 1, 7, 0.5, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64, 10**40, 1e308, -1e308, 1e-320, 3e38]
VALUES: list[Any] = [
    None,
    True,
    "",
    "x",
    "../x",
    "tinker://a/weights/b",
    "\0",
    "é" * 300,
    [],
    [[]],
    [None],
    {},
    {"a": 1},
    [1e300],
]


class Fuzzer:
    """Makes valid requests and damages them, the same way for the same seed."""

    def __init__(self, api: Calls, seed: int) -> None:
        self.api = api
        self.rng = random.Random(seed)  # noqa: S311
        self.session = ""
        self.renew()
        # A prompt that leaves room for a few tokens only: however the request is damaged, it is answered soon.
        self.prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 2044}]}

    def renew(self) -> None:
        """A new session with a model to be maltreated, because the old one's numbers may be used up."""
        if self.session:
            self.api.post(f"sessions/{self.session}/finish", {})
        self.session = self.api.session()
        self.made = 0
        self.model = self.api.model(self.session)
        self.sampler = self.api.sampler(self.session)
        saved = {"model_id": self.model, "seq_id": 1, "path": "state"}
        self.path = self.api.run("save_weights", saved)["path"]
        self.last = self.api.submit("optim_step", self.api.step(self.model, 2))
        self.api.result(self.last)

    def requests(self) -> list[tuple[str, str, Any]]:
        """One valid request for each endpoint; None has no body."""
        self.made += 1
        if self.made > 200 or self.api.last_number(self.model) > 10**6:
            self.renew()
        last = self.api.last_number(self.model)
        number = {"model_id": self.model, "seq_id": last + 1}
        train = self.api.train(self.model, last + 1)
        policy = copy.deepcopy(train)
        inputs = policy["forward_backward_input"]["data"][0]["loss_fn_inputs"]
        inputs["logprobs"], inputs["advantages"] = inputs["weights"], inputs.pop("weights")
        policy["forward_backward_input"] |= {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.5}}
        sample = {**self.api.sample(self.sampler, self.rng.randrange(2**40)), "prompt": self.prompt, "num_samples": 2}
        checkpoint = f"training_runs/{self.model}/checkpoints/weights/state"
        new = {"session_id": self.session, "model_seq_id": 10**6 + self.rng.randrange(10**6), "base_model": "tiny"}
        return [
            ("POST", "client/config", {"sdk_version": "0.36.0"}),
            ("POST", "client/dynamic_config", {"sdk_version": "0.36.0"}),
            (
                "POST",
                "create_session",
                {"tags": ["a"], "user_metadata": {"a": 1}, "sdk_version": "0", "project_id": "p"},
            ),
            ("POST", "session_heartbeat", {"session_id": self.session}),
            ("POST", "sessions/nobody/finish", {"reason": {"type": "success"}, "detail": None}),
            ("POST", "telemetry", {"events": [{"event": "SESSION_START"}], "session_id": self.session}),
            ("POST", "create_model", {**new, "lora_config": {"rank": 2, "seed": 3, "train_mlp": True}}),
            ("POST", "get_info", {"model_id": self.model}),
            ("POST", "weights_info", {"tinker_path": self.path}),
            ("POST", "forward_backward", train),
            ("POST", "forward_backward", policy),
            ("POST", "forward_backward", protobuf.encode_forward_backward(parse(train))),
            ("POST", "forward_backward", protobuf.encode_forward_backward(parse(policy))),
            ("POST", "forward", {"forward_input": train["forward_backward_input"], **number}),
            ("POST", "optim_step", self.api.step(self.model, last + 1, beta1=0.9, grad_clip_norm=1.0)),
            ("POST", "save_weights", {**number, "path": f"s{last}", "ttl_seconds": 60, "overwrite": True}),
            ("POST", "save_weights_for_sampler", {**number, "path": f"s{last}", "user_metadata": {"a": "b"}}),
            ("POST", "save_weights_for_sampler", {**number, "sampling_session_seq_id": 5}),
            ("POST", "save_weights_external", {**number, "path": f"e{last}", "ttl_seconds": 60}),
            ("POST", "load_weights", {**number, "path": self.path, "optimizer": True}),
            (
                "POST",
                "create_sampling_session",
                {"session_id": self.session, "sampling_session_seq_id": 3, "model_path": self.path},
            ),
            ("POST", "asample", sample),
            ("POST", "retrieve_future", {"request_id": self.last, "allow_metadata_only": False}),
            ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 1000}),
            ("DELETE", f"training_runs/{self.model}/checkpoints/weights/none", None),
            ("GET", f"training_runs/{self.model}/checkpoints", None),
            ("GET", f"{checkpoint}/archive", None),
            ("GET", f"training_runs/{self.model}/checkpoints/external_weights/none/external_weights_urls", None),
            ("GET", f"signed/{self.model}/weights/state/adapter.tar?expires=9999999999&signature=00", None),
            ("GET", "checkpoints?limit=2&offset=1", None),
            ("GET", "training_runs?limit=2", None),
            ("GET", f"samplers/{self.sampler}", None),
        ]

    def damaged(self) -> tuple[str, str, bytes, dict[str, str]]:
        """Method, path, body and headers of a request that was valid."""
        method, path, body = self.rng.choice(self.requests())
        headers = {"content-type": PROTOBUF if isinstance(body, bytes) else JSON}
        if body is None or self.rng.random() < 0.1:
            path = self.damaged_text(path)
        if isinstance(body, bytes):
            content = self.damaged_message(body) if self.rng.random() < 0.6 else self.damaged_bytes(body)
        elif self.rng.random() < 0.6:
            body = copy.deepcopy(body)
            for _ in range(self.rng.choice([1, 1, 2])):
                self.damage_tree(body)
            content = json.dumps(body).encode()
        else:
            content = self.damaged_bytes(json.dumps(body).encode())
        if self.rng.random() < 0.08:
            headers["content-type"] = self.rng.choice([JSON, PROTOBUF, "", "text/plain", "\x7f", "application/json;;"])
        if self.rng.random() < 0.08:
            headers["content-encoding"] = self.rng.choice(["zstd", "gzip", "identity", "", "zstd;q=1"])
            content = self.rng.choice([content, compression.compress(content), compression.compress(content)[:-2]])
        return method, path, content, headers

    def damage_tree(self, node: Any) -> None:
        places = list(self._places(node))
        if not places:
            return
        parent, key = self.rng.choice(places)
        how = self.rng.randrange(6)
        if how >= 4:  # stays plausible, so that it gets further
            leaves = [place for place in places if type(place[0][place[1]]) in (int, float)]
            parent, key = self.rng.choice(leaves or places)
            parent[key] = self.rng.choice([0, 1, -1, 2, 258, 0.5, 1e-3, 1e6, 1e30])
        elif how == 0:
            del parent[key]
        elif how == 1:
            parent[key] = self.rng.choice(NUMBERS)
        elif how == 2:
            parent[key] = copy.deepcopy(self.rng.choice(VALUES))
        elif isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            other, source = self.rng.choice(places)
            parent[key] = copy.deepcopy(other[source])

    def _places(self, node: Any) -> Any:
        keys: Any = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in list(keys)[:12]:
            yield node, key
            yield from self._places(node[key])

    def damaged_message(self, body: bytes) -> bytes:
        message = tinker_pb2.ForwardBackwardRequest.FromString(body)
        datum = message.data[0]
        tensor = datum.loss_fn_inputs[self.rng.choice([*datum.loss_fn_inputs, "new"])]
        damages: list[Callable[[], object]] = [
            lambda: setattr(tensor, "dtype", self.rng.randrange(5)),
            lambda: setattr(tensor, "dense", tensor.dense[: self.rng.randrange(9)]),
            lambda: setattr(tensor, "dense", self.rng.randbytes(len(tensor.dense))),
            lambda: setattr(tensor.sparse_csr, "values", b"\0" * 8),
            lambda: tensor.shape.append(self.rng.choice([0, 1, -1, 2**62])),
            lambda: setattr(datum.model_input[0].encoded_text, "tokens", self.rng.randbytes(40)),
            lambda: setattr(datum.model_input[0].image, "data", b"x"),
            lambda: datum.ClearField("model_input"),
            lambda: datum.model_input_spans.add(),
            lambda: message.data.add(),
            lambda: message.ClearField("data"),
            lambda: setattr(message, "seq_id", self.rng.choice([0, -1, 2**31 - 1])),
            lambda: setattr(message, "loss_fn", self.rng.choice(["", "gspo", "dro", "x"])),
            lambda: setattr(message.loss_fn_config_v2["clip_low_threshold"], "number", float("nan")),
            lambda: setattr(message.loss_fn_config_v2["x"], "text", "y"),
        ]
        self.rng.choice(damages)()
        return message.SerializeToString()

    def damaged_bytes(self, body: bytes) -> bytes:
        how = self.rng.randrange(5)
        at = self.rng.randrange(len(body)) if body else 0
        if how == 0:  # bit flips
            damaged = bytearray(body)
            for _ in range(self.rng.randrange(1, 6) if body else 0):
                damaged[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
            return bytes(damaged)
        if how == 1:
            return body[:at]
        if how == 2:  # a piece twice; in JSON often a key
            return body[:at] + body[max(0, at - 40) :]
        if how == 3:
            return body[:at] + self.rng.randbytes(self.rng.randrange(1, 30)) + body[at + self.rng.randrange(30) :]
        return self.rng.randbytes(self.rng.randrange(200))

    def damaged_text(self, path: str) -> str:
        at = self.rng.randrange(len(path))
        piece = self.rng.choice(["%2e%2e", "%00", "*", "%2f", "x" * 500, "", "&limit=-1", "?limit=1e9", "%ff", "é"])
        return path[:at] + piece + path[at + self.rng.randrange(4) :]


def parse(body: dict[str, Any]) -> Any:
    return wire_json.parse_forward_backward(json.dumps(body).encode(), forward_only=False)
