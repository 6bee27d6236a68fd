"""Rows for a class alone, where the message has none of the wordings that are known here.

A class that stands where a message begins was raised. Elsewhere it may be a name in source code, such as that of an
``except`` clause.
"""

from __future__ import annotations

from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family

_BEGINS: Final = r"^(?:[^\n]{0,100}[:\])|>*-]\x20?)?['\"*]{0,3}(?:[\w.]{1,60}\.)?"
_ENDS: Final = r"['\"*}\])]{0,4}$"
_HEADS: Final = r"\s{1,60}Traceback \(most recent call last\)"
"""What follows a class above the traceback that a notebook shows; the message comes below it."""
_OTHER: Final = r"[A-Z]\w{2,30}(?:Error|Exception)"
_AMONG_OTHERS: Final = rf"^\W{{0,12}}{_OTHER}\s{{0,3}}\n\W{{0,12}}MemoryError\s{{0,3}}\n\W{{0,12}}{_OTHER}$"
"""A list of the classes that there are."""


def _raised(names: str, *, alone: bool = False) -> str:
    return rf"{_BEGINS}(?:{names})(?::?{_ENDS}|{_HEADS}{'' if alone else '|:'})"


ROWS: Final = (
    Format(
        name="oom_class",
        family=Family.CUDA,
        title="PyTorch raised its out-of-memory error; the text has none of the wordings that are known here.",
        versions="PyTorch 1.13 on",
        needles=("outofmemoryerror",),
        pattern=compiled(_raised(r"(?<!lang\.)(?<!::)OutOfMemoryError")),
        unless=compiled(r"out of resource"),
        vague=True,
        device="cuda:{}",
        sample="torch.OutOfMemoryError: the device is full",
    ),
    Format(
        name="tf_class",
        family=Family.TF,
        title="TensorFlow ran out of a resource, as a rule of device memory.",
        versions="TensorFlow 1 and 2",
        needles=("resourceexhaustederror",),
        pattern=compiled(_raised("ResourceExhaustedError")),
        vague=True,
        device="cuda:{}",
        sample="ResourceExhaustedError: Graph execution error",
    ),
    Format(
        name="numpy_class",
        family=Family.NUMPY,
        title="NumPy could not get the host memory for an array.",
        versions="NumPy 1.17 on",
        needles=("arraymemoryerror", "_exceptions.memoryerror"),
        pattern=compiled(_raised(r"_?ArrayMemoryError|(?<=_exceptions\.)MemoryError")),
        vague=True,
        device="cpu",
        sample="numpy._core._exceptions._ArrayMemoryError",
    ),
    Format(
        name="memoryerror_bare",
        family=Family.HOST,
        title="Python could not get host memory; the error has no text.",
        versions="Python 3",
        needles=("memoryerror",),
        pattern=compiled(_raised("MemoryError", alone=True)),
        unless=compiled(_AMONG_OTHERS),
        vague=True,
        device="cpu",
        sample="MemoryError",
    ),
    Format(
        name="memoryerror_text",
        family=Family.HOST,
        title="Python could not get host memory.",
        versions="Python 3",
        needles=("memoryerror: ", "memoryerror('"),
        pattern=compiled(r"(?<![A-Za-z_])(?<!except\s)(?<!raise\s)MemoryError(?:: |\(')(?=\w)"),
        clauses=(compiled(r"allocate {requested#} bytes"), compiled(r"allocate {requested}")),
        vague=True,
        device="cpu",
        sample="MemoryError: Unable to allocate internal buffer.",
    ),
)
