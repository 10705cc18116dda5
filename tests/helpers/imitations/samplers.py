"""The samplers of an imitated server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers.imitations.state import Refusal
from tinker_lightning.server.trainer.checkpoint_summary import TinkerPath
from tinker_lightning.types import requests as rq
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from tests.helpers.imitations.state import Sampler, State
    from tests.helpers.imitations.submissions import Submissions
    from tinker_lightning.types import SampleResponse


class Samplers:
    """Creates samplers and samples from them."""

    def __init__(self, state: State, submissions: Submissions) -> None:
        self._state = state
        self._submissions = submissions
        self._behavior = state.behavior
        self._trainer = state.trainer

    def create_sampling_session(self, body: dict[str, Any]) -> dict[str, Any]:
        """Creates a sampler."""
        self._state.check_session(body)
        path = body.get("model_path")
        if path is not None and not self._behavior.checks_early:
            self._state.find(path, "sampler_weights")
        saved = self._state.checkpoints.get(path) if path else None
        base_model = saved.model.base_model if saved else body.get("base_model") or self._state.base
        sampler = self._state.new_sampler(base_model, path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}

    def describe(self, sampler_id: str) -> dict[str, Any]:
        """Describes a sampler."""
        if sampler_id not in self._state.samplers:
            raise Refusal(404, "Sampler not found")
        sampler = self._state.samplers[sampler_id]
        return {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.path}

    def asample(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submits sampling."""
        b = self._behavior
        sampler_id = body.get("sampling_session_id") or ""
        if b.rejects_colons and ":" in sampler_id:
            raise Refusal(400, "sampling_session_id must not contain ':' (the routing-key delimiter)")
        if sampler_id not in self._state.samplers:
            raise Refusal(404, "Sampling session not found")
        sampler = self._state.samplers[sampler_id]
        if b.checks_early and sampler.path is not None:
            self._state.find(sampler.path, "sampler_weights")
        params = dict(body["sampling_params"])
        if b.needs_max_tokens and params.get("max_tokens") is None:
            raise Refusal(400, "max_tokens is currently required")
        if b.ignores_sampling_seed:
            params.pop("seed", None)
        if not b.eos_stops and params.get("stop") is None:
            params["stop"] = []
        known = {name: body[name] for name in ("prompt", "num_samples", "prompt_logprobs") if body.get(name)}
        request = wire_json.parse(
            rq.SampleRequest,
            wire_json.dumps({**known, "sampling_params": params, "sampling_session_id": "", "seq_id": 0}),
        )

        def run() -> SampleResponse:
            inner = replace(request, sampling_session_id=self._inner_sampler(sampler), seq_id=next(self._state.count))
            result: SampleResponse = self._trainer.sampling.sample(inner).future.result()
            if b.lacks_sample_logprobs:
                result = replace(result, sequences=[replace(one, logprobs=None) for one in result.sequences])
            if b.short_prompt_logprobs and result.prompt_logprobs is not None:
                result = replace(result, prompt_logprobs=result.prompt_logprobs[1:])
            return result

        return self._submissions.submit("asample", ("asample", sampler_id, body.get("seq_id")), run)

    def _inner_sampler(self, sampler: Sampler) -> str:
        b, number = self._behavior, next(self._state.count)
        if sampler.path is None or b.samples_base:
            create = rq.CreateSamplingSessionRequest(self._state.session, number, base_model=self._state.base)
            return self._trainer.sampling.create_sampling_session(create).sampler_id
        found = self._state.find(sampler.path, "sampler_weights")
        model, inner_path = found.model, found.inner_path or ""
        if b.sampling_moves_weights and model.loaded != found.path:
            saved = self._trainer.store.load(TinkerPath.parse(inner_path)).weights
            with torch.no_grad():
                for name, tensor in self._state.adapter(model).weights.tensors.items():
                    tensor.copy_(saved.tensors[name])
            model.loaded = found.path
        if b.sampling_moves_weights or b.samples_live:
            save = rq.SaveWeightsForSamplerRequest(self._state.inner(model), next(model.numbers), None, number)
            live: str = self._trainer.training.save_weights_for_sampler(save).future.result().sampling_session_id
            return live
        create = rq.CreateSamplingSessionRequest(self._state.session, number, model_path=inner_path)
        return self._trainer.sampling.create_sampling_session(create).sampler_id
