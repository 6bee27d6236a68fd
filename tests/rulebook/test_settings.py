"""Rules that the settings of the notebook that runs name."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import oomdoctor
from oomdoctor.rulebook import of_notebook

OOM = "RuntimeError: CUDA out of memory. Tried to allocate 600.00 MiB (GPU 0; 7.50 GiB total capacity; 100.00 MiB free)"
RULE = """\
id: mine
since: 0.1.0
title: One of mine
what: What it looks at.
why: Why.
match: incident.requested > incident.free
confidence: 0.99
cause: unknown
because: ["{incident.requested:size} did not fit."]
false_positives: None.
fixes: []
references: []
examples:
  fires: [{incident: {requested: 2GiB, free: 1GiB}}]
  silent: [{incident: {requested: 1GiB, free: 2GiB}}]
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a rule that is sound and one that is not."""
    place = tmp_path / "rules"
    place.mkdir()
    (place / "mine.yaml").write_text(RULE)
    (place / "broken.yaml").write_text("id: broken\n")
    return place


@pytest.fixture
def notebook(monkeypatch):
    """Stand in for the IPython of a notebook; set its configuration and what it has to configure."""
    shell = SimpleNamespace(configurables=[])
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_in_a_notebook_explain_uses_the_folders_of_the_extension_and_tells_what_it_left_out(folder, notebook):
    class OomDoctor:
        rule_paths = (str(folder),)

    notebook.configurables = [OomDoctor()]
    explained = oomdoctor.explain(OOM)
    assert explained.findings[0].rule == "mine"
    (note,) = explained.to_dict()["notes"]
    assert str(folder / "broken.yaml") in note
    assert "rule left out: " in " ".join(str(explained).split())  # it is broken where the line ends
    shown = explained._repr_mimebundle_()
    assert "rule left out: " in " ".join(shown["text/plain"].split())
    assert "rule left out: " in shown["text/html"]


def test_without_a_notebook_there_are_no_folders(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert of_notebook() == ()
