"""Messages of the command line: those of the Python API with options in place of arguments, and mistakes in a file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinker_lightning.errors import PREDICT_OPTIONS, did_you_mean, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ENDPOINT = re.compile(r"^(?:GET|POST|PUT|DELETE) (?:https?://[^/\s]+)?/\S+: (?:path: )?")
# The prefix that torch adds to the error of a process that loads data.
_WORKER = re.compile(r"\ACaught \w+ in DataLoader worker process.*\n[\w.]+: ", re.DOTALL)
_SOURCES = "`tinker-lightning checkpoints list` lists the paths"
_EVERYWHERE = {
    r"Pass save_state\(\.\.\.\)\.result\(\)\.path, which has the form (\S+)\.": rf"{_SOURCES}, which have the form \1.",
    r"(is not of the form tinker://\S+)$": rf"\1. {_SOURCES}.",
    r"or pass api_key=\.": "or pass --api-key KEY.",
    r"(there is no such checkpoint)(?:; pass missing_ok=True to ignore this)?$": rf"\1. {_SOURCES}.",
}

EXPORT: Mapping[str, str] = {
    r"set overwrite=True to": "pass --overwrite to",
    r"overwrite=True": "--overwrite",
    r"ExportAdapter\(base_model='(\S+)'\)": r"--base-model \1",
    r"as base_model=, or check=False": "with --base-model, or --no-check",
    r"set check=False and merged=None": "pass --no-check and leave out --merged",
    r"^ExportAdapter needs": "export needs",
}
"""Advice in messages about an export."""

STAGES: Mapping[str, str] = {
    r"Resume with ckpt_path (\S+), from": r"Resume with the same command and --ckpt_path \1, from",
    r"TinkerStrategy\(max_wait=(\S+)\)": r"max_wait \1 of the strategy",
    r"or pass api_key=\.": "or pass --model.api_key KEY.",
    r"use Trainer\(strategy='tinker', devices=1, num_nodes=1\)": "use --trainer.devices 1 --trainer.num_nodes 1",
    r"Use gradient_clip_algorithm='norm'": "Use --trainer.gradient_clip_algorithm norm",
    r"set overwrite=True to": "set the option overwrite of ExportAdapter to true to",
    r"and overwrite=True would": "and its option overwrite would",
    r"Pass it as (\w+)": r"Set --model.\1",
    r"Pass it within predict, for example predict=\{'max_tokens': 32\}": "Set it as --model.predict.max_tokens",
    r"for example SFT\('tiny'\)": "for example --model.model tiny",
    r"pass (\w+)=\.\.\. to \w+(?:Data|Loader)\b": r"pass --data.\1",
    r"Pass truncate='left' or 'right' to cut it": "Set --data.truncate to left or right to cut it",
    r"or 'drop' to leave out such rows": "or to drop to leave out such rows",
    r"\(truncate='left'\)": "(--data.truncate left)",
    r"pass bad_rows='skip' to a data module": "pass --data.bad_rows skip",
    r"Pass (\w+)='?(\w+)'? to (?:the )?RolloutLoader": r"Pass --data.\1 \2",
}
"""Advice in messages about a stage."""


def reword(text: str, advice: Mapping[str, str]) -> str:
    """Returns a message with each pattern of `advice` replaced."""
    text = _ENDPOINT.sub("", _WORKER.sub("", text).strip())
    for pattern, replacement in {**advice, **_EVERYWHERE}.items():
        text = re.sub(pattern, replacement, text)
    return text


SECTIONS = ("model", "data", "trainer", "ckpt_path", "seed_everything", "output", *PREDICT_OPTIONS)
"""The keys of a file that the help describes."""

_OVERRIDE = "or override configure_optimizers in a class of your own"
# Sections that other programs on LightningCLI have.
_SET_BY_MODEL = {
    "lr_scheduler": f"Set --model.schedule linear, cosine or wsd, and --model.warmup, {_OVERRIDE}.",
    "optimizer": f"Set --model.optimizer, --model.learning_rate, --model.betas and others, {_OVERRIDE}.",
}

NO_CLASS = "expected class_path, a name, and init_args, the options of that class, and no other keys"
"""The message for a mapping that does not name a class."""


def not_yaml(reason: str) -> str:
    """Returns the message for a file that PyYAML cannot parse."""
    reason = reason.replace('in "<unicode string>",', "at")
    return f"--config is not valid YAML: {' '.join(reason.split())}"


def no_option(name: str, names: Iterable[str]) -> str:
    """Returns the message for an unknown option of the file or the command line."""
    hint = _SET_BY_MODEL.get(name) or did_you_mean(name, names) or "--help lists the options."
    return f"there is no option {name!r}. {hint}"


def no_option_of(class_path: str, name: str, names: Iterable[str], key: str) -> str:
    """Returns the message for an unknown option of a class."""
    hint = (suggestion if key == "model" else did_you_mean)(name, names)
    hint = hint or f"--{key}.help {class_path} lists its options."
    return f"{class_path.rpartition('.')[2]} has no option {name!r}. {hint}"


def no_class(class_path: str, names: Iterable[str]) -> str:
    """Returns the message for an unknown class."""
    hint = did_you_mean(class_path.rpartition(".")[2], names)
    return (
        f"there is no class {class_path!r}. {hint or 'Give a name that --help lists, or the import path of a class.'}"
    )
