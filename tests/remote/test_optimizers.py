"""RemoteAdamW is an ordinary torch optimizer, for remote and local parameters."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from tinker_lightning import AdamParams, Datum, ServiceClient
from tinker_lightning.errors import InvalidInput, TinkerLightningError, Unsupported
from tinker_lightning.remote.lm import RemoteLM
from tinker_lightning.remote.optimizers import RemoteAdamW, RemoteDiMuon
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import embedded_service
from tinker_lightning.types import DimuonParams

if TYPE_CHECKING:
    from pathlib import Path

DATA = [Datum.from_tokens(list(text)) for text in (b"hello world, this is a text", b"a short one")]


@pytest.fixture
def model(service: ServiceClient) -> RemoteLM:
    return RemoteLM(service.create_lora_training_client("tiny", rank=4, seed=1))


def nll(model: RemoteLM) -> torch.Tensor:
    return -torch.cat(model(DATA)).mean()


def train(model: RemoteLM, optimizer: torch.optim.Optimizer, steps: int, **kwargs: Any) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nll(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_plain_loop_trains(model: RemoteLM) -> None:  # R5.1
    losses = train(model, RemoteAdamW(model.parameters(), lr=3e-3), 15)
    assert losses[-1] < losses[0] - 0.5  # far less than it learns in fifteen steps


def test_the_settings_of_a_step_are_those_of_its_group(model: RemoteLM) -> None:
    optimizer = RemoteAdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    rates = []
    for _ in range(3):
        nll(model).backward()
        optimizer.step()
        scheduler.step()
        rates.append((optimizer.sent[0].optim.result().metrics or {})["learning_rate"])
    assert rates == [1e-2, 5e-3, 2.5e-3]


def test_the_defaults_are_tinkers(model: RemoteLM) -> None:
    (group,) = RemoteAdamW(model.parameters()).param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-4, (0.9, 0.95), 1e-12, 0.0)


def test_local_parameters_are_stepped_as_torch_steps_them(model: RemoteLM) -> None:  # R5.2
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    ours, torchs = (torch.nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    optimizer = RemoteAdamW([*model.parameters(), ours], **settings)
    reference = torch.optim.AdamW([torchs], **settings)
    for _ in range(5):
        optimizer.zero_grad()
        reference.zero_grad()
        (nll(model) + (ours**2).sum()).backward()
        (torchs**2).sum().backward()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, torchs)


def test_the_server_clips_to_grad_clip_norm(service: ServiceClient) -> None:
    clipped, scaled = (RemoteLM(service.create_lora_training_client("tiny", rank=4, seed=2)) for _ in range(2))
    # An eps that dwarfs the gradient makes Adam's first step proportional to it.
    optimizer = RemoteAdamW(clipped.parameters(), lr=1.0, eps=1e3, grad_clip_norm=0.01)
    nll(clipped).backward()
    optimizer.step()
    norm = (optimizer.sent[0].optim.result().metrics or {})["grad_norm"]
    assert norm > 0.01
    optimizer = RemoteAdamW(scaled.parameters(), lr=1.0, eps=1e3)
    (nll(scaled) * (0.01 / norm)).backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.allclose(torch.cat(clipped(DATA)), torch.cat(scaled(DATA)), atol=1e-6)


def test_clipping_a_group_of_local_and_remote_parameters_raises(model: RemoteLM) -> None:
    local = torch.nn.Parameter(torch.zeros(()))
    with pytest.raises(InvalidInput, match="into a separate group"):
        RemoteAdamW([*model.parameters(), local], grad_clip_norm=1.0)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "grad_clip_norm": 1.0}, {"params": [local]}]
    assert [group["grad_clip_norm"] for group in RemoteAdamW(groups).param_groups] == [1.0, 0.0]


def test_a_state_dict_round_trips(model: RemoteLM) -> None:
    local = torch.nn.Parameter(torch.ones(()))
    optimizer = RemoteAdamW([*model.parameters(), local], lr=3e-3)
    (nll(model) * local).backward()
    optimizer.step()
    other = RemoteAdamW([*model.parameters(), torch.nn.Parameter(torch.ones(()))])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 3e-3
    assert [state["step"] for state in other.state.values()] == [1.0]


def test_a_closure_is_run(model: RemoteLM) -> None:
    optimizer = RemoteAdamW(model.parameters(), lr=1e-2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nll(model)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert len(optimizer.sent) == 1


def test_invalid_settings_raise(model: RemoteLM) -> None:
    with pytest.raises(ValueError, match="beta"):
        RemoteAdamW(model.parameters(), betas=(0.9, 1.5))
    with pytest.raises(InvalidInput, match="grad_clip_norm"):
        RemoteAdamW(model.parameters(), grad_clip_norm=-1.0)


def test_a_failure_on_the_server_is_raised_at_the_next_use(model: RemoteLM) -> None:  # R4.5
    optimizer = RemoteAdamW(model.parameters(), lr=1e38)
    nll(model).backward()
    optimizer.step()
    while not optimizer.sent[0].optim.done():
        threading.Event().wait(0.01)
    with pytest.raises(TinkerLightningError, match=r"not finite.* \(optim_step 3 of "):
        nll(model)


def test_settings_that_the_server_does_not_support_raise(model: RemoteLM) -> None:
    with pytest.raises(InvalidInput, match=r"maximize=True .* negate the loss"):
        RemoteAdamW([{"params": list(model.parameters()), "maximize": True}])
    with pytest.raises(InvalidInput, match="amsgrad=True"):
        RemoteAdamW([{"params": list(model.parameters()), "amsgrad": True}])
    optimizer = RemoteAdamW(model.parameters(), grad_clip_norm=1.0)
    with pytest.raises(InvalidInput, match="into a separate group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(()))]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(()))], "grad_clip_norm": 0.0})
    assert len(optimizer.param_groups) == 2


def test_local_parameters_may_do_what_torch_can(model: RemoteLM) -> None:
    local = torch.nn.Parameter(torch.zeros(()))
    optimizer = RemoteAdamW([{"params": list(model.parameters())}, {"params": [local], "maximize": True}], lr=1e-2)
    (nll(model) + local).backward()
    optimizer.step()
    assert local > 0


def test_hooks_run_once_and_see_the_remote_model(model: RemoteLM) -> None:
    local = torch.nn.Parameter(torch.zeros(()))
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(()))])  # from here on torch's own step calls hooks
    optimizer = RemoteAdamW([*model.parameters(), local])
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(len(one.param_groups[0]["params"])))
    optimizer.register_step_post_hook(lambda one, *_: seen.append(len(one.param_groups[0]["params"])))
    (nll(model) + local).backward()
    optimizer.step()
    assert seen == [2, 2]


def test_a_state_of_torchs_adamw_loads(model: RemoteLM) -> None:
    local = torch.nn.Parameter(torch.zeros(()))
    torchs = torch.optim.AdamW([local], lr=3e-3, betas=(0.5, 0.6))
    optimizer = RemoteAdamW(model.parameters(), grad_clip_norm=2.0)
    optimizer.load_state_dict(torchs.state_dict())
    nll(model).backward()
    optimizer.step()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["grad_clip_norm"]) == (3e-3, (0.5, 0.6), 2.0)
    assert len(optimizer.sent) == 1


def test_dimuon_sends_its_settings_and_fits_only_its_models(tmp_path: Path) -> None:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    with embedded_service(trainer) as service:
        model = RemoteLM(service.create_lora_training_client("tiny", rank=4))
        assert model.backend.optimizer_kind == "adamw"
        with pytest.raises(InvalidInput, match="the optimizer is dimuon, but the model was created for adamw"):
            RemoteDiMuon(model.parameters())
        lazily = RemoteLM(lambda: service.create_lora_training_client("tiny", rank=4))
        optimizer = RemoteDiMuon(lazily.parameters(), lr=0.1, beta1=0.5, grad_clip_norm=2.0)
        assert optimizer.optim_params(optimizer.param_groups[0]) == DimuonParams(0.1, 2.0, 0.5)
        with pytest.raises(InvalidInput, match="the optimizer is dimuon, but the model was created for adamw"):
            lazily([Datum.from_tokens([1, 2, 3])])
        with pytest.raises(InvalidInput, match="only adamw is supported, not 'dimuon'"):
            service.create_lora_training_client("tiny", rank=4, optimizer="dimuon")
        with pytest.raises(Unsupported, match="this client trains with adamw, dimuon, got 'lion'"):
            service.create_lora_training_client("tiny", rank=4, optimizer="lion")
    with pytest.raises(InvalidInput, match="RemoteDiMuon steps remote models only"):
        RemoteDiMuon([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(InvalidInput, match="beta1 must lie in"):
        RemoteDiMuon(RemoteLM(None).parameters(), beta1=1.0)
    trainer.close()


class Silent(httpx.ASGITransport):
    """A server of DiMuon models that does not say which states are theirs, and of models only what it is told to."""

    def __init__(self, trainer: EmbeddedTrainer, reported: str | None) -> None:
        super().__init__(create_app(trainer))
        self.reported = reported
        self.steps: list[Any] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/optim_step"):
            self.steps.append(json.loads(await request.aread()).get("optimizer_params"))
            if self.steps[-1] is None:
                return httpx.Response(400, json={"detail": "this model has another optimizer", "category": "user"})
        response = await super().handle_async_request(request)
        if not path.endswith(("/weights_info", "/get_info")):
            return response
        kind = self.reported if path.endswith("/get_info") else None
        body = json.loads(await response.aread())
        return httpx.Response(200, json={**body, "optimizer_config": None if kind is None else {"type": kind}})


@pytest.mark.parametrize("reported", ["dimuon", None])
def test_a_state_whose_optimizer_is_not_reported(reported: str | None, tmp_path: Path) -> None:
    """The model's optimizer is asked for. If that is not known either, nothing is assumed, and the server decides."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    server = Silent(trainer, reported)
    with ServiceClient(base_url="http://embedded", transport=server) as service:
        path = service.create_lora_training_client("tiny", rank=4).save_state("one").result().path
        client = service.create_training_client_from_state_with_optimizer(path)
        assert client.optimizer_kind == reported
        RemoteDiMuon(RemoteLM(client).parameters())
        server.steps.clear()
        if reported:
            with pytest.raises(InvalidInput, match="the settings are for adamw, but this model was created for dimuon"):
                client.optim_step(AdamParams())
            settings = None
        else:
            with pytest.raises(InvalidInput, match=r"another optimizer.* does not report .* adamw.* pass DimuonParams"):
                client.optim_step(AdamParams()).result()
            settings = DimuonParams()
        client.optim_step(settings).exception()  # the trainer behind has no such optimizer
        assert (server.steps[-1]["type"], len(server.steps)) == ("dimuon", 1 if reported else 2)
    trainer.close()
