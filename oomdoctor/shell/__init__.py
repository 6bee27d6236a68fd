"""The IPython extension: ``%load_ext oomdoctor``.

Loading is silent and light: methods of the shell and the hook for threads that fail are wrapped, the magics and the
configuration are registered, and nothing of torch or ipywidgets is imported until a cell fails or asks for it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

_ATTRIBUTE = "_oomdoctor_extension"


def load_ipython_extension(shell: Any) -> None:
    """Install oomdoctor into ``shell``; doing so twice changes nothing."""
    from oomdoctor.shell.extension import Extension

    if getattr(shell, _ATTRIBUTE, None) is None:
        extension = Extension(shell)
        extension.install()
        setattr(shell, _ATTRIBUTE, extension)


def unload_ipython_extension(shell: Any) -> None:
    """Take oomdoctor away again, every hook put back."""
    extension = getattr(shell, _ATTRIBUTE, None)
    if extension is not None:
        extension.remove()
        delattr(shell, _ATTRIBUTE)
