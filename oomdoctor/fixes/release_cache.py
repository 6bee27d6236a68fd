"""PyTorch's unused cache given back to the driver, for what is allocated beside it.

The caching allocator gives its free segments back by itself before it fails, so ``empty_cache`` never helps a tensor
that PyTorch could not allocate. It does help what asks the driver: the handles and workspaces of cuBLAS and cuDNN,
CuPy, JAX and TensorFlow in the same process. It is proposed for those alone, and where segments are wholly free.
The cache fills again as the cell goes on, so this makes room for what is allocated once and early.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from oomdoctor.model.absence import Refused, Unavailable
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Family
from oomdoctor.model.memory import DeviceMemory
from oomdoctor.model.session import Cells
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines, rewriting

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Session

_BESIDE: Final = {
    Family.CUBLAS: "cuBLAS",
    Family.CUDNN: "cuDNN",
    Family.CUPY: "CuPy",
    Family.JAX: "JAX",
    Family.TF: "TensorFlow",
}
_KINDS: Final = frozenset({"cuda", "xpu"})
_CLEARS: Final = re.compile(r"\bempty_cache\(")


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where something beside PyTorch's allocator was refused and PyTorch holds free segments."""
    asker = _BESIDE.get(incident.family)
    if asker is None:
        return Refused("PyTorch's allocator gives its unused cache back by itself before it fails")
    device = evidence.device
    if device.simulated or device.name.partition(":")[0] not in _KINDS:
        return Refused(f"no cache of PyTorch's is in use on {device.name}")
    cached = _wholly_free(device)
    if isinstance(cached, Unavailable):
        return Refused(f"what PyTorch holds unused is not known: {cached.reason}")
    if cached <= 0:
        return Refused(f"PyTorch holds no segment on {device.name} that is wholly free")
    basis = f"measured: {format_size(cached)} of PyTorch's segments are wholly free, and {asker} asks the driver"
    dose = Dose.of(kind=device.name.partition(":")[0])
    return (Proposal(dose=dose, effect=Effect.EXACT, saves=cached, slowdown=1.0, basis=basis),)


def _wholly_free(device: DeviceMemory) -> int | Unavailable:
    """Return the bytes of segments without a live block: the others cannot be given back."""
    counted = (device.reserved, device.allocated, device.inactive_split)
    missing = next((one for one in counted if isinstance(one, Unavailable)), None)
    if missing is not None:
        return missing
    reserved, allocated, split = (one for one in counted if not isinstance(one, Unavailable))
    return reserved - allocated - split


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Give the unused cache back; no object of the program changes, so there is nothing to undo."""
    session.accelerator.empty_cache()
    yield


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Clear the cache at the start of the failing cell."""
    cell = cells.failing
    if _CLEARS.search(cell.source):
        return Refused("the cell empties the cache already")
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    leading = "\n".join(parsed.code(node) for node in takewhile(rewriting.is_import, parsed.module.body))
    torch = import_lines.torch_name(Cells(history=(*cells.history[:-1], replace(cell, source=leading))))
    if isinstance(torch, Refused) or torch != import_lines.torch_name(cells):
        return torch if isinstance(torch, Refused) else Refused("torch is imported in the middle of the cell")
    name, imports = torch
    line = f"{name}.{dose['kind']}.empty_cache()  # room for what is allocated beside PyTorch's cache"
    module = import_lines.insert_at_top(parsed, parsed.module, [*imports, line])
    return rewriting.join(cells, [rewriting.edit(cells, cell, parsed, module)])


FIX: Final = Fix(
    id="release_cache",
    title="Give PyTorch's unused cache back to the driver",
    effect=Effect.EXACT,
    cost="segments are allocated anew as they are needed",
    propose=propose,
    apply=apply,
    patch=patch,
    is_tried=False,
)
