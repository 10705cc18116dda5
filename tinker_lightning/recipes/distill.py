"""Distillation: a student learns the probabilities of a teacher.

`Distill` is the recipe, on the student's own samples or on texts. `Teacher` requests log-probabilities and the most
likely tokens from the teacher's server.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from typing_extensions import override

from tinker_lightning.client import connect
from tinker_lightning.errors import InvalidDatum, InvalidInput, ModelNotFound
from tinker_lightning.lightning.hyperparameters import Secret
from tinker_lightning.lightning.module import RemoteModule
from tinker_lightning.recipes.references import REFERENCE, References, whole_sequence
from tinker_lightning.recipes.rollout_module import RolloutModule
from tinker_lightning.types import ModelInput, SamplingParams
from tinker_lightning.types.datum import to_datum

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from torch import Tensor

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.lightning.hyperparameters import ModelSettings, Unpack
    from tinker_lightning.lightning.routes import Route
    from tinker_lightning.recipes.group_loss import Normalize, TrainedGroup
    from tinker_lightning.remote.lm import RemoteLM
    from tinker_lightning.rl.trajectory import Group
    from tinker_lightning.types import Datum


class Distill(RolloutModule):
    """Trains a student to give tokens the probabilities that a teacher gives them.

    **On-policy**, the default: takes batches of a `RolloutLoader`. The student samples, and each of its tokens is
    rewarded by how much more likely the teacher finds it, so that the reverse divergence `KL(student ‖ teacher)`
    falls (Agarwal et al. 2023, arXiv:2306.13649). Rewards of the loader are logged, not trained.

    **Off-policy**, with `top_k`: takes batches of `ChatData`, and loaders of texts, chats, dicts or datums. At each
    weighted position the student learns the teacher's `top_k` most likely tokens, by targets of shape `[T, K]`.

    The teacher's log-probabilities of a batch are requested together.

    Logs `policy/kl_teacher`, the divergence per sampled token, on-policy; `train_loss` and `nll` off-policy.

    Args:
        model: The student: the name of a base model (default: `TINKER_BASE_MODEL`), or a training client of any SDK.
        teacher: The teacher: the name of a base model, the `tinker://` path of saved sampler weights, or a sampling
            client. It must have the student's vocabulary.
        teacher_url: The URL of the teacher's server; by default the student's.
        teacher_api_key: The API key of the teacher's server.
        top_k: The number of the teacher's most likely tokens that are targets off-policy; None for on-policy.
        loss: The loss, by default `importance_sampling` on-policy, and off-policy `cross_entropy`, in which targets
            have the teacher's probabilities as weights. A function such as `losses.topk_distillation` gets
            `teacher_logprobs` off-policy, and weights without probabilities.
        kl_coefficient: The factor of the reward of each token, on-policy.
        baseline: What the reward of a token is compared with, on-policy. `leave_one_out`: the mean reward of the tokens
            of the other answers to its prompt, which reduces the variance of the gradient; a group of one has none.
            The gradient's expectation stays the same with `normalize="sum"`; otherwise it is divided by a number of
            tokens, which depends on the answer itself. None for no baseline, as in tinker-cookbook.
        normalize: What the loss of a group is divided by, on-policy; see `GRPO`.
        **settings: The other arguments of `RemoteModule`: `rank`, `learning_rate`, `schedule`, `predict` and others.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        teacher: Any,
        teacher_url: str | None = None,
        teacher_api_key: Secret | str | None = None,
        top_k: int | None = None,
        loss: Any = None,
        loss_config: Mapping[str, float | str] | None = None,
        kl_coefficient: float = 1.0,
        baseline: Literal["leave_one_out"] | None = "leave_one_out",
        normalize: Normalize = "token",
        **settings: Unpack[ModelSettings],
    ) -> None:
        if top_k is not None and top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, or None for on-policy distillation, got {top_k}")
        if not kl_coefficient > 0:
            raise InvalidInput(f"kl_coefficient must be positive, got {kl_coefficient}")
        if baseline not in ("leave_one_out", None):
            raise InvalidInput(f"baseline must be 'leave_one_out' or None, got {baseline!r}")
        default = "importance_sampling" if top_k is None else "cross_entropy"
        loss = default if loss is None else loss
        super().__init__(model, loss=loss, loss_config=loss_config, normalize=normalize, **settings)
        if top_k is not None:
            self.reduction = "mean"  # type: ignore[assignment]  # "sum" is for rollouts
        self.top_k = top_k
        self.kl_coefficient = kl_coefficient
        self.baseline = baseline
        self._gaps: list[float] = []
        key = None if teacher_api_key is None else Secret(teacher_api_key)
        self._teacher = Teacher(self.lm, lambda: self.tokenizer, teacher, teacher_url, key)

    @override
    def on_fit_start(self) -> None:
        """Opens the teacher before the first step."""
        super().on_fit_start()
        self._teacher.open()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        """Trains on the groups of a `RolloutLoader`, or with `top_k` on datums."""
        if self.top_k is None:
            return super().training_step(batch, batch_idx)
        return RemoteModule.training_step(self, batch, batch_idx)

    # On-policy.

    @override
    def advantages(self, group: Group) -> Sequence[float]:
        """Returns 1 for each episode: all of them are trained, whatever their reward."""
        return [1.0] * len(group.trajectories)

    @override
    def request(self, group: Group, data: list[Datum]) -> None:
        """Requests the teacher's log-probabilities."""
        del group
        self._teacher.request(data)

    @override
    def with_inputs(self, trained: TrainedGroup) -> list[Datum]:
        """Returns the datums with the teacher's `reference_logprobs` and the advantages that follow from them."""
        data = self._teacher.add_to(trained.data)
        masks = [datum.loss_fn_inputs["mask"].to_numpy() != 0 for datum in data]
        gaps = [
            np.where(mask, inputs[REFERENCE].to_numpy() - inputs["logprobs"].to_numpy(), 0.0)
            for mask, inputs in zip(masks, (datum.loss_fn_inputs for datum in data), strict=True)
        ]
        self._gaps += [float(gap.sum()) for gap in gaps]
        if self.baseline is not None:
            means = _leave_one_out_means(trained.episodes, gaps, [int(mask.sum()) for mask in masks])
            gaps = [np.where(mask, gap - mean, 0.0) for mask, gap, mean in zip(masks, gaps, means, strict=True)]
        return [datum.with_inputs(advantages=self.kl_coefficient * gap) for datum, gap in zip(data, gaps, strict=True)]

    @override
    def _loss(self, trained: list[TrainedGroup], planned: int) -> Tensor:
        self._gaps.clear()
        loss = super()._loss(trained, planned)
        metrics, count = self._batch_metrics
        divergence = -sum(self._gaps) / sum(one.tokens for one in trained)
        self._batch_metrics = ({**metrics, "policy/kl_teacher": divergence}, count)
        return loss

    # Off-policy.

    @override
    def chosen_route(self) -> Route:
        """Returns the route of the loss of groups on-policy, and of `loss` alone off-policy."""
        return super().chosen_route() if self.top_k is None else RemoteModule.chosen_route(self)

    @override
    def datums(self, batch: Any) -> list[Any]:
        """Returns the datums of a batch; with `top_k`, their targets are the teacher's most likely tokens."""
        data = super().datums(batch)
        if self.top_k is None:
            return data
        texts = [to_datum(datum) for datum in data]
        return [
            self._targets(datum, *top)
            for datum, top in zip(texts, self._teacher.top_targets(texts, self.top_k), strict=True)
        ]

    def _targets(self, datum: Datum, tokens_TK: Any, logprobs_TK: Any) -> Datum:
        weights = datum.loss_fn_inputs.get("weights")
        weights_T = np.ones(len(tokens_TK), np.float32) if weights is None else weights.to_numpy()
        inputs = {"target_tokens": tokens_TK, "weights": np.repeat(weights_T[:, None], tokens_TK.shape[1], 1)}
        loss: Any = self.loss
        if loss == "cross_entropy":
            probabilities = np.exp(logprobs_TK)
            inputs["weights"] *= probabilities / probabilities.sum(-1, keepdims=True)
            return datum.with_only_inputs(inputs)
        return datum.with_only_inputs({**inputs, "teacher_logprobs": logprobs_TK})

    # The session with the teacher's server ends with the module.

    @override
    def close(self) -> None:
        """Ends the sessions with the servers, if this module has opened them."""
        self._teacher.close()
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._teacher.close()
        super().__exit__(kind, error, traceback)


def _leave_one_out_means(episodes: Sequence[int], gaps: Sequence[Any], tokens: Sequence[int]) -> list[float]:
    """Returns, for each datum, the mean gap of the tokens of all other episodes; 0 if they have none."""
    sums: dict[int, float] = defaultdict(float)
    counts: dict[int, int] = defaultdict(int)
    for episode, gap, count in zip(episodes, gaps, tokens, strict=True):
        sums[episode] += float(gap.sum())
        counts[episode] += count
    total, number = sum(sums.values()), sum(counts.values())
    return [(total - sums[each]) / max(1, number - counts[each]) for each in episodes]


class Teacher(References):
    """Requests the log-probabilities of a teacher without waiting for them.

    Args:
        lm: The student.
        tokenizer: Returns the tokenizer of the student.
        teacher: The name of a base model, the `tinker://` path of saved sampler weights, or a sampling client.
        url: The URL of the teacher's server; by default the student's server.
        api_key: The API key of the teacher's server.
    """

    def __init__(
        self, lm: RemoteLM, tokenizer: Callable[[], Any], teacher: Any, url: str | None, api_key: str | None
    ) -> None:
        super().__init__(lm, str(teacher), None, keep=False)
        if isinstance(teacher, str) and not teacher:
            raise InvalidInput("teacher must be the name of a base model, a tinker:// path or a sampling client")
        if url is not None and not isinstance(teacher, str):
            raise InvalidInput("a sampling client has a server already; leave teacher_url out")
        self._tokenizer = tokenizer
        self._teacher = teacher
        self._url = url
        self._api_key = api_key
        self._service: ServiceClient | None = None
        self._top: dict[bytes, tuple[Any, Any]] = {}

    @override
    def open(self) -> tuple[str, Any]:
        """Returns the name of the teacher and a client that samples from it, created once."""
        if self._opened is None:
            client = self._client()
            try:
                vocabulary = client.get_tokenizer().get_vocab()
            except ModelNotFound:  # some servers do not name a tokenizer
                vocabulary = None
            if vocabulary is not None and vocabulary != self._tokenizer().get_vocab():
                raise InvalidInput(
                    "the teacher has another vocabulary than the student, so their probabilities cannot be compared "
                    "token by token. Choose a teacher of the same family, or train on its texts with SFT."
                )
            self._opened = str(self._teacher), client
        return self._opened

    def close(self) -> None:
        """Ends the session with the teacher's server, if it was opened here."""
        service, self._service = self._service, None
        if service is not None:
            service.close()

    def top_targets(self, data: Sequence[Datum], k: int) -> list[tuple[Any, Any]]:
        """Returns the teacher's k most likely tokens at each target of each datum, `[T, K]`, and their logprobs.

        All requests are sent before the first answer is waited for; a sequence that was seen before is not sent again.
        """
        client, sampling = self.open()[1], SamplingParams(max_tokens=1)
        keys = [self._key(datum) for datum in data]
        pending = {}
        for key, datum in zip(keys, data, strict=True):
            if key not in self._top and key not in pending:
                tokens = whole_sequence(datum)
                pending[key] = client.sample(ModelInput.from_ints(tokens), 1, sampling, topk_prompt_logprobs=k)
                self._lm.handle.remote.tokens.prefilled += len(tokens)
        for key, future in pending.items():
            rows = (future.result().topk_prompt_logprobs or [])[1:]  # nothing precedes the first token
            if not rows or any(row is None for row in rows):
                raise InvalidDatum("the teacher's server did not return the most likely tokens of the prompt")
            array = np.array(rows, np.float64)
            self._top[key] = array[..., 0].astype(np.int64), array[..., 1].astype(np.float32)
        return [self._top[key] for key in keys]

    def _client(self) -> Any:
        teacher = self._teacher
        if not isinstance(teacher, str):
            return teacher
        is_path = teacher.startswith("tinker://")
        if self._url is not None:
            self._service = connect(self._url, api_key=self._api_key)
            return self._service.create_sampling_client(*((teacher,) if is_path else (None, teacher)))
        backend = self._lm.backend
        return backend.create_sampling_client(teacher) if is_path else backend.create_base_sampling_client(teacher)
