"""How far one value walks through the house: ``benchmarks/walk.py [--write]``.

Three walks, each of one value from where it is known to where it is used: the evidence of a failure to what is shown
of it, the cells to a patch, the session to a plan. A step of a walk is a call of a function of the package that is
handed the value. Files are those whose functions are; stays are runs of steps within one file; returns are stays in
a file that was left before. What runs in forked copies of the process is not seen.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, Final

os.environ["OMP_NUM_THREADS"] = "1"

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import oomdoctor
from oomdoctor import fixes
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose
from oomdoctor.model.session import Cell, Cells, Session
from oomdoctor.model.unavailable import Refused

PACKAGE: Final = Path(oomdoctor.__file__).parent
RESULTS: Final = Path(__file__).parent / "results" / "walk.txt"
CELLS: Final = (
    """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Dropout(), nn.Linear(2048, 10))
optimizer = torch.optim.AdamW(model.parameters())
batches = [(torch.randn(2048, 256), torch.randint(10, (2048,))) for _ in range(3)]
""",
    """\
losses = []
for inputs, targets in batches:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
""",
)
LIMIT: Final = "64MiB"


@dataclass(slots=True)
class Walk:
    """The files in which functions were handed a value of one class, in the order of their calls."""

    kind: type
    steps: list[str] = field(default_factory=list)
    _generators: set[FrameType] = field(default_factory=set)

    def step(self, frame: FrameType) -> None:
        """Note a call, if it is one of a function of the package that is handed such a value."""
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)) or frame in self._generators:
            return
        if code.co_flags & inspect.CO_GENERATOR:
            self._generators.add(frame)  # that it goes on is no call
        handed = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if self.kind is object or any(type(frame.f_locals.get(name)) is self.kind for name in handed):
            self.steps.append(code.co_filename)

    def __str__(self) -> str:
        stays, files = [file for file, _ in groupby(self.steps)], dict.fromkeys(self.steps)
        counts = f"{len(files):>3} files  {len(stays):>4} stays  {len(stays) - len(files):>4} returns"
        names = ", ".join(str(Path(file).relative_to(PACKAGE).with_suffix("")) for file in files)
        return "\n".join([counts, *textwrap.wrap(names, 110, initial_indent="    ", subsequent_indent="    ")])


@contextlib.contextmanager
def walking(*walks: Walk) -> Iterator[None]:
    """Follow the values of some walks while the block runs."""

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            for walk in walks:
                walk.step(frame)

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


def walks() -> Iterator[tuple[str, Walk]]:
    """Yield each walk by its name."""
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    evidence, session, cells, everything = Walk(Evidence), Walk(Session), Walk(Cells), Walk(object)
    with capture_output() as shown:
        for line in ("%load_ext oomdoctor", f"%oomdoctor simulate {LIMIT}", CELLS[0]):
            shell.run_cell(line, store_history=True)
        with walking(evidence, session):
            shell.run_cell(CELLS[1], store_history=True)
    case = oomdoctor.last_case()
    assert case is not None, shown.stdout
    assert not isinstance(case.evidence, str)
    both = Cells(history=tuple(Cell(number=number, source=source) for number, source in enumerate(CELLS, 3)))
    with walking(cells, everything):
        patch = fixes.get("micro_batch").patch(both, case.evidence, Dose.of(parts=4))
    assert not isinstance(patch, Refused), patch
    yield "evidence, from a failure to what is shown", evidence
    yield "session, from a failure to a plan", session
    yield "cells, to a patch of micro_batch", cells
    yield "everything, to a patch of micro_batch", everything
    with capture_output():
        shell.run_cell("%unload_ext oomdoctor")


def main() -> int:
    """Print the walks; ``--write`` puts them into ``results/walk.txt``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put them into results/walk.txt")
    chosen = parser.parse_args()
    text = "\n".join(f"{name}\n{walk}" for name, walk in walks())
    print(text)
    if chosen.write:
        RESULTS.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
