"""What the tests of forecasts share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def put_away() -> None:
    """Leave in sight what was there before: a forked copy sees all of it, and so must what its forecast is held to."""
