"""What an imitated server knows: models, checkpoints and samplers, and their counterparts in the trainer."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tinker_lightning.types import AdamParams, LoraConfig

if TYPE_CHECKING:
    from tests.helpers.imitations.behavior import Behavior
    from tinker_lightning.server import EmbeddedTrainer
    from tinker_lightning.server.engine.interface import Adapter


class Refusal(Exception):
    """An error with the status that the server reports for it; `detail` may be a list."""

    def __init__(self, status: int, detail: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class Crash(Exception):
    """Ends a request as an error in a server does: the connection is closed."""


@dataclass(frozen=True)
class Failure:
    """The outcome of an operation that failed."""

    detail: str
    status: int | None = None


@dataclass
class Model:
    """A model in training."""

    model_id: str
    base_model: str
    lora: LoraConfig
    inner_id: str = ""  # set at the end of the creation
    sequences: int = 0  # since the last step
    has_gradient: bool = False
    next_number: int = 1
    failed_number: int | None = None
    rejected: set[int] = field(default_factory=set)  # numbers of rejected requests
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))  # of the trainer's requests
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    adam: AdamParams | None = None
    loaded: str | None = None  # path of the checkpoint that sampling has put into the model


@dataclass
class Checkpoint:
    """Saved weights."""

    model: Model
    kind: str
    name: str
    path: str
    inner_path: str | None = None  # set when it is written
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat())

    @property
    def listed_path(self) -> str:
        """The path in listings, which servers accept, too."""
        return f"tinker://{self.model.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class Sampler:
    """A base model or saved weights to sample from."""

    sampler_id: str
    base_model: str
    path: str | None = None


class State:
    """Models, checkpoints and samplers of a server by their ids and paths."""

    def __init__(self, behavior: Behavior, trainer: EmbeddedTrainer) -> None:
        self.behavior = behavior
        self.trainer = trainer
        self.session = trainer.open_session().session_id  # of the trainer
        self.base = trainer.catalog.names[0]
        self.sessions: set[str] = set()
        self.models: dict[str, Model] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.samplers: dict[str, Sampler] = {}
        self.count = itertools.count(1)

    def new_id(self, template: str) -> str:
        """Returns a new id."""
        number = next(self.count) if "{number}" in template else 0
        return template.format(hex=uuid.uuid4().hex[:8], uuid=uuid.uuid4(), number=number)

    def check_session(self, body: dict[str, Any], status: int = 404) -> None:
        """Raises if the session of a request does not exist."""
        if body["session_id"] not in self.sessions:
            raise Refusal(status, "Session not found")

    def model(self, body: dict[str, Any], status: int = 404) -> Model:
        """Returns the model of a request."""
        if body["model_id"] not in self.models:
            raise Refusal(status, "Model not found")
        return self.models[body["model_id"]]

    def inner(self, model: Model) -> str:
        """Returns the trainer's id of a model."""
        if not model.inner_id:
            raise Refusal(404, f"Model {model.model_id} not loaded")
        return model.inner_id

    def adapter(self, model: Model) -> Adapter:
        """Returns the adapter in training."""
        _, adapter = self.trainer.registry.model(self.inner(model)).ready()
        return adapter

    def new_checkpoint(self, model: Model, kind: str, body: dict[str, Any]) -> Checkpoint:
        """Returns a checkpoint that is still to be written."""
        b, name = self.behavior, body.get("path") or f"checkpoint-{next(self.count):04d}"
        if not re.fullmatch(b.checkpoint_name, name):
            message = f"String should match pattern '{b.checkpoint_name}'"
            fault = {"type": "string_pattern_mismatch", "loc": ["body", "path"], "msg": message, "input": name}
            raise Refusal(422, [fault])
        template = b.state_path if kind == "weights" else b.sampler_path
        checkpoint = Checkpoint(model, kind, name, template.format(model=model.model_id, name=name))
        exists = checkpoint.path in self.checkpoints
        if exists and (
            b.existing_checkpoint == "conflict" or (b.existing_checkpoint == "flag" and not body.get("overwrite"))
        ):
            raise Refusal(409, f"Checkpoint '{name}' already exists for model '{model.model_id}'")
        if not exists:
            self.checkpoints[checkpoint.path] = checkpoint
        return checkpoint

    def find(self, path: str, kind: str) -> Checkpoint:
        """Returns the checkpoint at a path, which must be of a kind."""
        found = self.checkpoints.get(path)
        if found is None:
            raise Refusal(404, f"Checkpoint not found: {re.sub(r'^[a-z]+://|(sampler_)?weights/', '', path)}")
        if found.kind != kind:
            raise Refusal(400, f"request.path must be in format tinker://source_model_id/{kind}/checkpoint_id")
        if found.inner_path is None:
            raise Refusal(425, "Checkpoint is still being created")
        return found

    def written(self) -> list[Checkpoint]:
        """Returns the checkpoints that have been written."""
        return list({id(each): each for each in self.checkpoints.values() if each.inner_path}.values())

    def new_sampler(self, base_model: str, path: str | None) -> Sampler:
        """Creates a sampler."""
        sampler = Sampler(self.new_id(self.behavior.sampler_id), base_model, path)
        self.samplers[sampler.sampler_id] = sampler
        return sampler
