from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor import fixes
from oomdoctor.fixes import optimizers
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("optimizer_8bit")
patch, propose = FIX.patch, FIX.propose

SETUP = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    criterion = nn.CrossEntropyLoss()
    batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(4)]
"""
MADE = """
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-3,
        betas=(0.9, 0.95),
        fused=True,
    )
"""
LOOP = """
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
"""
STAND_IN = """
import torch

class AdamW8bit(torch.optim.AdamW):
    '''A stand-in with the arguments of the real one, as its documentation has them.'''

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
"""


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def run(sources: list[str], namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    namespace = {} if namespace is None else namespace
    for source in sources:
        exec(compile(textwrap.dedent(source), "<cell>", "exec"), namespace)
    return namespace


def evidence(cells: Cells, device: str = "cuda:0") -> Evidence:
    namespace = run([cell.source for cell in cells.history[:-1]])
    kinds = (nn.Module, torch.optim.Optimizer)
    found = [[(name, value) for name, value in namespace.items() if isinstance(value, kind)] for kind in kinds]
    base = live.evidence()
    seen = replace(base.devices[0], tensor_device=device)
    return Evidence(devices=(seen,), host=base.host, censuses=base.censuses, code=facts(cells, namespace, *found))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of a name of its own, so that no real library and no later test is touched."""
    home = tmp_path / "eight_bits" / "optim"
    home.mkdir(parents=True)
    (home.parent / "__init__.py").write_text("")
    (home / "__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "eight_bits"


GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,7 +1,8 @@
\x20
-optimizer = torch.optim.AdamW(
+from eight_bits.optim import AdamW8bit
+
+optimizer = AdamW8bit(
     model.parameters(),
     lr=1e-3,
     betas=(0.9, 0.95),
-    fused=True,
 )
"""


def test_golden_diff_and_the_same_from_a_retry(installed: str) -> None:
    cells, dose = cells_of(SETUP, MADE, LOOP), Dose.of(library=installed)
    made = patch(cells, evidence(cells), dose)
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN
    (edit,) = made.edits
    fresh = run([SETUP, edit.after, LOOP])
    retried = run([SETUP, MADE])
    run([edit.replay, LOOP], retried)
    assert type(retried["optimizer"]).__name__ == type(fresh["optimizer"]).__name__ == "AdamW8bit"
    assert live.same(live.values(fresh["model"]), live.values(retried["model"]))
    again = cells_of(SETUP, edit.after, LOOP)
    assert isinstance(patch(again, evidence(again), dose), Refused)


def test_proposal_where_a_library_is_installed(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_LIBRARIES", ("no_such_library", installed))
    (made,) = propose(live.INCIDENT, evidence(cells_of(SETUP, MADE, LOOP)))  # type: ignore[misc]
    parameters = (8 * 64 + 64 + 64 * 4 + 4) * 4
    assert (made.dose, made.effect, made.saves) == (
        Dose.of(library=installed),
        Effect.CHANGES_RESULT,
        parameters * 3 // 2,
    )
    assert "rounded to 8 bits" in made.caveat
    assert FIX.apply is None


def test_no_proposal(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_LIBRARIES", ("no_such_library",))
    cells = cells_of(SETUP, MADE, LOOP)
    refused = propose(live.INCIDENT, evidence(cells))
    assert isinstance(refused, Refused)
    assert "neither torchao nor bitsandbytes is installed" in refused.reason
    monkeypatch.setattr(optimizers, "_LIBRARIES", (installed,))
    refused = propose(live.INCIDENT, evidence(cells, device="cpu"))
    assert isinstance(refused, Refused)
    assert "CUDA" in refused.reason
    idle = cells_of(SETUP, MADE, "model(batches[0][0])")
    assert isinstance(propose(live.INCIDENT, evidence(idle)), Refused)
    assert isinstance(patch(idle, evidence(idle), Dose.of(library=installed)), Refused)
