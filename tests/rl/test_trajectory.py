"""Trajectories are token-exact: what is trained is what was sampled, in the context in which it was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import examples
from tinker_lightning.errors import InvalidDatum
from tinker_lightning.rl import Completion, Trajectory, Turn

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


def completion(tokens: list[int], logprobs: Any = None, stop_reason: str = "stop", version: int = 0) -> Completion:
    found = np.full(len(tokens), -1.0) if logprobs is None else logprobs
    return Completion(tokens, np.asarray(found, np.float32), stop_reason, "", version)


@dataclass
class Conversation:
    turns: list[Turn]
    starts: list[int]  # the turns whose prompts do not extend the tokens before them


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    turns: list[Turn] = []
    starts: list[int] = []
    so_far: list[int] = []
    for i in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["extended", "extended", "unchanged", "shortened", "rewritten"])) if i else "new"
        prompt = {
            "new": draw(TOKENS),
            "extended": so_far + draw(TOKENS),
            "unchanged": so_far,
            "shortened": so_far[: draw(st.integers(1, max(1, len(so_far) - 1)))],
            "rewritten": [so_far[0] + 1 if so_far else 0, *so_far[1:], *draw(TOKENS)],
        }[kind]
        prompt = prompt or draw(TOKENS)
        tokens = draw(st.just([]) | TOKENS)
        logprobs = draw(st.lists(st.floats(-9, 0, width=32), min_size=len(tokens), max_size=len(tokens)))
        turns.append(Turn(prompt, completion(tokens, logprobs)))
        if tokens:
            if not so_far or prompt[: len(so_far)] != so_far:
                starts.append(i)
            so_far = prompt + tokens
    return Conversation(turns, starts)


@examples(few=60, many=1000)
@given(conversations())
def test_tokens_trained_are_the_tokens_sampled(conversation: Conversation) -> None:
    trajectory = Trajectory(conversation.turns, 1.0)
    data = trajectory.datums()

    trained = []
    for datum in data:
        inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
        assert inputs.keys() == {"target_tokens", "logprobs", "mask", "weights"}
        np.testing.assert_array_equal(inputs["mask"], inputs["weights"])
        assert set(inputs["mask"]) <= {0, 1}
        assert not inputs["logprobs"][inputs["mask"] == 0].any()
        tokens = datum.model_input.to_ints()
        assert tokens[1:] == inputs["target_tokens"][:-1].tolist()
        for i in np.flatnonzero(inputs["mask"]):
            trained.append((tokens[: i + 1], inputs["target_tokens"][i], inputs["logprobs"][i]))

    sampled = [
        (turn.prompt_tokens + turn.completion.tokens[:i], token, turn.completion.logprobs[i])
        for turn in conversation.turns
        for i, token in enumerate(turn.completion.tokens)
    ]
    assert trained == sampled
    assert len(data) == len(conversation.starts)

    receipt = trajectory.receipt
    assert (receipt.datums, receipt.sampled_tokens) == (len(data), len(sampled))
    empty = {i for i, turn in enumerate(conversation.turns) if not turn.completion.tokens}
    assert [split.partition(":")[0] for split in receipt.splits] == [
        f"turn {i}" for i in sorted({*conversation.starts[1:], *empty})
    ]


def test_the_receipt_says_why() -> None:
    turns = [
        Turn([1, 2], completion([3])),
        Turn([1, 2, 3, 4], completion([5])),
        Turn([1, 9, 3, 4, 5, 6], completion([7])),
        Turn([1, 9], completion([])),
        Turn([1, 9], completion([7])),
    ]
    receipt = Trajectory(turns, 0.0).receipt
    assert str(receipt) == (
        "3 datums of 4 sampled tokens; "
        "turn 2: its prompt differs from the tokens before it at position 1 of 5, where it has token 9 instead of 2; "
        "turn 3: the completion is empty, so it trains nothing; "
        "turn 4: its prompt has 2 tokens, the first of the 7 before it"
    )
    assert str(Trajectory(turns[:2], 0.0).receipt) == "1 datum of 2 sampled tokens"


def test_advantages_are_added_to_its_datums() -> None:
    datum = Trajectory([Turn([1, 2], completion([3, 4], [-0.5, -0.25]))], 1.0).datums()[0]
    mask = datum.loss_fn_inputs["mask"].to_numpy()
    assert mask.tolist() == [0, 1, 1]
    assert datum.loss_fn_inputs["logprobs"].tolist() == [0, -0.5, -0.25]
    assert datum.with_inputs(advantages=2.0 * mask).loss_fn_inputs["advantages"].tolist() == [0, 2, 2]


def test_a_trajectory_knows_whether_it_was_cut_scored_and_how_old_it_is() -> None:
    turns = [Turn([1], completion([2], version=3)), Turn([1, 2], completion([3], stop_reason="length", version=2))]
    assert Trajectory(turns, 0.5).truncated
    assert not Trajectory(turns, 0.5, truncated=False).truncated
    assert not Trajectory(turns[:1], 0.5).truncated
    assert Trajectory(turns, 0.5).version == 2
    assert Trajectory(turns, 0.5).is_scored
    assert not Trajectory(turns, float("nan")).is_scored


def test_an_empty_completion_has_no_datum() -> None:
    trajectory = Trajectory([Turn([1], completion([]))], 0.0)
    assert trajectory.datums() == []
    assert trajectory.receipt.datums == 0


def test_mistakes() -> None:
    with pytest.raises(InvalidDatum, match="2 tokens but 1 log-probabilities"):
        completion([1, 2], [-1.0])
    with pytest.raises(InvalidDatum, match="turn 0: the prompt is empty"):
        Trajectory([Turn([], completion([1]))], 0.0).datums()


def test_turns_that_are_not_trained_are_context() -> None:
    turns = [Turn([1, 2], completion([3]), trained=False), Turn([1, 2, 3, 4], completion([5]))]
    [datum] = Trajectory(turns, 0.0).datums()
    assert datum.loss_fn_inputs["mask"].tolist() == [0, 0, 0, 1]
