"""Every way to write an import of torch is seen, by whatever fix asks for it."""

from __future__ import annotations

import pytest

from oomdoctor.fixes import _frees_source, _imports
from oomdoctor.model.session import Cell, Cells


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
    assert _imports.knows_torch(cells(source))
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
    assert not _imports.knows_torch(cells(source))


def test_another_name() -> None:
    assert _frees_source.torch_name(cells("import random, torch as th")) == ("th", ())


@pytest.mark.parametrize(
    "source", ["from torch import (\n    nn,\n)", "import torch.nn as nn", "import os, torch.nn as nn"]
)
def test_what_is_in_torch(source: str) -> None:
    assert _imports.knows(cells(source), "nn", "torch.nn")
