"""Where rules come from: beside the package or inside it, from packages that are really installed, from folders."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from oomdoctor import fixes, pipeline
from oomdoctor.errors import NotAvailable
from oomdoctor.rulebook import everything, load, sources

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
    monkeypatch.setattr(sources, "__file__", str(package / "rulebook" / "sources.py"))
    with pytest.raises(NotAvailable):
        sources.locate()
    (tmp_path / "rules").mkdir()
    assert sources.locate() == tmp_path / "rules"
    (package / "_rules").mkdir()
    assert sources.locate() == package / "_rules"


def wheel(folder: Path, name: str, files: dict[str, str], points: str) -> Path:
    """Write a wheel by hand: what pip installs, without a build."""
    info = f"{name}-1.0.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[oomdoctor.rules]\n{points}\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*content, f"{info}/RECORD"))
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in content.items():
            archive.writestr(inner, text)
    return path


def install(target: Path, *wheels: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, *map(str, wheels)], check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})


def listed(target: Path, code: str) -> str:
    """Run ``code`` in a fresh interpreter that has what was installed into ``target``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rules_of_an_installed_package_are_loaded_and_its_code_is_not(tmp_path):
    good = wheel(
        tmp_path,
        "goodrules",
        {
            "goodrules/__init__.py": "raise SystemExit('imported')",
            "goodrules/rules/deep/of_a_package.yaml": RULE.replace("NAME", "of_a_package"),
            "goodrules/rules/broken.yaml": RULE.replace("NAME", "broken").replace("0.5", "7"),
        },
        "good = goodrules.rules",
    )
    bad = wheel(tmp_path, "badrules", {"badrules/__init__.py": ""}, "empty = badrules\ngone = nowhere.rules")
    install(tmp_path / "site", good, bad)
    told = listed(
        tmp_path / "site",
        "from oomdoctor import pipeline\n"
        "book = pipeline.rulebook()\n"
        "print([rule.id for rule in book.rules if 'site' in rule.path])\n"
        "print(*book.faults, sep='\\n')",
    )
    names, *faults = told.strip().splitlines()
    assert names == "['of_a_package']"
    assert faults[0].endswith("broken.yaml:7: confidence: input should be less than or equal to 1")
    assert faults[1:] == [
        "entry point empty of badrules:1: there is no package 'badrules' with rule files",
        "entry point gone of badrules:1: there is no package 'nowhere.rules' with rule files",
    ]


def test_a_package_fires_in_an_explanation_and_is_in_the_list(tmp_path):
    rule = RULE.replace("NAME", "of_a_package").replace("0.5", "1.0")
    made = wheel(tmp_path, "goodrules", {"goodrules/of_a_package.yaml": rule}, "good = goodrules")
    install(tmp_path / "site", made)
    text = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 8.00 GiB total capacity; 1.00 GiB free)"
    found = listed(tmp_path / "site", f"import oomdoctor; print(oomdoctor.explain({text!r}).findings[0].rule)")
    assert found.strip() == "of_a_package"
    shown = listed(tmp_path / "site", "from oomdoctor.cli import main; main(['rules', 'show', 'of_a_package'])")
    assert "Rule of a package" in shown


def test_without_such_packages_there_are_the_shipped_rules_and_no_faults():
    assert sources.offered() == ((), ())
    assert everything([], fixes.ids()).faults == ()


def test_examples_of_shipped_rules_are_tried_by_the_tests_and_not_in_a_notebook(tmp_path, monkeypatch):
    """Of other folders they are tried wherever the rules are read."""
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    for folder in (shipped, own):
        (folder / "family").mkdir(parents=True)
        wrong = RULE.replace("see: [activations_dominate]\n", "").replace("free: 1GiB", "free: 4GiB")
        (folder / "family" / f"of_{folder.name}.yaml").write_text(wrong.replace("NAME", f"of_{folder.name}"))
    monkeypatch.setattr(sources, "locate", lambda: shipped)
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
