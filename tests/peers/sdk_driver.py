"""Calls every public method of the installed official SDK on a server, and checks the results.

A script, run by `test_sdks.py` with one release of the SDK after another. It prints a JSON object that maps each
public method to "called", "not offered" (the error was checked), "local" (it sends nothing) or "broken in the SDK" (it
fails before it sends anything).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import sys
import time
import typing
import warnings
from typing import Any

import torch
from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.lib.public_interfaces.sampling_client import SamplingClient
from tinker.lib.public_interfaces.service_client import ServiceClient
from tinker.lib.public_interfaces.training_client import TrainingClient

KEY = "tml-any"
TOKENS = list(b"hello world")
PROMPT = types.ModelInput.from_ints(TOKENS)
ADAM = types.AdamParams(learning_rate=1e-2)
# Methods that send nothing to a server.
LOCAL = {"get_telemetry", "on_queue_state_change", "holder", "get_console_url", "create"}


def ready(returned: Any) -> Any:
    """The result of a call. Releases differ in whether they return a future of it: 0.38 does so of clients, too."""
    return returned.result() if hasattr(returned, "result") else returned


class Driver:
    """Calls methods in their plain and their `_async` form, and keeps which were called."""

    def __init__(self, url: str) -> None:
        self.service = ServiceClient(base_url=url, api_key=KEY)
        self.table: dict[str, str] = {}
        self.count = 0

    def name(self) -> str:
        """A checkpoint name that was not used before."""
        self.count += 1
        return f"n{self.count}"

    def call(self, target: Any, method: str, *args: Any, **options: Any) -> Any:
        """Calls one method and waits for its result."""
        self.table[f"{type(target).__name__}.{method}"] = "called"
        found = getattr(target, method)

        async def wait() -> Any:
            returned = await found(*args, **options)
            return await returned.result_async() if hasattr(returned, "result_async") else returned

        with warnings.catch_warnings():
            if hasattr(found, "__deprecated__"):  # from 0.38 on, all `_async` names are
                warnings.simplefilter("ignore", FutureWarning)
            return asyncio.run(wait()) if method.endswith("_async") else ready(found(*args, **options))

    def both(self, target: Any, method: str, *args: Any, **options: Any) -> list[Any]:
        """Calls both forms of a method, as far as this release has them; a callable argument is called for each."""
        results = []
        for form in (method, f"{method}_async"):
            if hasattr(target, form):
                given = [arg() if arg == self.name else arg for arg in args]
                results.append(self.call(target, form, *given, **options))
        return results

    def not_offered(self, target: Any, method: str, *args: Any, **options: Any) -> None:
        """Checks that both forms fail at once, with a status that says so and a message that names the reason."""
        for form in (method, f"{method}_async"):
            if not hasattr(target, form):
                continue
            started = time.monotonic()
            try:
                self.call(target, form, *args, **options)
            except Exception as error:
                failure = error
            else:
                raise AssertionError(f"{form} was expected to fail")
            assert time.monotonic() - started < 10, f"{form} was retried"
            if "incorrect event loop" in str(failure):
                self.table[f"{type(target).__name__}.{form}"] = "broken in the SDK"
                continue
            self.table[f"{type(target).__name__}.{form}"] = "not offered"
            # The SDK itself knows that there are no accounts, from the configuration.
            if "requires JWT auth" not in str(failure):
                assert getattr(failure, "status_code", None) == 404, failure
                assert "is not offered by this trainer" in str(failure), failure


def datum(**inputs: Any) -> types.Datum:
    """A datum over the tokens, with more inputs."""
    named: dict[str, Any] = {"target_tokens": TOKENS[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=named)


ONES = [1.0] * (len(TOKENS) - 1)
WEIGHTED = [datum(weights=ONES)]


def logprobs(output: Any) -> torch.Tensor:
    """The log-probabilities of the only datum."""
    return torch.tensor(output.loss_fn_outputs[0]["logprobs"].to_numpy().tolist())


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=2e-3, atol=2e-3)


def passes(drive: Driver, model: Any) -> None:
    """Forwards, every loss, and a custom one."""
    forwards = drive.both(model, "forward", WEIGHTED, "cross_entropy")
    values = logprobs(forwards[0])
    close(values, logprobs(forwards[1]))
    for output in drive.both(model, "forward_backward", WEIGHTED, "cross_entropy"):
        close(output.metrics["loss:sum"], -values.sum())
    drive.both(model, "optim_step", types.AdamParams(learning_rate=0.0))
    advantages = torch.linspace(-1, 1, len(ONES))
    policy = {"logprobs": values.tolist(), "advantages": advantages.tolist()}
    at_ratio_one = {"importance_sampling": -advantages.sum(), "ppo": -advantages.sum(), "gspo": -advantages.sum()}
    of_logprobs = {"cispo": -(values * advantages).sum(), "dro": -(values * advantages).sum()}
    for loss, expected in {**at_ratio_one, **of_logprobs}.items():
        if loss not in typing.get_args(types.LossFnType):
            continue
        more = {"sequence_ratio_mask": ONES} if loss == "gspo" else {}
        output = model.forward_backward([datum(**policy, **more)], loss).result()
        close(output.metrics["loss:sum"], expected)

    def negative_likelihood(data: Any, given: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -given[0].sum(), {"seen": float(len(data))}

    for output in drive.both(model, "forward_backward_custom", WEIGHTED, negative_likelihood):
        close(output.metrics["loss:sum"], -values.sum())
        assert output.metrics["seen"] == 1.0
    model.optim_step(types.AdamParams(learning_rate=0.0)).result()
    close(logprobs(model.forward(WEIGHTED, "cross_entropy").result()), values)  # learning rate 0 changes nothing


def step(model: Any) -> torch.Tensor:
    """Trains a step, and returns the log-probabilities after it."""
    model.forward_backward(WEIGHTED, "cross_entropy").result()
    model.optim_step(ADAM).result()
    return logprobs(model.forward(WEIGHTED, "cross_entropy").result())


def states(drive: Driver, model: Any) -> str:
    """Saves and loads, with and without the optimizer, into this model and into new ones."""
    service = drive.service
    step(model)
    saved = drive.both(model, "save_state", drive.name)[0].path
    after = step(model)
    drive.both(model, "load_state_with_optimizer", saved)
    assert torch.equal(step(model), after)
    drive.both(model, "load_state", saved)
    without = step(model)
    assert not torch.equal(without, after)
    for other in drive.both(service, "create_training_client_from_state_with_optimizer", saved):
        assert torch.equal(step(other), after)
    for other in drive.both(service, "create_training_client_from_state", saved):
        assert torch.equal(step(other), without)
    for info in drive.both(model, "get_info"):
        assert "tiny" in (info.model_data.model_name, info.model_name)
    assert drive.call(model, "get_tokenizer").decode(TOKENS[:5]) == "hello"
    return str(saved)


def samples(drive: Driver, model: Any, folder: str) -> tuple[Any, str]:
    """Samples from named and unnamed weights, and from clones of a client, and loads the tokenizer of each."""
    settings = types.SamplingParams(max_tokens=4, seed=3, stop=[])
    path = drive.both(model, "save_weights_for_sampler", drive.name)[0].path
    clients = drive.both(model, "create_sampling_client", path)
    clients += drive.both(drive.service, "create_sampling_client", path)
    clients += drive.both(model, "save_weights_and_get_sampling_client")
    if hasattr(model, "save_weights_and_get_sampling_client_submit"):  # the older name of its future
        drive.call(model, "save_weights_and_get_sampling_client_submit")
    results = [drive.both(client, "sample", PROMPT, 2, settings) for client in clients]
    drawn = {tuple(sequence.tokens) for pair in results for result in pair for sequence in result.sequences}
    assert len(drawn) == 2  # one for each sample, the same from every client and form
    clients += drive.both(drive.service, "create_sampling_client", base_model=folder)
    for each in clients:
        assert drive.call(each, "get_tokenizer").decode(TOKENS[:5]) == "hello"
    if "kind" in inspect.signature(model.save_weights_and_get_sampling_client).parameters:
        refused = model.save_weights_and_get_sampling_client(kind="inflight").future().exception()
        assert "only 'snapshot' is supported, not 'inflight'" in str(refused), refused
    client, expected = clients[0], logprobs(model.forward(WEIGHTED, "cross_entropy").result())
    for scores in drive.both(client, "compute_logprobs", PROMPT):
        assert scores[0] is None
        close(scores[1:], expected)
    options: dict[str, Any] = {"topk_prompt_logprobs": 2, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 3}
    known = inspect.signature(client.sample).parameters
    options = {name: value for name, value in options.items() if name in known}
    result = client.sample(PROMPT, 1, settings, include_prompt_logprobs=True, **options).result()
    close(result.prompt_logprobs[1:], expected)
    if options:
        assert [len(row or ()) for row in result.topk_prompt_logprobs] == [0] + [2] * (len(TOKENS) - 1)
    if "prompt_alt_tokens_k" in options:
        assert result.prompt_alt_tokens.tokens.shape == [len(TOKENS) - 1, 3]
    if "target_prompt_logprobs" in known:
        targets = types.TensorData.from_torch(torch.tensor(TOKENS[1:])[:, None])
        scored = client.sample(PROMPT, 1, settings, target_prompt_logprobs=targets).result().target_prompt_logprobs
        close(scored.to_torch()[:, 0], expected)
    if "prompt_logprobs_last_n" in known:
        assert client.compute_logprobs(PROMPT, 2).result()[:-2] == [None] * (len(TOKENS) - 2)
    clones = [pickle.loads(pickle.dumps(client))]  # noqa: S301  # as users pass it to other processes
    if hasattr(client, "get_sampler_handle"):
        handle = drive.call(client, "get_sampler_handle")
        clones.append(drive.call(client, "from_sampler_handle", handle, api_key=KEY))
    for clone in clones:
        assert {tuple(each.tokens) for each in clone.sample(PROMPT, 2, settings).result().sequences} == drawn
    drive.both(client, "get_base_model")
    return client, path


def listings(drive: Driver, model: Any, saved: str, path: str) -> None:
    """The REST client: listings, deletion, expiry, downloads."""
    rest = drive.call(drive.service, "create_rest_client")
    run = saved.split("/")[2]
    if hasattr(model, "save_weights_external"):
        external = drive.both(model, "save_weights_external", drive.name)[0].path
        for urls in drive.both(rest, "get_external_weights_urls", external):
            assert "adapter_config.json" in urls.urls
    listed = [*drive.both(rest, "list_checkpoints", run), *drive.both(rest, "list_user_checkpoints")]
    for listing in listed:
        assert saved in {checkpoint.tinker_path for checkpoint in listing.checkpoints}
    for runs in drive.both(rest, "list_training_runs"):
        assert run in {each.training_run_id for each in runs.training_runs}
    for found in [
        *drive.both(rest, "get_training_run", run),
        *drive.both(rest, "get_training_run_by_tinker_path", saved),
    ]:
        assert (found.training_run_id, found.base_model, found.lora_rank) == (run, "tiny", 4)
    for info in drive.both(rest, "get_weights_info_by_tinker_path", saved):
        assert (info.base_model, info.lora_rank) == ("tiny", 4)
    session = run.split(":")[0]
    for sessions in drive.both(rest, "list_sessions"):
        assert session in sessions.sessions
    for details in drive.both(rest, "get_session", session):
        assert run in details.training_run_ids
    for sampler in drive.both(rest, "get_sampler", details.sampler_ids[0]):
        assert sampler.sampler_id == details.sampler_ids[0]
    drive.both(rest, "set_checkpoint_ttl_from_tinker_path", path, 3600)
    for archive in ("get_checkpoint_archive_url_from_tinker_path", "get_checkpoint_archive_url"):
        given = (path,) if archive.endswith("path") else (run, path.split("/", 3)[3])
        for link in drive.both(rest, archive, *given):
            assert "signature=" in link.url
    for method, count in (("delete_checkpoint", 2), ("delete_checkpoint_from_tinker_path", 1)):
        for form in (method, f"{method}_async"):
            gone = model.save_state(drive.name()).result().path
            drive.call(rest, form, *((run, gone.split("/", 3)[3]) if count == 2 else (gone,)))
            assert gone not in {each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints}
    for method in ("publish_checkpoint_from_tinker_path", "unpublish_checkpoint_from_tinker_path"):
        drive.not_offered(rest, method, saved)
    drive.not_offered(rest, "copy_weights", saved, "project")
    os.environ["TINKER_PROJECT_ID"] = "project"  # the SDK demands one before it asks the server
    drive.not_offered(drive.service, "copy_weights", saved)
    drive.not_offered(rest, "assign_session_project", session, "project")
    drive.not_offered(rest, "export_session_trace", session)
    drive.not_offered(rest, "get_audit_log")
    drive.not_offered(rest, "get_billing_usage", "2026-01-01", "2026-02-01")
    drive.not_offered(rest, "get_current_checkpoint_storage_usage")
    drive.not_offered(rest, "whoami")
    if hasattr(rest, "search_sessions"):
        drive.not_offered(rest, "search_sessions", types.SessionSearchRequest())


def main(url: str) -> dict[str, str]:
    """Drives a server; returns what became of each public method."""
    drive = Driver(url)
    service = drive.service
    listed = drive.both(service, "get_server_capabilities")
    if hasattr(RestClient, "get_server_capabilities"):
        listed.append(drive.call(drive.call(service, "create_rest_client"), "get_server_capabilities"))
    for capabilities in listed:
        name, folder = (str(model.model_name) for model in capabilities.supported_models)
        assert (name, os.path.isdir(folder)) == ("tiny", True)
    model = drive.both(service, "create_lora_training_client", "tiny", rank=4, seed=1)[0]
    passes(drive, model)
    saved = states(drive, model)
    client, path = samples(drive, model, folder)
    listings(drive, model, saved, path)
    if hasattr(service, "create_custom_loss"):

        def per_datum(logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
            return -(logprobs * weights).sum(), {"custom/count:sum": weights.sum()}

        ranks: Any = {"logprobs": 1, "weights": 1}
        handle = drive.call(service, "create_custom_loss", per_datum, ranks)
        output = model.forward_backward_custom(WEIGHTED, handle).result()
        assert output.metrics["custom/count:sum"] == len(ONES)
    if hasattr(service, "close"):
        drive.call(service, "close", "success")
    targets: list[Any] = [ServiceClient, TrainingClient, SamplingClient, RestClient]
    for target in targets:
        for method, _ in inspect.getmembers(target):
            if not method.startswith("_"):
                drive.table.setdefault(f"{target.__name__}.{method}", "local" if method in LOCAL else "FORGOTTEN")
    assert client is not None
    return drive.table


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1]), sort_keys=True))
