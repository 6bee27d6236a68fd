"""``simulate(...)`` alone switches nothing on, and says so."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

import oomdoctor
from oomdoctor.allocator import virtual
from oomdoctor.errors import SizeError


def test_dropped_unused_it_warns_where_it_was_written() -> None:
    with pytest.warns(UserWarning, match=r"nothing was switched on: write `with oomdoctor.simulate") as told:
        oomdoctor.simulate("64MiB")
    assert [one.filename for one in told] == [__file__]
    assert virtual.active() is None


def test_a_notebook_that_shows_it_says_so() -> None:
    block = oomdoctor.simulate("64MiB")
    assert repr(block).startswith("<simulate: 64.0 MiB, is not switched on; write `with")
    with block as device:
        assert virtual.active() is device
    assert "was used" in repr(block)


def test_used_it_says_nothing_whatever_the_use() -> None:
    @oomdoctor.simulate("64MiB")
    def active() -> object:
        return virtual.active()

    @oomdoctor.simulate("64MiB")
    def never_called() -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with oomdoctor.simulate("64MiB") as device:
            assert virtual.active() is device
        assert active() is not active()
        with pytest.raises(torch.OutOfMemoryError), oomdoctor.simulate("64MiB"):
            torch.ones(1 << 26)
        with pytest.raises(SizeError):
            oomdoctor.simulate("lots")
        del active, never_called
        gc.collect()
    assert virtual.active() is None
