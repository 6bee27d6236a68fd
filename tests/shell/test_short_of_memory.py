"""What the failure pins is let go of even where there is no memory left for a thread, or for a traceback."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from typing import Any
from unittest import mock

import pytest

import oomdoctor.retry.release  # noqa: F401 - is looked up below
from oomdoctor.objects.frames import traceback_of

releasing = sys.modules["oomdoctor.retry.release"]  # the package gives its function that name


class Large:
    """Stands for a tensor."""


def failure(kept: list[Any]) -> BaseException:
    def inner(large: Large) -> None:
        kept.append(weakref.ref(large))
        raise MemoryError("inner")

    def outer() -> None:
        large = Large()
        try:
            inner(large)
        except MemoryError as exc:
            other = Large()
            kept.append(weakref.ref(other))
            raise RuntimeError("outer") from exc

    try:
        outer()
    except RuntimeError as exc:
        return exc
    raise AssertionError


def refuse(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def exhaust(*_: Any, **__: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("owner", "name", "fails"),
    [(threading.Thread, "start", refuse), (releasing, "empty_frame", exhaust)],
    ids=["no thread", "no frame"],
)
def test_the_locals_go_and_the_traceback_stays(owner: Any, name: str, fails: Any) -> None:
    kept: list[Any] = []
    exc, said = failure(kept), []
    before = "".join(traceback.format_exception(exc))
    with mock.patch.object(owner, name, fails), mock.patch.object(threading, "excepthook", said.append):
        releasing.release(exc)
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    assert said == [], "nothing is told of a thread that the user does not know"
    assert traceback_of(exc) is not None
    assert "".join(traceback.format_exception(exc)) == before
