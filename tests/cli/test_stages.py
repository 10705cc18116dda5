"""`tinker-lightning fit`, `validate`, `test` and `predict`, on `tiny`, in this process."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Union

import lightning.pytorch as pl
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser

from tests.helpers.soaking import first_only, mostly_soak
from tinker_lightning import callbacks, cli, data, recipes
from tinker_lightning.cli import stages, wording
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.hyperparameters import PredictOptions

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"{i}?", "completion": f"{i}."} for i in range(4)]
KEY = "tml-very-secret"

pytestmark = [
    # Advice of jsonargparse to Lightning, and of Lightning for loaders as small as these.
    pytest.mark.filterwarnings(r"ignore:[\s\S]*(in v5\.0\.0|JsonargparseDeprecationWarning)"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


OWN = """
from tinker_lightning.recipes import SFT

class Halved(SFT):
    def __init__(self, factor: float, **settings):
        super().__init__(**settings)
        print("factor", factor)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def config(model: str = "SFT", **init_args: Any) -> dict[str, Any]:
    data = {"train": "rows.jsonl", "validation": "rows.jsonl", "test": "rows.jsonl", "batch_size": 2}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "max_steps": 2, "num_sanity_val_steps": 0}
    settings = {"model": "tiny", "rank": 4, "base_url": "embedded", **init_args}
    return {
        "seed_everything": 1,
        "model": {"class_path": model, "init_args": settings},
        "data": {"class_path": "ChatData", "init_args": data},
        "trainer": {**quiet, "log_every_n_steps": 1, "logger": False},
    }


def run(stage: str, content: Any, *arguments: str) -> int:
    Path("run.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return cli.main([stage, "--config", "run.yaml", *arguments])


def test_a_model_is_trained_scored_and_sampled(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:  # R5.3
    logged = config()
    logged["trainer"]["logger"] = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}
    assert run("fit", logged, f"--model.api_key={KEY}") == 0
    (file,) = Path("logs").rglob("*.ckpt")
    content = torch.load(file, weights_only=True)
    del content["hyper_parameters"]["_class_path"]  # as in the file of a script
    torch.save(content, "script.ckpt")
    for stage, metric, saved in (("validate", "val_nll", str(file)), ("test", "test_nll", "script.ckpt")):
        assert run(stage, config(), "--ckpt_path", saved) == 0
        assert metric in capfd.readouterr().out
    limit = "--trainer.limit_predict_batches=1"
    assert run("predict", config(), "--ckpt_path", str(file), limit, "--output", "new/answers.jsonl") == 0
    answers = [json.loads(line) for line in Path("new/answers.jsonl").read_text().splitlines()]
    assert [sorted(answer) for answer in answers] == [["completion", "prompt", "stop_reason", "text"]] * 2
    (used,) = folder.rglob("config.yaml")  # next to the log of the fit, and not where there is no logger
    assert yaml.safe_load(used.read_text())["trainer"]["max_steps"] == 2
    assert [each for each in folder.rglob("*") if each.is_file() and KEY.encode() in each.read_bytes()] == []


def test_a_class_in_the_working_directory_and_callbacks_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])  # as the installed command finds it
    Path("own_recipe.py").write_text(OWN)
    own = config("own_recipe.Halved", factor=0.5)
    table = {"class_path": "SampleTable", "init_args": {"prompts": ["1?"], "every_n_steps": 1}}
    kept = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "kept"}}
    own["trainer"] |= {"callbacks": [kept, table]}
    assert run("fit", own, "--trainer.max_steps=1") == 0
    assert len(list(Path("kept").iterdir())) == 1
    printed = capfd.readouterr().out
    assert "factor 0.5" in printed
    assert "1?" in printed


PAIRS = [{"prompt": f"{i}?", "chosen": f"{i}.", "rejected": "No."} for i in range(4)]
ROLLOUTS = {"rewards": "tests.helpers.rollouts.code_points", "group_size": 2, "max_tokens": 4}
RECIPES: dict[str, tuple[str, list[Any], dict[str, Any], dict[str, Any]]] = {
    "SFT": ("ChatData", ROWS, {}, {}),
    "DPO": ("PreferenceData", PAIRS, {}, {}),
    "KTO": ("PreferenceData", [{**row, "label": i % 2 == 0} for i, row in enumerate(ROWS)], {}, {}),
    "GRPO": ("RolloutData", ROWS, {}, ROLLOUTS),
    "Distill": ("RolloutData", ROWS, {"teacher": "tiny"}, ROLLOUTS),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_has_a_schedule_and_sampling_options_in_a_file(
    recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    kind, rows, settings, options = RECIPES[recipe]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "num_samples": 2, "seed": 7, "stop": "b"}
    own = config(recipe, learning_rate=1e-2, schedule="linear", warmup=0.5, predict=predict, **settings)
    own["data"] = {"class_path": kind, "init_args": {"train": "own.jsonl", "batch_size": 2, **options}}
    own["trainer"]["logger"] = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}
    assert run("fit", own, "--trainer.max_steps=4", "--trainer.max_epochs=2") == 0
    (file,) = Path("logs").rglob("metrics.csv")
    metrics = csv.DictReader(file.read_text().splitlines())
    rates = [row["learning_rate"] for row in metrics if row["learning_rate"]]
    assert [float(rate) for rate in rates] == pytest.approx([5e-3, 1e-2, 1e-2, 5e-3])
    (saved,) = Path("logs").rglob("*.ckpt")
    (used,) = Path("logs").rglob("config.yaml")
    assert yaml.safe_load(used.read_text())["data"]["init_args"]["train"] == "own.jsonl"
    assert run("fit", used.read_text(), "--trainer.max_steps=1", "--trainer.logger=false") == 0
    own["trainer"]["logger"] = False
    assert run("predict", own, f"--ckpt_path={saved}", "--output=out.jsonl", "--num_samples=3") == 0
    answers = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    for row, answer in zip(rows, answers, strict=True):
        assert {name: answer[name] for name in row} == row
        assert len(answer["samples"]) == 3
        assert all(len(sample) <= 3 for sample in answer["samples"])


def test_the_columns_of_a_row_that_a_prediction_would_hide_are_renamed(folder: Path) -> None:
    Path("own.jsonl").write_text('{"text": "as it was", "id": 3}\n')
    assert run("predict", config(), "--data.test=own.jsonl", "--output=out.jsonl") == 0
    assert {"input_text": "as it was", "id": 3}.items() <= json.loads(Path("out.jsonl").read_text()).items()


CONFIGURATIONS = {file.stem: file for file in sorted((ROOT / "examples" / "configs").glob("*.yaml"))}


@pytest.mark.filterwarnings("ignore:the gradient of the loss")  # of multi_turn, whose model is still its reference
@pytest.mark.parametrize("name", mostly_soak(CONFIGURATIONS, but=["sft", "kto", "multi_turn"]))
def test_the_configurations_of_the_examples_train(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = CONFIGURATIONS[name]
    monkeypatch.chdir(ROOT)  # which their paths start from
    small = ["--model.model=tiny", "--model.rank=4", "--trainer.max_epochs=1"]
    small += ["--model.teacher=tiny"] if name == "distill" else []
    if name == "multi_turn":  # with a penalty, because without training all its rewards are 0
        small += ["--data.group_size=2", "--model.kl_coefficient=0.1", "--trainer.check_val_every_n_epoch=1"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.num_sanity_val_steps=0", "--data.batch_size=2"]
    quiet += ["--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"]
    assert cli.main(["fit", "--config", str(file), *small, *quiet, f"--trainer.default_root_dir={folder}"]) == 0
    assert list(folder.rglob("*.ckpt"))


GUESS = {"class_path": "examples.multi_turn.GuessTheNumber"}
GAMES = """
from examples.multi_turn import GuessTheNumber

def games(count):
    return [GuessTheNumber(i + 1) for i in range(count)]
"""
CALL = {"class_path": "own_games.games", "init_args": {"count": 2}}


REWARDS = ["own_rewards.length", ["own_rewards.length", "own_rewards.dots"], {"long": "own_rewards.length"}]


@pytest.mark.parametrize("rewards", mostly_soak(REWARDS, but=REWARDS[1:2]))
def test_the_printed_configuration_of_rewards_can_be_read_again(
    rewards: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    Path("own_rewards.py").write_text("def length(text): return len(text)\ndef dots(text): return text.count('.')\n")
    own = config("GRPO")
    Path("prompts.jsonl").write_text('{"prompt": "Hello."}\n')  # whose lines the parser could take for prompts
    train = ["Hello.", {"prompt": "Hi.", "answer": "three"}]
    init_args = {"train": train, "validation": "prompts.jsonl", "rewards": rewards}
    own["data"] = {"class_path": "RolloutData", "init_args": init_args}
    with pytest.raises(SystemExit):
        run("fit", own, "--print_config")
    options = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    assert {name: options[name] for name in init_args} == init_args


@pytest.mark.parametrize(
    "environments",
    mostly_soak([[{**GUESS, "init_args": {"secret": i}} for i in (3, 7)], CALL], but=[CALL]),
)
def test_environments_in_a_file(
    environments: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    Path("own_games.py").write_text(GAMES)
    own = config("GRPO")
    options = {"train": environments, "batch_size": 2, "group_size": 2, "max_tokens": 2}
    own["data"] = {"class_path": "RolloutData", "init_args": options}
    assert run("fit", own, "--trainer.fast_dev_run=true") == 0
    with pytest.raises(SystemExit):
        run("fit", own, "--print_config")
    assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["train"] == environments
    for mistake in ([{**GUESS, "init_args": {"secrt": 1}}], [GUESS]):
        own["data"]["init_args"]["train"] = mistake
        assert run("fit", own) == 2
        said = capsys.readouterr().err
        assert "tinker-lightning: data.train: GuessTheNumber " in said
        assert "Traceback" not in said


MISTAKES = [
    ("model: {class_path: SFTT}", "model: there is no class 'SFTT'. Did you mean 'SFT'?"),
    ("model: {class_path: SFT, init_args: {modle: a}}", "SFT has no option 'modle'. Did you mean 'model'?"),
    ("model: {class_path: SFT, init_args: {rank: a}}", "lightning: model.rank: expected int. Got value: a"),
    ("model: {class_path: DPO, init_args: {loss_type: a}}", "expected one of 'dpo', 'ipo', 'simpo', 'orpo'"),
    ("modle: {class_path: SFT}", "there is no option 'modle'. Did you mean 'model'?"),
    ("trainer: {max_epoch: 3}", "there is no option 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?"),
    ("trainer: {callbacks: [{class_path: EarlyStoping}]}", "Did you mean 'EarlyStopping'?"),
    ("data: {class_path: ChatDta}", "data: there is no class 'ChatDta'. Did you mean 'ChatData'?"),
    ("model: {class_path: none.Thing}", "No module named 'none'"),
    ("model: {class_path: SFT, init_args: {lora_alpha: 16}}", "SFT has no option 'lora_alpha'. The server fixes the"),
    ("model: {class_path: DPO, init_args: {target_modules: [q]}}", "by train_mlp, train_attn and train_unembed."),
    ("model: {class_path: GRPO, init_args: {lr: 1.0}}", "GRPO has no option 'lr'. Set --model.learning_rate."),
    ("model: {class_path: SFT, init_args: {top_k: 1}}", "has no option 'top_k'. Set it as --model.predict.max_tokens"),
    (
        "model: {class_path: SFT, init_args: {predict: {topk: 1}}}",
        "there is no option 'topk'. Did you mean 'top_k'?",
    ),
    ("model: {class_path: SFT}\nlr_scheduler: {class_path: StepLR}", "no option 'lr_scheduler'. Set --model.schedule"),
    ("model: [", "--config is not valid YAML: while parsing a flow node"),
    ("seed_everything: 1", " is missing. Pass --"),
    ("model: {class_path: SFT}\ndata: {class_path: ChatData, init_args: {train: no.jsonl}}", "no file no.jsonl"),
    ("model: {class_path: SFT}\ndata: {class_path: ChatData}\ntrainer: {strategy: foo}", "invalid strategy name"),
    ("model: {class_path: SFT}\ndata: {class_path: ChatData}", "pass one, for example --model.model tiny"),
    ("model: {class_path: SFT, model: tiny}", "model: expected class_path, a name, and init_args, the options of that"),
    ("model: {class_pth: SFT, init_args: {model: tiny}}", "model: expected class_path, a name, and init_args, the"),
]


# The names of classes and options, and YAML itself.
EARLY = ("SFTT", "modle", "max_epoch:", "Stoping", "ChatDta", "model: [", "SFT, model: tiny", "lora_alpha")
OF_OTHERS = ("target_modules", "{lr:", "{top_k:", "lr_scheduler")
FOUND_EARLY = {content for content, _ in MISTAKES if any(word in content for word in (*EARLY, *OF_OTHERS))}


# One of a class, of an option, of a value, of the trainer, of the YAML, and of what the stage itself finds.
@pytest.mark.parametrize(
    ("content", "message"), mostly_soak(MISTAKES, but=[MISTAKES[i] for i in (0, 1, 2, 5, 9, 14, 15, 17, 20)])
)
def test_a_mistake_in_a_file_is_one_message(
    content: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TINKER_BASE_MODEL", raising=False)
    quiet = ["--trainer.max_steps=1", "--trainer.logger=false"] if "\n" in content else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, on options that are missing
        assert run("fit", content, *quiet) == 2
    said = capsys.readouterr().err
    (line,) = [each for each in said.splitlines() if each.startswith("tinker-lightning: ")]
    assert message in line
    assert "Traceback" not in said
    if content in FOUND_EARLY:
        with pytest.raises(InvalidInput) as raised:
            stages.check_names("fit", ["--config", "run.yaml", *quiet])
        assert line == f"tinker-lightning: {wording.reword(str(raised.value), wording.STAGES)}"
    else:
        stages.check_names("fit", ["--config", "run.yaml", *quiet])


# 59,049 values: enough to be seen, and not so many that a parser that takes them never ends.
LEVELS = ["a: &a [1, 2, 3]", *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcd", "bcde", strict=True))]
MERGED = ["a: &a {k: 1}", *(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 99)}]}}" for a, b in ("ab", "bc"))]
BOMBS = {
    "\n".join(LEVELS): 'aliases repeat more than 10000 values; write less of it by aliases in "run.yaml", line 5',
    "\n".join(MERGED): 'aliases repeat more than 10000 values; write less of it by aliases in "run.yaml", line 3',
    "a: &a [*a]": 'aliases repeat more than 10000 values; write less of it by aliases in "run.yaml", line 1, column 8',
    "a: " + 200 * "[" + 200 * "]": 'values are nested more than 100 deep in "run.yaml", line 1, column 103',
}


@pytest.mark.parametrize("content", BOMBS, ids=["lists", "merged", "endless", "nested"])
def test_yaml_that_stands_for_more_than_a_parser_can_take_is_rejected(
    content: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = f"tinker-lightning: --config is not valid YAML: {BOMBS[content]}"
    assert run("fit", content) == 2  # by the parser, because this process has imported Lightning
    assert capsys.readouterr().err.startswith(expected)
    with pytest.raises(InvalidInput) as raised:
        stages.check_names("fit", ["--config", "run.yaml"])
    assert f"tinker-lightning: {raised.value}".startswith(expected)
    Path("part.yaml").write_text(content)
    assert run("fit", "model: part.yaml") == 2
    said = capsys.readouterr().err
    assert said.startswith("tinker-lightning: model: Invalid content in sub-config file part.yaml: ")
    assert BOMBS[content].partition(" in ")[0] in said


def test_a_file_may_use_aliases(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "{train: &rows rows.jsonl, validation: *rows, batch_size: 2}"
    options = "{<<: &options {model: tiny, rank: 4}, seed: &seed 3}"
    content = f"model: {{class_path: SFT, init_args: {options}}}\ndata: {{class_path: ChatData, init_args: {rows}}}"
    with pytest.raises(SystemExit):
        run("fit", f"{content}\nseed_everything: *seed", "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["init_args"]["validation"] == "rows.jsonl"
    assert (printed["model"]["init_args"]["rank"], printed["seed_everything"]) == (4, 3)


def test_mistakes_in_names_are_found_before_torch_is_imported(folder: Path) -> None:
    Path("run.yaml").write_text("model: {class_path: SFT, init_args: {modle: tiny}}")
    script = "import sys; from tinker_lightning import cli; code = cli.main(['fit', '--config', 'run.yaml']); "
    script += "sys.exit(code if not {'torch', 'lightning', 'jsonargparse'} & {*sys.modules} else 'imported')"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr == "tinker-lightning: model: SFT has no option 'modle'. Did you mean 'model'?\n"


def test_a_command_line_without_options_is_left_to_the_parser() -> None:
    stages.check_names("fit", [])


def test_no_name_that_the_parser_knows_is_a_mistake() -> None:
    from tinker_lightning.cli import lightning_cli

    ours = [*recipes.__all__[:-1], *data.__all__, *callbacks.__all__, "Trainer"]
    others = ["ModelCheckpoint", "EarlyStopping", "LearningRateMonitor", "CSVLogger", "WandbLogger", "TQDMProgressBar"]
    for name in (*ours, *others):
        package = next(each for each in (recipes, data, callbacks, pl, pl.callbacks, pl.loggers) if hasattr(each, name))
        names = stages._parameters(name)
        assert names is None if name == "WandbLogger" else names is not None
        if names is not None:
            assert names >= {*lightning_cli._options(f"{package.__name__}.{name}")}, name


USER_CLASS = {"class_path": "own_recipe.Halved", "init_args": {"factor": 0.5}}
CALLBACKS = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.patience=3"]
VALID: list[tuple[Any, list[str]]] = [
    ({"model": "SFT", "data": {"class_path": "ChatData", "dict_kwargs": {"x": 1}}}, []),
    ({"model": USER_CLASS, "data": {"class_path": "Known", "init_args": {"x": 1}}}, []),  # own_recipe may have it
    ({"model": "Known", "data": {"class_path": "RolloutData", "init_args": {"rewards": "own_recipe.reward"}}}, []),
    ({"model": {"class_path": "SFT", "init_args": {"beta": 1}}}, ["--model", "DPO"]),
    ({"model": {"class_path": "SFT"}}, ["--model.class_path=DPO", "--model.beta", "0.1"]),
    ({"model": {"init_args": {"beta": 1}}, "trainer": {"logger": True}}, ["--model=DPO", "--trainer.logger=false"]),
    ({"trainer": {"logger": {"class_path": "CSVLogger", "init_args": {"x": 1}}}}, ["--trainer.logger=WandbLogger"]),
    ({"trainer.max_epochs": 3, "ckpt_path": None, "trainer": {"callbacks": {"class_path": "EarlyStopping"}}}, []),
    ({"trainer": {"callbacks": "ModelCheckpoint"}}, [*CALLBACKS, "--trainer.max_epoc=1", "--print_config"]),
    ({}, ["--model", "{class_path: SFT, init_args: {rank: 4}}", "--data=null", "--trainer.logger=false"]),
    ({}, ["-c", "{model: SFT}", "--model.ran=3", "--model.init_args.rank=3", "--model.help", "DPO"]),
]


@pytest.mark.parametrize(("content", "arguments"), VALID)
def test_what_may_be_right_is_left_to_the_parser(content: Any, arguments: list[str], folder: Path) -> None:
    Path("own_recipe.py").write_text(OWN)
    Path("run.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        stages.check_names("fit", ["--config", "run.yaml", *arguments])


def test_debug_shows_the_stack_trace(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="Did you mean 'SFT'"):
        run("fit", "model: {class_path: SFTT}", "--debug")


def test_an_unknown_argument_gets_the_nearest_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", config(), "--trainer.max_epocs=3") == 2
    assert "Did you mean 'trainer.max_epochs'?" in capsys.readouterr().err
    assert cli.main(["fit", "--config", "none.yaml"]) == 2
    assert f"tinker-lightning: --config: there is no file {folder / 'none.yaml'}\n" in capsys.readouterr().err


def test_an_unknown_metric_to_monitor_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = config()
    own["trainer"] |= {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_nl"}}]}
    assert run("fit", own, "--trainer.max_steps=1", "--trainer.val_check_interval=1") == 2
    assert "could not find the monitored key" in capsys.readouterr().err


def test_the_help_names_every_recipe_data_module_and_option_of_predict(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["fit", "--help"])
    shown = re.findall(r"\w+", capsys.readouterr().out)
    assert {*recipes.__all__, *data.__all__, *PredictOptions.__annotations__} <= {*shown, "recommended_lr"}


def test_options_of_sampling_are_for_predict(capsys: pytest.CaptureFixture[str]) -> None:
    for name in PredictOptions.__annotations__:
        assert cli.main(["fit", "--config", "run.yaml", f"--{name}=1"]) == 2
        assert f"--{name} is for the samples of predict" in capsys.readouterr().err


def test_an_output_of_other_stages_than_predict_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--output", "model"], ["--output=model"]):
        assert cli.main(["fit", "--config", "run.yaml", *option]) == 2
        assert "--output is for the answers of predict" in capsys.readouterr().err


@pytest.mark.parametrize("cached", first_only([Union[float, int, None], Union[int, float, None]]))  # noqa: UP007 these differ
def test_a_limit_of_one_is_one_batch_whichever_union_is_cached(
    cached: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")]
    names += ["overfit_batches", "val_check_interval"]
    for name in names:  # what Lightning gets if it is imported while the union is in the cache of typing
        monkeypatch.setitem(pl.Trainer.__init__.__wrapped__.__annotations__, name, cached)  # type: ignore[attr-defined]
    for text, value in (("1", 1), ("1.0", 1.0), ("0.5", 0.5)):
        with pytest.raises(SystemExit):
            run("fit", config(), *(f"--trainer.{name}={text}" for name in names), "--print_config")
        printed = yaml.safe_load(capsys.readouterr().out)["trainer"]
        assert [repr(printed[name]) for name in names] == [repr(value)] * len(names)


@pytest.mark.parametrize(
    ("file", "message"), [("none.ckpt", "Checkpoint file not found: none.ckpt"), ("run.yaml", "checkpoint")]
)
def test_a_file_that_is_missing_or_no_checkpoint_is_one_message(
    file: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", config(), f"--ckpt_path={file}") == 2
    said = capsys.readouterr().err
    (line,) = [each for each in said.splitlines() if each.startswith("tinker-lightning: ")]
    assert message in line
    assert "Traceback" not in said


def test_the_configuration_is_printed_without_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"--model.api_key={KEY}", f"--model.teacher_api_key={KEY}"]
    with pytest.raises(SystemExit) as stop:
        run("fit", config("Distill", teacher="tiny"), *keys, "--print_config")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["model"]["init_args"]["rank"] == 4
    assert KEY not in printed


def test_help_is_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "--print_config" in printed
    assert "Optional[" not in printed


def test_each_option_of_a_recipe_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("fit", config(), "--model.help", "SFT")
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("The LoRA rank.", "The learning rate of the default optimizer", "The URL of the server"):
        assert words in printed
    assert run("fit", config(), "--model.help", "STF") == 2
    assert "tinker-lightning: model: there is no class 'STF'. Did you mean 'SFT'?\n" in capsys.readouterr().err


def test_an_error_of_a_process_that_loads_data_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    options = ["--data.train=bad.jsonl", "--data.validation=null", "--data.streaming=true", "--data.num_workers=1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run("fit", config(), *options) == 2
    said = capsys.readouterr().err
    assert "tinker-lightning: bad.jsonl:2: a row to train on needs messages" in said
    assert "Traceback" not in said


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert cli.main(["fit", "--config", "run.yaml"]) == 2
    assert "python -m pip install 'tinker-lightning[cli]'" in capsys.readouterr().err


def test_a_file_of_the_user_is_never_overwritten(folder: Path) -> None:
    from tinker_lightning.cli.lightning_cli import SaveConfig

    Path("config.yaml").write_text("mine")
    callback = SaveConfig.__new__(SaveConfig)
    callback.config_filename = "config.yaml"
    trainer = pl.Trainer(default_root_dir=folder, logger=False, accelerator="cpu", barebones=True)
    callback.setup(trainer, pl.LightningModule(), "fit")
    assert Path("config.yaml").read_text() == "mine"


def test_other_parsers_of_the_process_read_yaml_afterwards(folder: Path) -> None:
    assert run("fit", "modle: {class_path: SFT}") == 2
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--count", type=int)
    Path("other.yaml").write_text("count: 3")
    assert parser.parse_args(["--config", "other.yaml"]).count == 3
