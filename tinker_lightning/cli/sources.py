"""Models that `export` and `chat` start from: checkpoint files, runs, `tinker://` paths, PEFT folders, base models."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient, TrainingClient


@dataclass(frozen=True, slots=True)
class Source:
    """A model to start from: exactly one of a `tinker://` path, a PEFT folder and a base model.

    Attributes:
        path: The path of the weights on the server.
        adapter: A PEFT folder.
        base_model: The name of a base model.
        base_url: The server of the run that wrote a checkpoint file, if the file names it.
        checkpoint: The content of a checkpoint file, and its path.
    """

    path: str | None = None
    adapter: Path | None = None
    base_model: str | None = None
    base_url: str | None = None
    checkpoint: tuple[dict[str, Any], Path] | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parses a source. Anything that is neither a file nor a `tinker://` path is the name of a base model.

        The folder of a run stands for its newest checkpoint file.
        """
        if "://" in text:
            return cls(path=text)
        file = Path(text).expanduser()
        if (file / "adapter_config.json").is_file():
            return cls(adapter=file)
        if file.is_file():
            return cls._from_file(file)
        if file.is_dir() and not (file / "config.json").is_file():
            files = sorted(file.rglob("*.ckpt"), key=lambda each: each.stat().st_mtime)
            if not files:
                raise InvalidInput(
                    f"the folder {text} has neither checkpoint files (*.ckpt), nor an adapter (adapter_config.json), "
                    "nor a model (config.json)"
                )
            print(f"using {files[-1]}, the newest checkpoint file", file=sys.stderr)
            return cls._from_file(files[-1])
        if file.suffix == ".ckpt":
            raise InvalidInput(f"there is no checkpoint file {text}")
        return cls(base_model=text)

    @classmethod
    def _from_file(cls, file: Path) -> Source:
        from tinker_lightning.lightning.checkpoint import contents, files

        content = files.read(file)
        path = contents.state_in(content, file).path
        return cls(path, base_url=content.get("hyper_parameters", {}).get("base_url"), checkpoint=(content, file))

    def training_client(self, service: ServiceClient) -> TrainingClient:
        """Returns a client of a new model with the weights, for sources other than base models."""
        if self.adapter is not None:
            return service.create_lora_training_client_from_adapter(self.adapter)
        assert self.path is not None  # noqa: S101 for the type checker
        return service.create_training_client_from_state(self.path)


def add_server_options(parser: Any) -> None:
    """Adds the options that choose a server."""
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="the server; by default the one of the checkpoint file, TINKER_BASE_URL, or a trainer in this process",
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key; by default, TINKER_API_KEY")
