"""Optimizers for remote models: the base class, AdamW for remote and local parameters in one, DiMuon, and schedules."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from tinker_lightning.errors import InvalidInput, check_choice
from tinker_lightning.remote.lm import RemoteHandle
from tinker_lightning.threads.background import sigint_held
from tinker_lightning.types import AdamParams, DimuonParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tinker_lightning.remote.calls import PreparedCall, Step
    from tinker_lightning.remote.window import RemoteModel
    from tinker_lightning.types.params import OptimParams

OptimizerName: TypeAlias = Literal["adamw", "dimuon"]
Schedule: TypeAlias = Literal["constant", "linear", "cosine", "wsd"]

# The share of the steps in which the learning rate of "wsd" falls.
_DECAY = 0.2


class RemoteOptimizer(torch.optim.Optimizer):
    """An optimizer that steps on the server: a step sends the accumulation window and an optimizer step.

    A subclass names its optimizer by `params_type` and converts its parameter groups by `optim_params`. Its defaults
    include `grad_clip_norm`.
    """

    params_type: type[OptimParams]
    sent: Sequence[Step] = ()  # by the last step
    clip_next: float | None = None  # overrides the groups' own for the next step

    def optim_params(self, group: dict[str, Any]) -> OptimParams:
        """Returns the settings of a step with a parameter group; raises `InvalidInput` if one is invalid."""
        raise NotImplementedError

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps remote models on the server and local parameters locally; sends nothing without a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.sent = ()
        clip, self.clip_next = self.clip_next, None
        ready: list[tuple[RemoteModel, list[PreparedCall], OptimParams]] = []
        for group in self.param_groups:
            group = group if clip is None else {**group, "grad_clip_norm": clip}
            remotes = [parameter.remote for parameter in group["params"] if isinstance(parameter, RemoteHandle)]
            for remote in remotes:
                params = self.optim_params({**group, "grad_clip_norm": _clip_norm(remote, group)})
                if prepared := remote.prepare(params):
                    ready.append((remote, prepared, params))
        # Everything that may wait or fail was done above: from here on the step is taken by all models or by none.
        with contextlib.ExitStack() as held:
            held.enter_context(sigint_held())
            for remote, _, _ in ready:
                held.enter_context(remote.backend.unread.held())
            self.sent = [remote.step(prepared, params) for remote, prepared, params in ready]
            self._step_local()
        return loss

    def clip(self, norm: float) -> None:
        """Makes the server clip the gradient of the next step; raises `InvalidInput` if there are local parameters."""
        if not all(isinstance(parameter, RemoteHandle) for group in self.param_groups for parameter in group["params"]):
            raise InvalidInput(
                "gradient_clip_val is a norm over all parameters, but the gradient of the remote model is on the "
                "server and that of the local parameters is not. Leave it out, and set grad_clip_norm for the group "
                "of the remote model: RemoteAdamW([{'params': module.lm.parameters(), 'grad_clip_norm': 1.0}, "
                "{'params': module.head.parameters()}])."
            )
        self.clip_next = norm

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; raises `InvalidInput` if the server does not support its settings."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except InvalidInput:
            self.param_groups.pop()
            raise

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or of torch's optimizer of this name, which has no `grad_clip_norm`."""
        norms = [group["grad_clip_norm"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, norm in zip(self.param_groups, norms, strict=True):
            group.setdefault("grad_clip_norm", norm)
            self._check(group)

    def _check(self, group: dict[str, Any]) -> None:
        """Raises `InvalidInput` for settings that the server does not support, or a model of another optimizer."""
        handles = [parameter for parameter in group["params"] if isinstance(parameter, RemoteHandle)]
        if group["grad_clip_norm"] and len(handles) < len(group["params"]):
            raise InvalidInput(
                "grad_clip_norm clips the gradient of a remote model on the server, but this group also has local "
                "parameters. Put those into a separate group with grad_clip_norm=0, and clip them with torch."
            )
        self.optim_params(group)
        for handle in handles:
            handle.remote.use_optimizer(self.params_type.kind)

    def _step_local(self) -> None:
        """Steps local parameters; does nothing for an optimizer that has none."""


class RemoteAdamW(RemoteOptimizer, torch.optim.AdamW):
    """AdamW for remote models: a step sends the accumulation window and an optimizer step, without waiting.

    Local parameters are stepped on this machine with the same settings. The defaults are Tinker's.

    Args:
        params: Parameters or groups of them, as for any torch optimizer.
        lr: The learning rate.
        betas: The decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: The decoupled weight decay.
        grad_clip_norm: The norm to which the server clips the gradient of a remote model; 0 disables clipping.
    """

    params_type = AdamParams

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> None:
        AdamParams(lr, *betas, eps, weight_decay)  # before torch's, whose errors do not name the setting
        self._grad_clip_norm = grad_clip_norm  # torch's constructor adds groups before `defaults` can have it
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.defaults["grad_clip_norm"] = grad_clip_norm

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group.setdefault("grad_clip_norm", self._grad_clip_norm)
        super().add_param_group(param_group)

    @override
    def optim_params(self, group: dict[str, Any]) -> AdamParams:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return AdamParams(
            float(group["lr"]),
            beta1,
            beta2,
            float(group["eps"]),
            float(group["weight_decay"]),
            float(group["grad_clip_norm"]),
        )

    @override
    def _check(self, group: dict[str, Any]) -> None:
        for name in ("maximize", "amsgrad"):
            if group.get(name) and any(isinstance(parameter, RemoteHandle) for parameter in group["params"]):
                raise InvalidInput(
                    f"{name}=True is not supported for a remote model, whose server implements plain AdamW"
                    + ("; negate the loss instead" if name == "maximize" else "")
                )
        super()._check(group)

    @override
    def _step_local(self) -> None:
        """Runs torch's own step, which skips handles: with the windows sent, they have no gradient."""
        step: Any = torch.optim.AdamW.step
        if getattr(step, "hooked", False):  # torch's profiling wrapper runs step hooks, which already run for this step
            step = step.__wrapped__
        step(self)


class RemoteDiMuon(RemoteOptimizer):
    """DiMuon for remote models, on servers that offer it; the model is created for it.

    Args:
        params: The parameters of remote models, or groups of them.
        lr: The learning rate.
        beta1: The decay rate of the momentum.
        grad_clip_norm: The norm to which the server clips the gradient; 0 disables clipping.
    """

    params_type = DimuonParams

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, beta1: float = 0.9, grad_clip_norm: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "grad_clip_norm": grad_clip_norm})

    @override
    def optim_params(self, group: dict[str, Any]) -> DimuonParams:
        return DimuonParams(float(group["lr"]), float(group["grad_clip_norm"]), float(group["beta1"]))

    @override
    def _check(self, group: dict[str, Any]) -> None:
        if not all(isinstance(parameter, RemoteHandle) for parameter in group["params"]):
            raise InvalidInput(
                "RemoteDiMuon steps remote models only. Step local parameters with an optimizer of torch, for example "
                "torch.optim.AdamW(module.head.parameters())."
            )
        super()._check(group)


def new_optimizer(
    name: OptimizerName, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> RemoteOptimizer:
    """Creates the optimizer of a name, with those of the settings that it has."""
    if name == "dimuon":
        return RemoteDiMuon(params, lr, betas[0])
    return RemoteAdamW(params, lr, betas, eps, weight_decay)


def _clip_norm(remote: RemoteModel, group: dict[str, Any]) -> float:
    """Returns the smaller of the norms of the group and of `clip_grad_norm_`; 0 for none."""
    asked = remote.clip.limit if remote.clip is not None else None
    norms = [norm for norm in (group["grad_clip_norm"], asked) if norm]
    smallest = float(min(norms, default=0.0))
    return smallest if math.isfinite(smallest) else 0.0


def check_schedule(schedule: str, warmup: float) -> None:
    """Raises `InvalidInput` for a schedule that does not exist, or a warmup that is no share and no number of steps."""
    check_choice("schedule", schedule, get_args(Schedule))
    is_number = isinstance(warmup, int | float) and math.isfinite(warmup)
    if not is_number or warmup < 0 or (warmup >= 1 and warmup != int(warmup)):
        raise InvalidInput(
            f"warmup must be a share of the steps, at least 0 and below 1, or a whole number of steps, got {warmup!r}"
        )


def scheduled(optimizer: torch.optim.Optimizer, schedule: Schedule, warmup: float, steps: float) -> LambdaLR:
    """Returns a scheduler to step after each optimizer step, whose learning rate is the optimizer's at its peak.

    ```text
    constant        linear          cosine          wsd
     ___________     .               ..__            ________
    /               / ' - .         /    `.         /        `.
    /              /        ' - .  /       `--..   /           `.
    ```

    After the warmup, the rate falls to 0 at the end of the fit: with `linear` and `cosine` from the first step on, with
    `wsd` (warmup, stable, decay: arXiv:2404.06395) linearly over the last fifth of all steps.

    Args:
        optimizer: The optimizer.
        schedule: `constant`, `linear`, `cosine` or `wsd`.
        warmup: The steps in which the rate rises linearly: below 1 a share of all steps, from 1 on their number.
        steps: The number of all steps; may be infinite if neither schedule nor warmup depends on it.
    """
    rising = warmup if warmup >= 1 or not warmup else math.ceil(warmup * steps)
    return LambdaLR(optimizer, functools.partial(_share_of_peak, schedule, rising, steps))


def _share_of_peak(schedule: Schedule, warmup: float, steps: float, step: int) -> float:
    """Returns the factor of the learning rate of a step, counted from 0."""
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    left = max(0.0, (steps - step) / max(1.0, steps - warmup))
    if schedule == "cosine":
        return 0.5 - 0.5 * math.cos(math.pi * left)
    return left if schedule == "linear" else min(1.0, max(0.0, steps - step) / max(1.0, math.ceil(_DECAY * steps)))
