"""What a failed cell has given to the loop and to pools: cancelled where that is exact, or named, and not retried."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from programs import DATA, MODEL, TRAIN
from state_shell import besides, known, run, seed, started

from oomdoctor.model.case import OutcomeKind

SMALL = (
    MODEL.replace("width=128, depth=6", "width=64, depth=3"),
    DATA.replace("512", "128").replace("32, 128", "32, 64").replace("batch_size=128", "batch_size=64"),
    """\
import asyncio, concurrent.futures, functools, multiprocessing.pool, threading, time
seen, done = [], threading.Event()
def note(what): seen.append(what)
""",
)


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    with started("chunked_forward") as made:
        yield made


@pytest.fixture(autouse=True)
def program(shell: InteractiveShell) -> Iterator[None]:
    shell.run_cell("%oomdoctor simulate off")
    shell.reset(new_session=True)
    seed()
    for cell in (*SMALL, f"%oomdoctor simulate {besides('12MiB')}"):
        assert run(shell, cell)[0].success
    done = shell.user_ns["done"]
    yield
    done.set()
    pool = shell.user_ns.get("pool")
    if isinstance(pool, Executor):
        for child in multiprocessing.active_children():
            child.terminate()
        pool.shutdown(wait=True)
    elif pool is not None:
        pool.terminate()
        pool.join()
    shell.run_cell("%oomdoctor simulate off")


def on_a_loop(shell: InteractiveShell, cell: str) -> list[Any]:
    """Run a cell as a kernel does; return what the loop would have called of it, and call what is due."""

    async def main() -> list[Any]:
        loop: Any = asyncio.get_running_loop()
        early = loop.call_later(600, shell.user_ns["note"], "early")
        result = await shell.run_cell_async(cell, store_history=True, transformed_cell=shell.transform_cell(cell))
        assert result.success
        await asyncio.sleep(0)
        assert not early.cancelled(), "it was there before the cell"
        return [one for one in loop._scheduled if not one.cancelled() and one is not early]

    return asyncio.run(main())


CALLS = {
    "a function of the cell": "loop.call_later(600, note, 'mine')",
    "a method that is built in": "loop.call_later(600, seen.append, 'mine')",
    "a part of a function": "loop.call_later(600, functools.partial(note, 'mine'))",
    "by way of a library": "loop.call_later(600, asyncio.events.Handle._run, functools.partial(note, 'mine'))",
    "an object of the cell": "class Call:\n    def __call__(self): pass\nloop.call_later(600, Call())",
}


@pytest.mark.parametrize("calls", CALLS)
def test_what_the_failed_cell_had_the_loop_call_later_is_not_called_and_that_of_its_retry_is(
    shell: InteractiveShell, calls: str
) -> None:
    assert len(on_a_loop(shell, f"loop = asyncio.get_running_loop()\n{CALLS[calls]}\n{TRAIN}")) == 1
    assert known().outcome.kind is OutcomeKind.HEALED


def test_what_the_failed_cell_had_the_loop_call_soon_is_called_once(shell: InteractiveShell) -> None:
    on_a_loop(shell, f"asyncio.get_running_loop().call_soon(note, 'soon')\n{TRAIN}")
    assert known().outcome.kind is OutcomeKind.HEALED
    assert shell.user_ns["seen"] == ["soon"]


def kernel() -> None:
    """Do what a library does within a cell."""
    loop = asyncio.get_running_loop()
    loop.call_later(600, loop.create_future().set_result, None)
    loop.call_later(600, asyncio.Event().set)


def test_what_libraries_have_the_loop_call_meanwhile_is_called(shell: InteractiveShell) -> None:
    shell.user_ns["kernel"] = kernel
    calls = on_a_loop(shell, f"kernel()\n{TRAIN}")
    assert known().outcome.kind is OutcomeKind.HEALED
    assert len(calls) == 2 + 2, "those of the failed run and those of its retry"


POOLS = {
    "threads of an executor": (
        "pool = concurrent.futures.ThreadPoolExecutor(1)\n",
        "pool.submit(done.wait, 60)\n",
    ),
    "threads of a pool": (
        "pool = multiprocessing.pool.ThreadPool(1)\n",
        "pool.apply_async(done.wait, (60,))\n",
    ),
    "processes of an executor": (
        """\
pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
pool.submit(time.sleep, 0).result()
""",
        "pool.submit(time.sleep, 60)\n",
    ),
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_that_goes_on_with_what_the_cell_gave_it_is_named_and_the_retry_refused(
    shell: InteractiveShell, kind: str
) -> None:
    made, given = POOLS[kind]
    assert run(shell, made)[0].success
    assert not run(shell, given + TRAIN)[0].success
    outcome = known().outcome
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.REFUSED, 0)
    assert "goes on with what the cell gave it" in outcome.why
    run(shell, "%oomdoctor retry --anyway")
    assert known().outcome.kind is OutcomeKind.HEALED


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_that_has_work_from_before_the_cell_or_none_is_no_reason(shell: InteractiveShell, kind: str) -> None:
    made, given = POOLS[kind]
    assert run(shell, made + given)[0].success
    assert run(shell, TRAIN)[0].success
    assert known().outcome.kind is OutcomeKind.HEALED
