"""`tinker-lightning fit`, `validate`, `test` and `predict`: a stage of the Lightning trainer from a YAML file."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import sys
from typing import Any

from tinker_lightning.cli import wording
from tinker_lightning.errors import InvalidInput, TinkerLightningError

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
    if options.stage != "predict" and any(each.partition("=")[0] == "--output" for each in options.rest):
        raise InvalidInput(
            f"--output is for the answers of predict, and {options.stage} writes none. Set where logs and checkpoints "
            "go with --trainer.default_root_dir FOLDER."
        )
    try:
        import jsonargparse
        import lightning.pytorch.cli  # noqa: F401 which raises if an extra of jsonargparse is missing
    except ImportError as error:
        raise InvalidInput(
            f"tinker-lightning {options.stage} needs jsonargparse. Install it with: python -m pip install "
            "'tinker-lightning[cli]'"
        ) from error
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from tinker_lightning.cli import lightning_cli
    from tinker_lightning.cli.lightning_cli import run_stage

    if (folder := os.getcwd()) not in sys.path:  # classes and rewards of the user, as with `python -m`
        sys.path.append(folder)
    with contextlib.ExitStack() as stack:
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
