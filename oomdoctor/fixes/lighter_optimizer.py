"""An optimizer that keeps less for each weight: Adafactor, or SGD with momentum, in the place of Adam.

Adam keeps two values for each weight. Adafactor keeps one for each row and column of a matrix, SGD with momentum one
for each weight. Both train in another way, and their learning rates mean something else, so this is the user's to
choose. The optimizer is made where it was made before, and schedulers on it with it; it begins without a history.

There is no live form: a loop that holds the old optimizer would go on stepping it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._precision_optimizer import Maker, adams, replaced
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_ANEW: Final = "it begins without what the optimizer has gathered so far, and its learning rate has to be found anew"
_MAKERS: Final = {
    "SGD": Maker(
        name=lambda _: "torch.optim.SGD", keeps=frozenset({"weight_decay", "foreach"}), adds=("momentum=0.9",)
    ),
    "Adafactor": Maker(name=lambda _: "torch.optim.Adafactor", keeps=frozenset({"weight_decay", "foreach"})),
}
_CAVEATS: Final = {
    "SGD": f"SGD with momentum takes steps of another size and direction than Adam: {_ANEW}",
    "Adafactor": f"Adafactor scales its steps by rows and columns and by the size of the weights: {_ANEW}",
}


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose SGD with momentum, which halves the state, and Adafactor, which leaves next to none of it."""
    del incident
    through = _trainer_source.owner(evidence.code, "lighter_optimizer")
    found = adams(evidence)
    if isinstance(found, Refused):
        return found
    parameters = sum(one.parameter_bytes for one in found)
    if not parameters:
        return Refused("the optimizer has no parameters that it would keep a state for")
    state = evidence.census.bytes_of(Role.OPTIMIZER_STATE)
    known = f"the census found {format_size(state)} of state" if state else "its state is still to come"
    saves = {"SGD": parameters, "Adafactor": 2 * parameters}
    return tuple(
        Proposal(
            dose=Dose.of(optimizer=name),
            effect=Effect.CHANGES_RESULT,
            saves=saves[name],
            slowdown=1.0,
            basis=f"analytic estimate: Adam keeps two values for each of {format_size(parameters)} of parameters, "
            f"{name} {'one' if name == 'SGD' else 'next to none'}; {known}",
            caveat=_CAVEATS[name] if through is None else _trainer_terms.ADAFACTOR,
        )
        for name in (_available() if through is None else ("Adafactor",))
    )


def _available() -> tuple[str, ...]:
    import torch

    # Adafactor is in torch from 2.5 on.
    return tuple(name for name in _MAKERS if hasattr(torch.optim, name))


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with ``dose["optimizer"]`` in the place of Adam."""
    if (through := _trainer_source.patched("lighter_optimizer", cells, evidence, dose)) is not None:
        return through
    return replaced(cells, evidence.code, _MAKERS[str(dose["optimizer"])])


FIX: Final = Fix(
    id="lighter_optimizer",
    title="Train with an optimizer that keeps less for each weight",
    effect=Effect.CHANGES_RESULT,
    cost="another course of the training; its learning rate has to be found anew",
    propose=propose,
    apply=None,
    patch=patch,
)
