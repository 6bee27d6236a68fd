"""The whole message table: every row, in the order of priority."""

from __future__ import annotations

from typing import Final

from oomdoctor.incident import (
    rows_class,
    rows_framework,
    rows_host,
    rows_killed,
    rows_limits,
    rows_lookalike,
    rows_runtime,
    rows_serving,
    rows_structure,
    rows_torch,
    rows_translated,
)
from oomdoctor.incident.formats import Format

FORMATS: Final[tuple[Format, ...]] = (
    *rows_torch.ROWS,
    *rows_runtime.ROWS,
    *rows_serving.ROWS,
    *rows_framework.ROWS,
    *rows_host.ROWS,
    *rows_killed.ROWS,
    *rows_limits.ROWS,
    *rows_translated.ROWS,
    *rows_class.ROWS,
    *rows_lookalike.ROWS,
    *rows_structure.ROWS,
)
"""Every row, in the order of priority."""
