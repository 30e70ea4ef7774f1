"""How a method of Megatron is replaced: by a wrapper around what is there, at most once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_dynatrain_wrappers"


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by `wrapper(original, *args, **kwargs)`; nothing where that wrapper is there already.

    Args:
        owner: Class or module.
        name: Its function.
        wrapper: Called with the function found now as its first argument; identified by its module and name.
    """
    original = getattr(owner, name)
    identity = f"{wrapper.__module__}.{wrapper.__qualname__}"
    present = getattr(original, _MARK, frozenset())
    if identity in present:
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(replaced, _MARK, present | {identity})
    setattr(owner, name, replaced)
