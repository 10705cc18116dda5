"""Requests in the terms of a dialect."""

import json
from dataclasses import dataclass, fields

import pytest

from tests.helpers.imitated_clients import pair
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.client.dialects.dialect import NEWER_FIELDS, OLD_NESTED_FIELDS
from tinker_lightning.client.passes.request import weighted
from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams
from tinker_lightning.types.requests import ForwardBackwardRequest, SampleRequest

ZEROS = weighted(pair(3, 1), 0.0)


@pytest.mark.parametrize("weighs", [pair(3, 1), weighted(pair(3, 1), 1.0)], ids=["no weights", "weights"])
def test_a_forward_never_becomes_a_backward_with_a_gradient(weighs: Datum) -> None:
    request = ForwardBackwardRequest("model", 1, [ZEROS, weighs], "cross_entropy", forward_only=True)
    with pytest.raises(InvalidInput, match="datum 1: a forward needs weights of 0 on servers of the dialect 'open-rl'"):
        dialect_named("open-rl").encode_pass(request)
    assert dialect_named("skyrl").encode_pass(request)[0] == "forward"
    zeros = ForwardBackwardRequest("model", 1, [ZEROS], "cross_entropy", forward_only=True)
    assert dialect_named("open-rl").encode_pass(zeros)[0] == "forward_backward"


@dataclass(frozen=True, slots=True)
class NewerParams(SamplingParams):
    min_p: float = 0.0
    bias: float = 0.0


@pytest.mark.parametrize("name", ["tuft", "skyrl", "embedded"])
def test_a_newer_nested_field_is_sent_only_to_servers_that_list_it(name: str) -> None:
    dialect = dialect_named(name)
    prompt = ModelInput.from_ints([1, 2])
    body = dialect.encode_json("asample", SampleRequest("sampler", 1, prompt, NewerParams(max_tokens=3)))
    assert json.loads(body)["sampling_params"] == {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    request = SampleRequest("sampler", 1, prompt, NewerParams(min_p=0.1))
    with pytest.raises(Unsupported, match=f"sampling_params.min_p: servers of the dialect '{name}' do not support it"):
        dialect.encode_json("asample", request)
    fields = NEWER_FIELDS | {"asample.sampling_params.min_p"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinker_lightning.client.dialects.dialect.NEWER_FIELDS", fields)
        sent = json.loads(dialect.but(newer_fields=fields).encode_json("asample", request))["sampling_params"]
    assert sent["min_p"] == 0.1
    assert "bias" not in sent


def test_every_field_of_nested_parameters_is_old_or_listed() -> None:
    for name, cls in (("adam_params", AdamParams), ("lora_config", LoraConfig), ("sampling_params", SamplingParams)):
        listed = {field.rpartition(".")[2] for field in NEWER_FIELDS if f".{name}." in field}
        assert {field.name for field in fields(cls)} == OLD_NESTED_FIELDS[name] | listed
