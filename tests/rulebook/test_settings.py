"""Rules that the settings name: of the notebook that runs, and of the profile that a new one would have."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from traitlets.config import Config

import oomdoctor
from oomdoctor.cli import main
from oomdoctor.rulebook.sources import of_notebook, of_profile

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
def profile(tmp_path, monkeypatch):
    """Write the settings of the default profile."""
    home = tmp_path / "ipython" / "profile_default"
    home.mkdir(parents=True)
    monkeypatch.setenv("IPYTHONDIR", str(home.parent))

    def write(text, name="ipython_config.py"):
        (home / name).write_text(text)

    return write


@pytest.fixture
def notebook(monkeypatch):
    """Stand in for the IPython of a notebook; set its configuration and what it has to configure."""
    shell = SimpleNamespace(configurables=[], config=Config())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_the_rules_of_the_profile_are_listed_shown_and_used(folder, profile, tmp_path, capsys):
    profile(f"print('a profile that talks')\nc.OomDoctor.rule_paths = [{str(folder)!r}]\n")
    assert main(["rules", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "mine" in {rule["id"] for rule in listed["rules"]}
    assert {fault["path"] for fault in listed["faults"]} == {str(folder / "broken.yaml")}
    assert main(["rules", "show", "mine"]) == 0
    assert "One of mine" in capsys.readouterr().out
    log = tmp_path / "run.log"
    log.write_text(OOM)
    assert main(["explain", "--json", str(log)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][0]["rule"] == "mine"
    assert any("rule left out" in note and "broken.yaml" in note for note in told["notes"])
    assert main(["explain", str(log)]) == 0
    assert "rule left out" in capsys.readouterr().out


def test_a_rule_that_was_left_out_is_told_when_it_is_asked_for(folder, profile, capsys):
    profile(f"c.OomDoctor.rule_paths = [{str(folder)!r}]")
    assert main(["rules", "show", "broken"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("oomdoctor rules: the rule 'broken' is left out: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("c.OomDoctor.rule_paths = ['/a']", "ipython_config.py"),
        ("c.OomDoctor.rule_paths.append('/a')", "ipython_kernel_config.py"),
        ('{"OomDoctor": {"rule_paths": ["/a"]}}', "ipython_config.json"),
    ],
)
def test_the_settings_are_read_in_each_form_that_ipython_reads(text, name, profile):
    profile(text, name)
    folders, faults = of_profile()
    assert [str(one) for one in folders] == ["/a"]
    assert faults == ()


@pytest.mark.parametrize("text", ["raise SystemExit(3)", "1 / 0", "c.OomDoctor.rule_paths = 5", "this is not Python"])
def test_settings_that_cannot_be_read_are_told_and_the_rest_goes_on(text, profile, capsys):
    profile(text)
    assert main(["rules", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed["rules"]) > 50
    assert ["the settings cannot be read: " in fault["message"] for fault in listed["faults"]] == [True]


def test_without_a_notebook_or_settings_there_are_no_folders(profile):
    del profile
    assert of_profile() == ((), ())
    assert of_notebook() == ()


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


def test_in_a_notebook_without_the_extension_the_configuration_counts(folder, notebook):
    notebook.config.OomDoctor.rule_paths = [str(folder)]
    assert oomdoctor.explain(OOM).findings[0].rule == "mine"
