"""Every finding says what it rests on, whatever the text; and numbers that cannot be are not reckoned with."""

from __future__ import annotations

import pytest
from incident.gathered import CORPUS, FILE, records
from scenes import SCENES, of

from oomdoctor import fixes
from oomdoctor.incident import from_text
from oomdoctor.model.case import Cause
from oomdoctor.rulebook import load, locate
from oomdoctor.rulebook.facts import facts_of

BOOK = load([locate()], known_fixes=fixes.ids())
TEXTS = [(record["id"], record["text"]) for path in (FILE, CORPUS) if path.exists() for record in records(path)]


def test_every_finding_of_every_text_says_what_it_rests_on():
    assert len(TEXTS) > 240
    found = [
        (name, finding.rule, finding.because)
        for name, text in TEXTS
        for incident in from_text(text)
        for finding in BOOK.match(incident, None)
    ]
    assert len(found) > 240
    assert [(name, rule) for name, rule, because in found if not because] == []


def old_message(*, total="8.00 GiB", allocated="5.00 GiB", free="1.00 GiB", reserved="6.00 GiB", requested="2.00 GiB"):
    (incident,) = from_text(
        f"RuntimeError: CUDA out of memory. Tried to allocate {requested} (GPU 0; {total} total capacity; {allocated} "
        f"already allocated; {free} free; {reserved} reserved in total by PyTorch)"
    )
    return incident


def test_more_free_than_there_is_is_said_to_contradict_and_reckoned_with_by_no_rule():
    message = old_message(free="12.00 GiB")
    found = BOOK.match(message, None)
    assert [(finding.rule, finding.cause) for finding in found] == [("numbers_contradict", Cause.UNKNOWN)]
    assert "12.0 GiB free of 8.00 GiB in total" in found[0].because[0]
    facts = facts_of(message, None)["incident"]
    assert [facts[name] for name in ("free", "total", "elsewhere", "request_ratio", "allocated_ratio")] == [None] * 5
    assert "numbers_contradict" not in {finding.rule for finding in BOOK.match(old_message(free="8.01 GiB"), None)}


def test_what_rounding_makes_larger_leaves_nothing_unused():
    facts = facts_of(old_message(allocated="6.01 GiB", reserved="6.00 GiB"), None)["incident"]
    assert facts["unused"] == 0


@pytest.mark.parametrize("numbers", [{"allocated": "14.00 GiB", "reserved": "15.00 GiB"}, {"reserved": "15.00 GiB"}])
def test_more_allocated_than_there_is_says_where_that_can_be_and_is_reckoned_with_no_further(numbers):
    found = {finding.rule: finding for finding in BOOK.match(old_message(free="0 bytes", **numbers), None)}
    assert "Windows, WSL and managed memory" in " ".join(found["spilled_past_device"].because)
    assert "larger_card" not in found
    assert "fragmentation" not in found
    facts = facts_of(old_message(free="0 bytes", **numbers), None)
    assert facts["incident"]["elsewhere"] is None
    assert "card_that_fits" not in facts["device"]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.first)
def test_every_finding_of_a_measured_failure_says_what_it_rests_on(scene):
    found = BOOK.match(scene.incident, of(scene))
    assert [finding.rule for finding in found if not finding.because] == []
