"""Hooks whose own part always runs: an override that forgets `super()` must not lose a model.

Lightning's hooks do nothing, so nobody calls `super()` in them; those of a `RemoteModule` save and load weights.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MARK = "__is_essential__"
_FOLLOWED = "__is_followed__"


def essential(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a hook of a base class that overrides must not leave out."""

    @functools.wraps(hook)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._hooks_run.add(hook.__name__)
        return hook(self, *args, **kwargs)

    setattr(recorded, _MARK, True)
    return recorded


def complete(kind: type, base: type) -> None:
    """Lets hooks of a class, and of mixins before the base, be followed by the base's, unless they have called it."""
    for name in dir(base):
        hook, own = getattr(base, name), getattr(kind, name)
        if getattr(hook, _MARK, False) and own is not hook and not hasattr(own, _FOLLOWED):
            setattr(kind, name, _followed(own, hook, name))


def _followed(own: Callable[..., Any], hook: Any, name: str) -> Callable[..., Any]:
    @functools.wraps(own)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._hooks_run.discard(name)
        result = own(self, *args, **kwargs)
        if name not in self._hooks_run:
            hook(self, *args, **kwargs)
        return result

    setattr(both, _FOLLOWED, True)
    return both
