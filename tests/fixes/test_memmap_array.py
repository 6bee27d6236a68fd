from __future__ import annotations

import ctypes
import textwrap
from pathlib import Path
from typing import Any

import live
import numpy as np
import pytest
import torch

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("memmap_array")
patch, propose = FIX.patch, FIX.propose

MIB = 1 << 20

TRAINS = """\
import numpy as np
import torch

torch.manual_seed(0)
features = np.load(path)  # a row for each sample
mean, std = features.mean(0), features.std(0)
model = torch.nn.Linear(features.shape[1], 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for start in range(0, len(features), 8):
    x = torch.tensor((features[start:start + 8] - mean) / std)
    loss = model(x.float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -2,7 +2,7 @@
 import torch
\x20
 torch.manual_seed(0)
-features = np.load(path)  # a row for each sample
+features = np.load(path, mmap_mode="r")  # a row for each sample
 mean, std = features.mean(0), features.std(0)
 model = torch.nn.Linear(features.shape[1], 1)
 optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def incident(source: str, requested: int | None = 16 * MIB) -> Incident:
    lines = textwrap.dedent(source).splitlines()
    at = next(index for index, line in enumerate(lines, 1) if ".load(" in line)
    line = CellLine(number=1, line=at, source_line=lines[at - 1].strip())
    return Incident(is_oom=True, family=Family.NUMPY, device="cpu", requested=requested, cell=line)


def patched(source: str, *later: str) -> Patch | Refused:
    cells = live.cells_of(textwrap.dedent(source), *map(textwrap.dedent, later))
    proposed = propose(incident(source), live.evidence())
    assert not isinstance(proposed, Refused), proposed
    return patch(cells, live.evidence(), proposed[0].dose)


def after(source: str, *later: str) -> str:
    made = patched(source, *later)
    assert isinstance(made, Patch), made
    return made.edits[-1].after


def run(source: str, **names: Any) -> dict[str, Any]:
    space: dict[str, Any] = {"np": np, "torch": torch, **names}
    exec(source, space)
    return space


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(64, 33)))
    return tmp_path / "x.npy"


def test_it_is_proposed_by_what_the_array_asked_for() -> None:
    (one,) = propose(incident(TRAINS), live.evidence())  # type: ignore[misc]
    assert (str(one.dose), one.effect, one.saves) == ("cell=1, line=5", Effect.EXACT, 16 * MIB)
    assert one.basis == "the array asked for 16.0 MiB, which stay in its file"


def test_golden_diff_and_second_time() -> None:
    made = patched(TRAINS)
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    again = patch(live.cells_of(made.edits[0].after), live.evidence(), Dose.of(cell=1, line=5))
    assert isinstance(again, Refused)
    assert "mapped already" in again.reason


def test_the_same_bits_after_training_and_the_file_is_as_it_was(path: Path) -> None:
    content = path.read_bytes()
    plain = run(TRAINS, path=path)
    rng = torch.get_rng_state()
    fixed = run(after(TRAINS), path=path)
    assert torch.equal(torch.get_rng_state(), rng)
    assert fixed["losses"] == plain["losses"]
    assert live.same(live.values(plain["model"]), live.values(fixed["model"]))
    assert path.read_bytes() == content


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind, without what the C library keeps free for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel's count is read from /proc")
def test_the_array_stays_in_its_file(path: Path) -> None:
    np.save(path, np.ones((5120, 1024)))
    source = "x = np.load(path)\ntotal = sum(float(x[i].sum()) for i in range(5120))\n"
    taken = []
    for text in (source, after(source)):
        before = anonymous_bytes()
        space = run(text, path=path)
        taken.append(anonymous_bytes() - before)
        assert space["total"] == 5120 * 1024
        del space
    assert taken[0] > 38 * MIB
    assert taken[1] < 2 * MIB


READS = """
class Rows(torch.utils.data.Dataset):
    def __init__(self, path):
        self.rows = np.load(path)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        return torch.tensor(self.rows[i]), self.rows.shape
rows = Rows(path)
first = rows[3][0]
"""


def test_an_array_of_a_data_set_whose_samples_are_copies(path: Path) -> None:
    text = after(READS)
    assert 'self.rows = np.load(path, mmap_mode="r")' in text
    plain, fixed = run(READS, path=path), run(text, path=path)
    assert torch.equal(plain["first"], fixed["first"])
    assert isinstance(fixed["rows"].rows, np.memmap)


@pytest.mark.parametrize(
    "use",
    [
        "y = x[idx].astype(np.float32)",
        "y = np.array(x[:8])\ny += 1",
        "y = x[::2] * 2\ny[0] = 1",
        "n, m = x.shape\ny = np.unique(x)",
        "def rows(i):\n    return torch.tensor(x[i])",
        "y = x[0].copy()\ny[:] = 0\ndel x",
        "if (x > 3).any():\n    y = -x[0]",
        "y = x\nfor row in x:\n    total += row[0] == 1",
        "data = TensorDataset(torch.tensor(x))",
    ],
)
def test_uses_that_only_read(use: str) -> None:
    assert 'mmap_mode="r"' in after(f"x = np.load(path)\n{use}")


@pytest.mark.parametrize(
    "use",
    [
        "t = torch.from_numpy(x[0])",
        "t = torch.as_tensor(x)",
    ],
)
def test_uses_that_may_share_memory_are_refused(use: str) -> None:
    for sources in ((f"x = np.load(path)\n{use}",), ("x = np.load(path)", use)):
        refused = patched(*sources)
        assert isinstance(refused, Refused), refused.diff()
        assert "may share memory with the array" in refused.reason


def test_what_writes_to_it_by_another_name_is_told_by_an_error(path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        run(after("x = np.load(path)\ny = x[0]\ny[0] = 1"), path=path)


@pytest.mark.parametrize(
    "writer",
    [
        "from numpy import save\nsave(path, y)",
        "from numpy import savez as keep\nkeep(path, y)",
        "from numpy import *\nsave(path, y)",
        "import numpy as xp\nxp.save(path, y)",
        "from numpy.lib.format import open_memmap\ny = open_memmap(path, 'w+')",
        "y = numpy.lib.format.open_memmap(path, 'w+')",
        "y = np.memmap(path)",
        "y.tofile(path)",
        "pool.submit(np.save, path, y)",
        "%time np.save(path, y)",
        "%%timeit\nnp.save(path, y)",
        "%%somewhere\nnp.save(path, y)",
    ],
)
def test_a_cell_that_writes_arrays_is_known_by_what_it_calls(writer: str) -> None:
    refused = patched("x = np.load(path)", writer)
    assert isinstance(refused, Refused), refused.diff()
    assert "cell 2 writes arrays to files" in refused.reason


@pytest.mark.parametrize(
    "cell",
    [
        "subprocess.run([sys.executable, '-c', 'import numpy as np; np.save(path, 1)'])",
        "# np.save(path, y)",
        "!python -c 'np.save(path, 1)'",
        "%%writefile make.py\nnp.save(path, 1)",
        "save(model)",
        "model.save(path)",
        "isinstance(y, np.memmap)",
    ],
)
def test_a_cell_that_only_speaks_of_writing_is_none(cell: str) -> None:
    made = patch(live.cells_of(cell, "x = np.load(path)"), live.evidence(), Dose.of(cell=2, line=1))
    assert isinstance(made, Patch), made
    assert made.edits[0].after == 'x = np.load(path, mmap_mode="r")'


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x = np.load('a.npz')['x']", ".npz"),
        ("x = np.load(path, mmap_mode='c')", "mapped already"),
        ("x = np.load(path, allow_pickle=True)", "Python objects"),
        ("f = open(path, 'rb')\nx = np.load(f)", "open file"),
        ("with open(path, 'rb') as f:\n    x = np.load(f)", "open file"),
        ("x = np.load(path)\nnp.save(path, y)", "writes arrays to files"),
        ("x = np.load(*paths)", "no array as a whole"),
    ],
)
def test_patch_refuses(source: str, why: str) -> None:
    refused = patched(source)
    assert isinstance(refused, Refused), refused.diff()
    assert why in refused.reason


def test_refusals() -> None:
    def why(found: Incident) -> str:
        refused = propose(found, live.evidence())
        assert isinstance(refused, Refused)
        return refused.reason

    assert "a device ran out" in why(live.INCIDENT)
    assert "reads no array" in why(incident("x = torch.load(path)"))
    assert "how large the array is" in why(incident(TRAINS, requested=None))
    assert FIX.apply is None
