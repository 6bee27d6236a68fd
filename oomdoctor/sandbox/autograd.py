"""The autograd engine of a forked process, so that a backward runs there.

Two things of the parent's engine would stop it. It has threads where a device is in use, which did not survive, and
notes that at the fork in a byte that nothing resets; and it asks the device which streams are current. The byte is
found by decoding one instruction and cleared, if it read 0 before the fork and 1 after. The second is left without a
device to ask by a backend of Python's that has none.

Limits: x86-64 where the engine has threads.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch.utils import backend_registration

if TYPE_CHECKING:
    from oomdoctor.sandbox.card import Card

_SYMBOL: Final = "_ZN5torch8autograd6Engine30initialize_device_threads_poolEv"
_COMPARE_BYTE: Final = b"\x80\x3d"
"""``cmpb imm8, disp32(%rip)``: seven bytes, of which the displacement is the third to the sixth."""
_LATEST: Final = 24
"""The engine looks at the byte first thing: an instruction that comes later is another one."""


def fork_flag() -> int | None:
    """Return the address of the byte that says that the engine's threads were lost in a fork; None if not found."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        begin = ctypes.cast(library[_SYMBOL], ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    if begin is None:
        return None
    code = ctypes.string_at(begin, 64)
    at = code.find(_COMPARE_BYTE)
    if not 0 <= at <= _LATEST or code[at + 6] != 0:
        return None
    (displacement,) = struct.unpack_from("<i", code, at + 2)
    return begin + at + 7 + int(displacement)


def mend_autograd(card: Card) -> None:
    """Let a backward begin in this forked process, if the parent's engine had threads."""
    if card.flag is not None:
        byte = ctypes.c_ubyte.from_address(card.flag)
        if byte.value == 1:
            byte.value = 0
    if torch._C._get_privateuse1_backend_name() == "privateuseone":
        backend_registration._setup_privateuseone_for_python_backend(rename="oomdoctor_none")
