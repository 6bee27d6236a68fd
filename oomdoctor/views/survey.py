"""The memory as it stands now, as the facts that ``%memreport`` shows: each device, then the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from oomdoctor.errors import UsageError
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.growth import Mark
from oomdoctor.views import words
from oomdoctor.views.absences import absences
from oomdoctor.views.device_card import Card, device_card
from oomdoctor.views.document import Document, Line, Section, apart, given, prose
from oomdoctor.views.growth import GrowthRows, since_cell
from oomdoctor.views.holders import TOP
from oomdoctor.views.host_card import host_card

_HOST: Final = "cpu"


def survey(
    evidence: Evidence,
    *,
    top: int = TOP,
    growth: GrowthRows | None = None,
    marks: tuple[Mark, Mark] | None = None,
    absent: Sequence[tuple[str, Unavailable]] = (),
) -> Document:
    """Return one sentence for each memory of ``evidence``, then the devices one by one, then the host.

    Args:
        top: holders to list for each device. Above ``holders.TOP`` weights are listed one by one, and all limits.
        growth: what grew since an earlier report, where that was asked for.
        marks: the counters at the start of the last cell, and now.
        absent: what is known to be missing on this machine, by name.
    """
    found = cards(evidence, top=top)
    return (
        *(_headline(card.headline) for card in found),
        *given(None if marks is None else Line(since_cell(*marks, evidence.devices))),
        *apart(*(growth.blocks() if growth is not None else [])),
        *(Section(card.blocks()) for card in found),
        *apart(*(Line(line, "muted") for line in absences(evidence, absent))),
    )


def cards(evidence: Evidence, *, top: int = TOP) -> tuple[Card, ...]:
    """Return the card of each memory; the host comes last."""
    models = evidence.code.models
    devices = [device for device in evidence.devices if device.name != _HOST]
    host = host_card(
        evidence.host,
        next((device for device in evidence.devices if device.name == _HOST), None),
        evidence.census_of(_HOST),
        models,
        top=top,
        is_alone=not devices,
        simulated=sum(words.known(device.allocated) or 0 for device in devices if device.simulated),
        held=evidence.beside_tensors,
    )
    return (*(device_card(device, evidence.census_of(device.name), models, top=top) for device in devices), host)


def _headline(sentence: str) -> Line:
    text = prose(sentence)
    text.stylize_before("strong", 0, sentence.index(": "))
    return Line(text, "lead")


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
