"""``make new FIX=name`` in a copy of the checkout: what it writes, what it refuses, and that no stub passes as done."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oomdoctor.rulebook import load

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path):
    for folder in ("oomdoctor", "rules", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "fixes").mkdir(parents=True)
    return tmp_path


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_checkout(checkout, *command):
    # These tests may themselves run under make, whose flags and variables are not for the make that they start.
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=checkout, env=own, capture_output=True, text=True, check=False, timeout=170)


def make_new(checkout, *arguments):
    return in_checkout(checkout, "make", "--no-print-directory", "new", f"PYTHON={sys.executable}", *arguments)


def test_it_writes_three_files_and_edits_none(checkout):
    before = files_of(checkout)
    done = make_new(checkout, "FIX=offload_states", "RULE=device/states_fill_memory")
    assert done.returncode == 0, done.stderr
    after = files_of(checkout)
    assert before.items() <= after.items()
    assert {str(path) for path in after.keys() - before.keys()} == {
        "oomdoctor/fixes/offload_states.py",
        "tests/fixes/test_offload_states.py",
        "rules/device/states_fill_memory.yaml",
    }
    for path in after.keys() - before.keys():
        assert b"@" not in after[path], f"a placeholder is left in {path}"


def test_no_rule_is_written_where_none_is_named(checkout):
    before = files_of(checkout)
    done = make_new(checkout, "FIX=offload_states")
    assert done.returncode == 0
    assert not [path for path in files_of(checkout).keys() - before.keys() if path.suffix == ".yaml"]
    assert "No rule suggests it yet" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give the fix a name"),
        (["FIX="], "give the fix a name"),
        (["FIX=two words"], "'two words' cannot name a fix"),
        (["FIX=micro-batch"], "'micro-batch' cannot name a fix"),
        (["FIX=_private"], "'_private' cannot name a fix"),
        (["FIX=1st"], "'1st' cannot name a fix"),
        (["FIX=lambda"], "'lambda' cannot name a fix"),
        (["FIX=../outside"], "'../outside' cannot name a fix"),
        (["FIX=checkpoint_blocks"], "oomdoctor/fixes/checkpoint_blocks.py exists already"),
        (["FIX=fresh", "RULE=nofamily"], "'nofamily' cannot name a rule"),
        (["FIX=fresh", "RULE=../outside"], "'../outside' cannot name a rule"),
    ],
)
def test_a_bad_name_gets_one_line_and_changes_nothing(checkout, arguments, said):
    before = files_of(checkout)
    done = make_new(checkout, *arguments)
    assert done.returncode != 0
    own = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("make: ***")]
    assert len(own) == 1
    assert said in own[0]
    assert files_of(checkout) == before


def test_one_file_in_the_way_stops_all_three(checkout):
    (checkout / "tests" / "fixes" / "test_offload_states.py").write_text("# mine\n")
    before = files_of(checkout)
    assert make_new(checkout, "FIX=offload_states").returncode != 0
    assert files_of(checkout) == before


def test_the_new_rule_is_sound_but_for_its_example(checkout):
    assert make_new(checkout, "FIX=offload_states", "RULE=device/states_fill_memory").returncode == 0
    rule = checkout / "rules" / "device" / "states_fill_memory.yaml"
    book = load([rule], known_fixes=["offload_states"])
    assert [fault.message for fault in book.faults] == ["the rule does not fire on this example"]
    rule.write_text(rule.read_text().replace("activation_ratio > 1", "activation_ratio > 0.5"))
    assert load([rule], known_fixes=["offload_states"]).rules[0].file.id == "states_fill_memory"


@pytest.mark.thorough
def test_the_scaffold_passes_the_checks_and_its_tests_fail(checkout):
    assert make_new(checkout, "FIX=offload_states").returncode == 0
    python = sys.executable
    fix, test = "oomdoctor/fixes/offload_states.py", "tests/fixes/test_offload_states.py"
    for command in (
        ("ruff", "check", fix, test),
        ("ruff", "format", "--check", fix, test),
        ("mypy", "--follow-imports=silent", fix),
    ):
        done = in_checkout(checkout, python, "-m", *command)
        assert done.returncode == 0, done.stdout + done.stderr
    done = in_checkout(checkout, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    assert "5 failed" in done.stdout, done.stdout + done.stderr
