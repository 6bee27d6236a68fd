"""oomdoctor: what filled the memory, why, what to change, and the cell run again with the change in place.

``%load_ext oomdoctor`` in a notebook; the functions below in scripts. Importing this package loads neither torch
nor ipywidgets: each function brings what it needs when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from oomdoctor.allocator.virtual import simulate
    from oomdoctor.fixes._batch_split import batch_parts, in_parts, join_parts
    from oomdoctor.fixes._chunked_loss import chunked_head, chunked_loss
    from oomdoctor.fixes._forward import recompute
    from oomdoctor.pipeline import explain, last_case
    from oomdoctor.shell import load_ipython_extension, unload_ipython_extension
    from oomdoctor.shell.memplan import plan
    from oomdoctor.shell.memreport import report
    from oomdoctor.shell.scripts import heal

__all__ = [
    "__version__",
    "batch_parts",
    "chunked_head",
    "chunked_loss",
    "explain",
    "heal",
    "in_parts",
    "join_parts",
    "last_case",
    "load_ipython_extension",
    "plan",
    "recompute",
    "report",
    "simulate",
    "unload_ipython_extension",
]

__version__: Final = "0.1.0"

_HOMES: Final = {
    "batch_parts": "oomdoctor.fixes._batch_split",
    "chunked_head": "oomdoctor.fixes._chunked_loss",
    "chunked_loss": "oomdoctor.fixes._chunked_loss",
    "explain": "oomdoctor.pipeline",
    "heal": "oomdoctor.shell.scripts",
    "in_parts": "oomdoctor.fixes._batch_split",
    "join_parts": "oomdoctor.fixes._batch_split",
    "last_case": "oomdoctor.pipeline",
    "load_ipython_extension": "oomdoctor.shell",
    "plan": "oomdoctor.shell.memplan",
    "recompute": "oomdoctor.fixes._forward",
    "report": "oomdoctor.shell.memreport",
    "simulate": "oomdoctor.allocator.virtual",
    "unload_ipython_extension": "oomdoctor.shell",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oomdoctor' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
