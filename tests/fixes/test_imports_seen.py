"""Every way to write an import of torch is seen, by whatever fix asks for it."""

from __future__ import annotations

import live
import pytest

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Patch
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import import_lines


def cells(source: str) -> Cells:
    return Cells(history=(Cell(number=1, source=source), Cell(number=2, source="x = 1")))


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import random, torch",
        "import random, torch, os",
        "import torch, random  # both",
        "import os; import torch",
        "import torch.nn",
        "import random, \\\n    torch",
        "try:\n    import torch\nexcept ImportError:\n    raise",
        "%matplotlib inline\nimport random, torch",
    ],
)
def test_torch_is_known(source: str) -> None:
    assert import_lines.knows_torch(cells(source))
    assert import_lines.library_name(cells(source)) == ("torch", ())


@pytest.mark.parametrize(
    "source",
    [
        "import random",
        "import torch as th",
        "'''\nimport torch\n'''",
        "def f():\n    import torch",
        "import torchvision",
    ],
)
def test_torch_is_not_known(source: str) -> None:
    assert not import_lines.knows_torch(cells(source))


@pytest.mark.parametrize(
    "source", ["import random, torch", "import torch as t", "from torch import nn, cuda", "import os, torch.nn as nn"]
)
def test_the_variable_of_the_allocator_is_set_before_any_import_of_torch(source: str) -> None:
    made = fixes.get("expandable_segments").patch(
        cells(source), live.evidence(), Dose.of(variable="PYTORCH_ALLOC_CONF")
    )
    assert isinstance(made, Patch)
    assert made.edits[0].after.endswith(f'_segments:True"\n\n{source}')


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils.checkpoint import (\n    checkpoint,\n    set_device_states,\n)",
        "from torch.utils.checkpoint import set_device_states as put, checkpoint",
    ],
)
def test_a_function_that_is_imported_already_keeps_its_name(source: str) -> None:
    assert import_lines.name_for("torch.utils.checkpoint", "checkpoint", cells(source), "recompute") == "checkpoint"


def test_another_name() -> None:
    assert import_lines.library_name(cells("import random, torch as th")) == ("th", ())


@pytest.mark.parametrize(
    "source", ["from torch import (\n    nn,\n)", "import torch.nn as nn", "import os, torch.nn as nn"]
)
def test_what_is_in_torch(source: str) -> None:
    assert import_lines.qualified_name(cells(source), "nn.Linear") == "torch.nn.Linear"


@pytest.mark.parametrize(
    ("source", "text", "stands_for"),
    [
        ("import torch.nn.functional as F", "F.relu", "torch.nn.functional.relu"),
        ("from torch.nn import functional", "functional.relu", "torch.nn.functional.relu"),
        ("from torch import nn as layers", "layers.functional.relu", "torch.nn.functional.relu"),
        ("import torch.nn", "torch.nn.functional.relu", "torch.nn.functional.relu"),
        ("from torch.nn.functional import relu as r", "r", "torch.nn.functional.relu"),
        ("from torch.nn.functional import *", "relu", "torch.nn.functional.relu"),
        ("def f():\n    from torch.nn import functional as G", "G.relu", "torch.nn.functional.relu"),
        ("import torch.nn.functional as F\nF = other", "F.relu", "torch.nn.functional.relu"),
        ("import torch.nn.functional as F\ndef F(): pass", "F.relu", "torch.nn.functional.relu"),
        ("x = 1", "F.relu", "F.relu"),
    ],
)
def test_what_a_name_stands_for(source: str, text: str, stands_for: str) -> None:
    found = import_lines.qualified_name(cells(source), text)
    is_rebound = "other" in source or "def F" in source
    assert found == ("" if is_rebound else stands_for)


def test_a_name_that_another_cell_binds_again_is_not_known() -> None:
    of = cells("import torch.nn.functional as F")
    both = Cells(history=(*of.history, Cell(number=3, source="F = mine")))
    assert import_lines.qualified_name(of, "F.relu") == "torch.nn.functional.relu"
    assert import_lines.qualified_name(both, "F.relu") == ""
    assert import_lines.spelled(of, "torch.nn.functional.relu") == "F.relu"
    assert import_lines.spelled(both, "torch.nn.functional.relu") is None


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import torch\nfrom torch import nn\nimport torch.nn.functional as F", "F.relu"),
        ("import torch\nfrom torch import nn", "nn.functional.relu"),
        ("import torch as t", "t.nn.functional.relu"),
        ("def f():\n    import torch", None),
    ],
)
def test_the_shortest_way_to_write_a_name(source: str, text: str | None) -> None:
    assert import_lines.spelled(cells(source), "torch.nn.functional.relu") == text
