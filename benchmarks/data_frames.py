"""What the fixes for pandas save: the programs as they are and as changed, in processes of their own.

    python benchmarks/data_frames.py [FILE]

Told are by how much the cell raises the peak of its process, and what it holds afterwards. A last cell is healed in a
memory group, which needs root and cgroup v1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "fixes")]

import live  # noqa: E402 - of the tests
from guard import SMALL, answered, kernel_in  # noqa: E402
from memory_groups import kills  # noqa: E402 - of the tests

from oomdoctor import fixes  # noqa: E402
from oomdoctor.model.fix import Dose  # noqa: E402

_TEXTS: Final = """\
texts = [f"a long name of a city, number {at % 300}" for at in range(600_000)]
pd.DataFrame({f"t{at}": texts for at in range(6)}).to_csv("big.csv", index=False)
del texts"""
_FRAMES: Final[dict[str, tuple[str, str]]] = {
    "sparse_dummies": ("cities = pd.Series(np.arange(400_000) % 2_000)", "wide = pd.get_dummies(cities)"),
    "category_columns": (
        _TEXTS,
        'frame = pd.read_csv("big.csv")',
    ),
    "narrow_columns": (
        'pd.DataFrame(np.random.default_rng(0).random((800_000, 24)).round(4)).to_csv("big.csv", index=False)',
        'frame = pd.read_csv("big.csv")',
    ),
}
_HELD: Final = """\
import gc, sys
import numpy as np, pandas as pd
def status(name): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
exec(sys.argv[1])
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
most, anon = status("VmHWM"), status("RssAnon")
exec(sys.argv[2])
gc.collect()
print((status("VmHWM") - most) >> 10, (status("RssAnon") - anon) >> 10)
"""


def rows() -> Iterator[str]:
    """Yield a line for each fix, and one for a cell that one of them heals."""
    for fix_id, (before, cell) in _FRAMES.items():
        text = f"{before}\n{cell}\n"
        dose = Dose.of(cell=1, line=len(text.splitlines()))
        patch: Any = fixes.get(fix_id).patch(live.cells_of(text), live.evidence(), dose)
        changed = patch.edits[-1].after.removeprefix(f"{before}\n")
        with tempfile.TemporaryDirectory() as scratch:
            told = [_held(scratch, before, one) for one in (cell, changed)]
        (most, held), (less, kept) = told
        yield f"{fix_id}: peak {most} MiB, {less} MiB with it; held after the cell {held} MiB, {kept} MiB with it"
    before, cell = _FRAMES["sparse_dummies"]
    with kernel_in(SMALL) as (kernel, folder):
        for text in ("%load_ext oomdoctor", "%oomdoctor auto any", f"import numpy as np, pandas as pd\n{before}"):
            answered(kernel, text)
        reply = answered(kernel, cell)
        told = answered(kernel, "import oomdoctor\nprint(oomdoctor.last_case().outcome.fixes)")
        ended = "was lost" if reply is None or told is None else f"{reply.status}, by {told.stdout.strip()}"
        yield f"get_dummies of 763 MiB in a group of 512 MiB, `auto any`: {ended}, counter +{kills(folder)}"


def _held(folder: str, before: str, cell: str) -> list[int]:
    """Return by how many MiB a cell raises the peak of a process, and what it holds afterwards."""
    command = [sys.executable, "-c", _HELD, before, cell]
    return [int(word) for word in subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout.split()]


def main() -> None:
    lines = []
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
