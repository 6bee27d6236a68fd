"""The IPython extension: ``%load_ext oomdoctor``.

Loading is silent and light: methods of the shell and the hook for threads that fail are wrapped, the magics and the
configuration are registered, and nothing of torch or ipywidgets is imported until a cell fails or asks for it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ATTRIBUTE", "load_ipython_extension", "unload_ipython_extension"]

ATTRIBUTE = "_oomdoctor_extension"
"""Of a shell: the extension that is loaded into it."""


def load_ipython_extension(shell: Any) -> None:
    """Install oomdoctor into ``shell``; doing so twice changes nothing."""
    from oomdoctor.shell.extension import Extension

    if getattr(shell, ATTRIBUTE, None) is None:
        extension = Extension(shell)
        extension.install()
        setattr(shell, ATTRIBUTE, extension)


def unload_ipython_extension(shell: Any) -> None:
    """Take oomdoctor away again, every hook put back."""
    extension = getattr(shell, ATTRIBUTE, None)
    if extension is not None:
        extension.remove()
        delattr(shell, ATTRIBUTE)
