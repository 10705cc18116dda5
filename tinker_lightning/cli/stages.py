"""`tinker-lightning fit`, `validate`, `test` and `predict`: a stage of the Lightning trainer from a YAML file."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
import io
import itertools
import math
import os
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_lightning.cli import wording
from tinker_lightning.errors import PREDICT_OPTIONS, InvalidInput, TinkerLightningError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_STAGES = {
    "fit": ("train a model", "Trains a model, and validates it if there is validation data."),
    "validate": ("score a model on validation data", "Scores a model on the validation data."),
    "test": ("score a model on test data", "Scores a model on the test data."),
    "predict": ("sample answers to prompts", "Samples an answer to each prompt, and prints it as a line of JSON."),
}

_HELP = """\
options, in the YAML file or as arguments, which take precedence:
  --config FILE         read options from a YAML file; may be given several times
  --model NAME          the recipe, SFT, DPO, KTO, GRPO or Distill, or the import path of a LightningModule
  --model.OPTION VALUE  an option of the recipe, for example --model.model smollm2-135m
  --data NAME           ChatData, PreferenceData, PromptData or RolloutData, or the import path of a
                        LightningDataModule
  --data.OPTION VALUE   an option of the data module, for example --data.train chats.jsonl
  --trainer.OPTION VALUE
                        an option of Lightning's Trainer, for example --trainer.max_epochs 3
  --trainer.callbacks+ NAME
                        add a callback, for example ModelCheckpoint, or the import path of one
  --output FILE         predict: write the answers to a file
  --max_tokens N, --temperature T, --top_p P, --top_k K, --num_samples N, --seed N, --stop TEXT
                        predict: how to sample; also in the YAML file, as options of its model's predict
  --ckpt_path FILE      start from a checkpoint file: fit resumes, the others load its weights
  --seed_everything N   the seed of the run
  --print_config        print all options with their values as YAML, and exit
  --model.help NAME, --data.help NAME, --trainer.callbacks.help NAME
                        show the options of a class, and exit
  --debug               show the stack trace of an error

The API key is read from TINKER_API_KEY, and no file contains it.
"""


def add_to(commands: Any) -> None:
    """Adds the four sub-commands to the parser."""
    for name, (short, description) in _STAGES.items():
        parser = commands.add_parser(
            name,
            usage=f"tinker-lightning {name} --config FILE [--OPTION VALUE ...]",
            help=short,
            description=description,
            epilog=_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(run=run, stage=name, takes_rest=True, advice=wording.STAGES)


def run(options: argparse.Namespace) -> int:
    """Runs a stage with `LightningCLI`; returns the exit code."""
    names = [each.partition("=")[0] for each in options.rest]
    if options.stage != "predict" and "--output" in names:
        raise InvalidInput(
            f"--output is for the answers of predict, and {options.stage} writes none. Set where logs and checkpoints "
            "go with --trainer.default_root_dir FOLDER."
        )
    if options.stage != "predict" and (used := [name for name in names if name.removeprefix("--") in PREDICT_OPTIONS]):
        raise InvalidInput(
            f"{used[0]} is for the samples of predict. RolloutData has the options of rollouts, for example "
            "--data.max_tokens, and --seed_everything is the seed of a run."
        )
    if (folder := os.getcwd()) not in sys.path:  # classes and rewards of the user, as with `python -m`
        sys.path.append(folder)
    if "lightning" not in sys.modules:  # else nothing is saved, and the classes of the caller have short names, too
        check_names(options.stage, options.rest)
    try:
        import jsonargparse
        import lightning.pytorch.cli  # noqa: F401 which raises if an extra of jsonargparse is missing
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidInput(
            f"tinker-lightning {options.stage} needs jsonargparse. Install it with: python -m pip install "
            "'tinker-lightning[cli]'"
        ) from error
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from tinker_lightning.cli import lightning_cli
    from tinker_lightning.cli.lightning_cli import run_stage

    with contextlib.ExitStack() as stack:
        load, errors = jsonargparse.get_loader("yaml"), (yaml.YAMLError,)

        def load_checked(text: str, path: object = "") -> Any:
            check_yaml(text, str(path))
            return load(text)

        jsonargparse.set_loader("yaml", load_checked, errors)
        # With the same arguments, which the parser notes and would pass to the loader that was there.
        stack.callback(jsonargparse.set_loader, "yaml", lambda text, path="": load(text), errors)  # noqa: ARG005
        try:
            run_stage(options.stage, options.rest, stack)
        except jsonargparse.ArgumentError as error:
            raise InvalidInput(lightning_cli.explain(str(error))) from error
        except TinkerLightningError:
            raise
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise InvalidInput(f"ckpt_path is not a checkpoint file of Lightning: {reason}") from error
        except (ValueError, RuntimeError, TypeError, MisconfigurationException) as error:
            if own := lightning_cli.library_error(error):
                raise own from error
            if isinstance(error, MisconfigurationException) or lightning_cli.is_lightning_error(error):
                raise InvalidInput(lightning_cli.explain(str(error))) from error
            raise
    return 0


# The packages with classes for each key that names one.
_PACKAGES = {
    "model": ("tinker_lightning/recipes",),
    "data": ("tinker_lightning/data",),
    "trainer.callbacks": ("tinker_lightning/callbacks", "lightning/pytorch/callbacks"),
    "trainer.logger": ("lightning/pytorch/loggers",),
}
_SPEC = {"class_path", "init_args", "dict_kwargs"}
# The most values that the aliases of a YAML file may repeat, and the levels of its lists and mappings.
_ALIASED, _DEPTH = 10_000, 100
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def check_names(stage: str, arguments: list[str]) -> None:
    """Raises `InvalidInput` for invalid YAML, and for sections, classes and options that do not exist.

    It reads the source of Lightning and of this package, because importing them takes seconds. Whatever is not
    certainly wrong is left to the parser.
    """
    packages = ("yaml", "jsonargparse", "lightning")
    if any(importlib.util.find_spec(package) is None for package in packages) or "Trainer" not in _definitions():
        return
    given = list(_given(arguments))
    contents = [content for name, value in given if name == "config" for content in _contents(value)]
    sections, options = _parameters("Trainer", stage), _parameters("Trainer")
    for content in contents:
        if sections and (name := _unknown(content, {*wording.SECTIONS, "config", *sections})):
            raise InvalidInput(wording.no_option(name, wording.SECTIONS))
        if options and isinstance(trainer := content.get("trainer"), Mapping) and (name := _unknown(trainer, options)):
            raise InvalidInput(wording.no_option(f"trainer.{name}", [f"trainer.{each}" for each in options]))
    if options and (name := _unknown(_typed(given, "trainer", options), options)):
        raise InvalidInput(wording.no_option(f"trainer.{name}", [f"trainer.{each}" for each in options]))
    if _imports(contents) or _imports([value for _, value in given]):  # may add classes with short names
        return
    for key, spec in _specs(given, contents):
        _check_class(key, spec["class_path"])
        if spec.keys() - _SPEC:
            raise InvalidInput(f"{key}: {wording.NO_CLASS}")
        options = _parameters(spec["class_path"].rpartition(".")[2])
        for names in (spec.get("init_args"), _typed(given, key, options) if key in ("model", "data") else None):
            if options and isinstance(names, Mapping) and (name := _unknown(names, options)):
                raise InvalidInput(f"{key}: {wording.no_option_of(spec['class_path'], name, options, key)}")


def _given(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the options of a command line, without dashes, with their values."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument.startswith("-"):
            name, equals, value = argument.lstrip("-").partition("=")
            yield "config" if name == "c" else name.rstrip("+"), value if equals else following


def _typed(given: Iterable[tuple[str, str]], key: str, options: Iterable[str] | None) -> dict[str, None]:
    """Returns the options of a class on a command line, where the parser takes the start of a name, too."""
    names = [name.removeprefix(f"{key}.").partition(".")[0] for name, _ in given if name.startswith(f"{key}.")]
    starts = {option[:length] for option in options or () for length in range(1, len(option))}
    return dict.fromkeys(name for name in names if name not in {*_SPEC, "help", *starts})


def _imports(value: Any) -> bool:
    """Returns whether the parser may import a module of another package for a value or for one inside it."""
    if isinstance(value, Mapping | list):
        return any(map(_imports, value.values() if isinstance(value, Mapping) else value))
    package, dot, _ = value.partition(".") if isinstance(value, str) else ("", "", "")
    if not dot or not package.isidentifier() or package in ("tinker_lightning", "lightning"):
        return False
    return importlib.util.find_spec(package) is not None


def _contents(value: str) -> Iterator[Mapping[Any, Any]]:
    """Yields the mapping of a `--config`: a file, or YAML itself."""
    import yaml

    is_file = os.path.isfile(value)
    try:
        text = Path(value).read_text(encoding="utf-8") if is_file else value
        check_yaml(text, value if is_file else "")
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 a safe loader
    except yaml.MarkedYAMLError as error:
        if is_file:
            raise InvalidInput(wording.not_yaml(str(error))) from error
    except (yaml.YAMLError, OSError, UnicodeDecodeError):
        return
    else:
        if isinstance(content, str) and not os.path.exists(value):
            raise InvalidInput(f"--config: there is no file {os.path.abspath(value)}")
        if isinstance(content, Mapping):
            yield content


def check_yaml(text: str, file: str = "") -> None:
    """Raises `yaml.MarkedYAMLError`, which names the file, for invalid YAML and for more than a parser can take.

    A few lines of aliases can stand for billions of values, and the C parser crashes where lists are nested deep.
    """
    import yaml

    stream = io.StringIO(text)
    stream.name = file or "<unicode string>"  # read by PyYAML
    sizes: dict[str | None, float] = {}  # how many values each anchor stands for
    opened: list[tuple[str | None, float]] = []  # the anchors of open lists and mappings, and the values before them
    total = 0.0
    for count, event in enumerate(yaml.parse(stream, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            total += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.NodeEvent):
            sizes[event.anchor] = 1
            if isinstance(event, yaml.CollectionStartEvent):
                sizes[event.anchor] = math.inf  # for an alias inside of what it stands for
                opened.append((event.anchor, total))
            total += 1
        problem = f"values are nested more than {_DEPTH} deep" if len(opened) > _DEPTH else ""
        if total > count + _ALIASED:
            problem = f"aliases repeat more than {_ALIASED} values; write less of it by aliases"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _specs(given: list[tuple[str, str]], contents: list[Mapping[Any, Any]]) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yields the classes that are named, each with its key and as a mapping; those named twice are left out."""
    for key in _PACKAGES:
        section, _, name = key.partition(".")
        values = [content[section] for content in contents if section in content]
        if name:
            values = [value[name] for value in values if isinstance(value, Mapping) and name in value]
            values += [None for option, _ in given if option.startswith(key)]  # YAML, which need not be a name
        else:
            typed = [value for option, value in given if option in (key, f"{key}.class_path")]
            values += [None if value == "null" else value for value in typed]
        for spec in values[0] if len(values) == 1 and isinstance(values[0], list) else values:
            if isinstance(spec, str) and not os.path.exists(spec):  # a file would contain the mapping
                spec = {"class_path": spec}
            path = spec.get("class_path") if isinstance(spec, Mapping) else None
            if isinstance(path, str) and path.replace(".", "_").isidentifier() and len(values) == 1:
                yield key, spec


def _unknown(names: Iterable[Any], known: Iterable[str]) -> str | None:
    """Returns the first name that is not known; names with dots, for the parser, are left out."""
    return next((name for name in names if isinstance(name, str) and "." not in name and name not in {*known}), None)


def _check_class(key: str, class_path: str) -> None:
    """Raises `InvalidInput` if neither this package nor Lightning defines a class of that name."""
    short = class_path.rpartition(".")[2]
    if short not in _definitions() and class_path.rpartition(".")[0].partition(".")[0] in ("", "tinker_lightning"):
        names = [
            name
            for name, files in _definitions().items()
            if any(package in file.as_posix() for file in files for package in _PACKAGES[key])
        ]
        raise InvalidInput(f"{key}: {wording.no_class(class_path, names)}")


@functools.cache
def _definitions() -> dict[str, list[Path]]:
    """Returns the files of this package and of Lightning that define each class, by its name."""
    definitions: dict[str, list[Path]] = {}
    for package, folder in (("tinker_lightning", ""), ("lightning", "pytorch")):
        spec = importlib.util.find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            for file in Path(root, folder).rglob("*.py"):
                for name in _CLASS.findall(file.read_text(encoding="utf-8")):
                    definitions.setdefault(name, []).append(file)
    return definitions


@functools.cache
def _parameters(name: str, method: str = "__init__") -> frozenset[str] | None:
    """Returns the arguments of a method of a class, inherited ones behind `**kwargs` included; None if uncertain."""
    if len(files := _definitions().get(name, [])) != 1:
        return None
    module = ast.parse(files[0].read_text(encoding="utf-8"))
    cls = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = [node.args for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == method]
    own = {each.arg for arguments in methods for each in (*arguments.args[1:], *arguments.kwonlyargs)}
    rest = [arguments.kwarg.annotation for arguments in methods if arguments.kwarg]
    if methods and all(isinstance(each, ast.Name) and each.id == "Never" for each in rest):
        return frozenset(own)
    bases = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in cls.bases]
    inherited = [_parameters(base, method) for base in bases]
    known = [each for each in inherited if each is not None]
    return frozenset(own).union(*known) if known and len(known) == len(inherited) else None
