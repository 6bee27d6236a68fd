"""What the tests of forecasts share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def put_away() -> None:
    """Leave in sight what was there before: a forked copy sees all of it, and so must what its forecast is held to.

    What nobody holds any more goes first: it would close files of its own in the midst of a test that counts them.
    """
    gc.unfreeze()
    gc.collect()
