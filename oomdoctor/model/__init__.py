"""The nouns of oomdoctor: frozen values that the rooms hand to one another, and the live ``Session``.

Those that nearly every fix is written in can be had from here.
"""

from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cell, Cells, Session
from oomdoctor.model.site import Site
from oomdoctor.model.unavailable import Refused, Unavailable

__all__ = [
    "Cell",
    "Cells",
    "Dose",
    "Edit",
    "Effect",
    "Evidence",
    "Fix",
    "Incident",
    "Patch",
    "Proposal",
    "Refused",
    "Role",
    "Session",
    "Site",
    "Unavailable",
]
