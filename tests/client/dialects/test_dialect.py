"""Dialects as data: known ones, changed ones, saved ones."""

import json

import pytest

from tinker_lightning.client.dialects.dialect import NEWER_FIELDS, Dialect
from tinker_lightning.client.dialects.servers import KNOWN, dialect_named
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.errors import InvalidInput


@pytest.mark.parametrize("name", KNOWN)
def test_a_dialect_survives_json(name: str) -> None:
    assert Dialect.from_dict(json.loads(json.dumps(dialect_named(name).to_dict()))) == dialect_named(name)


def test_fields_that_are_not_newer_are_always_sent() -> None:
    for dialect in KNOWN.values():
        assert dialect.knows("optim_step", "adam_params")
        assert dialect.knows("create_model", "lora_config")
    assert dialect_named("hosted").knows("create_model", "optimizer_config")
    assert not dialect_named("tuft").knows("create_model", "optimizer_config")


def test_every_known_surrogate_is_exact_or_absent() -> None:
    assert dialect_named("json").surrogate is None
    assert dialect_named("protobuf").surrogate is None
    assert all(dialect_named(name).surrogate for name in ("hosted", "embedded", "skyrl", "tuft", "twinkle"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"newer_fields": frozenset({"create_model.colour"})}, r"newer_fields: create_model\.colour: unknown"),
        ({"encoding": "xml"}, "dialect json: encoding: 'xml' is unknown; choose from 'protobuf', 'json'"),
        ({"concurrent": "no"}, "concurrent: 'no' is unknown; choose from True, False, None"),
        ({"deduplicates": 1}, "deduplicates: 1 is unknown; choose from True, False"),
        ({"newer_fields": None}, "dialect json: newer_fields: None is not a list of names; list some of asample"),
        ({"newer_fields": "create_model.optimizer_config"}, "newer_fields: 'create.*' is not a list of names"),
        ({"losses": "importance_sampling"}, "losses: 'importance_sampling' is not a list of names; list some of cispo"),
        ({"losses": [["ppo"]]}, r"losses: \[\['ppo'\]\] is not a list of names"),
        ({"losses": {"ppo", "sft"}}, "dialect json: losses: sft: unknown; choose from cispo, cross_entropy"),
        ({"surrogate": "cispo"}, r"dialect json: surrogate: 'cispo' is not a Surrogate. Pass Surrogate\('cispo'"),
        (
            {"forward": "zero_weights", "surrogate": Surrogate("cispo", per_batch="window")},
            "dialect json: forward: 'zero_weights' is not supported with a surrogate of per_batch='window'",
        ),
    ],
)
def test_an_invalid_dialect_names_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        dialect_named("json").but(**changes)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "dialect: name: missing"),
        ({"name": "mine", "colour": "red"}, "dialect mine: colour: unknown; choose from name, encoding"),
        ({"name": "mine", "surrogate": {"los": "cispo"}}, "dialect mine: surrogate: los: unknown; choose from loss"),
        ({"name": "mine", "surrogate": "cispo"}, 'dialect mine: surrogate: .* such as {"loss": "cispo"}'),
        ({"name": "mine", "newer_fields": None}, "dialect mine: newer_fields: None is not a list of names"),
        ({"name": "mine", "surrogate": {"loss": "dro"}}, "surrogate: loss: 'dro' is unknown; choose from 'cross_"),
    ],
)
def test_an_invalid_file_names_the_field(plain: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Dialect.from_dict(plain)


def test_names_may_be_any_collection() -> None:
    listed = dialect_named("json").but(losses=["ppo"], newer_fields=["save_weights.overwrite"])
    frozen = dialect_named("json").but(losses=frozenset({"ppo"}), newer_fields=frozenset({"save_weights.overwrite"}))
    assert listed == frozen
    assert hash(listed) == hash(frozen)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="'sky' is unknown; choose from auto, hosted, embedded, skyrl"):
        dialect_named("sky")


def test_newer_fields_name_real_fields() -> None:
    from dataclasses import fields

    from tinker_lightning.types import requests

    classes = {
        "create_model": requests.CreateModelRequest,
        "load_weights": requests.CreateFromWeightsRequest,
        "save_weights": requests.SaveWeightsRequest,
        "save_weights_for_sampler": requests.SaveWeightsForSamplerRequest,
        "asample": requests.SampleRequest,
        "retrieve_future": requests.RetrieveFutureRequest,
        "ttl": requests.TtlRequest,
    }
    for qualified in NEWER_FIELDS:
        endpoint, name = qualified.split(".")
        assert name in {field.name for field in fields(classes[endpoint])}, qualified
