"""Whose code a module is: Python's or a package's that was installed, or the user's own."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from types import ModuleType
from typing import Any, Final, TypeGuard

__all__ = ["is_installed", "is_ours", "is_users_file", "own_modules"]

_FOLDERS: Final = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES: Final = ("site-packages", "dist-packages")
_OURS: Final = __name__.partition(".")[0]


def is_users_file(path: Any) -> TypeGuard[str]:
    """Return whether ``__file__`` of a module is a path in no folder of Python's or of installed packages."""
    return type(path) is str and not path.startswith(_FOLDERS) and not any(folder in path for folder in _PACKAGES)


@lru_cache(maxsize=4096)
def is_installed(module: object) -> bool:
    """Return whether the module of this name is Python's or an installed package's; unknown ones are taken to be.

    This package is one, wherever it lies.
    """
    if module == "__main__":
        return False
    if is_ours(module):
        return True
    found = sys.modules.get(module) if type(module) is str else None
    return not is_users_file(getattr(found, "__file__", None))


def is_ours(module: object) -> bool:
    """Return whether the module of this name is of this package."""
    return type(module) is str and module.partition(".")[0] == _OURS


_looked_at: Final[set[str]] = {"__main__", "__mp_main__"}
_own: Final[list[str]] = []
_newest: tuple[int, str, int] = (0, "", 0)


def own_modules() -> list[ModuleType]:
    """Return the modules that are loaded from files of the user's, but for the program itself.

    Each name is looked at once, and none where the newest module is as before: there are thousands.
    """
    global _newest
    last = next(reversed(sys.modules))
    before, _newest = _newest, (len(sys.modules), last, id(sys.modules[last]))
    for name in () if _newest == before else sys.modules.keys() - _looked_at:
        _looked_at.add(name)
        home = getattr(sys.modules.get(name), "__file__", None)
        # Parts of a package may be made in it, as ``torch.ops`` is, and have no file.
        if home and not is_installed(name.partition(".")[0]) and not is_installed(name):
            _own.append(name)
    return [module for name in _own if type(module := sys.modules.get(name)) is ModuleType]
