"""The dialect of one kind of server: its encodings, fields, losses and habits."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.client.dialects.values import check_names, check_values, checked_names
from tinker_lightning.errors import InvalidInput, InvalidMessage, Unsupported
from tinker_lightning.losses.builtin import LOSSES, NOT_PUBLISHED, UNPUBLISHED
from tinker_lightning.wire import json as wire_json
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tinker_lightning.types import Datum
    from tinker_lightning.types.requests import ForwardBackwardRequest

# The fields of nested parameters that every server knows. Any other one is a newer field, for example
# `asample.sampling_params.min_p`.
OLD_NESTED_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "adam_params": frozenset({"learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"}),
        "lora_config": frozenset({"rank", "seed", "train_unembed", "train_mlp", "train_attn"}),
        "sampling_params": frozenset({"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"}),
    }
)
# Optional fields of requests, by endpoint, that newer versions of the protocol have added. They are sent only to
# servers that know them; all other fields are sent always, because servers differ in their defaults.
NEWER_FIELDS = frozenset(
    {
        "create_model.optimizer_config",
        "load_weights.session_id",  # creates a model from a state in one request
        "save_weights.overwrite",
        "save_weights.ttl_seconds",
        "save_weights.user_metadata",
        "save_weights_for_sampler.ttl_seconds",
        "save_weights_for_sampler.user_metadata",
        "save_weights_for_sampler.kind",
        "asample.topk_prompt_logprobs",
        "asample.topk_sample_logprobs",
        "asample.target_prompt_logprobs",
        "asample.prompt_alt_tokens_k",
        "asample.prompt_logprobs_last_n",
        "asample.record_stability_info",
        "retrieve_future.allow_metadata_only",
        "ttl.ttl_seconds",
    }
)
# How pydantic, and with it FastAPI, rejects a field that it does not know.
_REJECTED_FIELD = re.compile(r"([\w.]+): Extra inputs are not permitted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The dialect of a kind of server, and where it differs from the newest version of the protocol.

    Write one for a server that this library does not know, by changing the closest known dialect:
    `dialect_named("json").but(name="mine", forward="zero_weights")`.

    Args:
        name: How logs and errors call it.
        encoding: How passes are encoded.
        forward: Where a forward goes: to `forward_backward` with the flag `forward_only`, to the endpoint `forward`,
            or to `forward_backward` with weights of zero, where that adds nothing to the gradient.
        newer_fields: The optional fields that the server knows, of `NEWER_FIELDS`.
        concurrent: Whether requests of one model may be posted concurrently; None to do as the server's configuration
            says. Never without `deduplicates`.
        numbers: What a number is: `order` by which the server sorts requests, `strict` where a refused submission
            must be repeated with the same number, or `ignored`.
        deduplicates: Whether a repeated submission is answered from the record instead of run again.
        surrogate: Which built-in loss carries the gradient of a custom loss; None if that is not known, and no custom
            loss is trained.
        losses: The built-in losses whose value and gradient are the protocol's up to the surrogate's factors; None
            for all.
        sends_other_losses: Whether another built-in loss that is asked for by name is trained as the server computes
            it; otherwise, it raises `Unsupported`.
        clips_gradients: Whether `grad_clip_norm` is honored.
        resets_optimizer: Whether `load_state` resets the optimizer state.
        clears_gradient: Whether loading a state clears the gradient that was accumulated since the last step.
        loads_first: Whether a state can be loaded only by the first request of a model. The client then loads it into a
            new model, which takes the place of the earlier one.
        unloads_models: Whether a model can be unloaded before its session ends.
        deletes_checkpoints: Whether saved states can be deleted.
        samples_old_weights: Whether saved weights can be sampled while their model is trained further; False if that
            would replace the weights in training, or sample from those.
        unit_forward_weights: Whether a forward must have weights of one, because the log-probabilities of positions
            with weight 0 come back as 0.
        multiple_targets: Whether a position may have several targets, `[T, K]`.
    """

    name: str
    encoding: Literal["protobuf", "json"] = "protobuf"
    forward: Literal["forward_only", "forward", "zero_weights"] = "forward_only"
    newer_fields: frozenset[str] = NEWER_FIELDS
    concurrent: bool | None = None
    numbers: Literal["order", "strict", "ignored"] = "order"
    deduplicates: bool = True
    surrogate: Surrogate | None = field(default_factory=Surrogate)
    losses: frozenset[str] | None = None
    sends_other_losses: bool = False
    clips_gradients: bool = True
    resets_optimizer: bool = True
    clears_gradient: bool = False
    loads_first: bool = False
    unloads_models: bool = True
    deletes_checkpoints: bool = True
    samples_old_weights: bool = True
    unit_forward_weights: bool = False
    multiple_targets: bool = True

    def __post_init__(self) -> None:
        what = f"dialect {self.name}"
        check_values(what, self)
        newer_fields = checked_names(f"{what}: newer_fields", self.newer_fields, NEWER_FIELDS)
        object.__setattr__(self, "newer_fields", newer_fields)
        if self.losses is not None:
            object.__setattr__(self, "losses", checked_names(f"{what}: losses", self.losses, LOSSES))
        if not isinstance(self.surrogate, Surrogate | None):
            raise InvalidInput(
                f"{what}: surrogate: {self.surrogate!r} is not a Surrogate. Pass Surrogate('cispo', ...), or in a "
                'file an object with its fields, such as {"loss": "cispo"}.'
            )
        if self.forward == "zero_weights" and self.surrogate is not None and self.surrogate.per_batch == "window":
            raise InvalidInput(
                f"{what}: forward: 'zero_weights' is not supported with a surrogate of per_batch='window', because the "
                "server would count the sequences of forwards too. Use 'forward' or 'forward_only' if it has that."
            )

    def but(self, **changes: Any) -> Self:
        """Returns a dialect that differs in the given fields."""
        return replace(self, **changes)

    def knows(self, endpoint: str, name: str) -> bool:
        """Returns whether a field of a request, or a nested one such as `sampling_params.seed`, may be sent."""
        qualified = f"{endpoint}.{name}"
        parent, _, nested = name.rpartition(".")
        is_old = nested in OLD_NESTED_FIELDS[parent] if parent else qualified not in NEWER_FIELDS
        return is_old or qualified in self.newer_fields

    def rejection_hint(self, endpoint: str, error: str) -> str:
        """Returns how to leave out the newer fields that an error of a server calls unknown, or nothing."""
        names = sorted({f"{endpoint}.{name}" for name in _REJECTED_FIELD.findall(error)} & self.newer_fields)
        if not names:
            return ""
        return (
            f". The server is older than its dialect {self.name!r}, which sends newer fields. Connect with "
            f"dialect=mine.but(newer_fields=mine.newer_fields - {set(names)}), where mine is client.dialect"
        )

    def load_hint(self, error: str) -> str:
        """Returns what to do if loading a state into a model has failed because the server does not permit it."""
        if self.loads_first or "not permitted" not in error:
            return ""
        return (
            f" The server loads states only into new models, unlike servers of the dialect {self.name!r}. "
            f"Pass connect(dialect=dialect_named({self.name!r}).but(loads_first=True)), or create a client from the "
            "state with create_training_client_from_state_with_optimizer()."
        )

    def check_targets(self, data: Sequence[Datum]) -> None:
        """Raises `InvalidInput` if a datum has several targets per position on a server that takes one."""
        if self.multiple_targets:
            return
        for i, datum in enumerate(data):
            targets = datum.loss_fn_inputs.get("target_tokens")
            if targets is not None and len(targets.shape) != 1:
                raise InvalidInput(
                    f"datum {i}: target_tokens has the shape {targets.shape}, but servers of the dialect {self.name!r} "
                    "take one target per position"
                )

    def check_loss(self, loss: str) -> None:
        """Raises `Unsupported` for a loss whose formula is not published, unless the server offers it."""
        if loss == UNPUBLISHED and not self.knows("asample", "record_stability_info"):
            raise Unsupported(f"servers of the dialect {self.name!r} do not have this loss: {NOT_PUBLISHED}")

    def encode_pass(self, request: ForwardBackwardRequest) -> tuple[str, bytes, str]:
        """Returns the endpoint, the body and the content type of a pass; a forward is one of `as_forward`.

        Raises:
            InvalidInput: If the server would misunderstand a datum, or compute a gradient in a forward.
        """
        self.check_targets(request.data)
        if request.forward_only and self.forward == "zero_weights":
            for i, datum in enumerate(request.data):
                weights = datum.loss_fn_inputs.get("weights")
                if weights is None or weights.to_numpy().any():
                    raise InvalidInput(
                        f"datum {i}: a forward needs weights of 0 on servers of the dialect {self.name!r}, because "
                        "their passes always accumulate a gradient"
                    )
            request = replace(request, forward_only=False)
        endpoint = "forward" if request.forward_only and self.forward == "forward" else "forward_backward"
        if self.encoding == "json":
            return endpoint, wire_json.forward_backward_body(request), wire_json.CONTENT_TYPE
        return endpoint, protobuf.encode_forward_backward(request), protobuf.CONTENT_TYPE

    def encode_json(self, endpoint: str, request: Any) -> bytes:
        """Returns the JSON body of a request, without the optional fields that the server does not know.

        Raises:
            Unsupported: If such a field has a value that matters.
        """
        body: dict[str, Any] = {}
        for name in self._unknown(endpoint, request):
            parent, _, nested = name.rpartition(".")
            known = body = body or wire_json.fields_of(request)
            if parent:
                known = body[parent] = wire_json.fields_of(body[parent])
            known.pop(nested, None)
        return wire_json.dumps(body or request)

    def _unknown(self, endpoint: str, message: Any, prefix: str = "") -> Iterator[str]:
        """Yields the fields of a message that the server does not know; raises `Unsupported` if one has a value."""
        for each in fields(message):
            value, name = getattr(message, each.name), f"{prefix}{each.name}"
            if self.knows(endpoint, name):
                if not prefix and each.name in OLD_NESTED_FIELDS and is_dataclass(value):
                    yield from self._unknown(endpoint, value, f"{name}.")
                continue
            if value != each.default:
                raise Unsupported(f"{name}: servers of the dialect {self.name!r} do not support it; leave it out")
            yield name

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data that can be saved as JSON and given to `from_dict`."""
        plain = asdict(self)
        plain["newer_fields"] = sorted(self.newer_fields)
        plain["losses"] = None if self.losses is None else sorted(self.losses)
        return plain

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a dialect from a JSON file: what `to_dict` returned, or a report of `tinker-lightning doctor --save`.

        Raises:
            InvalidInput: If the file cannot be read or contains no dialect.
        """
        try:
            content = wire_json.loads(Path(path).read_bytes())
        except (OSError, InvalidMessage) as error:
            raise InvalidInput(f"dialect: cannot read {os.fspath(path)}: {error}") from error
        return cls.from_dict(content["dialect"] if isinstance(content.get("dialect"), dict) else content)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Creates a dialect from what `to_dict` returned.

        Raises:
            InvalidInput: If a field is unknown or has no valid value.
        """
        values = dict(plain)
        if not isinstance(values.get("name"), str):
            raise InvalidInput("dialect: name: missing; give it one, by which logs and errors call it")
        what = f"dialect {values['name']}"
        check_names(what, cls, values)
        if isinstance(values.get("surrogate"), dict):
            check_names(f"{what}: surrogate", Surrogate, values["surrogate"])
            values["surrogate"] = Surrogate(**values["surrogate"])
        return cls(**values)
