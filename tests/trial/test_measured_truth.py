"""What the name of each program says of it (same, differs, unseen within two steps) is what running it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "programs").glob("*.py"))

Differences = dict[str, str | None]


def _measured(programs: list[Path], *options: str) -> Differences:
    command = [sys.executable, str(HERE / "truth.py"), *options, *map(str, programs)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return {name: difference for name, difference, _ in map(json.loads, answer.stdout.splitlines())}


@pytest.fixture(scope="module")
def whole() -> Differences:
    """The first difference of each pair, run to its end."""
    return _measured(PROGRAMS)


@pytest.fixture(scope="module")
def begun() -> Differences:
    """The first difference after two steps of the optimizers, of those pairs that differ in the end."""
    return _measured([path for path in PROGRAMS if not path.stem.startswith("same_")], "--steps", "2")


@pytest.mark.thorough  # all are run, whichever is asked for; their names change where they do
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_name_says_what_is_measured(program: Path, whole: Differences, begun: Differences) -> None:
    """A difference that is told as unseen shows only after two steps or in many rows, any other within two steps."""
    kind, difference = program.stem.split("_")[0], whole[program.name]
    if kind == "same":
        assert difference is None
    else:
        assert difference is not None
        few_rows = "Not visible in 16 rows" in program.read_text()  # here all rows of a batch are run
        assert few_rows or (begun[program.name] is None) == (kind == "unseen")


def test_each_program_says_what_it_shows() -> None:
    """There are many of both kinds, and the difference of each is told with where it can be seen."""
    kinds = [path.stem.split("_")[0] for path in PROGRAMS]
    assert set(kinds) == {"same", "differs", "unseen"}
    assert min(kinds.count("same"), kinds.count("differs")) >= 30
    for path in PROGRAMS:
        first = path.read_text().splitlines()[0]
        assert first.startswith('"""')
        assert first.endswith('."""')
        assert path.stem.startswith("same_") or "isible " in first, path.name
