from __future__ import annotations

import pytest
from gathered import FILE, close, records

from oomdoctor.incident import from_text

RECORDS = [record for record in records() if not record["ambiguous"]]


def read_otherwise(record):
    """Yield the names of what is read otherwise than it was labelled."""
    incident = from_text(record["text"])[0]
    if incident.is_oom != record["is_oom"]:
        yield "is_oom"
    if incident.family not in (record["family"], *record["alt_families"]):
        yield "family"
    for name, wanted in record["fields"].items():
        if name == "device":
            is_read = str(incident.device).rpartition(":")[2] == str(wanted)
        else:
            is_read = close(getattr(incident, {"max_allowed": "total"}.get(name, name)), wanted)
        if not is_read:
            yield name
    # The class is the one that the message opens with.
    if record["exc_type"] and (incident.exc_type == record["exc_type"]) == ("exc_type" in record.get("misses", ())):
        yield "exc_type"


def test_gathered_messages_are_read_as_they_were_labelled():
    assert [(record["id"], name) for record in RECORDS for name in read_otherwise(record)] == []


@pytest.mark.parametrize(
    ("label", "wrong"), [("is_oom", None), ("family", "-"), ("fields", {"requested": 1}), ("exc_type", "Wrong")]
)
def test_a_label_that_is_not_what_is_read_is_told(label, wrong):
    record = next(one for one in RECORDS if one["exc_type"] and "requested" in one["fields"])
    assert list(read_otherwise(record)) == []
    assert len(list(read_otherwise({**record, label: wrong, "alt_families": []}))) == 1


def test_every_record_names_where_its_wording_was_reported():
    assert len(RECORDS) > 240, FILE
    assert all(record["source"].startswith(("https://", "http://")) for record in records())
    assert sum(not record["is_oom"] for record in RECORDS) >= 30
