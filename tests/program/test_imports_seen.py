"""Every way to write an import of torch is seen, by whatever fix asks for it."""

from __future__ import annotations

import live
import pytest

from oomdoctor.fixes import _frees_source, expandable_segments
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
    assert _frees_source.torch_name(cells(source)) == ("torch", ())


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
    made = expandable_segments.patch(cells(source), live.evidence(), Dose.of(variable="PYTORCH_ALLOC_CONF"))
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
    assert _frees_source.torch_name(cells("import random, torch as th")) == ("th", ())


@pytest.mark.parametrize(
    "source", ["from torch import (\n    nn,\n)", "import torch.nn as nn", "import os, torch.nn as nn"]
)
def test_what_is_in_torch(source: str) -> None:
    assert import_lines.knows(cells(source), "nn", "torch.nn")
