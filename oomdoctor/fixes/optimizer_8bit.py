"""Adam with its state in 8 bits, by torchao or bitsandbytes where one of them is installed.

Adam's two values for each weight take 8 bytes in float32 and 2 in 8 bits, with a scale for each block of them. Both
libraries keep small tensors in 32 bits. They are made for CUDA devices, so that nothing is proposed elsewhere, the
virtual accelerator included.

There is no live form: a loop that holds the old optimizer would go on stepping it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oomdoctor.fixes import _trainer_source
from oomdoctor.fixes._precision_dtype import kind_of_device
from oomdoctor.fixes._precision_optimizer import Maker, adams, replaced
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_LIBRARIES: Final = ("torchao", "bitsandbytes")


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the state in 8 bits by the first library that is installed."""
    del incident
    found = adams(evidence)
    if isinstance(found, Refused):
        return found
    if kind_of_device(evidence) != "cuda":
        return Refused("optimizers with a state of 8 bits are made for CUDA devices")
    library = next((name for name in _LIBRARIES if _has_optimizers(name)), None)
    if library is None:
        return Refused("neither torchao nor bitsandbytes is installed, which have optimizers with a state of 8 bits")
    parameters = sum(one.parameter_bytes for one in found)
    if not parameters:
        return Refused("the optimizer has no parameters that it would keep a state for")
    return (
        Proposal(
            dose=Dose.of(library=library),
            effect=Effect.CHANGES_RESULT,
            saves=2 * parameters * 3 // 4,
            slowdown=1.0,
            basis=f"analytic estimate: two values for each of {format_size(parameters)} of parameters, in 1 byte and "
            "not in 4",
            caveat="Adam's averages are rounded to 8 bits in each step, and begin anew",
        ),
    )


def _has_optimizers(library: str) -> bool:
    """Whether ``library`` is installed with its ``optim``; nothing of it is imported."""
    spec = find_spec(library)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "optim").is_dir() for place in places or ())


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the optimizer of ``dose["library"]`` in the place of Adam."""
    library = str(dose["library"])
    if any("8bit" in cell.source for cell in cells.history):
        return Refused("the cells have to do with optimizers of 8 bits already")
    if (through := _trainer_source.patched("optimizer_8bit", cells, evidence, dose)) is not None:
        return through
    maker = Maker(
        name=lambda cls: f"{cls}8bit",
        keeps=frozenset({"betas", "eps", "weight_decay"}),
        imports=lambda cls: f"from {library}.optim import {cls}8bit",
    )
    return replaced(cells, evidence.code, maker)


FIX: Final = Fix(
    id="optimizer_8bit",
    title="Keep Adam's state in 8 bits",
    effect=Effect.CHANGES_RESULT,
    cost="averages rounded to 8 bits; a little time for each step",
    propose=propose,
    apply=None,
    patch=patch,
)
