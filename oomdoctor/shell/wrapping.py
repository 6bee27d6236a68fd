"""One method of one object, wrapped on the instance and put back without a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Wrapped:
    """A wrapped method.

    Where somebody else has wrapped ours when it is removed, theirs stays, and ours only passes on from then.

    Args:
        owner: the object.
        name: of its method.
        around: is called in place of the method, with what the method would be called with.

    Attributes:
        original: the method as it was.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._was_on_instance = name in vars(owner)
        self.original: Callable[..., Any] = getattr(owner, name)
        self._active = True

        @functools.wraps(self.original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (around if self._active else self.original)(*args, **kwargs)

        self._wrapper = wrapper
        setattr(owner, name, wrapper)

    def remove(self) -> None:
        """Put the method back."""
        self._active = False
        if vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._was_on_instance:
            setattr(self._owner, self._name, self.original)
        else:
            delattr(self._owner, self._name)
