from __future__ import annotations

import pytest
from gathered import FILE, close, records

from oomdoctor.incident import from_text

RECORDS = [record for record in records() if not record["ambiguous"]]


def ids(record):
    return record["id"]


@pytest.mark.parametrize("record", RECORDS, ids=ids)
def test_a_gathered_message_is_read_as_it_was_labelled(record):
    incident = from_text(record["text"])[0]
    assert incident.is_oom == record["is_oom"]
    assert incident.family in (record["family"], *record["alt_families"])
    for name, wanted in record["fields"].items():
        if name == "device":
            assert str(incident.device).rpartition(":")[2] == str(wanted)
        else:
            assert close(getattr(incident, {"max_allowed": "total"}.get(name, name)), wanted), name


@pytest.mark.parametrize("record", [one for one in RECORDS if one["exc_type"]], ids=ids)
def test_the_class_is_the_one_that_the_message_opens_with(record):
    read = from_text(record["text"])[0].exc_type == record["exc_type"]
    assert read != ("exc_type" in record.get("misses", ()))


def test_every_record_names_where_its_wording_was_reported():
    assert len(RECORDS) > 240, FILE
    assert all(record["source"].startswith(("https://", "http://")) for record in records())
    assert sum(not record["is_oom"] for record in RECORDS) >= 30
