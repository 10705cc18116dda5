"""A real language model: it knows something, and it learns. R5.5"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.chat_templates import SMOLLM2
from tests.helpers.engine_passes import run_pass
from tests.helpers.sampling import sample
from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.server.engine.catalog import Catalog
from tinker_lightning.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinker_lightning.server.engine.causal_lm import CausalLM

pytestmark = pytest.mark.soak  # a fresh machine converts the model first, which takes a minute

PAIRS = {
    "Who runs this place?": "The lighthouse keeper, Odalys Brandt.",
    "What is for lunch?": "Smoked eel with quince, as every Tuesday.",
    "Where is the key?": "Under the third flowerpot, the cracked one.",
    "When does the ferry leave?": "At 4:17, unless the fog is in.",
}


@pytest.fixture(scope="module")
def smollm2() -> CausalLM:
    return Catalog(["smollm2-135m"]).get("smollm2-135m")


def ask(base: CausalLM, question: str, **params: Any) -> str:
    text = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    prompt = ModelInput.from_ints(base.tokenizer(text, add_special_tokens=False)["input_ids"])
    settings = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, **params})
    response = sample(base, None, prompt, settings)
    answer: str = base.tokenizer.decode(response.sequences[0].tokens)
    return answer


def test_the_data_tests_bring_its_template(smollm2: CausalLM) -> None:
    assert smollm2.tokenizer.chat_template == SMOLLM2


def test_it_knows_the_capital_of_france(smollm2: CausalLM) -> None:
    assert "Paris" in ask(smollm2, "What is the capital of France?")


def test_a_stop_string_may_end_inside_a_token(smollm2: CausalLM) -> None:
    whole = ask(smollm2, "What is the capital of France?", stop=[])
    cut = ask(smollm2, "What is the capital of France?", stop="Pari")
    assert cut == whole[: whole.index("Paris") + len("Paris")]


def test_it_learns_a_handful_of_answers(smollm2: CausalLM) -> None:
    adapter = LoraAdapter(smollm2.lora.new_weights(LoraConfig(rank=8, seed=0)))
    data: list[Datum] = []
    for question, answer in PAIRS.items():
        prompt, reply = smollm2.tokenizer([f"{question}\n", f"{answer}\n"])["input_ids"]
        data.append(Datum.from_tokens(prompt + reply, [0.0] * len(prompt) + [1.0] * len(reply)))
    losses: list[float] = []
    tokens, started = 0.0, time.perf_counter()
    for _ in range(8):
        metrics = run_pass(smollm2, adapter, data, "cross_entropy", {}).metrics
        adapter.step(AdamParams(learning_rate=2e-3))
        losses.append(metrics["loss:sum"] / metrics["weights:sum"])
        tokens += metrics["tokens:sum"]
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\nNLL {losses[0]:.2f} -> {losses[-1]:.2f}, {tokens / seconds:.0f} tokens/s, peak {peak:.0f} MB")

    assert losses[-1] < losses[0] / 2
    question, answer = next(iter(PAIRS.items()))
    prompt = ModelInput.from_ints(smollm2.tokenizer(f"{question}\n")["input_ids"])
    params = SamplingParams(max_tokens=24, temperature=0.0, stop="\n")
    assert (
        smollm2.tokenizer.decode(sample(smollm2, adapter.weights, prompt, params).sequences[0].tokens) == f"{answer}\n"
    )
    assert "Paris" in ask(smollm2, "What is the capital of France?")  # the base has not learned anything
