"""The memory as it stands now, as the facts that ``%memreport`` shows: each device, then the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from oomdoctor.errors import UsageError
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.growth import Mark
from oomdoctor.views import words
from oomdoctor.views.absences import absences
from oomdoctor.views.card import Card
from oomdoctor.views.device_card import device_card
from oomdoctor.views.growth import GrowthRows, since_cell
from oomdoctor.views.holders import TOP
from oomdoctor.views.host_card import host_card

_HOST: Final = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All memories of this machine that the program uses; the host comes last.

    Attributes:
        since_cell: what the last cell made grow, empty where that is not known.
        growth: what grew since an earlier report, None where that was not asked for.
        absent: what this machine lacks and what cannot be told, a line each.
    """

    since_cell: str
    growth: GrowthRows | None
    cards: tuple[Card, ...]
    absent: tuple[str, ...]


def survey(
    evidence: Evidence,
    *,
    top: int = TOP,
    growth: GrowthRows | None = None,
    marks: tuple[Mark, Mark] | None = None,
    absent: Sequence[tuple[str, Unavailable]] = (),
) -> Survey:
    """Return the facts of ``evidence``.

    Args:
        top: holders to list for each device. Above ``holders.TOP`` weights are listed one by one, and all limits.
        growth: what grew since an earlier report, where that was asked for.
        marks: the counters at the start of the last cell, and now.
        absent: what is known to be missing on this machine, by name.
    """
    models = evidence.code.models
    devices = [device for device in evidence.devices if device.name != _HOST]
    tensors = next((device for device in evidence.devices if device.name == _HOST), None)
    cards = [device_card(device, evidence.census_of(device.name), models, top=top) for device in devices]
    census = evidence.census_of(_HOST)
    simulated = sum(words.known(device.allocated) or 0 for device in devices if device.simulated)
    host = host_card(
        evidence.host,
        tensors,
        census,
        models,
        top=top,
        is_alone=not devices,
        simulated=simulated,
        held=evidence.beside_tensors,
    )
    return Survey(
        since_cell=since_cell(*marks, evidence.devices) if marks is not None else "",
        growth=growth,
        cards=(*cards, host),
        absent=absences(evidence, absent),
    )


def focus(evidence: Evidence, device: str) -> Evidence:
    """Return ``evidence`` of one device alone, and of the host as a whole.

    Args:
        device: its name, or the beginning of it: the first such device is taken.

    Raises:
        UsageError: no device in use is called so.
    """
    names = [found.name for found in evidence.devices]
    chosen = next((name for name in names if name == device), None)
    chosen = chosen or next((name for name in names if device and name.startswith(device)), None)
    if chosen is None:
        raise UsageError(f"no device {device!r} is in use: there is {' and '.join(names)}")
    return replace(
        evidence,
        devices=tuple(found for found in evidence.devices if found.name == chosen),
        censuses=tuple(census for census in evidence.censuses if census.device == chosen),
    )
