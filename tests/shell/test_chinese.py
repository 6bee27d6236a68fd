"""Chinese in a real kernel: what a reader sees of a failure, and that nothing but that is another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from frontend import Frontend
from kernels import Kernel
from latin import latin_share, shown
from programs import BUDGET, DATA, MODEL, TRAIN

WATCHED = {"JPY_SESSION_NAME": "notebook.ipynb", "LANGUAGE": ""}
BAR = 0.10
"""Share of letters that may be Latin, where they are neither code, nor names, nor units."""
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"


@pytest.fixture(scope="module")
def chinese() -> Iterator[Kernel]:
    kernel = Kernel({**WATCHED, "LANG": "zh_CN.UTF-8"})
    for cell in (f"%load_ext oomdoctor\n{MODEL}{DATA}", f"%oomdoctor simulate {BUDGET}"):
        kernel.run(cell, ok=True)
    kernel.run("%config OomDoctor.forecast_time_s = 60")
    yield kernel
    kernel.stop()


@pytest.fixture(scope="module")
def failed(chinese: Kernel) -> Frontend:
    """A page that shows a failure with its forecasts."""
    page = Frontend(chinese)
    assert page.run(TRAIN) == "error"
    page.take_until(lambda: page.has("显示改动"))
    return page


def test_the_answer_its_details_and_the_panel(failed: Frontend) -> None:
    shows = [one.get(kind, "") for one in failed.displays.values() for kind in ("text/plain", "text/html")]
    names = ("description", "tooltip", "value", "placeholder")
    shows.append(
        "\n".join(one[name] for one in failed.widgets.values() if "rows" not in one for name in names if one.get(name))
    )
    assert any("内存不足" in text for text in shows)
    assert {f"{latin_share(text):.1%}": shown(text) for text in shows if latin_share(text) > BAR} == {}


@pytest.mark.parametrize(
    "cell",
    [
        "%oomdoctor why",
        "%oomdoctor status",
        "%oomdoctor cases",
        "%oomdoctor help",
        "%oomdoctor config",
        "%oomdoctor rules",
        "%oomdoctor fix 99",
        "%oomdoctor undo",
        "%memreport",
        "%memreport --cells",
        "%memreport --diff",
        "%memreport --help",
        "%memplan --help",
        "%%mempeak\nx = 1",
        f"%%memplan\n{TRAIN}",
    ],
    ids=lambda cell: cell.splitlines()[0],
)
def test_each_magic_answers_in_chinese(cell: str, chinese: Kernel, failed: Frontend) -> None:
    reply = chinese.run(cell, ok=True)
    for text in (reply.stdout, reply.stderr, *reply.data("text/plain"), *reply.data("text/html")):
        assert latin_share(text) <= BAR, shown(text)


def test_the_traceback_and_the_json_are_english(chinese: Kernel, failed: Frontend) -> None:
    case = chinese.value("__import__('oomdoctor').last_case().to_dict()")
    assert not any("\u4e00" <= char <= "\u9fff" for char in json.dumps(case, ensure_ascii=False))
    report = json.loads(chinese.run("%memreport --json", ok=True).stdout)
    assert not any("\u4e00" <= char <= "\u9fff" for char in json.dumps(report, ensure_ascii=False))


def test_the_setting_holds_from_then_on_and_a_bad_value_is_one_line(chinese: Kernel, failed: Frontend) -> None:
    chinese.run("%config OomDoctor.language = 'en'", ok=True)
    assert "auto retry: off" in chinese.run("%oomdoctor status", ok=True).stdout
    reply = chinese.run("%config OomDoctor.language = 'fr'")
    told = [line for line in reply.text.splitlines() if "language" in line]
    assert any("'auto', 'en', 'zh'" in line or "auto" in line for line in told), reply.text
    assert "auto retry: off" in chinese.run("%oomdoctor status", ok=True).stdout
    chinese.run("%config OomDoctor.language = 'auto'", ok=True)
    assert "自动重试：关闭" in chinese.run("%oomdoctor status", ok=True).stdout


def command(*arguments: str, language: str, given: str = OOM) -> str:
    environ = {**os.environ, "LANGUAGE": language}
    run = [sys.executable, "-m", "oomdoctor", *arguments]
    return subprocess.run(run, input=given, env=environ, capture_output=True, text=True, check=False).stdout


def test_the_shell_command_goes_by_the_environment() -> None:
    assert latin_share(command("explain", language="zh_CN")) <= BAR
    assert command("explain", "--json", language="zh_CN") == command("explain", "--json", language="en")
    assert "显示" in command("--help", language="zh_CN")


def test_a_script_is_healed_in_chinese(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{MODEL}{DATA}{TRAIN}", encoding="utf-8")
    run = [sys.executable, "-m", "oomdoctor", "run", "--simulate", BUDGET, str(script)]
    told = subprocess.run(
        run, env={**os.environ, "LANGUAGE": "zh"}, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "已修复" in told.stderr, told.stderr
