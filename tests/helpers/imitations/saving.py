"""The checkpoints of an imitated server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.helpers.imitations.state import Refusal
from tinker_lightning.server.trainer.checkpoint_summary import TinkerPath
from tinker_lightning.types import requests as rq

if TYPE_CHECKING:
    from tests.helpers.imitations.state import State
    from tests.helpers.imitations.submissions import Submissions


class Saving:
    """Saves, loads, lists and deletes checkpoints."""

    def __init__(self, state: State, submissions: Submissions) -> None:
        self._state = state
        self._submissions = submissions
        self._behavior = state.behavior
        self._trainer = state.trainer

    def save_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits the saving of a training state."""
        model, number = self._state.model(body), body.get("seq_id")
        checkpoint = self._state.new_checkpoint(model, "weights", body)

        def run() -> dict[str, Any]:
            request = rq.SaveWeightsRequest(
                self._state.inner(model), next(model.numbers), f"c{next(self._state.count)}"
            )
            checkpoint.inner_path = self._trainer.training.save_weights(request).future.result().path
            self._state.checkpoints[checkpoint.path] = checkpoint
            return {"path": checkpoint.path, "type": "save_weights"}

        return self._submissions.submit_numbered("save_weights", model, number, run)

    def save_weights_for_sampler(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits the saving of weights for sampling, and creates a sampler if they have no name."""
        model, sampler_number = self._state.model(body), body.get("sampling_session_seq_id")
        if not body.get("path"):
            body = {**body, "path": f"ss{sampler_number}_seq{body.get('seq_id')}"}
        else:
            sampler_number = None
        checkpoint = self._state.new_checkpoint(model, "sampler_weights", body)

        def run() -> dict[str, Any]:
            name = f"c{next(self._state.count)}"
            request = rq.SaveWeightsForSamplerRequest(self._state.inner(model), next(model.numbers), name)
            checkpoint.inner_path = self._trainer.training.save_weights_for_sampler(request).future.result().path
            self._state.checkpoints[checkpoint.path] = self._state.checkpoints[checkpoint.listed_path] = checkpoint
            if sampler_number is None:
                return {"path": checkpoint.path, "sampling_session_id": None, "type": "save_weights_for_sampler"}
            sampler = self._state.new_sampler(model.base_model, checkpoint.path)
            return {"path": None, "sampling_session_id": sampler.sampler_id, "type": "save_weights_for_sampler"}

        return self._submissions.submit_numbered("save_weights_for_sampler", model, body.get("seq_id"), run)

    def load_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits the loading of a training state."""
        b, model, path = self._behavior, self._state.model(body), body["path"]

        def check() -> object:
            return self._state.find(path, "weights")

        if b.checks_early:
            check()
        optimizer = b.saves_optimizer and (b.ignores_optimizer_on_load or bool(body.get("optimizer")))

        def run() -> dict[str, Any]:
            found, adapter = self._state.find(path, "weights"), self._state.adapter(model)
            gradient = adapter.gradient
            request = rq.LoadWeightsRequest(
                self._state.inner(model), next(model.numbers), found.inner_path or "", optimizer=optimizer
            )
            self._trainer.training.load_weights(request).future.result()
            # Our states contain the gradient of an unfinished window, those of other servers do not.
            adapter.gradient = gradient if b.keeps_gradient_on_load else {}
            model.has_gradient &= b.keeps_gradient_on_load
            answer = {"path": path, "type": "load_weights"}
            return {name: answer[name] for name in b.load_answer}

        return self._submissions.submit_numbered("load_weights", model, body.get("seq_id"), run, check)

    def weights_info(self, body: dict[str, Any]) -> dict[str, Any]:
        """Describes saved weights."""
        path, status = body["tinker_path"], self._behavior.unknown_id
        model = self._state.models.get(path.partition("://")[2].partition("/")[0])
        if model is None or not self._behavior.weights_info_of_run:
            try:
                model = self._state.find(path, "weights").model
            except Refusal as error:
                raise Refusal(error.status if status == 404 else status, error.detail) from error
        return {"base_model": model.base_model, "is_lora": True, "lora_rank": model.lora.rank}

    def listing(self, model_id: str | None) -> dict[str, Any]:
        """Lists the checkpoints of a model, or of all models."""
        if model_id is not None and model_id not in self._state.models and self._behavior.unknown_id == 500:
            raise Refusal(500, "Model not found")
        types = {"weights": "training", "sampler_weights": "sampler"}
        found = [each for each in self._state.written() if model_id in (None, each.model.model_id)]
        return {
            "checkpoints": [
                {
                    "checkpoint_id": self._behavior.checkpoint_id.format(kind=each.kind, name=each.name),
                    "checkpoint_type": types[each.kind],
                    "time": each.time,
                    "tinker_path": each.listed_path if each.path.startswith("tinker:") else each.path,
                }
                for each in found
            ]
        }

    def delete(self, model_id: str, checkpoint_id: str) -> None:
        """Deletes a checkpoint."""
        kind, _, name = checkpoint_id.rpartition("/")
        given = (model_id, kind, name)
        found = [each for each in self._state.written() if (each.model.model_id, each.kind, each.name) == given]
        if not found:
            raise Refusal(self._behavior.unknown_id, f"Checkpoint {checkpoint_id} not found")
        if self._behavior.keeps_deleted:
            return
        self._state.checkpoints = {path: each for path, each in self._state.checkpoints.items() if each is not found[0]}
        self._trainer.store.delete(TinkerPath.parse(found[0].inner_path or ""))
