"""``make pages``: runs the commands of the pages in ``docs/`` that people write, and writes what they put out.

    python tools/page_sessions.py [--check] [PAGE ...]

A page is one session. A ``python`` block is a cell of IPython; the ``text`` block right after it is what it put out.
With ``title="NAME"`` it is a file of that name instead. Of a ``console`` block, lines that begin with ``$`` are run in
the folder of these files, and the others are what they put out. A comment before a block says more of it:
``<!-- not run -->``, or ``<!-- from: X -->`` and ``<!-- until: Y -->``, the beginnings of the line with which what is
shown of the output begins, and of that before which it ends. Of a traceback, the last line is shown.

``--check`` writes nothing, and tells where another output comes now. Digits are not compared, nor lines that say how
long something took.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_WRITTEN: Final = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/how-to/*.md"))
PAGES: Final = ("README.md", "docs/tutorial.md", *_WRITTEN)
_WIDTH: Final = 88
_NEAR: Final = 5
"""Lines between a cell and its output: the fences, an empty one, and two comments."""
_BLOCK: Final = re.compile(
    r"(?P<said>(?:^<!-- (?:not run|from: [^\n]*|until: [^\n]*) -->\n)*)"
    r"^```(?P<language>python|text|console)(?: title=\"(?P<title>[^\"\n]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_TRACEBACK: Final = re.compile(r"^-{70,}\n\w+ +Traceback.*?^(\w+: [^\n]*)$", re.MULTILINE | re.DOTALL)
_TIME: Final = re.compile(r"\d s\b|time ≈|slower|faster|process|available|in use|USS|host memory|[▣▧◇·]{3}")


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code of a page."""

    said: str
    language: str
    title: str | None
    body: str
    start: int
    end: int

    def cut(self, text: str) -> str:
        """Return what is shown of an output."""
        lines = text.strip("\n").split("\n")
        for said in self.said.splitlines():
            word, _, beginning = said.removeprefix("<!-- ").removesuffix(" -->").partition(": ")
            at = next((at for at, line in enumerate(lines) if line.strip().startswith(beginning)), None)
            if word in ("from", "until") and at is None:
                raise SystemExit(f"no line of the output begins with {beginning!r}:\n{text}")
            if word == "from":
                lines = lines[at:]
            elif word == "until":
                lines = [*lines[:at], "…"]
        return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page that are run or written."""
    return [
        Block(found["said"], found["language"], found["title"], found["body"], *found.span("body"))
        for found in _BLOCK.finditer(page)
    ]


def renewed(page: str) -> str:
    """Run a page and return it with what its commands put out."""
    changes, told = [], None
    found = blocks(page)
    with tempfile.TemporaryDirectory(prefix="oomdoctor-page-") as folder, _Session(folder) as session:
        for block, before in zip(found, [None, *found], strict=False):
            if "not run" in block.said:
                told = None
            elif block.title:
                Path(folder, block.title).write_text(block.body, encoding="utf-8")
                told = None
            elif block.language == "python":
                _refuse_untold(told)
                told = session.run(block.body)
            elif block.language == "console":
                changes.append((block, _console(block, folder)))
            elif told is not None and before is not None and page[before.end : block.start].count("\n") <= _NEAR:
                changes.append((block, block.cut(told)))
                told = None
        _refuse_untold(told)
    for block, text in reversed(changes):
        page = page[: block.start] + text + page[block.end :]
    return page


def _refuse_untold(told: str | None) -> None:
    """Stop where a cell has failed and the page does not say so."""
    if told and re.match(r"\w+Error: |oomdoctor: ", told):
        raise SystemExit(f"a cell failed, and no block with its output follows:\n{told}")


class _Session:
    """An IPython of its own process, which runs cells and says what they put out."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, __file__, "--serve"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=folder, env=_environment(), stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, cell: str) -> str:
        """Run a cell and return what it put out, a traceback as its last line."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(cell) + "\n")
        stdin.flush()
        told: str = json.loads(stdout.readline())
        return _TRACEBACK.sub(lambda error: ". ".join(error[1].split(". ")[:2]), told)


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "COLUMNS": str(_WIDTH), "NO_COLOR": "1", "PYTHONPATH": str(ROOT), "PATH": path}


def _console(block: Block, folder: str) -> str:
    lines = []
    for command in re.findall(r"^\$ (.*)$", block.body, re.MULTILINE):
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        told = re.sub(r"^Traceback \(most recent call last\):\n(?: .*\n)+", "", done.stdout, flags=re.MULTILINE)
        told = told.replace(f"{folder}/", "").replace(f"{ROOT}/", "")
        lines.append(f"$ {command}\n" + (block.cut(told) if told.strip() else ""))
    return "".join(lines)


def _serve() -> None:
    """Run the cells that come in, one a line, and answer with what each put out."""
    from IPython.core.interactiveshell import InteractiveShell

    answers = os.fdopen(os.dup(1), "w")
    shell = InteractiveShell.instance(colors="nocolor")
    for line in sys.stdin:
        told = io.StringIO()
        with redirect_stdout(told), redirect_stderr(told):
            shell.run_cell(json.loads(line), store_history=True)
        answers.write(json.dumps(re.sub(r"\x1b\[[0-9;]*m", "", told.getvalue())) + "\n")
        answers.flush()


def likeness(page: str) -> list[str]:
    """Return the lines of a page without what is another one each time."""
    return [re.sub(r"[\d.]+", "#", line) for line in page.splitlines() if not _TIME.search(line)]


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or say which would change."""
    parser = argparse.ArgumentParser(prog="make pages", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where another output comes now")
    parser.add_argument("pages", nargs="*", metavar="PAGE", default=PAGES)
    args = parser.parse_args(argv)
    stale = 0
    for name in args.pages:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = renewed(before)
        if not args.check:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {name}")
        elif likeness(before) != likeness(after):
            stale += 1
            print(f"{name}: another output comes now: make pages", file=sys.stderr)
            diff = difflib.unified_diff(likeness(before), likeness(after), lineterm="", n=1)
            print("\n".join(diff), file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        _serve()
    else:
        sys.exit(main())
