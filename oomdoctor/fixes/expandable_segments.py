"""Segments that grow instead of segments in pieces, where the pool of the CUDA allocator is fragmented.

The allocator cannot join free pieces of different segments, nor give back a segment that is partly in use. With
``expandable_segments:True`` segments are mapped page by page and grow at their end. Values do not change.

Live, the setting is made at run time, for segments allocated from then on, and put back on exit. torch has had a
function for that under several names; where it has none the change is advice. The allocator parses its settings as a
whole and forgets those that are not said again, so the other settings in force are said again each time.

In the source it is the environment variable, in the first cell that imports torch, before the import: there it holds
for the whole notebook from its next start on. Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html; that
``PYTORCH_ALLOC_CONF`` did not reach the CUDA allocator in torch 2.9: https://github.com/pytorch/pytorch/issues/183387
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.model.absence import Refused, Unavailable
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.names import imports_in

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cell, Cells, Session

__all__ = ["FIX", "apply", "patch", "propose"]

_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_HONOURED: Final = (2, 11)
"""The first torch whose CUDA allocator is known to read ``PYTORCH_ALLOC_CONF``; before it, the older name works."""
_SMALL: Final = 2 << 20
"""Requests are served from the pool of small blocks up to 1 MiB, whose segments of 2 MiB a message prints."""
_SETS: Final = re.compile(r"PYTORCH_\w*ALLOC_CONF|expandable_segments")
_TORCH: Final = frozenset({"torch", "lightning", "transformers", "fastai", "accelerate", "timm"})
_OPTION: Final = "expandable_segments"


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where the free pieces of partly used segments could have served the request, had they been one."""
    device = evidence.device
    if device.simulated or device.name.partition(":")[0] != "cuda":
        return Refused(f"{device.name} has no CUDA allocator whose segments could expand")
    if not sys.platform.startswith("linux"):
        return Refused("expandable segments exist on Linux alone")
    if evidence.code.cuda_graphs is not None:
        return Refused("CUDA graphs keep pools of their own, which expandable segments do not serve")
    split, requested = device.inactive_split, incident.requested
    if isinstance(split, Unavailable):
        return Refused(f"whether the pool is fragmented is not known: {split.reason}")
    if requested is None or requested <= _SMALL or split < requested:
        return Refused("the pool is not fragmented: its free pieces together would not have served the request")
    if not isinstance(device.largest_free_block, Unavailable) and device.largest_free_block >= requested:
        return Refused("the pool is not fragmented: one of its free blocks would have served the request")
    at_once = _setter() is not None
    return (
        Proposal(
            dose=Dose.of(variable=_variable()),
            effect=Effect.EXACT if at_once else Effect.ADVICE,
            saves=split,
            slowdown=1.0,
            basis=f"measured: {format_size(split)} are unused in segments that are partly in use",
            caveat="it holds for this cell at once, and for the whole notebook when the kernel is started again"
            if at_once
            else "it holds when the kernel is started again: this torch cannot set it at run time",
        ),
    )


def _variable() -> str:
    """Return the environment variable that the allocator of the installed torch reads."""
    try:
        numbers = re.findall(r"\d+", version("torch"))[:2]
    except PackageNotFoundError:
        return _VARIABLES[0]
    return _VARIABLES[2] if tuple(map(int, numbers)) >= _HONOURED else _VARIABLES[0]


def _setter() -> Callable[[str], Any] | None:
    """Return torch's function that changes the settings at run time, None where it has none."""
    import torch

    found = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    return found or getattr(torch.cuda.memory, "_set_allocator_settings", None)


def _settings() -> str:
    """Return the settings in force, as text."""
    import torch

    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    said = str(read()) if read is not None else ""
    return said or next((value for name in _VARIABLES if (value := os.environ.get(name))), "")


def _with_option(settings: str, value: str) -> str:
    """Return ``settings`` with the option set; commas within brackets separate items of a list."""
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", settings) if part.strip()]
    kept = [part for part in parts if part.partition(":")[0].strip() != _OPTION]
    return ",".join([*kept, f"{_OPTION}:{value}"])


def _is_on(settings: str) -> bool:
    return re.search(rf"\b{_OPTION}\s*:\s*true\b", settings, re.IGNORECASE) is not None


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Have segments expand from here on; the settings that were in force are put back on exit.

    Raises:
        OomDoctorError: torch cannot do that at run time, or does it already.
    """
    setter, before = _setter(), _settings()
    if _is_on(before):
        raise OomDoctorError("segments expand already")
    if setter is None:
        raise OomDoctorError(f"this torch sets it at its start alone, by {dose['variable']}")
    _set(setter, _with_option(before, "True"))
    try:
        yield
    finally:
        _set(setter, before if before and _OPTION in before else _with_option(before, "False"))


def _set(setter: Callable[[str], Any], settings: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 calls its own function deprecated
            setter(settings)
    except (RuntimeError, ValueError) as error:
        raise OomDoctorError(f"the allocator does not take {settings!r}: {str(error).splitlines()[0]}") from error


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Set the environment variable before the first import of torch."""
    if any(_SETS.search(cell.source) for cell in cells.history):
        return Refused("a cell makes settings of the allocator already")
    first = next((cell for cell in cells.beside(cells.failing).history if _imports_torch(cell.source)), None)
    if first is None:
        return Refused("no cell imports torch: the variable has to be set before that")
    cell = [one for one in cells.history if one.source == first.source][-1]
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    return _with_variable(cells, cell, parsed, f'os.environ["{dose["variable"]}"] = "{_OPTION}:True"')


def _with_variable(cells: Cells, cell: Cell, parsed: rewriting.ParsedCell, setting: str) -> Patch | Refused:
    body = list(parsed.module.body)
    at = next((i for i, node in enumerate(body) if _is_import(node) and _imports_torch(parsed.code(node))), None)
    if at is None:
        return Refused(f"torch is imported under a condition in {cell}")
    has_os = any(("os", "os") in imports_in(parsed.code(node)) for node in body[:at] if _is_import(node))
    first = 0 if has_os else next(i for i, node in enumerate(body) if _is_import(node))
    start = at if has_os else first
    new = list(rewriting.statements(("" if has_os else "import os\n\n") + setting + "\n", parsed))
    lead = list(getattr(body[start], "leading_lines", ()))
    if has_os:
        new[0] = new[0].with_changes(leading_lines=[cst.EmptyLine(indent=False), *lead])
    else:
        new[0] = new[0].with_changes(leading_lines=lead)
    body[start] = body[start].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    module = parsed.module.with_changes(body=[*body[:start], *new, *body[start:]])
    after = rewriting.write(parsed, module)
    if isinstance(after, Refused):
        return after
    replay = after if cell is cells.failing else f"import os\n\n{setting}\n"
    return Patch(edits=(Edit(cell=cell.number, before=cell.source, after=after, replay=replay),))


def _imports_torch(source: str) -> bool:
    return any(home.partition(".")[0] in _TORCH for _, home in imports_in(source))


def _is_import(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Import | cst.ImportFrom)


FIX: Final = Fix(
    id="expandable_segments",
    title="Let the allocator's segments grow instead of leaving pieces",
    effect=Effect.EXACT,
    cost="a little more work to allocate",
    propose=propose,
    apply=apply,
    patch=patch,
    guard=apply,
    is_tried=False,
)
