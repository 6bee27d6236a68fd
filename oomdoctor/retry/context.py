"""Values of context variables: a context is copied at no cost, and tells later what each variable was.

The settings of ``torch._dynamo``, ``torch._inductor`` and the like are such variables since torch 2.13, and attributes
before.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any, Final

_CONFIGS: Final = (
    *("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config", "torch.compiler.config"),
    *("torch._export.config", "torch.fx.config", "torch.fx.experimental._config", "torch.distributed.config"),
)
_UNSET: Final = object()


class ContextValues:
    """What context variables and torch's settings of compilation were when it was taken."""

    def __init__(self) -> None:
        self._before = copy_context()
        self._left: set[ContextVar[Any]] = set()
        self._attributes = {
            name: {key: entry.user_override for key, entry in config.items()}
            for name, config in _configs()
            if not _are_variables(config)
        }

    def leave(self, later: ContextValues) -> None:
        """Have those variables and settings stay as they are that a later cell has set."""
        now = copy_context()
        self._left |= {one for one in now if one not in later._before or later._before[one] is not now[one]}
        for name, config in _configs():
            known, before = later._attributes.get(name, {}), self._attributes.get(name, {})
            before |= {key: one.user_override for key, one in config.items() if known.get(key) is not one.user_override}

    def lost(self, variables: Iterable[tuple[str, ContextVar[Any]]]) -> Iterator[str]:
        """Yield a sentence for each variable that had no value: one that was set cannot be taken away."""
        now = copy_context()
        for path, variable in variables:
            if variable in now and variable not in self._before and variable not in self._left:
                yield f"`{path}` was set for the first time, which cannot be taken back"

    def restore(self, variables: Iterable[tuple[str, ContextVar[Any]]]) -> None:
        """Set the variables of the user's to what they were, and torch's settings."""
        for _, variable in variables:
            is_left = variable in self._left or variable not in self._before
            if not is_left and variable.get(_UNSET) is not self._before[variable]:
                variable.set(self._before[variable])
        with warnings.catch_warnings(action="ignore"):  # of settings that are deprecated
            for name, config in _configs():
                known = self._attributes.get(name, {})
                for key, entry in config.items():
                    self._restore_setting(name, key, entry, known)

    def _restore_setting(self, name: str, key: str, entry: Any, known: dict[str, Any]) -> None:
        held = entry.user_override
        unset = vars(sys.modules["torch.utils._config_module"])["_UNSET_SENTINEL"]
        if isinstance(held, ContextVar):
            now, before = held.get(), self._before.get(held, unset)
        else:
            now, before = held, known.get(key, unset)
        if now is before or (isinstance(held, ContextVar) and held in self._left):
            return
        if before is unset:
            delattr(sys.modules[name], key)
            entry.hide = False
        else:
            setattr(sys.modules[name], key, before)


def _configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each module of settings that is loaded, and its entries."""
    for name in _CONFIGS:
        config = vars(sys.modules[name]).get("_config") if name in sys.modules else None
        if config and "torch.utils._config_module" in sys.modules:
            first = next(iter(config.values()))
            if hasattr(first, "user_override"):  # since torch 2.6; values themselves before
                yield name, config


def _are_variables(config: dict[str, Any]) -> bool:
    return isinstance(next(iter(config.values())).user_override, ContextVar)
