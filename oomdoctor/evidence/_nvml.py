"""NVML, opened for one question at a time, its refusals put into plain words.

NVML looks at a card through the driver: it creates no CUDA context and takes no memory there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from oomdoctor.errors import NotAvailable
from oomdoctor.model.absence import Unavailable

__all__ = ["ask", "opened"]

_WORDS: Final = {
    "LibraryNotFound": "this machine has no NVIDIA driver",
    "DriverNotLoaded": "the NVIDIA driver is installed but not loaded",
    "LibRmVersionMismatch": "the NVIDIA driver was updated while its old kernel module is still loaded: restart the "
    "machine (or the container)",
    "NotSupported": "the NVIDIA driver does not tell this of this card",
    "NoPermission": "the NVIDIA driver does not tell this to this user",
    "NotFound": "the NVIDIA driver knows nothing by that name",
    "GpuNotFound": "the NVIDIA driver finds no such card",
    "FunctionNotFound": "the NVIDIA driver is too old to tell this",
    "ArgumentVersionMismatch": "the NVIDIA driver is too old to tell this",
    "Deprecated": "the NVIDIA driver is too new for this version of nvidia-ml-py",
    "GpuIsLost": "the card was lost: the driver cannot reach it until the machine restarts",
    "ResetRequired": "the card must be reset before it can be used",
    "InvalidState": "the card is in a state in which the NVIDIA driver cannot tell this",
    "NotReady": "the card is not ready yet",
    "InUse": "the card is in use for something that rules this out",
    "OperatingSystem": "the operating system, or the container, blocks the question to the NVIDIA driver",
    "Timeout": "the NVIDIA driver did not answer in time",
    "InsufficientPower": "the card's power cables are not connected",
    "IrqIssue": "the NVIDIA driver gets no interrupts from the card",
    "CorruptedInforom": "the card's own store of information is corrupt",
    "Memory": "the NVIDIA driver ran out of host memory",
    "InsufficientResources": "the NVIDIA driver ran out of resources of its own",
    "NoData": "the NVIDIA driver has no data on this yet",
    "Uninitialized": "NVML was shut down by another part of this process",
}
"""What pynvml's errors mean for the reader. Source: ``nvmlReturn_t`` in the NVML API reference."""


@contextmanager
def opened() -> Iterator[Any]:
    """Lend ``pynvml``, initialised.

    Raises:
        NotAvailable: it cannot be had; the text is the reason.
    """
    try:
        import pynvml
    except ImportError:
        raise NotAvailable("the Python package nvidia-ml-py is not installed") from None
    started = ask(pynvml, "nvmlInit")
    if isinstance(started, Unavailable):
        raise NotAvailable(started.reason)
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def ask(nvml: Any, function: str, *args: Any, **options: Any) -> Any:
    """Return what a function of ``pynvml`` answers, or ``Unavailable`` with what it refused for."""
    misfit = getattr(nvml, "NVMLLibraryMismatchError", AttributeError)  # nvidia-ml-py 12 has it not everywhere
    try:
        return getattr(nvml, function)(*args, **options)
    except nvml.NVMLError as error:
        kind = type(error).__name__.removeprefix("NVMLError_")
        return Unavailable(_WORDS.get(kind, f"the NVIDIA driver refused ({_spaced(kind)})"))
    except (misfit, AttributeError):
        return Unavailable("the NVIDIA driver and the installed nvidia-ml-py do not fit together")
    except UnicodeDecodeError:
        return Unavailable("the NVIDIA driver answered in bytes that are no text")


def _spaced(kind: str) -> str:
    """Return a class name as words: ``FreqNotSupported`` as ``freq not supported``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()
