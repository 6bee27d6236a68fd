"""Where the code of a module lies: with Python and the packages that were installed, or with the user's own."""

from __future__ import annotations

import sysconfig
from typing import Any, Final, TypeGuard

__all__ = ["is_users_file"]

_FOLDERS: Final = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES: Final = ("site-packages", "dist-packages")


def is_users_file(path: Any) -> TypeGuard[str]:
    """Return whether ``__file__`` of a module is a path in no folder of Python's or of installed packages."""
    return type(path) is str and not path.startswith(_FOLDERS) and not any(folder in path for folder in _PACKAGES)
