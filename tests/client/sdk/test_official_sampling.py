"""Sampling through the official SDK's client: the options and results of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tinker

from tinker_lightning import ModelInput, SamplingParams, connect
from tinker_lightning.client.sdk.adapters import as_sampler
from tinker_lightning.client.sdk.clients import OfficialSamplingClient
from tinker_lightning.errors import Unsupported
from tinker_lightning.types import TensorData
from tinker_lightning.wire import protobuf

PROMPT = ModelInput.from_ints(list(b"hello world"))
PARAMS = SamplingParams(max_tokens=3, seed=1)


def test_every_option_gives_what_our_client_gives(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # R5.4
    encode = protobuf.encode_sample
    monkeypatch.setattr(protobuf, "encode_sample", lambda each: encode(replace(each, prompt_cache_hit_tokens=7)))
    targets = TensorData.from_data(np.array([[5, -1]] * (len(b"hello world") - 1), np.int64))
    options = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 3,
        "target_prompt_logprobs": targets,
        "prompt_alt_tokens_k": 2,
        "prompt_logprobs_last_n": 4,
    }
    with connect(served.url) as ours, tinker.ServiceClient(base_url=served.url, api_key="tml-any") as official:
        samplers = [as_sampler(each.create_sampling_client(base_model="tiny")) for each in (ours, official)]
        expected, found = (sampler.sample(PROMPT, 2, PARAMS, **options).result() for sampler in samplers)
        scores = [sampler.compute_logprobs(PROMPT, 4).result() for sampler in samplers]
    assert found == expected
    assert found.prompt_cache_hit_tokens == 7
    assert len({one.sequence_id for one in found.sequences} - {""}) == 2
    assert all(len(one.topk_logprobs[0]) == 3 for one in found.sequences)
    assert found.topk_prompt_logprobs[0] is None
    assert len(found.topk_prompt_logprobs[-1]) == 2
    assert found.target_prompt_logprobs.shape == [10, 2]
    assert found.prompt_alt_tokens.tokens.shape == [10, 2]
    assert scores[1] == scores[0]
    assert scores[1][:7] == [None] * 7


class Older:
    """The method of a release that knows fewer options."""

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any, include_prompt_logprobs: bool = False) -> Any:
        raise AssertionError(
            f"called without an option: {prompt, num_samples, sampling_params, include_prompt_logprobs}"
        )


def test_an_option_that_the_installed_sdk_lacks_raises() -> None:
    client = OfficialSamplingClient(Older())  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="sample of this client has no topk_sample_logprobs"):
        client.sample(PROMPT, 1, PARAMS, topk_sample_logprobs=2).result()
