"""Jittor as it stands in this process: what it says of its memory, its variables by name, and the way back of one.

Nothing is computed: Jittor gives a variable memory when somebody asks for its value, and nobody does here. Nothing is
imported: where the program has not loaded Jittor, there is nothing to read.

What writes to a variable, a step of an optimizer and ``assign`` among it, gives its Python object another value. So to
put it back, its first value is held by an object of ours. Limits: ``var[at] = x`` writes into the value itself, as do
writes through the array that ``var.data`` gives; the first is told by the text of the cell, the second leaves no trace.
What lies on a GPU is not held, as that would take memory there.

Source: python/jittor/src/mem/mem_info.cc, var_holder.h and var_holder.cc of Jittor 1.3.11.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, Final

from oomdoctor.model.memory import HostHolding, JittorMemory
from oomdoctor.objects.containers import GONE, living, weak
from oomdoctor.objects.kinds import module_of, mro_of, name_of
from oomdoctor.objects.mementos import Code, Memento

_SIZE: Final = r"\s*(\d+(?:\.\d+)?(?:e\+\d+)?)\s*([KMG]?)B"
_COUNT: Final = re.compile(r"\b(hold_vars|lived_vars|lived_ops):\s*(\d+)")
_POOL: Final = re.compile(rf"is_(?:device|cuda):\s*([01])\s+used:{_SIZE}\([^)]*\)\s+unused:{_SIZE}")
_WHERE: Final = "oomdoctor:0"
"""What is logged as the place of the call, a file and a line."""
_TOTAL: Final = re.compile(rf"\btotal_(cpu|cuda|device)_ram:{_SIZE}")


def is_var(cls: type) -> bool:
    """Return whether objects of a class are Jittor's variables."""
    return any((module_of(one), name_of(one)) == ("jittor", "jittor_core.Var") for one in mro_of(cls))


def role_of(cls: type) -> str | None:
    """Return ``model`` or ``optimizer`` for a class of Jittor's modules or optimizers, or one that derives from it."""
    for one in mro_of(cls):
        if module_of(one).partition(".")[0] == "jittor" and name_of(one) in _ROLES:
            return _ROLES[name_of(one)]
    return None


_ROLES: Final = {"Module": "model", "Optimizer": "optimizer"}


def size_of(var: Any) -> int:
    """Return the bytes of a variable's values, computed or not; 0 for a shape that is known when it is computed."""
    shape = tuple(var.uncertain_shape)
    return prod(shape) * int(var.dtype.dsize()) if all(length >= 0 for length in shape) else 0


def told(text: str) -> JittorMemory | None:
    """Return what a block of ``display_memory_info`` in a text says, None without one."""
    counts = {name: int(count) for name, count in _COUNT.findall(text)}
    if len(counts) < 3:
        return None
    pools = [(on == "1", _bytes(*rest[:2]), _bytes(*rest[2:])) for on, *rest in _POOL.findall(text)]
    on_device = any(on and used for on, used, _ in pools)
    own = [(used, unused) for on, used, unused in pools if on is on_device]
    totals = {"cpu" if where == "cpu" else "device": _bytes(*size) for where, *size in _TOTAL.findall(text)}
    return JittorMemory(
        held=counts["hold_vars"],
        alive=counts["lived_vars"],
        operators=counts["lived_ops"],
        pool_used=sum(used for used, _ in own) if own else None,
        pool_unused=sum(unused for _, unused in own) if own else None,
        total=totals.get("device" if on_device else "cpu"),
        host_total=totals.get("cpu"),
        on_device=on_device,
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** " KMG".index(unit or " "))


def memory(holders: Callable[[], tuple[HostHolding, ...]]) -> JittorMemory | None:
    """Return what Jittor holds now, None where it is not loaded, or is still being loaded.

    ``holders`` finds the names that lead to most of its variables.
    """
    jittor: Any = sys.modules.get("jittor")
    if not hasattr(jittor, "display_memory_info") or not hasattr(jittor, "flags"):
        return None
    found = told(_block(jittor)) or JittorMemory(
        held=jittor.number_of_hold_vars(),
        alive=jittor.number_of_lived_vars(),
        operators=jittor.number_of_lived_ops(),
        on_device=bool(jittor.flags.use_cuda),
    )
    limit = jittor.flags.device_mem_limit if found.on_device else jittor.flags.cpu_mem_limit
    swaps = os.environ.get("JT_SAVE_MEM", "0") not in {"", "0"}
    return replace(found, limit=limit if limit >= 0 else None, swaps=swaps, holders=holders())


def _block(jittor: Any) -> str:
    """Return what Jittor logs of its memory, which is kept from the program's output."""
    if jittor.single_log_capture:  # the program captures the log itself
        return ""
    log, silent = jittor.LOG, jittor.flags.log_silent
    log.log_capture_start()
    try:
        jittor.flags.log_silent = 1
        jittor.core.display_memory_info(_WHERE)
    finally:
        jittor.flags.log_silent = silent
        log.log_capture_stop()
    return "\n".join(entry["msg"] for entry in log.log_capture_read())


class Value(Memento):
    """The value of one variable, held by a variable of ours."""

    def __init__(self, var: Any, path: str) -> None:
        self.path, self._var = path, weak(var)
        self._kept = None if sys.modules["jittor"].flags.use_cuda else _holder_of(var)

    def restore(self, memo: dict[int, Any]) -> None:
        """Give it that value again."""
        var = living(self._var)
        if var is not GONE and self._kept is not None:
            var._update(self._kept)

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence for what lies on a GPU, of which no copy is made, and for what is written into in place."""
        var = living(self._var)
        if self._kept is None and var is not GONE and code.reaches(var):
            yield f"`{self.path}` is a variable of Jittor's on a GPU, of which no copy is made"
        elif code.writes(self.path):
            yield f"`{self.path}` is a variable of Jittor's, and the cell may have written into its value"


def engine() -> Any:
    """Return the state of Jittor's random number generator on the host as a ``c_uint64``, None where there is none.

    Source: ``get_random_engine`` in python/jittor/src/init.cc gives a ``std::default_random_engine``, which in the GNU
    library is ``minstd_rand0``: one number.
    """
    core = sys.modules.get("jittor_core")
    if core is None or sys.platform != "linux":
        return None
    found = getattr(ctypes.CDLL(core.__file__), "_ZN6jittor17get_random_engineEv", None)
    if found is None:
        return None
    found.restype = ctypes.c_void_p
    at = found()
    return ctypes.c_uint64.from_address(at) if at else None


def _holder_of(var: Any) -> Any:
    """Return another variable with the very value of ``var``, which goes on to be the one that writes go to."""
    kept = sys.modules["jittor"].empty([1])
    kept._update(var)
    var._update(var)  # Jittor has one owner for each value, to which ``var[0][1] = x`` writes
    return kept
