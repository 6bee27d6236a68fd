"""Wordings of many programs, and of people who write what happened; each in ``wordings.jsonl``, made up by us.

``families`` are the readings that a text allows, ``fields`` the numbers that it tells in bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gathered import close, records

from oomdoctor.incident import from_text

WORDINGS = records(Path(__file__).with_name("wordings.jsonl"))


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: wording["text"][:60])
def test_a_wording_is_read_for_what_it_says(wording):
    incident = from_text(wording["text"])[0]
    assert incident.family in wording["families"]
    assert incident.is_oom == (wording["families"][0] not in ("not_oom", "triton_resource"))
    for name, wanted in wording["fields"].items():
        if name == "device":
            assert str(incident.device).rpartition(":")[2] == str(wanted)
        else:
            assert close(getattr(incident, name), wanted), name


def test_there_are_failures_and_look_alikes():
    told = [wording["families"][0] == "not_oom" for wording in WORDINGS]
    assert sum(told) > 40 < told.count(False)
