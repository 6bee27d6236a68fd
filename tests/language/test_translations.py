"""Each text has its translation, with the same placeholders, and a finished text finds it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from oomdoctor import fixes, language
from oomdoctor.language.catalogue import HOLE, Catalogue, holes, read, shipped
from oomdoctor.rulebook import everything
from oomdoctor.rulebook.loading import files_in, locate

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "translations.py"


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return Catalogue(shipped())


@pytest.fixture
def chinese() -> Iterator[None]:
    language.choose("zh")
    yield
    language.choose("auto")


def test_every_text_is_in_both_languages_with_the_same_placeholders(
    tool: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (tool["main"](["--check"]), capsys.readouterr().err) == (0, ""), "run: python tools/translations.py"


def test_the_catalogue_is_written_as_it_is_read(tool: dict[str, Any]) -> None:
    for room, texts in tool["rooms"]().items():
        path = tool["file_of"](room)
        assert tool["page"](room, texts, dict(read(path))) == path.read_text(encoding="utf-8")


def test_shared_words_have_the_same_placeholders(tool: dict[str, Any]) -> None:
    words = dict(read(ROOT / "oomdoctor" / "language" / "zh" / "_words.yaml"))
    assert [fault for english, said in words.items() for fault in tool["disagreements"](english, said)] == []
    assert all(words.values())


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("{b} 中的 {a}", ""),
        ("{b#2}，{a}，{b}", ""),
        ("{a}", "without b: {a} in {b} or {b}"),
        ("{b}、{a}、{c}", "no such placeholder as {c}: {a} in {b} or {b}"),
        ("{b#3}、{a}", "no such placeholder as {b#3}: {a} in {b} or {b}"),
    ],
)
def test_a_translation_with_other_placeholders_is_told(tool: dict[str, Any], said: str, wrong: str) -> None:
    assert "\n".join(tool["disagreements"]("{a} in {b} or {b}", said)) == wrong


def test_a_missing_and_a_stale_text_are_told(tool: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "oomdoctor" / "language" / "zh" / "views.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("gone for good: 没有了\nnot yet: ''\n", encoding="utf-8")
    tool = runpy.run_path(str(TOOL))
    tool["main"].__globals__["ROOT"] = tmp_path
    found = list(tool["faults"]("views", {"module": ["not yet", "quite new"]}))
    assert found == [
        "zh/views.yaml: missing: not yet",
        "zh/views.yaml: missing: quite new",
        "zh/views.yaml: stale: gone for good",
    ]


def test_each_rule_is_said_in_chinese_with_its_own_placeholders() -> None:
    rules = [path for path in files_in([locate()], []) if not path.with_suffix(".zh.yaml").is_file()]
    assert rules == []  # that they agree, `oomdoctor rules check` tells


@pytest.mark.parametrize(
    ("english", "said"),
    [
        ("Out of memory", "内存不足"),
        ("Show change", "显示改动"),
        ("Show change 3", "显示改动 3"),
        ("Forecasts: 2 of 5 fixes, 3 s.", "预测：2/5 个方案，3 s。"),
        ("✓ fits", "✓ 放得下"),
        (
            (
                "`x()` (In[5], line 7) asked for 48 MiB, 3.5 MiB more than was free of the 64 MiB of cuda:0 (simulated)"
                "; 71 % of what is held is activations of `model`."
            ),
            (
                "`x()`（In[5]，第 7 行）请求 48 MiB，比 cuda:0（模拟）的 64 MiB 中空闲的部分多 3.5 MiB；"
                "被占用的部分中 71 % 是激活值（`model`）。"
            ),
        ),
        (
            (
                "Split each batch and accumulate gradients (parts=8): same results up to rounding, about 5 % slower, "
                "peak ≈ 28 MiB of 32 MiB."
            ),
            "把每批拆成小份并做梯度累积 (parts=8)：除舍入误差外结果相同，慢约 5 %，峰值 ≈ 28 MiB，上限 32 MiB。",
        ),
        (
            "Healed: In[5] ran to its end with 2 changes in place, after 1 attempt.",
            "已修复：In[5] 运行完成，2 处改动生效，经 1 次尝试。",
        ),
        ("host memory (memory cgroup)", "主机内存（内存 cgroup）"),
        ("not ours at all: `free`, (free_cache)", "not ours at all: `free`, (free_cache)"),
        ("", ""),
    ],
)
def test_a_finished_text_is_translated(catalogue: Catalogue, english: str, said: str) -> None:
    assert catalogue.translated(english) == said


def test_code_between_backticks_stays() -> None:
    catalogue = Catalogue([("free", "空闲"), ("`{name}` is {state}", "`{name}` 是{state}")])
    assert catalogue.translated("`free` is free") == "`free` 是空闲"
    assert catalogue.translated("`a; free` is free, free") == "`a; free` 是空闲，空闲"


def test_the_template_with_most_text_of_its_own_wins() -> None:
    catalogue = Catalogue([("{a} is held", "{a} 被持有"), ("{a} is held by {b} alone", "{a} 只由 {b} 持有")])
    assert catalogue.translated("x is held by y alone") == "x 只由 y 持有"


SAMPLES = {
    **dict.fromkeys(("n", "len", "line", "lineno", "peak_line", "number", "ranks", "count"), "7"),
    "format_size": "7.5 MiB",
    "about": "≈ 7.5 MiB",
    "percent": "7 %",
    "device": "cuda:0",
    "which": " (q)",
    "change": "+7 MiB",
    "dtype": "float32",
    "fix": "micro_batch(parts=8)",
    "role": "activations",
    "figure": "total",
}


def filled(text: str) -> str:
    return HOLE.sub(lambda hole: SAMPLES.get(hole[0].strip("{}").partition("#")[0], "q7"), text)


def test_every_text_finds_its_own_translation(catalogue: Catalogue) -> None:
    """A text whose placeholders are filled in is known again, whatever else is like it."""

    def letters(text: str) -> str:
        return re.sub(r"[\W_]", "", text)

    others = []
    for english, said in shipped():
        found = catalogue.translated(filled(english))
        assert "{" not in found.replace("{{", "") or "{" in filled(english), english
        if "\n" not in said and letters(found) not in (
            letters(filled(said)),
            letters(catalogue.translated(filled(said))),
        ):
            others.append(f"{english}: {found}")
    rest = [one for one in others if "role}" not in one and "figure}" not in one]
    assert len(rest) <= 12, "\n".join(rest)


def test_a_text_is_translated_in_a_millisecond() -> None:
    texts = [filled(english) for english, _ in shipped() if len(english) < 300]
    catalogue = Catalogue(shipped())
    begun = time.perf_counter()
    for text in texts:
        catalogue.translated(text)
    assert (time.perf_counter() - begun) / len(texts) < 0.003


def test_english_is_the_same_object_and_reads_no_catalogue() -> None:
    code = (
        "import sys; from oomdoctor.language import say; text = 'Out of memory'; assert say(text) is text;"
        "assert 'yaml' not in sys.modules and 'oomdoctor.language.catalogue' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rules_are_said_once_they_are_loaded(chinese: None) -> None:
    book = everything((), fixes.ids())
    assert language.say(book.get("activations_dominate").title) != book.get("activations_dominate").title


def test_placeholders_of_one_name_are_numbered() -> None:
    assert holes("{a} of {b} and {a}") == ["{a}", "{b}", "{a#2}"]


def test_each_fix_and_each_rule_is_told_in_chinese(chinese: None) -> None:
    said = {"size": "7.5 GiB", "percent": "7 %", "count": "7", "": "loss.grad"}
    texts = [text for name in fixes.ids() for text in (fixes.get(name).title, fixes.get(name).cost)]
    for rule in everything((), fixes.ids()).rules:
        sentences = (list(Formatter().parse(sentence)) for sentence in rule.file.because)
        texts += [rule.title]
        texts += ["".join(text + ("" if way is None else said[way]) for text, _, way, _ in one) for one in sentences]
    english = [text for text in texts if not re.search(r"[\u4e00-\u9fff]", language.say(text))]
    assert set(english) <= {"loss.grad."}  # what a fact says by itself
