"""Starts the unmodified TuFT server without a GPU: `python tuft_on_cpu.py FOLDER CONFIG PORT`."""

from __future__ import annotations

import sys
from pathlib import Path


def setup_worker() -> None:
    """Replaces the one call for GPU statistics that the training backend makes in any case."""
    import torch

    torch.cuda.reset_peak_memory_stats = lambda *_, **__: None
    torch.set_num_threads(1)


def main(folder: Path, config: Path, port: str) -> None:
    import ray
    from tuft.cli import main as tuft

    # The trainer asks Ray for a GPU; this one exists only in Ray's books.
    ray.init(
        address="local",
        num_gpus=1,
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 1024 * 1024,
        _temp_dir=str(folder / "ray"),
        runtime_env={"worker_process_setup_hook": setup_worker},
    )
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--config": str(config),
        "--checkpoint-dir": str(folder / "checkpoints"),
    }
    sys.argv = ["tuft", "launch", *(part for option in options.items() for part in option)]
    tuft()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
