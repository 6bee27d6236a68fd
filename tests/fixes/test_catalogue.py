"""What holds for every fix, whoever wrote it: found by listing the folder, never by a list."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from oomdoctor.errors import UsageError
from oomdoctor.fixes import catalogue, get, home, ids, title
from oomdoctor.model.fix import Effect, Fix

HERE = Path(__file__).parent
HOME = HERE.parents[1] / "oomdoctor" / "fixes"


def test_every_module_of_the_folder_is_a_fix() -> None:
    assert {home(fix_id).rpartition(".")[2] for fix_id in ids()} == {path.stem for path in HOME.glob("[!_]*.py")}
    assert {fix_id: fix.title for fix_id, fix in catalogue().items()} == {fix_id: title(fix_id) for fix_id in ids()}


@pytest.mark.parametrize("fix_id", ids())
def test_a_fix_keeps_the_protocol(fix_id) -> None:
    fix = get(fix_id)
    assert isinstance(fix, Fix)
    assert fix.id == fix_id
    assert fix.title
    assert fix.cost
    assert not fix.title.endswith(".")
    assert list(inspect.signature(fix.propose).parameters) == ["incident", "evidence"]
    assert list(inspect.signature(fix.patch).parameters) == ["cells", "evidence", "dose"]
    if fix.apply is not None:
        assert list(inspect.signature(fix.apply).parameters) == ["session", "dose"]


@pytest.mark.parametrize("fix_id", ids())
def test_a_tolerance_is_stated_for_equivalent_results_alone(fix_id) -> None:
    fix = get(fix_id)
    assert fix.tolerance is not None or fix.effect is not Effect.EQUIVALENT
    # The strongest promise may be EXACT, and weaker for some models.
    assert fix.tolerance is None or fix.effect in (Effect.EXACT, Effect.EQUIVALENT)
    assert fix.tolerance is None or 0 < fix.tolerance < 0.01


@pytest.mark.parametrize("fix_id", ids())
def test_a_fix_has_its_tests(fix_id) -> None:
    assert (HERE / f"test_{fix_id}.py").is_file()


@pytest.mark.parametrize("fix_id", ids())
def test_a_fix_says_why_it_exists(fix_id) -> None:
    assert len((import_module(home(fix_id)).__doc__ or "").split()) > 30


def test_an_unknown_fix_is_a_usage_error_that_names_the_known() -> None:
    with pytest.raises(UsageError, match=ids()[0]):
        get("no_such_fix")


def test_listing_the_fixes_loads_no_torch() -> None:
    code = "import sys; from oomdoctor.fixes import ids; ids(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], check=False).returncode == 0
