"""The least that a cell needs, where no shadow run can be had: what is there already, and what training adds to it.

Gradients take as much as the parameters that are trained, Adam's state twice as much. Activations are not counted, so
this tells what cannot fit, and never what does.
"""

from __future__ import annotations

from typing import Final

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.code import OptimizerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.memory import Role
from oomdoctor.model.plan import Forecast

_STATES: Final = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Adagrad": 1, "RMSprop": 1}
"""Values that an optimizer keeps for each weight with its default settings. Source: ``torch.optim``, ``state[...]``."""


def least(evidence: Evidence, budget: int | None, why: str) -> Forecast | None:
    """Return the least that the last cell needs, None where it trains nothing that was found.

    Args:
        why: why there is no forecast.
    """
    allocated = evidence.device.allocated
    stepped = {text for loop in evidence.code.loops if loop.in_failing_run for text in loop.optimizers}
    trained = [facts for facts in evidence.code.steppers if facts.path in stepped]
    if isinstance(allocated, Unavailable) or not trained:
        return None
    gradients = sum(facts.parameter_bytes for facts in trained)
    states = sum(map(_state_bytes, trained))
    missing = max(gradients - evidence.census.bytes_of(Role.GRADIENT), 0)
    missing += max(states - evidence.census.bytes_of(Role.OPTIMIZER_STATE), 0)
    basis = "analytic estimate: what is held now, gradients and optimizer state; activations are not counted"
    return Forecast(basis=basis, budget=budget, peak=allocated + missing, refused=why)


def _state_bytes(facts: OptimizerFacts) -> int:
    return facts.parameter_bytes * _STATES.get(facts.type_name, 0) if facts.home.startswith("torch.optim") else 0
