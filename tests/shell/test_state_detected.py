"""What a cell does that cannot be undone: each kind is told, and a retry by itself refused."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from IPython.core.interactiveshell import InteractiveShell
from state_programs import Planted, cells_of
from state_shell import run, seed, started

from oomdoctor import pipeline
from oomdoctor.model.case import OutcomeKind

CELLS: Final = cells_of("mlp", "AdamW")
KINDS: Final = {
    "an iterator": ("numbered = iter(range(99))", "next(numbered)", "`numbered` is an iterator"),
    "a generator": ("numbered = (n for n in range(99))", "list(numbered)", "`numbered` is an iterator"),
    "a loader's iterator": (
        "batches = iter(train_loader); next(batches)", "x, y = next(batches)", "`batches` is an iterator",
    ),
    "an open file": ("log = open('log.txt', 'w')", "print('step', file=log)", "`log` is an iterator, an open file"),
    "a file that is opened": ("", "open('out.txt', 'a').close()", "open('out.txt', 'a')"),
    "a socket": ("import socket\nhere, there = socket.socketpair()", "here.send(b'a')", "`here` is an iterator"),
    "a process": ("import subprocess", "subprocess.run(['true'])", "subprocess.run"),
    "a process before": (
        "import subprocess\ncat = subprocess.Popen(['cat'], stdin=-1)", "cat.stdin.write(b'a')", "`cat` is",
    ),
    "a database": ("import sqlite3\ndb = sqlite3.connect(':memory:')", "db.execute('create table a (b)')", "`db` is"),
    "a tensor": (
        "raw = torch.zeros(4, requires_grad=True)", "with torch.no_grad(): raw += 1", "`raw` was written in place",
    ),
    "a very large array": ("import numpy as np\nlarge = np.zeros(9_000_000)", "large += 1", "`large` is a large array"),
    "a request": ("class requests:\n    get = staticmethod(print)", "requests.get('http://a')", "requests.get"),
    "a service": ("class wandb:\n    log = staticmethod(print)", "wandb.log({'a': 1})", "wandb.log"),
    "a scalar of a board": ("class SummaryWriter:\n    __getattr__ = lambda *_: print\nboard = SummaryWriter()",
                            "board.add_scalar('loss', 1, 1)", "board.add_scalar('loss', 1, 1)"),
    "git": ("", "!git status", "!git status"),
    "a shell line": ("", "!true", "!true"),
    "a file that is removed": ("import os; open('gone', 'w').close()", "os.remove('gone')", "os.remove('gone')"),
    "a table": (
        "import pandas as pd\ndf = pd.DataFrame({'a': [1]})", "df.to_csv('a.csv', mode='a')", "df.to_csv(",
    ),
    "a log file": (
        "import logging\nlogger = logging.getLogger('cell')\nlogger.addHandler(logging.FileHandler('a.log'))",
        "logger.error('a')", "a.log was written to",
    ),
    "a context variable": (
        "import contextvars; step = contextvars.ContextVar('step')", "step.set(1)", "`step` is a context variable that",
    ),
    "what lies in a long list": (
        "rows = [{'n': 0} for _ in range(30_000)]", "for row in rows: row['n'] += 1", "`rows` has more than 20000",
    ),
    "a very long list that a function writes to": (
        "rows = [0] * 300_000\ndef bump():\n    rows[7] += 1", "bump()", "`rows` has more than 20000",
    ),
    "one item of a very large array": (
        "import numpy as np\nlarge = np.zeros(9_000_000)", "large[7] += 1", "`large` is a large array",
    ),
    "a question": ("input = lambda text: 'y'", "input('go on?')", "input('go on?')"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    with started("micro_batch", "chunked_forward") as made:
        yield made


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_taken_back_refuses(
    shell: InteractiveShell, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, does, told = KINDS[kind]
    monkeypatch.chdir(tmp_path)
    shell.reset(new_session=True)
    seed()
    *first, last = CELLS
    for cell in (*first, setup):
        assert run(shell, cell)[0].success
    with Planted("third iteration"):
        result, _ = run(shell, f"{does}\n{last}")
    case = pipeline.last_case()
    assert case is not None
    assert isinstance(result.error_in_exec, RuntimeError)
    assert (case.outcome.kind, case.outcome.attempts) == (OutcomeKind.REFUSED, 0)
    assert told in case.outcome.why
    assert shell.user_ns["progress"].steps == 2, "nothing was touched"
    for name in ("log", "here", "there", "db"):
        if name in shell.user_ns:
            shell.user_ns[name].close()
    if "cat" in shell.user_ns:
        shell.user_ns["cat"].communicate()
    if "logger" in shell.user_ns:
        handler = shell.user_ns["logger"].handlers.pop()
        handler.close()


def test_what_lies_out_of_sight_is_as_if_the_cell_had_run_once(shell: InteractiveShell) -> None:
    shell.reset(new_session=True)
    seed()
    setup = (
        "import gc, io, sys, threading\n"
        "def counted(): pass\n"
        "local, tally = threading.local(), dict.fromkeys(range(30_000), 0); local.n = 0"
    )
    does = (
        "counted.calls = getattr(counted, 'calls', 0) + 1; local.n += 1; tally[7] += 1\n"
        "thresholds = gc.get_threshold(); gc.set_threshold(thresholds[0] + 1)\n"
        "shown = sys.stdout; sys.stdout = io.StringIO()\n"
    )
    thresholds, stdout = gc.get_threshold(), sys.stdout
    for cell in (*CELLS[:-1], setup):
        assert run(shell, cell)[0].success
    try:
        with Planted("third iteration"):
            result, _ = run(shell, f"{does}{CELLS[-1]}\nsys.stdout = shown")
        assert result.success, result.error_in_exec
        case = pipeline.last_case()
        assert case is not None
        assert case.outcome.kind is OutcomeKind.HEALED, case.outcome.why
        names = shell.user_ns
        counts = (names["counted"].calls, names["local"].n, names["tally"][7])
        assert counts == (1, 1, 1)
        assert names["thresholds"] == thresholds
    finally:
        gc.set_threshold(*thresholds)
        sys.stdout = stdout


def test_what_is_there_and_not_touched_is_no_reason(shell: InteractiveShell) -> None:
    shell.reset(new_session=True)
    seed()
    for cell in (*CELLS[:-1], "numbered = iter(range(9)); raw = torch.zeros(4)"):
        assert run(shell, cell)[0].success
    with Planted("third iteration"):
        assert run(shell, CELLS[-1])[0].success
