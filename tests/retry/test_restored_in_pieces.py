"""A restore that meets an error goes on with the rest, and names what it could not bring back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from oomdoctor.objects.leaves import state_digests
from oomdoctor.objects.named import own_modules
from oomdoctor.retry import Transaction
from oomdoctor.retry.snapshot import Snapshot

CELL = """
config["rates"].append(3)
counts[0] = 9
optimizer.zero_grad()
model(rows).sum().backward()
optimizer.step()
numbers.random()
raise MemoryError
"""


def program() -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__", "rows": torch.randn(4, 8), "model": nn.Linear(8, 8)}
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    names |= {"config": {"rates": [1, 2]}, "counts": np.zeros(3), "numbers": np.random.default_rng(0)}
    names["shared"] = np.from_dlpack(torch.ones(4))
    return names


def failed(names: dict[str, Any]) -> Transaction:
    transaction = Transaction(names, CELL, lambda: 1 << 30)
    with transaction.armed(), pytest.raises(MemoryError):
        exec(CELL, names)
    return transaction


def labels() -> list[str]:
    snapshot = failed(program())._snapshot
    assert snapshot is not None
    others = tuple(f"`{module.__name__}" for module in own_modules())  # those of other tests, by chance
    return list(dict.fromkeys(path for path, _ in snapshot._pieces({}) if not path.startswith(others)))


def test_memory_that_another_library_has_lent_is_no_obstacle() -> None:
    names = program()
    before = state_digests(names)
    transaction = failed(names)
    assert state_digests(names) != before
    assert transaction.settle() == ()
    assert state_digests(names) == before


@pytest.mark.parametrize("broken", labels())
def test_whatever_cannot_be_put_back_the_rest_is(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = program()
    before, pieces = state_digests(names), Snapshot._pieces

    def refuse() -> None:
        raise ValueError("sabotaged")

    def sabotaged(self: Snapshot, memo: dict[int, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        yield from ((path, refuse if path == broken else put) for path, put in pieces(self, memo))

    transaction = failed(names)
    monkeypatch.setattr(Snapshot, "_pieces", sabotaged)
    told = transaction.settle()
    assert any(broken in one and "sabotaged" in one for one in told)
    after = state_digests(names)
    differing = {name for name in before if before[name] != after[name]}
    own = broken.strip("`").partition(".")[0].partition("[")[0]
    own_names = {"a gradient": {"model"}, "a Generator": {"numbers"}}.get(broken, {own})
    if broken == "the random number generators":
        own_names = {f"({own[4:]})"}
    if "model" in own_names:
        own_names = {"model", "optimizer"}  # its digest goes through its weights
    assert differing <= own_names
