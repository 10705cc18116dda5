"""Remote models in PyTorch Lightning: the module, the strategy, checkpoints and exact resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinker_lightning.lightning.module import RemoteModule
    from tinker_lightning.lightning.strategy import TinkerStrategy

__all__ = ["RemoteModule", "TinkerStrategy"]


def __getattr__(name: str) -> Any:
    """Loads the public names at their first use, because modules of this package import each other."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import tinker_lightning

    value = globals()[name] = getattr(tinker_lightning, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
