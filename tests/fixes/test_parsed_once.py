"""A failure's cells are parsed once, however many readers ask."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import libcst as cst
import live
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oomdoctor.evidence.code import facts
from oomdoctor.fixes.micro_batch import patch
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Patch

SETUP = """\
import torch
import torch.nn.functional as F
from torch import nn
%matplotlib inline
reduction = "mean"
model = nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())
"""
TRAIN = """\
def step(x, y):
    return F.cross_entropy(model(x), y, reduction=reduction)

for x, y in loader:
    loss = step(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_micro_batch_parses_each_cell_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [f"{text}# read by one test alone\n" for text in (SETUP, TRAIN)]
    trees, modules = Counter[str](), Counter[str]()
    parse, parse_module = ast.parse, cst.parse_module

    def counted(source: Any, *args: Any, **kwargs: Any) -> Any:
        trees[source] += 1
        return parse(source, *args, **kwargs)

    def counted_module(source: Any, *args: Any, **kwargs: Any) -> Any:
        modules[source] += 1
        return parse_module(source, *args, **kwargs)

    monkeypatch.setattr(ast, "parse", counted)
    monkeypatch.setattr(cst, "parse_module", counted_module)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long)))
    cells, namespace = live.cells_of(*sources), {"model": model, "optimizer": optimizer, "loader": loader}
    base = live.evidence()
    code = facts(cells, namespace, [("model", model)], [("optimizer", optimizer)])
    evidence = Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=code)
    assert isinstance(patch(cells, evidence, Dose.of(parts=2)), Patch)
    of_cells = {text: count for text, count in trees.items() if "# read by one test alone" in str(text)}
    assert len(of_cells) == 3  # the cell with a magic is tried as it is, and then masked
    assert set(of_cells.values()) == {1}
    assert {count for text, count in modules.items() if "# read by one test alone" in text} == {1}
