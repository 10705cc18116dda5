"""Starts real servers of other projects on this machine, with a tiny random model."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

_STARTS_WITHIN = 180.0


def write_tiny_qwen(folder: Path) -> Path:
    """Writes a random Qwen3 of two layers and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|end|>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(  # noqa: S106
        folder
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.05,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def skyrl(folder: Path, model: Path) -> Iterator[str]:
    """Runs SkyRL's server with its JAX backend; yields the URL."""
    port = _free_port()
    backend = {"max_lora_adapters": 16, "max_lora_rank": 16, "train_micro_batch_size": 8, "sample_max_num_sequences": 8}
    command = [
        *("uv", "run", "--no-project", "-m", "skyrl.tinker.api"),  # which its engine starts itself by, too
        *("--base-model", str(model), "--backend", "jax", "--backend-config", json.dumps(backend)),
        *("--checkpoints-base", str(folder / "checkpoints"), "--database-url", f"sqlite:///{folder / 'tinker.db'}"),
        *("--session-timeout-sec", "-1", "--host", "127.0.0.1", "--port", str(port)),
    ]
    bin_folder = os.path.dirname(sys.executable)
    settings = {
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "UV_OFFLINE": "1",
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
    }
    with _running(command, folder, settings, port) as url:
        yield url


@contextlib.contextmanager
def tuft(model: Path, name: str = "tiny", api_key: str = "tml-test-key") -> Iterator[str]:
    """Runs TuFT's server with its transformers backend and without its sampler, which needs vLLM; yields the URL.

    Args:
        model: The folder of the base model.
        name: The name by which clients call it.
        api_key: The key that clients must send.
    """
    port = _free_port()
    described = {"model_name": name, "model_path": str(model), "max_model_len": 512, "max_lora_rank": 16}
    limits = {"max_loras": 16, "micro_batch_size": 8, "training_backend": "hf", "capabilities": ["training"]}
    config = {
        "supported_models": [described | limits],
        "authorized_users": {api_key: "tester"},
        "persistence": {"mode": "DISABLE"},
    }
    # Ray puts sockets into this folder, whose path has to be short.
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp", ignore_cleanup_errors=True) as short:
        folder = Path(short)
        (folder / "config.yaml").write_text(json.dumps(config))  # which is YAML, too
        launcher = Path(__file__).with_name("tuft_on_cpu.py")
        python = os.environ.get("TUFT_PYTHON", sys.executable)
        command = [python, str(launcher), str(folder), str(folder / "config.yaml"), str(port)]
        settings = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TUFT_HOME": str(folder / "home"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": secrets.token_hex(24),  # otherwise Ray writes one into the home directory
            "PYTHONPATH": "",
        }
        with _running(command, folder, settings, port) as url:
            yield url


@contextlib.contextmanager
def _running(command: list[str], folder: Path, settings: dict[str, str], port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            deadline = time.monotonic() + _STARTS_WITHIN
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{(folder / 'server.log').read_text()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz", timeout=2).is_success
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])
