"""Named keys: what is in their file, how a change takes effect, and that no owner reaches what another one has."""

from __future__ import annotations

import base64
import json
import logging
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from starlette.routing import Mount

from tests.helpers.api import Api
from tinker_lightning import cli
from tinker_lightning.errors import InvalidInput
from tinker_lightning.server import create_app
from tinker_lightning.server import serve as serve_module
from tinker_lightning.server.keys import Keys, Owner, add_key, read_file, remove_key
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.types import Datum, TensorData
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx

    from tinker_lightning.server import EmbeddedTrainer

JSON, BINARY = "application/json", "application/x-protobuf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def touch(file: Path) -> None:
    """Makes sure that a change is seen on file systems with coarse times."""
    later = time.time_ns() + 10**9
    os.utime(file, ns=(later, later))


# The file and the command.


def test_a_key_is_printed_once_and_only_its_hash_is_stored(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("alice", "bob"):
        assert cli.main(["keys", "add", name, "--file", str(file)]) == 0
    alice, bob = capsys.readouterr().out.split()
    assert alice.startswith("tml-")
    assert alice != bob
    assert alice not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert cli.main(["keys", "list", "--file", str(file)]) == 0
    assert capsys.readouterr().out.split() == ["alice", "bob"]
    keys = Keys.from_file(file)
    assert keys.find(alice.encode()) == Owner("alice", is_first=True)
    assert keys.find(bob.encode()) == Owner("bob")
    assert [keys.find(each) for each in (b"", b"alice", alice[:-1].encode(), file.read_bytes().split()[1])] == [
        None
    ] * 4
    assert cli.main(["keys", "remove", "alice", "--file", str(file)]) == 0
    assert list(read_file(file)) == ["bob"]
    assert [each.name for each in file.parent.iterdir()] == ["keys"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "alice"], "already has a key 'alice'"),
        (["add", "no spaces"], "'no spaces' is not a name for a key"),
        (["add", "-x\n"], "is not a name for a key"),
        (["remove", "carol"], "has no key 'carol'; it has alice"),
    ],
)
def test_mistakes_at_the_command_line(
    arguments: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_key(file, "alice")
    action, name = arguments
    assert cli.main(["keys", action, "--file", str(file), "--", name]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["tml-a-key-as-it-is", f"a {'0' * 64}\na {'1' * 64}", f"a {'0' * 64} more", "a b"])
def test_a_damaged_file_is_named_without_its_content(file: Path, content: str) -> None:
    file.write_text(f"# keys\n{content}\n")
    with pytest.raises(InvalidInput, match=r"keys, line \d: is not the name of a key") as caught:
        Keys.from_file(file)
    assert "tml-" not in str(caught.value)


def test_a_server_does_not_start_without_a_usable_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve_module.KEY_VARIABLE, raising=False)
    for bad in ("", " ", "tml-\n", "tml-é", "a\tb"):
        with pytest.raises(InvalidInput, match="--api-key: a key must be printable ASCII"):
            serve_module.serve(["tiny"], api_key=bad)
        with pytest.raises(InvalidInput, match="api_key: a key must be"):
            Keys.single(bad)
    with pytest.raises(InvalidInput, match=r"cannot read the key file .*No such file"):
        serve_module.serve(["tiny"], api_key_file=file)
    file.write_text("# none yet\n")
    with pytest.raises(InvalidInput, match=r"has no key\. Add one: tinker-lightning keys add NAME --file"):
        serve_module.serve(["tiny"], api_key_file=file)
    with pytest.raises(InvalidInput, match="--api-key and --api-key-file exclude each other"):
        serve_module.serve(["tiny"], api_key="tml-x", api_key_file=file)
    add_key(file, "alice")
    with pytest.raises(InvalidInput, match="so a single API key is required"):
        serve_module.serve(["tiny"], api_key_file=file, allow_pickled_losses=True)
    monkeypatch.setenv(serve_module.KEY_VARIABLE, " ")
    with pytest.raises(InvalidInput, match="TINKER_LIGHTNING_SERVE_KEY: a key must be"):
        serve_module.serve(["tiny"])


def test_a_key_on_the_command_line_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, key in (("variable", None), ("option", "tml-secret")):
        monkeypatch.setenv(serve_module.KEY_VARIABLE, "tml-secret")
        caplog.clear()
        with pytest.raises(InvalidInput, match="cannot listen"):
            serve_module.serve(["tiny"], port=-1, api_key=key, data_dir=tmp_path)
        assert ("can be read by every user of this machine" in caplog.text) == (name == "option")
        assert "tml-secret" not in caplog.text


# Changes while a server runs.


@pytest.fixture
def alice(trainer: EmbeddedTrainer, file: Path) -> Iterator[Api]:
    """The app of a server with the keys of alice and bob, as alice uses it."""
    sent = add_key(file, "alice")
    (file.parent / "bob").write_text(add_key(file, "bob"))
    api = Api(trainer, Keys.from_file(file), sent)
    yield api
    api.close()


@pytest.fixture
def bob(alice: Api, file: Path) -> dict[str, str]:
    """The headers that bob sends."""
    return {"x-api-key": (file.parent / "bob").read_text()}


def test_a_removed_key_ends_its_sessions_and_no_others(
    alice: Api, bob: dict[str, str], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = alice.session()
    model = alice.model(session)
    theirs = alice.post("create_session", {}, headers=bob).json()["session_id"]
    remove_key(file, "alice")
    touch(file)
    with caplog.at_level(logging.WARNING):
        assert alice.request("GET", "sessions").status_code == 401
    assert f"finishing {session}: the key alice was removed" in caplog.text
    assert alice.trainer.registry.session(session).finished
    alice.trainer.scheduler.find(f"{session}:finish").future.result(60)
    assert not alice.trainer.registry.has_model(model)
    assert alice.request("GET", "sessions", headers=bob).json() == {"sessions": [theirs]}


def test_a_key_that_is_added_is_accepted_at_once_and_a_damaged_file_changes_nothing(
    alice: Api, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    carol = {"x-api-key": add_key(file, "carol")}
    touch(file)
    assert alice.request("GET", "sessions", headers=carol).status_code == 200
    for damage in (lambda: file.write_text("half a li"), file.unlink):
        damage()
        caplog.clear()
        for _ in range(3):
            assert alice.request("GET", "sessions", headers=carol).status_code == 200
        assert caplog.text.count("keeping the keys that were read before") == 1


# Owners.


def test_what_has_no_owner_belongs_to_the_first_key(trainer: EmbeddedTrainer, api: Api, alice: Api, bob: Any) -> None:
    model = api.model()  # without a key
    path = api.run("save_weights", {"model_id": model, "seq_id": 1, "path": "old"})["path"]
    assert alice.post("weights_info", {"tinker_path": path}).status_code == 200
    assert alice.post("weights_info", {"tinker_path": path}, headers=bob).status_code == 404
    mine = alice.run("save_weights", {"model_id": alice.model(), "seq_id": 1, "path": "new"})["path"]
    folder = trainer.store.root / mine.removeprefix("tinker://").replace(":", "+")
    assert json.loads((folder / "checkpoint.json").read_text())["owner"] == "alice"
    listed = [each["tinker_path"] for each in alice.request("GET", "checkpoints").json()["checkpoints"]]
    assert listed == [mine, path]
    assert alice.request("GET", "checkpoints", headers=bob).json()["checkpoints"] == []
    assert api.post("weights_info", {"tinker_path": mine}).status_code == 200  # without keys, everything is anybody's


def test_the_same_adapter_imported_by_two_owners_is_two_checkpoints(alice: Api, bob: Any) -> None:
    saved = alice.run("save_weights", {"model_id": alice.model(), "seq_id": 1, "path": "x"})["path"]
    folder = alice.trainer.store.root / saved.removeprefix("tinker://").replace(":", "+")
    weights = base64.b64encode((folder / "adapter_model.safetensors").read_bytes()).decode()
    paths = []
    senders: list[dict[str, str]] = [{}, bob]
    for headers in senders:
        session = alice.post("create_session", {}, headers=headers).json()["session_id"]
        body = {"session_id": session, "base_model": "tiny", "scaling": 8.0, "weights": weights}
        paths.append(alice.post("http://embedded/ext/v1/import_adapter", body, headers=headers).json()["path"])
        assert alice.post("weights_info", {"tinker_path": paths[-1]}, headers=headers).status_code == 200
    assert alice.post("weights_info", {"tinker_path": paths[0]}, headers=bob).status_code == 404


def test_views_of_owners_share_everything_but_what_they_look_up(trainer: EmbeddedTrainer) -> None:
    """A view is a copy, so a part that replaced its state would fall apart; this shows which parts are copies."""
    view = trainer.owned_by(Owner("alice"))
    copied = {name for name, value in vars(view).items() if value is not getattr(trainer, name)}
    assert copied == {"registry", "store", "jobs", "passes", "training", "sampling"}
    for part in ("registry", "store"):
        ours, theirs = vars(getattr(view, part)), vars(getattr(trainer, part))
        assert {name for name in ours if ours[name] is not theirs[name]} == {"owner"}


class Belongings:
    """The ids of everything that an owner has."""

    def __init__(self, api: Api) -> None:
        self.session = api.session()
        self.model = api.model(self.session)
        self.sampler = api.sampler(self.session)
        self.request = api.submit("forward_backward", api.train(self.model, 1))
        api.result(self.request)
        self.sample = api.submit("asample", api.sample(self.sampler, 0))
        saved = {"model_id": self.model, "path": "kept"}
        self.path = str(api.run("save_weights", {**saved, "seq_id": 2})["path"])
        api.run("save_weights_external", {**saved, "seq_id": 3})
        self.seq = 4
        self.base = "tiny"

    @property
    def checkpoints(self) -> str:
        return f"training_runs/{self.model}/checkpoints"

    def absent(self) -> Belongings:
        """The same ids in a session that there never was."""
        other = object.__new__(Belongings)
        vars(other).update(vars(self))
        for name in ("session", "model", "sampler", "request", "sample", "path"):
            setattr(other, name, getattr(self, name).replace(self.session, "session-0123456789abcdef"))
        return other


def passes(its: Belongings) -> dict[str, Any]:
    inputs = {"target_tokens": {"data": [1, 2], "dtype": "int64", "shape": [2]}}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": inputs}
    return {
        "model_id": its.model,
        "seq_id": its.seq,
        "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
    }


def binary(its: Belongings, **config: Any) -> bytes:
    data = [Datum.from_tokens([1, 2, 3])]
    if config:
        data = [Datum(data[0].model_input, {"gradient": TensorData([0.0, 0.0], "float32", [2])})]
    return protobuf.encode_forward_backward(
        ForwardBackwardRequest(its.model, its.seq, data, "cross_entropy", loss_fn_config=config)
    )


# What a stranger sends to each endpoint that leads to an object: a path and, if it is posted, the body.
REACHING: dict[str, Callable[[Belongings], tuple[str, Any]]] = {
    "POST /api/v1/session_heartbeat": lambda its: ("session_heartbeat", {"session_id": its.session}),
    "POST /api/v1/sessions/{session_id}/finish": lambda its: (f"sessions/{its.session}/finish", {}),
    "GET /api/v1/sessions/{session_id}": lambda its: (f"sessions/{its.session}", None),
    "POST /api/v1/create_model": lambda its: (
        "create_model",
        {"session_id": its.session, "model_seq_id": 9, "base_model": "tiny"},
    ),
    "POST /api/v1/unload_model": lambda its: ("unload_model", {"model_id": its.model}),
    "POST /api/v1/get_info": lambda its: ("get_info", {"model_id": its.model}),
    "POST /api/v1/forward": lambda its: (
        "forward",
        {**passes(its), "forward_input": passes(its)["forward_backward_input"]},
    ),
    "POST /api/v1/forward_backward": lambda its: ("forward_backward", passes(its)),
    "POST /api/v1/optim_step": lambda its: ("optim_step", {"model_id": its.model, "seq_id": its.seq}),
    "POST /api/v1/save_weights": lambda its: ("save_weights", {"model_id": its.model, "seq_id": its.seq}),
    "POST /api/v1/load_weights": lambda its: (
        "load_weights",
        {"model_id": its.model, "seq_id": its.seq, "path": its.path},
    ),
    "POST /api/v1/save_weights_for_sampler": lambda its: (
        "save_weights_for_sampler",
        {"model_id": its.model, "seq_id": its.seq, "path": "x"},
    ),
    "POST /api/v1/save_weights_external": lambda its: (
        "save_weights_external",
        {"model_id": its.model, "seq_id": its.seq, "path": "x"},
    ),
    "POST /api/v1/create_custom_loss": lambda its: (
        "create_custom_loss",
        {"session_id": its.session, "custom_loss_seq_id": 0, "name": "x", "inputs": [], "graph": {}},
    ),
    "POST /api/v1/create_sampling_session": lambda its: (
        "create_sampling_session",
        {"session_id": its.session, "sampling_session_seq_id": 9, "base_model": "tiny"},
    ),
    "POST /api/v1/join_sampling_session": lambda its: ("join_sampling_session", {"sampling_session_id": its.sampler}),
    "GET /api/v1/samplers/{sampler_id}": lambda its: (f"samplers/{its.sampler}", None),
    "POST /api/v1/asample": lambda its: (
        "asample",
        {
            "sampling_session_id": its.sampler,
            "seq_id": 5,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
        },
    ),
    "POST /api/v1/retrieve_future": lambda its: ("retrieve_future", {"request_id": its.request}),
    "POST /api/v1/retrieve_futures": lambda its: (
        "retrieve_futures",
        {"target": {"sampling_session_id": its.sampler}, "timeout": 0},
    ),
    "POST /api/v1/cancel_future": lambda its: ("cancel_future", {"request_id": its.sample}),
    "POST /api/v1/weights_info": lambda its: ("weights_info", {"tinker_path": its.path}),
    "GET /api/v1/training_runs/{run_id}": lambda its: (f"training_runs/{its.model}", None),
    "GET /api/v1/training_runs/{run_id}/checkpoints": lambda its: (its.checkpoints, None),
    "GET /api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/archive": lambda its: (
        f"{its.checkpoints}/weights/kept/archive",
        None,
    ),
    "GET /api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/external_weights_urls": lambda its: (
        f"{its.checkpoints}/external_weights/kept/external_weights_urls",
        None,
    ),
    "PUT /api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl": lambda its: (
        f"{its.checkpoints}/weights/kept/ttl",
        {"ttl_seconds": 1},
    ),
    "DELETE /api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id:path}": lambda its: (
        f"{its.checkpoints}/weights/kept",
        None,
    ),
    "POST /ext/v1/losses": lambda its: ("http://embedded/ext/v1/losses", {"session_id": its.session, "loss": {}}),
    "GET /ext/v1/losses": lambda its: (f"http://embedded/ext/v1/losses?session_id={its.session}", None),
    "POST /ext/v1/counted_forward_backward": lambda its: (
        "http://embedded/ext/v1/counted_forward_backward",
        binary(its),
    ),
    "POST /ext/v1/retained_forward": lambda its: ("http://embedded/ext/v1/retained_forward", binary(its)),
    "POST /ext/v1/retained_backward": lambda its: (
        "http://embedded/ext/v1/retained_backward",
        binary(its, forward=1),
    ),
    "POST /ext/v1/import_adapter": lambda its: (
        "http://embedded/ext/v1/import_adapter",
        {"session_id": its.session, "base_model": "tiny", "scaling": 1.0, "weights": ""},
    ),
}
# The rest leads to no object of anybody's.
REACHING_NOTHING = {
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/create_session",
    "GET /api/v1/sessions",  # lists those of the owner: tested below
    "POST /api/v1/telemetry",
    "GET /api/v1/healthz",
    "GET /api/v1/get_server_capabilities",
    "GET /api/v1/checkpoints",  # as above
    "GET /api/v1/training_runs",  # as above
    "GET /api/v1/signed/{name:path}",  # its signature covers the owner: tested below
    "GET /ext/v1/tokenizer",
    "GET /metrics",  # numbers of the whole server
}
# Answered by the same error for everybody, without looking anything up.
REFUSED = (
    *("/publish", "/copy_weights", "/sessions/search", "/project", "/trace_export", "/audit", "/billing/{rest:path}"),
    *("/auth/token", "/auth/apikey/me"),
)


def endpoints(trainer: EmbeddedTrainer) -> set[str]:
    """The method and path of each endpoint of a server with keys."""
    found = set()
    for mount in create_app(trainer, api_key="tml-x").routes:
        for route in mount.routes if isinstance(mount, Mount) else [mount]:
            prefix = mount.path if isinstance(mount, Mount) else ""
            path: str = route.path  # type: ignore[attr-defined]
            for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]
                if not path.endswith(REFUSED):
                    found.add(f"{method} {prefix}{path}")
    return found


def ask(api: Api, endpoint: str, its: Belongings, **options: Any) -> httpx.Response:
    method = endpoint.split()[0]
    path, body = REACHING[endpoint](its)
    headers = options.pop("headers", {})
    if isinstance(body, bytes):
        return api.request(method, path, content=body, headers={**headers, "content-type": BINARY})
    return api.request(method, path, headers=headers, **({} if body is None else {"json": body}))


def test_no_endpoint_leads_to_what_another_owner_has(alice: Api, bob: dict[str, str]) -> None:
    """A new endpoint has to be listed here with a request for an object, or as one that leads to none."""
    every = endpoints(alice.trainer)
    twins = {each for each in every if each.startswith("POST /ext/v1/") and each.replace("/ext/", "/api/") in REACHING}
    assert every - twins == REACHING.keys() | REACHING_NOTHING
    its = Belongings(alice)
    absent = its.absent()
    before = alice.state(its.model)
    for endpoint in sorted(REACHING):
        theirs, nobodys = ask(alice, endpoint, its, headers=bob), ask(alice, endpoint, absent, headers=bob)
        assert theirs.status_code == nobodys.status_code == 404, (endpoint, theirs.text, nobodys.text)
        for name in ("request", "sample", "path", "model", "sampler", "session"):  # the same answer but for the id
            assert getattr(its, name) not in nobodys.text
        swapped = theirs.text.replace(its.session, "session-0123456789abcdef")
        assert swapped == nobodys.text, endpoint
        assert {k: v for k, v in theirs.headers.items() if k != "date"} == dict(nobodys.headers), endpoint
    assert alice.state(its.model) == before
    assert not alice.trainer.registry.session(its.session).finished
    assert alice.post("weights_info", {"tinker_path": its.path}).status_code == 200
    for endpoint in sorted(REACHING):  # and each request is one that finds the object of its owner
        if "finish" not in endpoint and "DELETE" not in endpoint and "unload" not in endpoint:
            assert ask(alice, endpoint, its).status_code != 404, endpoint


def test_listings_and_paths_inside_of_requests_lead_to_nothing_of_another_owner(
    alice: Api, bob: dict[str, str]
) -> None:
    its = Belongings(alice)
    for path, key in (("sessions", "sessions"), ("checkpoints", "checkpoints"), ("training_runs", "training_runs")):
        assert alice.request("GET", path).json()[key]
        assert alice.request("GET", path, headers=bob).json()[key] == []
    session = alice.post("create_session", {}, headers=bob).json()["session_id"]

    def run(endpoint: str, **body: Any) -> Any:
        receipt = alice.post(endpoint, body, headers=bob)
        if receipt.status_code != 200:
            return receipt.status_code
        return alice.post("retrieve_future", {"request_id": receipt.json()["request_id"]}, headers=bob).json()

    new = {"session_id": session, "model_seq_id": 0}
    assert run("load_weights", **new, path=its.path) == 404
    model = run("create_model", **new, base_model="tiny", lora_config={"rank": 4})["model_id"]
    loaded = run("load_weights", model_id=model, seq_id=1, path=its.path)
    assert loaded["error"] == f"{its.path}: there is no such checkpoint"
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": its.path}
    assert alice.post("create_sampling_session", sampler, headers=bob).status_code == 404


def test_signed_urls_are_worth_what_their_owner_is(alice: Api, bob: dict[str, str], file: Path) -> None:
    its = Belongings(alice)
    archive = alice.request("GET", f"{its.checkpoints}/weights/kept/archive")
    url = archive.headers["location"]
    none = {"x-api-key": ""}
    assert "owner=alice" in url
    assert alice.request("GET", url, headers=none).status_code == 200
    for forged in ("owner=bob", "owner=", "x=alice"):
        assert alice.request("GET", url.replace("owner=alice", forged), headers=none).status_code == 403
    remove_key(file, "alice")
    touch(file)
    assert alice.request("GET", url, headers=none).status_code == 403
    assert alice.request("GET", url, headers=bob).status_code == 403


def test_many_sessions_of_one_owner_take_no_more_time_than_the_one_of_another(alice: Api, bob: Any) -> None:
    now, ran = 100.0, []
    scheduler = alice.trainer.scheduler
    vars(scheduler)["_ready"]._clock = lambda: now
    may_start = threading.Event()
    held = scheduler.submit(Job("held", "held", lambda: may_start.wait(60), owner=alice.session()))

    def submit(name: str, session: str) -> None:
        def run() -> None:
            nonlocal now
            now += 1.0
            ran.append(name)

        jobs.append(scheduler.submit(Job(f"{session}:{len(jobs)}", "work", run, owner=session)))

    jobs: list[Job] = []
    for _ in range(10):
        session = alice.post("create_session", {}, headers=bob).json()["session_id"]
        for _ in range(2):
            submit("bob", session)
    session = alice.session()
    for _ in range(10):
        submit("alice", session)
    may_start.set()
    for job in (held, *jobs):
        job.future.result(60)
    assert 9 <= ran[:20].count("alice") <= 10  # and not two, as one of eleven sessions
    assert alice.trainer.memory.charge("a request", 1, "messages", owner=session).key == "alice"  # so is memory


def test_a_key_can_be_sent_as_a_bearer_token(alice: Api, bob: dict[str, str]) -> None:
    header = {"x-api-key": "", "authorization": f"Bearer {bob['x-api-key']}"}
    assert alice.request("GET", "sessions", headers=header).status_code == 200
    assert alice.request("GET", "sessions", headers={**header, "authorization": "Bearer x"}).status_code == 401
