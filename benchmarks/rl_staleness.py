"""Steps per second of GRPO by staleness, on a simulated server whose sampler and trainer are separate timed queues.

Passes and samples take a fixed time and compute nothing, so that only the schedule is measured: what of sampling and
training runs at the same time. The sampler takes several requests at once, the trainer one after another. Everything
else is real: `Trainer.fit`, `GRPO`, `RolloutLoader` and the requests that they send. Then the same on the embedded
trainer, where sampling ahead must not be slower.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np

from benchmarks import report
from tinker_lightning import SamplingParams
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.client.futures import TinkerFuture, UnreadFailures
from tinker_lightning.recipes import GRPO
from tinker_lightning.rl import Environment, RolloutLoader
from tinker_lightning.rl.trajectory import Trajectory, Turn
from tinker_lightning.types.responses import (
    ForwardBackwardOutput,
    GetInfoResponse,
    ModelData,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
)
from tinker_lightning.types.tensor import TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tinker_lightning import Datum
    from tinker_lightning.rl import Policy

GROUPS, GROUP_SIZE, TOKENS = 4, 2, 4
STRAGGLER = 5


@dataclass(frozen=True)
class Times:
    """How long the parts of a step take, in seconds.

    Args:
        sample: One request to the sampler.
        passes: All forward and backward passes of a step, in equal parts.
        step: The optimizer step.
    """

    sample: float
    passes: float
    step: float


class Queue:
    """Runs requests in order, as many at once as it has workers; each takes a given time."""

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers)

    def submit(self, seconds: float, result: Callable[[], Any], name: str) -> TinkerFuture[Any]:
        def run() -> Any:
            time.sleep(seconds)
            return result()

        source: Future[Any] = self._pool.submit(run)
        return TinkerFuture(source, name)


class Tokenizer:
    """Letters of the byte that a token is."""

    eos_token_id = None

    def decode(self, tokens: Iterable[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


class Sampler:
    """Samples after a fixed time, for every fourth prompt five times as long if there are stragglers."""

    def __init__(self, queue: Queue, seconds: float) -> None:
        self._queue, self._seconds = queue, seconds

    def sample(self, prompt: Any, num_samples: int, params: SamplingParams, **_: Any) -> TinkerFuture[SampleResponse]:
        (kind,) = prompt.to_ints()
        seconds = self._seconds * (STRAGGLER if kind else 1)
        draw = np.random.default_rng(params.seed)
        sequences = [
            SampledSequence(draw.integers(97, 122, TOKENS).tolist(), [-1.0] * TOKENS, "stop")
            for _ in range(num_samples)
        ]
        return self._queue.submit(seconds, lambda: SampleResponse(sequences), "sample")

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()


class Simulated:
    """A training backend of two queues."""

    losses = None
    optimizer_kind = "adamw"
    retains = True
    can_expire = False
    pause = None
    server = storage = "simulated"
    dialect = dialect_named("embedded")

    def __init__(self, times: Times) -> None:
        self.unread = UnreadFailures()
        self._times = times
        self._trainer, self._sampler = Queue(1), Queue(GROUPS)

    def prepare(self, data: list[Datum], *_: Any, **__: Any) -> list[Datum]:
        return data

    def prepare_gradient(self, data: list[Datum], *_: Any) -> list[Datum]:
        return data

    def computes(self, loss: str) -> bool:
        return bool(loss)

    def logprobs(self, data: list[Datum], *, retain: bool = False) -> TinkerFuture[ForwardBackwardOutput]:
        del retain
        return self.send(data)

    def send(self, request: list[Datum]) -> TinkerFuture[ForwardBackwardOutput]:
        seconds = self._times.passes / (2 * GROUPS)
        outputs = [
            {"logprobs": TensorData.from_data(-np.ones(len(each.model_input.to_ints()), np.float32))}
            for each in request
        ]
        return self._trainer.submit(seconds, lambda: ForwardBackwardOutput(outputs, {}), "pass")

    def prepare_step(self, _: Any) -> None:
        pass

    def drop_unsent(self, _: str) -> int:
        return 0

    def optim_step(self, *_: Any) -> TinkerFuture[OptimStepResponse]:
        return self._trainer.submit(self._times.step, lambda: OptimStepResponse({}), "optim_step")

    def submit_sampling_client(self) -> TinkerFuture[Sampler]:
        return self._trainer.submit(0.0, lambda: Sampler(self._sampler, self._times.sample), "save")

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def get_info(self) -> GetInfoResponse:
        return GetInfoResponse("simulated", ModelData(model_name="simulated"))

    def record(self, _: Any) -> None:
        pass

    def max_context_length(self) -> None:
        return None

    def list_checkpoints(self) -> list[Any]:
        return []

    def _not_simulated(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    forward = forward_backward = forward_backward_custom = save_state = load_state_with_optimizer = _not_simulated
    checkpoint_exists = delete_checkpoint = set_checkpoint_ttl = save_weights_external = download_checkpoint = (
        _not_simulated
    )
    save_weights_and_get_sampling_client = create_sampling_client = create_base_sampling_client = _not_simulated


class Task(Environment):
    """One request; the reward differs for each answer."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    async def rollout(self, policy: Policy) -> Trajectory:
        (completion,) = await policy.sample([self.kind])
        return self._scored(completion)

    async def group(self, policies: Any) -> list[Trajectory]:
        return [self._scored(each) for each in await policies[0].sample([self.kind], num_samples=len(policies))]

    def _scored(self, completion: Any) -> Trajectory:
        return Trajectory([Turn([self.kind], completion)], float(sum(completion.tokens)))


class WithoutStreaming(GRPO):
    """Sends the forward passes of a batch when all its groups have arrived."""

    def _receive(self, batch: Any, job: Any, slots: Any) -> Any:
        slots = list(slots)
        for _ in job.receive(slots, None):
            pass
        return super()._receive(batch, job, slots)


def steps_per_second(times: Times, *, straggler: bool, staleness: int, streaming: bool, steps: int) -> float:
    """Measures a fit of some steps, after two that fill the queues."""
    tasks = [Task(int(straggler and i % GROUPS == 0)) for i in range(GROUPS)]
    loader = RolloutLoader(tasks, group_size=GROUP_SIZE, batch_size=GROUPS, staleness=staleness, shuffle=False)
    return _fit((GRPO if streaming else WithoutStreaming)(Simulated(times), reference=None), loader, steps)[0]


def _fit(module: GRPO, loader: RolloutLoader, steps: int) -> tuple[float, float]:
    """Returns steps per second, and the seconds of CPU time of a step."""
    began: list[tuple[float, float]] = []

    class Clock(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            began.append((time.perf_counter(), time.process_time()))

    trainer = pl.Trainer(
        strategy="tinker",
        max_steps=steps + 2 + loader.staleness,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock()],
    )
    trainer.fit(module, loader)
    seconds, cpu = (last - first for first, last in zip(began[1], began[steps + 1], strict=True))
    return steps / seconds, cpu / steps


CASES = (("sync", 0, False), ("streaming", 0, True), ("k = 1", 1, True), ("k = 2", 2, True), ("k = 4", 4, True))


def measure(unit: float, steps: int) -> list[dict[str, Any]]:
    """Sampling takes as long as training, with and without a straggler of five times the length in each batch."""
    times = Times(sample=unit, passes=0.9 * unit, step=0.1 * unit)
    rows = []
    for name, staleness, streaming in CASES:
        rates = [
            steps_per_second(times, straggler=straggler, staleness=staleness, streaming=streaming, steps=steps)
            for straggler in (False, True)
        ]
        rows.append({"schedule": name, "even": rates[0] * unit, "one straggler of 5x": rates[1] * unit})
    return rows


def measure_real(steps: int, rounds: int = 3) -> list[dict[str, Any]]:
    """Fits `tiny` on the embedded trainer, which samples and trains on the same processor; medians over rounds."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, staleness, _ in CASES[1:] * rounds:
        loader = RolloutLoader(
            [f"prompt {i}:" for i in range(16)],
            lambda _, completion: sum(map(ord, completion)) / 1000,  # differs for all answers
            group_size=4,
            batch_size=GROUPS,
            staleness=staleness,
            sampling_params=SamplingParams(max_tokens=16),
            as_text=True,
        )
        with GRPO("tiny", rank=8, base_url="embedded", reference=None) as module:
            found[name].append(_fit(module, loader, steps))
    return [
        {
            "schedule": name,
            "steps per second": statistics.median(rate for rate, _ in own),
            "CPU, ms a step": 1000 * statistics.median(cpu for _, cpu in own),
        }
        for name, own in found.items()
    ]


def main() -> None:
    options = report.arguments(__doc__)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    rows = measure(0.4 if options.quick else 1.0, 4 if options.quick else 8)
    print("Optimizer steps in the time that sampling a batch takes:\n")
    report.show([{name: f"{v:.2f}" if isinstance(v, float) else v for name, v in row.items()} for row in rows])
    real = measure_real(4 if options.quick else 12)
    print("On the embedded trainer:\n")
    report.show([{**row, "CPU, ms a step": f"{row['CPU, ms a step']:.0f}"} for row in real])
    report.write(options.json, {"rl_staleness": rows, "rl_staleness_embedded": real})


if __name__ == "__main__":
    main()
