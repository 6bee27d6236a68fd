"""The gallery: each notebook executed in a real kernel, and what its story claims held against what came out."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from executed import NOTEBOOKS, Executed, execute

MIB = 1 << 20
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
CASE = "oomdoctor.last_case().to_dict()"
MOST_CELLS = 14

pytestmark = pytest.mark.slow


def sizes(text: str) -> list[float]:
    """The sizes in MiB that a text tells, in their order."""
    return [float(size) for size in re.findall(r"([0-9.]+) MiB", text)]


def the_picture(run: Executed, name: str = "picture") -> None:
    (png,) = run.data(name, "image/png")
    assert len(png) > 5000  # base64 of more than an empty frame


def source(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found
