"""Time of the embedded trainer's passes on smollm2-135m, compared with transformers and peft as users would write them.

Wall time and processor time of one forward and backward pass, rank 32, medians of interleaved rounds. Ratios above 1
mean that the first is faster.
"""

from __future__ import annotations

import statistics
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import peft
import torch
from transformers import AutoModelForCausalLM

from benchmarks import report
from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.server.engine.catalog import Catalog
from tinker_lightning.server.engine.interface import Activations
from tinker_lightning.types import Datum, LoraConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinker_lightning.server.engine.causal_lm import CausalLM

RANK = 32
EQUAL = (128,) * 8
MIXED = (32, 64, 96, 128, 160, 192, 224, 256)
MASKED = 0.8  # share of the tokens that are prompt


def make_data(lengths: Sequence[int], masked: float = 0.0) -> list[Datum]:
    """Returns random datums, whose first tokens have a weight of 0."""
    draw = torch.Generator().manual_seed(0)
    data = []
    for length in lengths:
        tokens, targets = torch.randint(0, 49_000, (2, length), generator=draw)
        prompt = int(masked * length)
        data.append(Datum.from_targets(tokens, targets, weights=[0.0] * prompt + [1.0] * (length - prompt)))
    return data


class Engine:
    """Passes of the embedded trainer."""

    def __init__(self) -> None:
        self.base: CausalLM = Catalog(["smollm2-135m"]).get("smollm2-135m")
        self._adapter = LoraAdapter(self.base.lora.new_weights(LoraConfig(rank=RANK)))

    def built_in(self, data: list[Datum], *, counted_only: bool = False) -> None:
        list(self.base.start_pass(self._adapter, data, "cross_entropy", {}, counted_only=counted_only))
        self._adapter.gradient = {}

    def retained(self, data: list[Datum]) -> None:
        """A custom loss: the forward is kept until its gradient is known."""
        kept = Activations()
        list(self.base.start_pass(self._adapter, data, "cross_entropy", {}, forward_only=True, activations=kept))
        list(self.base.start_pass(self._adapter, data, "cross_entropy", {}, activations=kept))
        self._adapter.gradient = {}


class Plain:
    """transformers and peft, with padding to the longest sequence."""

    def __init__(self, path: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
        config = peft.LoraConfig(r=RANK, lora_alpha=32, task_type="CAUSAL_LM", target_modules=layers)
        self.model: Any = peft.get_peft_model(model, config).train()

    def loss(self, data: list[Datum]) -> Any:
        rows = [torch.from_numpy(datum.model_input.tokens().astype("int64")) for datum in data]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss

    def step(self, data: list[Datum]) -> None:
        self.loss(data).backward()
        self.model.zero_grad()


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Returns the wall and the processor time that it takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(ways: Mapping[str, Callable[[], tuple[float, float]]], rounds: int) -> dict[str, tuple[float, float]]:
    """Returns the medians of wall and processor time of each way, in interleaved rounds after one to warm up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, run in ways.items():
            taken = run()
            if round_:
                times[name].append(taken)
    return {name: _medians(found) for name, found in times.items()}


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    walls, cpus = zip(*times, strict=True)
    return statistics.median(walls), statistics.median(cpus)


def main() -> None:
    options = report.arguments(__doc__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    engine = Engine()
    plain = Plain(engine.base.tokenizer_id)
    share = 4 if options.quick else 1  # of the datums
    equal, mixed = make_data(EQUAL[::share]), make_data(MIXED[::share])
    masked = make_data(EQUAL[::share], MASKED)
    rows = []
    for name, first, second in (
        ("built-in loss / transformers + peft, equal lengths", (engine.built_in, equal), (plain.step, equal)),
        ("built-in loss / transformers + peft, mixed lengths", (engine.built_in, mixed), (plain.step, mixed)),
        ("built-in loss / retained custom loss", (engine.built_in, equal), (engine.retained, equal)),
        ("80 % of weight 0 / all weighted, standard endpoint", (engine.built_in, masked), (engine.built_in, equal)),
        ("80 % of weight 0 / all weighted, RemoteModule", (_counted(engine), masked), (engine.built_in, equal)),
    ):
        ways = {"a": partial(timed, partial(first[0], first[1])), "b": partial(timed, partial(second[0], second[1]))}
        found = measure(ways, 1 if options.quick else 5)
        (wall, cpu), (other_wall, other_cpu) = found["a"], found["b"]
        rows.append({"pass": name, "times faster": other_wall / wall, "by processor time": other_cpu / cpu})
        report.show(rows[-1:])
    report.show(rows)
    report.write(options.json, {"passes": rows})


def _counted(engine: Engine) -> Callable[[list[Datum]], None]:
    return lambda data: engine.built_in(data, counted_only=True)


if __name__ == "__main__":
    main()
