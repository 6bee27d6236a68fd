"""Where rules come from: beside the package or inside it, and from folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomdoctor import fixes, pipeline
from oomdoctor.errors import NotAvailable
from oomdoctor.rulebook import everything, load, loading, locate

RULE = """\
id: NAME
since: 0.1.0
title: Rule of a package
what: What it looks at.
why: Why.
match: incident.requested > incident.free
confidence: 0.5
cause: unknown
because: ["{incident.requested:size} did not fit."]
false_positives: None.
fixes: []
see: [activations_dominate]
references: []
examples:
  fires: [{incident: {requested: 2GiB, free: 1GiB}}]
  silent: [{incident: {requested: 1GiB, free: 2GiB}}]
"""


def test_the_rules_are_found_beside_the_package_or_inside_it(tmp_path, monkeypatch):
    package = tmp_path / "oomdoctor"
    (package / "rulebook").mkdir(parents=True)
    monkeypatch.setattr(loading, "__file__", str(package / "rulebook" / "loading.py"))
    with pytest.raises(NotAvailable):
        locate()
    (tmp_path / "rules").mkdir()
    assert locate() == tmp_path / "rules"
    (package / "_rules").mkdir()
    assert locate() == package / "_rules"


def test_the_shipped_rules_have_no_faults():
    assert everything([], fixes.ids()).faults == ()


def test_examples_of_shipped_rules_are_tried_by_the_tests_and_not_in_a_notebook(tmp_path, monkeypatch):
    """Of other folders they are tried wherever the rules are read."""
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    for folder in (shipped, own):
        (folder / "family").mkdir(parents=True)
        wrong = RULE.replace("see: [activations_dominate]\n", "").replace("free: 1GiB", "free: 4GiB")
        (folder / "family" / f"of_{folder.name}.yaml").write_text(wrong.replace("NAME", f"of_{folder.name}"))
    monkeypatch.setattr(loading, "locate", lambda: shipped)
    book = everything([own], fixes.ids())
    assert [rule.id for rule in book.rules] == ["of_shipped"]
    assert [Path(fault.path).stem for fault in book.faults] == ["of_own"]
    assert "does not fire on this example" in str(load([shipped], None).faults[0])


def test_a_folder_of_the_users_is_read_again_when_a_file_has_changed(tmp_path):
    rule = tmp_path / "mine.yaml"
    rule.write_text(RULE.replace("NAME", "mine").replace("unknown", "gremlins"))
    first = pipeline.rulebook((tmp_path,))
    assert [fault.line for fault in first.faults] == [8]
    assert pipeline.rulebook((tmp_path,)) is first
    rule.write_text(RULE.replace("NAME", "mine"))
    mended = pipeline.rulebook((tmp_path,))
    assert mended.faults == ()
    assert mended.get("mine").path == str(rule)
    assert len(mended.rules) == len(first.rules) + 1


def test_a_folder_in_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.yaml").write_text(RULE.replace("NAME", "mine"))
    assert pipeline.rulebook((Path("~/mine"),)).get("mine").id == "mine"


def test_a_folder_that_is_not_there_is_a_fault(tmp_path):
    (fault,) = pipeline.rulebook((tmp_path / "nowhere",)).faults
    assert "there is no such file or folder" in str(fault)
