"""Bad input gets one clear line and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Kernel

LINES = {
    "%oomdoctor frobnicate": "there is no verb 'frobnicate': there are status, auto, fix",
    "%oomdoctor simulate lots": "'lots' is not a memory size",
    "%oomdoctor simulate": "simulate takes a size",
    "%oomdoctor simulate -3GiB": "'-3GiB' is not a memory size",
    "%oomdoctor auto always": "auto takes one of off, exact, any, not 'always'",
    "%oomdoctor fix": "no cell that ran out of memory was diagnosed so far",
    "%oomdoctor diff 3": "no cell that ran out of memory was diagnosed so far",
    "%oomdoctor undo": "there is nothing to undo",
    "%oomdoctor guard maybe": "guard takes one of on, off, auto, status, not 'maybe'",
    "%%memlimit lots\n1": "'lots' is not a memory size",
    "%%memlimit 4\n1": "'4' has no unit",
    "%oomdoctor status now": "status does not take 'now'",
    "%oomdoctor 'fix": "cannot be read",
    "%memreport --tpo 3": "unrecognized arguments: --tpo 3; it takes --device",
    "%memreport --top many": "argument --top: it needs a number above zero, not 'many'",
    "%memreport --html": "argument --html: expected one argument",
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run("%load_ext oomdoctor", ok=True)
    yield kernel
    kernel.stop()


def test_a_comment_behind_a_magic_is_none_of_its_words() -> None:
    from oomdoctor.shell.magics import _split

    assert _split("fix 1 --insert  # keep it, don't run it") == ["fix", "1", "--insert"]
    assert _split("# nothing else") == []
    assert _split("simulate '16 #1'") == ["simulate", "16 #1"]
    assert _split("--html report#1.html") == ["--html", "report#1.html"]


@pytest.mark.parametrize("line", LINES)
def test_one_line_and_nothing_changed(loaded: Kernel, line: str) -> None:
    names = "sorted(name for name in globals() if not name.startswith('_'))"
    before = loaded.value(names)
    settings = loaded.run("%oomdoctor config", ok=True).stdout
    reply = loaded.run(line, ok=True)
    assert LINES[line] in reply.stderr
    assert reply.stderr.count("\n") == 1
    assert reply.stdout == ""
    assert loaded.value(names) == before
    assert loaded.run("%oomdoctor config", ok=True).stdout == settings


def test_a_fix_that_does_not_exist(loaded: Kernel) -> None:
    loaded.run("import torch\n%config OomDoctor.forecast_time_s = 0\n%oomdoctor simulate 64MiB", ok=True)
    loaded.run("torch.ones(1 << 26)", ok=False)
    for word in ("99", "0", "nosuchfix"):
        reply = loaded.run(f"%oomdoctor fix {word}", ok=True)
        assert f"unknown fix {word!r}" in reply.stderr
        assert reply.stderr.count("\n") == 1
    loaded.run("%oomdoctor simulate off", ok=True)
