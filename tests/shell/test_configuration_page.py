"""The page of all settings: up to date, and with every setting, its values and its default."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from traitlets import Bool, Dict, Float, Int

from oomdoctor.shell.config import OomDoctor

ROOT = Path(__file__).parents[2]
SETTINGS = OomDoctor.class_own_traits(config=True)


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("configuration_page", ROOT / "tools" / "configuration_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_traits_say(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert (tool.main(["--check"]), capsys.readouterr().err) == (0, ""), "run: make docs"


def test_a_page_that_is_out_of_date_is_told(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "PAGE", tmp_path / "docs" / "configuration.md")
    assert tool.main(["--check"]) == 1
    assert capsys.readouterr().err == "docs/configuration.md is out of date: make docs\n"
    assert tool.main([]) == 0
    tool.PAGE.write_text(tool.PAGE.read_text().replace("| `3` |", "| `4` |", 1))
    assert tool.main(["--check"]) == 1


def test_every_setting_has_its_row_with_its_default_and_its_words(tool: ModuleType) -> None:
    lines = [line for line in tool.PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |")) for line in lines]
    rows = {name.strip("`"): rest for name, *rest in cells}
    assert set(rows) == set(SETTINGS)
    for name, (accepted, default, words) in rows.items():
        assert accepted
        assert default.strip("`").replace('"', "'") == repr(SETTINGS[name].default())
        assert words == SETTINGS[name].help != ""


def test_each_value_that_the_page_names_is_accepted(tool: ModuleType) -> None:
    for name, trait in SETTINGS.items():
        for value in re.findall(r"`([^`]+)`", tool.accepts(trait)):
            setattr(OomDoctor(), name, {"True": True, "False": False}.get(value, value.strip('"')))


def test_bounds_are_told_and_a_trait_without_words_is_no_blank_cell(tool: ModuleType) -> None:
    assert tool.accepts(Int(1, min=1, max=20)) == "a whole number from 1 to 20"
    assert tool.accepts(Float(0.0, min=0.0)) == "a number, 0 or more"
    assert tool.accepts(Float(0.0, max=1.0)) == "a number, 1 or less"
    assert tool.accepts(Float(0.0)) == "a number"
    assert tool.accepts(Bool()) == "`True`, `False`"
    with pytest.raises(TypeError, match="cannot describe"):
        tool.accepts(Dict())
