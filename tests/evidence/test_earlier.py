"""Errors of before that are still alive, and hold what their frames hold."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest

from oomdoctor.objects.frames import earlier_errors

CELLS = {"<cell 1>": 1}


@pytest.fixture(autouse=True)
def nothing_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    gc.collect()


def raised(filename: str = "<cell 1>", kind: str = "ValueError") -> BaseException:
    """An error that went through code of that file."""
    try:
        exec(compile(f"def work():\n    raise {kind}('planted')\nwork()", filename, "exec"), {})
    except Exception as error:  # noqa: BLE001 - whatever was planted
        return error
    raise AssertionError


def test_the_error_last_shown_is_one() -> None:
    shown = raised("<a script>")
    sys.last_value = shown
    assert earlier_errors(None, CELLS) == (shown,)
    assert earlier_errors(raised(), CELLS) == (shown,)


def test_the_failure_at_hand_and_what_it_comes_from_are_none() -> None:
    cause, failure = raised(), raised()
    failure.__cause__ = cause
    sys.last_value = failure
    assert earlier_errors(failure, CELLS) == ()


def test_an_error_that_the_program_kept_is_found() -> None:
    saved = {"last": raised()}
    assert earlier_errors(raised(), CELLS) == (saved["last"],)
    assert earlier_errors(raised(), {}) == ()
    assert earlier_errors(None, CELLS) == ()


def test_an_error_in_a_cycle_with_its_own_frame_is_found_until_it_is_collected() -> None:
    gc.disable()
    try:
        namespace: dict[str, Any] = {}
        text = (
            "def run():\n    try:\n        1 / 0\n    except ZeroDivisionError as error:\n        result = error\nrun()"
        )
        exec(compile(text, "<cell 1>", "exec"), namespace)
        (found,) = earlier_errors(raised(), CELLS)
        assert isinstance(found, ZeroDivisionError)
        del found
        gc.collect()
        assert earlier_errors(raised(), CELLS) == ()
    finally:
        gc.enable()


def test_no_code_of_an_error_class_is_run() -> None:
    source = (
        "class Odd(Exception):\n"
        "    def __getattribute__(self, name):\n        raise SystemExit\n"
        "    __repr__ = __eq__ = __hash__ = None\n"
        "raise Odd"
    )
    kept = []
    try:
        exec(compile(source, "<cell 1>", "exec"), {"__name__": "odd"})
    except Exception as error:  # noqa: BLE001 - the odd one
        kept.append(error)
    (found,) = earlier_errors(raised(), CELLS)
    assert found is kept.pop()


def test_tuples_that_other_threads_are_making_are_left_alone() -> None:
    went_wrong: list[BaseException] = []
    is_over = threading.Event()

    def make() -> None:
        try:
            while not is_over.is_set():
                tuple(number for number in range(20_000))
        except SystemError as error:  # a tuple that somebody else holds cannot grow
            went_wrong.append(error)

    maker = threading.Thread(target=make)
    maker.start()
    for _ in range(5):
        earlier_errors(raised(), CELLS)
    is_over.set()
    maker.join()
    assert not went_wrong
