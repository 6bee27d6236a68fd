"""Errors of oneDNN, which do not tell whether it was memory that was wanting.

oneDNN writes machine code for each new operation and shape by the assembler Xbyak. Where that gets no memory, it keeps
the error for the thread that it happened in, and makes nothing there any more, however much is free by then. Where the
library's table of symbols tells the place of that error, it says what was wanting, and is cleared.

Source: ``local::SetError`` and the codes in ``third_party/xbyak/xbyak.h`` of oneDNN; dlinfo(3); elf(5).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Final

from oomdoctor.sandbox import data_limit, reserve

_WORDS: Final = ("could not create a primitive", "could not execute a primitive", "could not create a memory object")
"""What is left of the status. Source: ``error::wrap_c_api`` in oneDNN's ``include/oneapi/dnnl/dnnl_common.hpp``."""
_MARK: Final = "__oomdoctor_short_of_memory__"
_ROOM: Final = 64 << 20
"""What a primitive's code and scratchpad have room in: the code takes less than 1 MiB, the scratchpad what it does."""
_NO_MEMORY: Final = (14, 22)
"""Xbyak's ``ERR_CANT_PROTECT`` and ``ERR_CANT_ALLOC``."""
_LIBRARY: Final = "libtorch_cpu.so"
_TLS_DATA: Final = 10
"""``RTLD_DI_TLS_DATA``: the place of what a library keeps for the thread that asks."""
_ERROR: Final = b"\0_ZZN5Xbyak5local11GetErrorRefEvE3err\0"
_SYMBOLS: Final = 2
"""Type of the section that holds all symbols, those of this library alone included."""


def is_short_of_memory(exc: BaseException) -> bool:
    """Return whether ``exc`` is oneDNN's, for want of memory; in this thread oneDNN goes on then, where it can.

    What was found when it was first asked is noted on ``exc`` and stays: later its frames hold less.
    """
    words = BaseException.__dict__["args"].__get__(exc)
    if type(exc) is not RuntimeError or not words or not str(words[0]).startswith(_WORDS):
        return False
    noted: dict[str, bool] = vars(exc)
    if _MARK not in noted:
        error = assemblers_error()
        noted[_MARK] = (error is not None and error.value in _NO_MEMORY) or is_memory_refused()
        if error is not None:
            error.value = 0
    return noted[_MARK]


def is_memory_refused() -> bool:
    """Return whether the system refuses this process the memory that a primitive has room in, now.

    What was kept back and has been given back since, the primitive did not have; nor had it what a limit of ours kept.
    """
    if data_limit.room is not None and data_limit.room < _ROOM:
        return True
    return not reserve.has_room(_ROOM + reserve.released())


def assemblers_error() -> ctypes.c_int | None:
    """Return the error that the assembler keeps for this thread, 0 for none; None where its place is not known."""
    torch = sys.modules.get("torch")
    home = getattr(torch, "__file__", None)
    if sys.platform != "linux" or not isinstance(home, str):
        return None
    path, start = str(Path(home).with_name("lib") / _LIBRARY), ctypes.c_void_p()
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        failed = ctypes.PyDLL(None).dlinfo(ctypes.c_void_p(library._handle), _TLS_DATA, ctypes.byref(start))
    except (OSError, AttributeError):
        return None
    offset = None if failed or not start.value else _offset(path)
    return None if offset is None else ctypes.c_int.from_address((start.value or 0) + offset)


@cache
def _offset(path: str) -> int | None:
    """Return where the error lies within what the library keeps for each thread."""
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
            (table,), (size, count) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 58)
            sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + at * size) for at in range(count)]
            for _, kind, _, _, start, length, names, _, _, entry in sections:
                _, _, _, _, first, named, *_ = sections[names]
                if kind == _SYMBOLS and (at := elf.find(_ERROR, first, first + named)) >= 0:
                    wanted = struct.pack("<I", at + 1 - first)
                    symbol = elf.find(wanted, start, start + length)
                    while symbol >= 0:
                        if (symbol - start) % entry == 0:
                            return int(struct.unpack_from("<IBBHQ", elf, symbol)[4])
                        symbol = elf.find(wanted, symbol + 1, start + length)
    except (OSError, ValueError, IndexError, struct.error):
        pass
    return None
