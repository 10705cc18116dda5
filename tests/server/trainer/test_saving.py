"""Saving and loading through the protocol: resuming, sampling, listing, other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.helpers.api import Api


def train(api: Api, model: str, seqs: range, text: str = "hello world") -> None:
    """Alternates passes and steps."""
    for seq in seqs:
        path, body = (
            ("forward_backward", api.train(model, seq, text)) if seq % 2 else ("optim_step", api.step(model, seq))
        )
        assert "error" not in api.run(path, body)


def save(api: Api, model: str, seq: int, name: str = "state", **options: Any) -> str:
    return str(api.run("save_weights", {"model_id": model, "seq_id": seq, "path": name, **options})["path"])


def load(api: Api, model: str, seq: int, path: str, *, optimizer: bool) -> Any:
    return api.run("load_weights", {"model_id": model, "seq_id": seq, "path": path, "optimizer": optimizer})


@pytest.mark.parametrize("pending", [False, True])
def test_resuming_with_the_optimizer_is_bit_equal_to_not_stopping(api: Api, pending: bool) -> None:
    session = api.session()
    whole, resumed, without = (api.model(session, i, seed=i) for i in range(3))
    train(api, whole, range(1, 5))
    if pending:  # the gradient of a window that has not been stepped is part of the state
        api.run("forward_backward", api.train(whole, 5, "pending"))
    number = 6 if pending else 5
    path = save(api, whole, number)
    for model, optimizer in ((resumed, True), (without, False)):
        assert load(api, model, 1, path, optimizer=optimizer)["path"] == path
    assert api.state(resumed) == api.state(whole)
    for model, seq in ((whole, number + 1), (resumed, 2), (without, 2)):
        api.submit("forward_backward", api.train(model, seq, "more"))
        api.run("optim_step", api.step(model, seq + 1))
    assert api.state(resumed) == api.state(whole)
    assert api.state(without) != api.state(whole)


def test_loading_into_a_model_of_another_shape_changes_nothing(api: Api) -> None:
    session = api.session()
    path = save(api, api.model(session, 0), 1)
    shapes: list[tuple[dict[str, Any], str]] = [({"rank": 8}, "rank=4"), ({"train_mlp": False}, "train_mlp=True")]
    for i, (lora, named) in enumerate(shapes):
        model = api.model(session, i + 1, **lora)
        before = api.state(model)
        failed = load(api, model, 1, path, optimizer=True)
        assert failed["category"] == "user"
        assert f"has {named}, but this model has" in failed["error"]
        assert api.state(model) == before


def test_weights_saved_for_sampling_hold_no_optimizer(api: Api) -> None:
    model = api.model()
    train(api, model, range(1, 3))
    body = {"model_id": model, "seq_id": 3, "path": "s"}
    path = api.run("save_weights_for_sampler", body)["path"]
    assert path == f"tinker://{model}/sampler_weights/s"
    failed = load(api, model, 4, path, optimizer=True)
    assert "has no optimizer state" in failed["error"]
    assert load(api, model, 5, path, optimizer=False)["path"] == path


def test_a_sampler_on_saved_weights_scores_as_the_model_did_when_they_were_saved(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    train(api, model, range(1, 5), "abcd")
    api.run("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "s"})
    passes = api.train(model, 6, "abcd")["forward_backward_input"]
    forward = api.run("forward", {"forward_input": passes, "model_id": model, "seq_id": 6})
    train(api, model, range(7, 9))
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": f"tinker://{model}/sampler_weights/s"}
    sampler = api.post("create_sampling_session", body).json()["sampling_session_id"]
    prompt = {"chunks": [{"tokens": list(b"abcd")}]}
    sampled = api.run("asample", {**api.sample(sampler, 0), "prompt": prompt, "prompt_logprobs": True})
    expected = forward["loss_fn_outputs"][0]["logprobs"]["data"]
    assert sampled["prompt_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    assert api.request("GET", f"samplers/{sampler}").json()["model_path"] == body["model_path"]


def test_a_checkpoint_loads_in_peft_and_gives_the_same_logprobs(api: Api) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    model = api.model()
    train(api, model, range(1, 7))
    save(api, model, 7)
    passes = api.train(model, 8)["forward_backward_input"]
    forward = api.run("forward", {"forward_input": passes, "model_id": model, "seq_id": 8})
    folder = api.trainer.store.root / model.replace(":", "+") / "weights" / "state"
    base = AutoModelForCausalLM.from_pretrained(api.trainer.catalog.get("tiny").tokenizer_id)
    loaded = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    ids = torch.tensor([list(b"hello world")])
    with torch.no_grad():
        logits = loaded(input_ids=ids[:, :-1]).logits
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
    assert forward["loss_fn_outputs"][0]["logprobs"]["data"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_listings_pages_deletion_and_ttl(api: Api) -> None:
    model = api.model()
    paths = [save(api, model, i + 1, f"s{i}", user_metadata={"i": str(i)}) for i in range(4)]
    api.run("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "for-sampling"})
    listed = api.request("GET", f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [item["tinker_path"] for item in listed[:4]] == paths
    assert listed[0]["checkpoint_id"] == "weights/s0"
    assert listed[0]["checkpoint_type"] == "training"
    assert listed[0]["user_metadata"] == {"i": "0"}
    assert listed[4]["checkpoint_type"] == "sampler"

    pages = [api.request("GET", "checkpoints", params={"limit": 2, "offset": n}).json() for n in (0, 2, 4, 6)]
    assert [len(page["checkpoints"]) for page in pages] == [2, 2, 1, 0]
    assert pages[1]["cursor"] == {"offset": 2, "limit": 2, "total_count": 5}
    newest_first = [item["tinker_path"] for page in pages for item in page["checkpoints"]]
    assert newest_first[1:] == paths[::-1]

    url = f"training_runs/{model}/checkpoints/weights/s1"
    assert api.request("DELETE", url).status_code == 200
    assert api.request("DELETE", url).status_code == 404
    assert api.post("weights_info", {"tinker_path": paths[1]}).status_code == 404
    url = f"training_runs/{model}/checkpoints/weights/s2/ttl"
    assert api.request("PUT", url, json={"ttl_seconds": 3600}).status_code == 200
    assert api.request("PUT", url, json={"ttl_seconds": -1}).status_code == 400
    (item,) = [c for c in api.request("GET", "checkpoints").json()["checkpoints"] if c["tinker_path"] == paths[2]]
    assert item["expires_at"] > item["time"]
    assert api.request("PUT", url, json={"ttl_seconds": None}).status_code == 200


def test_runs_are_listed_also_those_of_an_earlier_life(api: Api) -> None:
    model = api.model(rank=2)
    save(api, model, 1)
    runs = api.request("GET", "training_runs").json()
    assert runs["cursor"]["total_count"] == 1
    (run,) = runs["training_runs"]
    assert run["training_run_id"] == model
    assert run["lora_rank"] == 2
    assert run["is_lora"] is True
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/state"
    assert api.request("GET", f"training_runs/{model}").json() == run
    assert api.request("GET", "training_runs/none").status_code == 404
    assert api.request("GET", "training_runs/none/checkpoints").status_code == 404
    later = type(api.trainer)(["tiny"], data_dir=api.trainer.store.root.parent)
    other = type(api)(later)
    try:
        (found,) = other.request("GET", "training_runs").json()["training_runs"]
        assert found["training_run_id"] == model
        listed = other.request("GET", f"training_runs/{model}/checkpoints").json()["checkpoints"]
        fresh = other.model(rank=2)
        assert load(other, fresh, 1, listed[0]["tinker_path"], optimizer=True)["path"] == listed[0]["tinker_path"]
        assert other.state(fresh) == api.state(model)
    finally:
        other.close()
        later.close()


def test_weights_info_tells_which_model_to_create(api: Api) -> None:
    path = save(api, api.model(rank=2, train_mlp=False), 1)
    assert api.post("weights_info", {"tinker_path": path}).json() == {
        "base_model": "tiny",
        "is_lora": True,
        "lora_rank": 2,
        "train_unembed": True,
        "train_mlp": False,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }


def test_overwriting_needs_the_flag_and_an_unnamed_state_gets_a_name_of_its_own(api: Api) -> None:
    model = api.model()
    path = save(api, model, 1)
    failed = api.run("save_weights", {"model_id": model, "seq_id": 2, "path": "state"})
    assert "already exists" in failed["error"]
    assert save(api, model, 3, overwrite=True) == path
    assert api.run("save_weights", {"model_id": model, "seq_id": 4})["path"].endswith("/weights/checkpoint-000004")


def test_a_save_beyond_the_limit_fails_and_training_continues(api: Api) -> None:
    api.trainer.store.disk_limit = 100_000
    model = api.model()
    api.run("forward_backward", api.train(model, 1))
    before = api.state(model)
    failed = api.run("save_weights", {"model_id": model, "seq_id": 2, "path": "state"})
    assert failed["category"] == "server"  # the client cannot fix it, and is not told that its input is wrong
    assert failed["error_class"] == "NotStored"
    assert "of the 97.7 KiB that are allowed" in failed["error"]
    assert api.state(model) == before
    assert "metrics" in api.run("optim_step", api.step(model, 3))
    assert not api.request("GET", "checkpoints").json()["checkpoints"]


def test_metadata_of_a_checkpoint_is_bounded(api: Api) -> None:
    """Every listing returns it."""
    model = api.model()
    body = {"model_id": model, "seq_id": 1, "path": "state", "user_metadata": {"a": "x" * (64 << 10)}}
    assert "at most 65536 are kept" in api.run("save_weights", body)["error"]
    assert not api.request("GET", "checkpoints").json()["checkpoints"]
