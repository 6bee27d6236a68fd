"""The page of the JSON shape: up to date, and what real objects and hand-built ones give has that shape."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import memplans
import pytest
from cases import CASES, offered
from jsonschema import Draft202012Validator

import oomdoctor
from oomdoctor.cli.explain import to_dict
from oomdoctor.model import jsonable
from oomdoctor.model.memory import CellGrowth
from oomdoctor.model.peak import Allocations, Caller, Moment, Peak
from oomdoctor.model.sizes import MIB
from oomdoctor.views.displayed import Report

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*[part for _ in range(4) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(4096, 256))
loader = torch.utils.data.DataLoader(data, batch_size=4096)
for (x,) in loader:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
ASKING = """\
import json
import torch
import oomdoctor

before = oomdoctor.report()
kept = torch.zeros(1024, 256)
after = oomdoctor.report()
model = torch.nn.Linear(256, 256)
growth = after.diff(before).to_dict()
plan = oomdoctor.plan("model(torch.randn(64, 256)).sum().backward()", device_memory="64MiB")
print(json.dumps({"Report": after.to_dict() | {"growth": growth}, "Growth": growth, "MemPlan": plan.to_dict()}))
"""


def test_a_case_tells_which_fixes_were_refused_and_why() -> None:
    case = offered()
    assert case.plan.refusals
    assert case.to_dict()["refusals"] == dict(case.plan.refusals)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("json_page", ROOT / "tools" / "json_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What scripts gave: a report, a growth, a plan, and the case of a failure, which was healed."""
    folder = tmp_path_factory.mktemp("json")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "asking.py").write_text(ASKING)
    for arguments in (
        ["-m", "oomdoctor", "run", "--simulate", "30MiB", "--json", "case.json", "script.py"],
        ["asking.py"],
    ):
        done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"Case": json.loads((folder / "case.json").read_text())}


@cache
def validator(tool: ModuleType, name: str) -> Draft202012Validator:
    whole = {**tool.schema(), "$ref": f"#/$defs/{name}"}
    Draft202012Validator.check_schema(whole)
    return Draft202012Validator(whole)


def faults(tool: ModuleType, name: str, found: Any) -> list[str]:
    """Return where ``found`` is not what the page says of ``name``."""
    given = json.loads(json.dumps(found))
    wrong = [f"{error.json_path}: {error.message}" for error in validator(tool, name).iter_errors(given)]
    return wrong + [f"{where}: a reason beside a value" for where, part in walk(given) if reasons_for_values(part)]


def walk(found: Any, where: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(found, dict):
        yield where, found
    for key, value in found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ():
        yield from walk(value, f"{where}.{key}")


def reasons_for_values(part: dict[str, Any]) -> list[str]:
    return [key for key in part if key.endswith("_why") and part.get(key.removesuffix("_why")) is not None]


def test_the_page_is_what_the_package_says(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert (tool.main(["--check"]), capsys.readouterr().err) == (0, ""), "run: make docs"


def test_a_page_that_is_out_of_date_is_told(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "PAGE", tmp_path / "docs" / "json.md")
    assert tool.main(["--check"]) == 1
    assert capsys.readouterr().err == "docs/json.md is out of date: make docs\n"
    assert tool.main([]) == 0
    tool.PAGE.write_text(tool.PAGE.read_text().replace("`peak`", "`peek`", 1))
    assert tool.main(["--check"]) == 1


def test_every_part_has_its_section_and_every_key_its_row(tool: ModuleType) -> None:
    sections = dict(part.split("\n", 1) for part in tool.PAGE.read_text().split("\n## ")[1:])
    shapes = tool.schema()["$defs"]
    assert set(sections) == set(shapes)
    for name, shape in shapes.items():
        shown = [f"| `{key}` |" for key in shape.get("properties", ()) if not key.endswith("_why")]
        assert [
            row for row in [*shown, *(f"`{word}`" for word in shape.get("enum", ()))] if row not in sections[name]
        ] == []


def test_what_cells_have_left_has_the_shape(tool: ModuleType) -> None:
    cell = CellGrowth(number=7, grown={"cuda:0": MIB, "host": -MIB})
    assert faults(tool, "Cells", {"schema": 1, "cells": [jsonable.plain(cell)]}) == []
    assert faults(tool, "Cells", {"schema": 1, "cells": [{"number": 7, "grown": {"host": None}}]})


def test_what_a_snapshot_held_has_the_shape(tool: ModuleType) -> None:
    caller = Caller(path="train.py", line=3, function="step")
    held = Allocations(size=MIB, count=1, caller=caller, innermost=caller)
    found = Peak(device="cuda:0", moment=Moment.PEAK, allocated=MIB, reserved=2 * MIB, holders=(held,))
    assert faults(tool, "Snapshot", to_dict([found])) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Case", "Growth", "MemPlan", "Report"])
def test_what_a_real_script_gives_has_the_shape(tool: ModuleType, real: dict[str, Any], name: str) -> None:
    assert faults(tool, name, real[name]) == []


@pytest.mark.thorough
def test_the_real_objects_have_what_their_parts_are_told_for(real: dict[str, Any]) -> None:
    case, plan, growth = real["Case"], real["MemPlan"], real["Growth"]
    assert case["outcome"]["kind"] == "healed"
    assert any(fix["patch"] for fix in case["fixes"])
    assert case["evidence"]["census"]["roles"]
    assert case["evidence"]["code"]["loops"]
    assert plan["cards"]
    assert plan["forecast"]["course"]["points"]
    assert sum(device["roles"].get("user_tensor", 0) for device in growth["devices"]) >= 1 << 20


@pytest.mark.parametrize(
    "text", ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "all is well"]
)
def test_explanations_have_the_shape(tool: ModuleType, text: str) -> None:
    assert faults(tool, "Explanation", oomdoctor.explain(text).to_dict()) == []


@pytest.mark.parametrize("name", CASES)
def test_cases_of_every_ending_have_the_shape(tool: ModuleType, name: str) -> None:
    case = CASES[name]()
    assert faults(tool, "Case", case.to_dict()) == []
    assert faults(tool, "Report", Report(case.evidence).to_dict()) == []


@pytest.mark.parametrize("make", [memplans.too_large, memplans.fits, memplans.no_batch_fits, memplans.refused])
def test_plans_of_every_kind_have_the_shape(tool: ModuleType, make: Any) -> None:
    assert faults(tool, "MemPlan", make().to_dict()) == []


def test_a_key_too_many_or_too_few_and_a_wrong_kind_are_seen(tool: ModuleType) -> None:
    right = json.loads(json.dumps(offered().to_dict()))
    assert faults(tool, "Case", right) == []
    places = [where for where, part in walk(right) if not where.endswith((".roles", ".dose", ".refusals")) and part]
    assert len(places) > 20
    for where in places:
        for change in (more, fewer, another_kind):
            wrong = deepcopy(right)
            change(dict(walk(wrong))[where])
            assert not validator(tool, "Case").is_valid(wrong), f"{change.__name__} at {where}"


def more(part: dict[str, Any]) -> None:
    part["surprise"] = 1


def fewer(part: dict[str, Any]) -> None:
    del part[next(iter(part))]


def another_kind(part: dict[str, Any]) -> None:
    part[next(iter(part))] = {"surprise": 1}
