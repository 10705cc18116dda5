"""Prompts, rewards and environments of files, objects and configuration files, as loaders of rollouts."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from torch.utils.data import DataLoader

from examples.grpo import digits, right
from examples.multi_turn import GuessTheNumber
from tests.helpers.rollouts import Stream, code_points
from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning.cli import lightning_cli  # noqa: F401 which sets how options are parsed
from tinker_lightning.cli.lightning_cli import explain
from tinker_lightning.data import RolloutData
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.recipes import GRPO
from tinker_lightning.rl import Environment, RolloutLoader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL
ROWS = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(6)]


def configured(**options: Any) -> RolloutData:
    """Creates a data module from the options of a configuration file, as the command line does."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutData, "data", fail_untyped=False)
    try:
        data: RolloutData = parser.instantiate(parser.parse_object({"data": options})).data
    except (ArgumentError, ValueError) as error:
        raise InvalidInput(explain(str(error))) from error
    return data


def test_loaders_of_files_and_rewards_by_import_path(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = configured(
        train=str(file),
        validation=ROWS[:2],
        rewards=["examples.grpo.right", "examples.grpo.digits"],
        weights=[1, 0.5],
        batch_size=3,
        max_tokens=5,
        staleness=1,
    )
    train, validation = (getattr(data, f"{part}_dataloader")() for part in ("train", "val"))
    assert (train.batch_size, train.group_size, train.staleness, len(train)) == (3, 8, 1, 2)
    assert (validation.staleness, len(validation)) == (0, 1)
    assert train.sampling.params.max_tokens == 5
    assert train is data.train_dataloader()  # its position is part of the checkpoint
    rewards: Any = data._rewards
    assert rewards.functions == {"right": right, "digits": digits}
    assert rewards.weights == {"right": 1, "digits": 0.5}


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"data\.rewards: the module examples\.grpo has no 'wrong'"):
        configured(train=ROWS, rewards="examples.grpo.wrong")
    with pytest.raises(InvalidInput, match=r"data\.rewards: 'right' is not an import path"):
        configured(train=ROWS, rewards="right")
    with pytest.raises(InvalidInput, match=r"train: there is no file no\.jsonl"):
        RolloutData("no.jsonl", rewards=right).train_dataloader()
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1 + 1 ="}\n{"prompt": \n')
    with pytest.raises(InvalidDatum, match=r"broken\.jsonl:2: not JSON"):
        RolloutData(broken, rewards=right).train_dataloader()


def test_predict_answers_the_prompts_of_rollouts(service: ServiceClient, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "One?", "answer": 1}\n{"prompt": "Two?", "answer": 2}\n')
    module = new(service, GRPO, predict={"max_tokens": 2, "num_samples": 2})
    data = RolloutData([["Other?"]], rewards=code_points, test=tmp_path / "prompts.jsonl", batch_size=1, as_text=True)
    answers: Any = quiet().predict(module, data)
    assert [len(each["samples"]) for (each,) in answers] == [2, 2]
    assert [batch[0]["answer"] for batch in data.predict_dataloader()] == [1, 2]
    for source in ([GuessTheNumber(3)], [[GuessTheNumber(3)]], itertools.repeat("One?")):
        with pytest.raises(InvalidInput, match="predict samples answers to prompts, but train has environments"):
            quiet().predict(module, RolloutData(source, rewards=code_points))


def test_epochs_end_the_fit_as_max_epochs_does(service: ServiceClient) -> None:  # R5.9
    class Planning(GRPO):
        def configure_optimizers(self) -> Any:
            self.planned = self.trainer.estimated_stepping_batches  # as a scheduler would
            return super().configure_optimizers()

    options: dict[str, Any] = {
        "rewards": code_points,
        "max_tokens": 2,
        "batch_size": 4,
        "group_size": 2,
        "minibatches": 2,
    }
    for most, epochs in ((-1, 2), (5, 2), (1, 1)):
        module = Planning(service.create_lora_training_client("tiny", rank=4, seed=1), reference=None)
        data, trainer = RolloutData(ROWS[:5], num_epochs=2, **options), quiet(max_epochs=most)
        trainer.fit(module, data)
        assert trainer.current_epoch == epochs
        assert module.planned == epochs * len(data.train_dataloader()) == epochs * 4
        assert module.lm.handle.remote.steps == epochs * 3  # the last batch has one prompt, which is one minibatch
    stream = RolloutData(lambda: Stream(ROWS[:5]), num_epochs=2, **options | {"minibatches": 1})
    trainer = quiet(max_epochs=-1)
    trainer.fit(Planning(service.create_lora_training_client("tiny", rank=4, seed=1), reference=None), stream)
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)


GUESS = "examples.multi_turn.GuessTheNumber"


def games(count: int = 3) -> list[Environment]:
    return [GuessTheNumber(secret) for secret in range(1, count + 1)]


def endless() -> Iterator[Environment]:
    return (GuessTheNumber(secret % 9) for secret in itertools.count())


def other(secret: int) -> dict[str, int]:
    return {"secret": secret}


class Unfinished(Environment):
    pass


def guess(*secrets: int) -> list[dict[str, Any]]:
    return [{"class_path": GUESS, "init_args": {"secret": secret}} for secret in secrets]


def secrets(data: RolloutData) -> list[int]:
    loader: Any = data.train_dataloader()
    return sorted(task.environment.secret for task in loader._tasks.take(3))


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (guess(1, 2, 3), {}),
        (f"{__name__}.games", {}),
        ([f"{__name__}.games"], {}),
        ({"class_path": f"{__name__}.games"}, {}),
        ({"class_path": f"{__name__}.games", "init_args": {"count": 3}}, {}),
        ([{"class_path": f"{__name__}.games", "init_args": {"count": 2}}, *guess(3)], {}),
        ([{"secret": 1}, {"secret": 2}, {"secret": 3}], {"environment": GUESS}),
        ([{"secret": 1}, {"secret": 2}, {"secret": 3}], {"environment": f"{__name__}.GuessTheNumber"}),
    ],
)
def test_environments_by_import_path(source: Any, settings: dict[str, Any]) -> None:
    assert secrets(configured(train=source, **settings)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (games(), {}),
        (games, {}),
        ([games(2), GuessTheNumber(3)], {}),
        (({"secret": 1}, {"secret": 2}, {"secret": 3}), {"environment": GuessTheNumber}),
    ],
)
def test_environments_as_objects(source: Any, settings: dict[str, Any]) -> None:
    assert secrets(RolloutData(source, **settings)) == [1, 2, 3]


def test_strings_of_a_configuration_file_stay_strings() -> None:
    rows: list[Any] = [{"prompt": "1", "answer": "2", "level": 3}, "true", [{"role": "user", "content": "4"}]]
    assert configured(train=rows)._sources["train"] == rows


def test_environments_of_a_file_alone_and_without_end(tmp_path: Path) -> None:
    file = tmp_path / "games.jsonl"
    file.write_text('{"secret": 3}\n{"secret": 4}\n{"secret": 5}\n')
    assert secrets(configured(train=str(file), environment=GUESS)) == [3, 4, 5]
    assert secrets(configured(train=guess(7)[0])) == secrets(RolloutData(GuessTheNumber(7))) == [7, 7, 7]
    assert secrets(configured(train=f"{__name__}.endless")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ([{"class_path": f"{GUESS}s"}], {}, "data.train: the module examples.multi_turn has no 'GuessTheNumbers'"),
        ([{"class_path": f"{GUESS}s"}], {}, "Did you mean 'GuessTheNumber'?"),
        ({"class_path": "no_package.games"}, {}, "data.train: No module named 'no_package'"),
        ("no_package.games", {}, "train: there is no file no_package.games, and no such function"),
        ([{"secret": 1}], {"environment": f"{GUESS}s"}, "data.environment: the module examples.multi_turn has no"),
        (
            [{"class_path": GUESS, "init_args": {"secrt": 1}}],
            {},
            "data.train: GuessTheNumber has no option 'secrt'. Did you mean 'secret'?",
        ),
        ([{"class_path": GUESS}], {}, "data.train: GuessTheNumber is missing a required argument: 'secret'"),
        ([{"class_path": GUESS, "args": {}}], {}, "train: expected class_path and init_args, and no other keys, got"),
        ({"class_path": f"{__name__}.games", "init_args": {"cuont": 1}}, {}, "games has no argument 'cuont'. Did you"),
        ({"class_path": f"{__name__}.Unfinished"}, {}, "the class Unfinished has no method rollout"),
        ({"class_path": f"{__name__}.GUESS"}, {}, f"data.train: Import path {__name__}.GUESS does not correspond to"),
        ({"class_path": "fractions.Fraction"}, {}, "train must be a JSON Lines file, a dataset or a list of rows, got"),
        ([{"class_path": "fractions.Fraction"}], {}, "or instances of subclasses of Environment, got Fraction"),
        ([{"secret": 1}, {"secrt": 2}], {"environment": GUESS}, "train: row 1: GuessTheNumber has no argument 'secrt'"),
        (["3"], {"environment": GUESS}, "train: row 0 must be a dict with the arguments of an environment, got a str"),
        ([{"secret": 1}], {"environment": f"{__name__}.other"}, "environment must be a subclass of Environment, or a"),
        (
            [{"secret": 1}],
            {"environment": f"{__name__}.Unfinished"},
            "row 0: the class Unfinished has no method rollou",
        ),
        (f"{__name__}.endless", {"environment": GUESS}, "train has no length"),
    ],
)
def test_mistakes_in_environments(source: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        configured(train=source, **settings).train_dataloader()
    assert message in str(raised.value)


def test_what_is_neither_a_prompt_nor_an_environment() -> None:
    for item, message in ((GuessTheNumber, "got the class GuessTheNumber; pass an instance"), (3.5, "got float")):
        with pytest.raises(InvalidInput, match=message):
            RolloutLoader([item], right)


def test_a_mistake_in_the_data_leaves_torch_as_it_was() -> None:
    before = DataLoader.__init__
    with GRPO("tiny", rank=4) as module, pytest.raises(InvalidInput, match="there is no file"):
        quiet(max_steps=1).fit(module, RolloutData("no_package.games", rewards=right))
    assert DataLoader.__init__ is before
