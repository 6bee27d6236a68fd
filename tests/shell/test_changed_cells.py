"""A second failure in what a first one changed: told, and healed, where it stands now."""

from __future__ import annotations

from typing import Final

from state_shell import besides, known, run, said, started

from oomdoctor.program.compiled import on_their_lines
from oomdoctor.shell import ATTRIBUTE

MADE: Final = """import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
x, y = torch.randn(3000, 64), torch.randn(3000, 1)
def loader(times):
    pairs = torch.utils.data.TensorDataset(x.repeat(times, 1), y.repeat(times, 1))
    return torch.utils.data.DataLoader(pairs, batch_size=3000 * times)
small, large = loader(1), loader(4)"""
TRAINS: Final = """steps = 2

def train(loader):
    for xb, yb in loader:
        loss = F.mse_loss(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()"""


def test_a_second_failure_in_a_changed_function_is_told_and_healed_where_it_stands() -> None:
    with started("micro_batch", "chunked_forward") as shell:
        run(shell, MADE)
        run(shell, TRAINS)
        number = shell.execution_count - 1
        shell.run_cell(f"%oomdoctor simulate {besides('32MiB')}B")
        places, diffs = [], []
        for cell in ("train(small)", "train(large)"):
            assert run(shell, cell)[0].success
            inner = known().incident.inner
            assert inner is not None
            places.append((inner.number, inner.line, inner.source_line))
            diffs.append(said(shell, "%oomdoctor diff"))
        assert known().outcome.fixes[0].startswith("chunked_forward"), known().outcome
        first, second = places
        assert first == (number, 5, "loss = F.mse_loss(model(xb), yb)")
        # The comment that the first change has written stands above.
        assert second[:2] == (number, 8), second
        assert "+            loss = F.mse_loss(model(micro_xb), micro_yb)" in diffs[0]
        assert "-            loss = F.mse_loss(model(micro_xb), micro_yb)" in diffs[1]
        said(shell, "%oomdoctor undo")
        changed = getattr(shell, ATTRIBUTE).changed[number]
        assert "micro_xb" in changed
        assert "checkpoint" not in changed


def test_statements_stand_on_the_lines_that_they_have_in_their_cell() -> None:
    cell = "!ls\nimport os\n\n@wraps\ndef f():\n    # why\n    return 1\ng = 2"
    function = "@wraps\ndef f():\n    return 1"
    assert on_their_lines(function, cell) == "#\n\n\n@wraps\ndef f():\n    # why\n    return 1\n"
    assert on_their_lines("def h(): pass", cell) == "def h(): pass"
    assert on_their_lines("g = 2", "g = 2\nh = 3") == "g = 2\n"
    assert on_their_lines("g = 2", "h = draw(); g = 2") == "g = 2", "what shares its line does not run again"
    assert on_their_lines("g += 2", "g += 2\nh = 3\ng += 2") == "g += 2", "nor what is there twice"
