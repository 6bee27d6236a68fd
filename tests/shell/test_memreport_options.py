"""The options of ``%memreport``: what cannot be used is refused with one short line, and nothing is changed for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import Kernel

from oomdoctor.errors import UsageError
from oomdoctor.shell.magics import VERBS
from oomdoctor.shell.memreport import _OPTIONS
from oomdoctor.shell.outputs import PRINTED, put

LONG = "n" * 300
DIGITS = "9" * 5000
REFUSED = {
    "--top=": "--top: it needs a number above zero",
    "--top": "--top: expected one argument",
    f"--top {DIGITS}": "--top: it needs a number above zero, not '999",
    "--top 0": "--top: it needs a number above zero, not '0'",
    "--top 1.5": "--top: it needs a number above zero, not '1.5'",
    "--top \u0663": "--top: it needs a number above zero, not",
    "--json ~nouser/x": "--json: there is no home folder of that name",
    "--snapshot ~nouser/x": "--snapshot: there is no home folder of that name",
    "--html ''": "--html: it needs a path",
    "--json=": "--json: it needs a path",
    "--html .": "--html: it needs a path, of a file in a folder that exists",
    "--snapshot missing/x": "--snapshot: it needs a path, of a file in a folder that exists",
    "--device": "--device: expected one argument",
    f"--{LONG}": "unrecognized arguments: --nnn",
    "--to 3": "--to 3; it takes --device, --top",
    "--html a page.html": "unrecognized arguments: page.html",
    f"{DIGITS}": "unrecognized arguments: 999",
    "'a\x1b[31m\nb'": r"unrecognized arguments: a\x1b[31m\nb",
    "--diff=1": "--diff: ignored explicit argument '1'",
}


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: ascii(words)[:40])
def test_what_cannot_be_used_is_refused_with_one_short_line(words: str) -> None:
    with pytest.raises(UsageError) as refused:
        _OPTIONS.parse_args(shlex.split(words))
    says = str(refused.value)
    assert REFUSED[words] in says
    assert len(says) < 300
    assert says.isprintable()


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", LONG], ids=ascii)
def test_what_cannot_be_written_is_told_in_one_short_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="cannot be written: ") as refused:
        put("text", Path(path))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def test_what_can_be_used_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = _OPTIONS.parse_args(
        shlex.split("--top 12 --device cuda --diff --json 'a name' --html=~/new --snapshot ./s")
    )
    assert (found.top, found.device, found.diff) == (12, "cuda", True)
    assert (str(found.json), found.html, str(found.snapshot)) == ("a name", tmp_path / "new", "s")
    assert _OPTIONS.parse_args(["--json"]).json == _OPTIONS.parse_args(["--json", "-"]).json == PRINTED


# In a kernel ----------------------------------------------------------------------------------------------------

TYPED = {
    f"%memreport --top {DIGITS}": "--top: it needs a number above zero",
    "%memreport --json ~nouser/x": "there is no home folder of that name",
    f"%memreport --html {LONG}": "File name too long",
    f"%memreport --device {LONG}": "is in use: there is cpu",
    "%memreport --device 'c\\x1b'": "is in use: there is cpu",
    f"%memreport '{LONG}": "cannot be read: No closing quotation",
    f"%oomdoctor {LONG}": "there is no verb 'nnn",
    f"%oomdoctor status {LONG}": "status does not take 'nnn",
    f"%oomdoctor auto {LONG}": "auto takes one of off, exact, any, not 'nnn",
    f"%oomdoctor fix {DIGITS}": "no cell that ran out of memory was diagnosed so far",
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run("%load_ext oomdoctor", ok=True)
    yield kernel
    kernel.stop()


@pytest.mark.parametrize("typed", TYPED, ids=lambda typed: typed[:40])
def test_one_line_in_a_kernel(loaded: Kernel, typed: str) -> None:
    files = "sorted(__import__('os').listdir('.'))"
    before = loaded.value(files)
    reply = loaded.run(typed, ok=True)
    assert TYPED[typed] in reply.stderr
    assert reply.stderr.count("\n") == 1
    assert len(reply.stderr) < 500
    assert reply.text.strip() == reply.stderr.strip()
    assert loaded.value(files) == before


def test_a_number_of_thousands_of_digits_is_no_fix(loaded: Kernel) -> None:
    loaded.run("import torch\n%config OomDoctor.forecast_time_s = 0\n%oomdoctor simulate 64MiB", ok=True)
    loaded.run("torch.ones(1 << 26)", ok=False)
    for verb in ("fix", "diff"):
        reply = loaded.run(f"%oomdoctor {verb} {DIGITS}", ok=True)
        assert "unknown fix '999" in reply.stderr
        assert reply.stderr.count("\n") == 1
        assert len(reply.stderr) < 500
    loaded.run("%oomdoctor simulate off", ok=True)


def test_the_help_has_every_verb(loaded: Kernel) -> None:
    shown = loaded.run("%oomdoctor help", ok=True).stdout
    assert all(f"`%oomdoctor {verb}" in shown for verb in VERBS)
    assert "    " not in shown
