from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader

from oomdoctor.incident import all_from_exception, find_oom, from_exception
from oomdoctor.model.incident import Family
from oomdoctor.model.sizes import GIB, MIB

CUDA = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU {} has a total capacity of 4.00 GiB of which 64.00 MiB "
    "is free. Of the allocated memory 3.50 GiB is allocated by PyTorch, and 128.00 MiB is reserved by PyTorch but "
    "unallocated."
)
TRACEBACK = (
    "\x1b[0;31m-----------------------------------------\x1b[0m\n"
    "OutOfMemoryError                          Traceback (most recent call last)\n"
    "Cell In[5], line 2\n      1 x = batch.cuda()\n----> 2 y = model(x)\n\n"
    "File /venv/site-packages/torch/nn/modules/linear.py:125, in Linear.forward(self, input)\n\n"
    f"OutOfMemoryError: {CUDA.format(1)}"
)


def caught(call):
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


# ---- torch: real workers -------------------------------------------------------------------------------------------


class Odd(Exception):
    """One that torch cannot build from a message: it carries a RuntimeError out of the worker instead."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class Items:
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if self.kind is KeyError:
            raise KeyError(CUDA.format(0))
        if self.kind is Odd:
            raise Odd("RuntimeError:", CUDA.format(0))
        if self.kind is MemoryError:
            return torch.empty(1 << 50, dtype=torch.uint8)
        raise self.kind(CUDA.format(0))


@pytest.mark.parametrize(
    ("kind", "family", "requested"),
    [
        (torch.OutOfMemoryError, Family.CUDA, 512 * MIB),
        (KeyError, Family.CUDA, 512 * MIB),
        (Odd, Family.CUDA, 512 * MIB),
        (MemoryError, Family.HOST, 1 << 50),
    ],
)
def test_an_error_that_a_loader_carries_out_of_its_worker_is_read(kind, family, requested, monkeypatch):
    # A loader waits this long for a worker of its that has failed; five seconds as it is.
    for module in (torch.utils.data._utils, torch.utils.data._utils.worker):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 0.2)
    error = caught(lambda: next(iter(DataLoader(Items(kind), num_workers=1))))
    assert "DataLoader worker process 0" in str(error)
    assert find_oom(error) is error
    incident = from_exception(error, {})
    assert (incident.family, incident.requested) == (family, requested)
    del error
    gc.collect()  # the loader that the traceback holds ends its worker here, and not in a later test


def spawned(rank):
    torch.empty(1 << 50, dtype=torch.uint8)


def killed(rank):
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_spawned_process_raised_is_read():
    error = caught(lambda: torch.multiprocessing.start_processes(spawned, nprocs=1, start_method="fork"))
    assert type(error).__name__ == "ProcessRaisedException"
    incident = from_exception(error, {})
    assert (incident.family, incident.requested, incident.exc_type) == (Family.HOST, 1 << 50, "RuntimeError")


def test_a_spawned_process_that_was_killed_is_read():
    error = caught(lambda: torch.multiprocessing.start_processes(killed, nprocs=1, start_method="fork"))
    assert type(error).__name__ == "ProcessExitedException"
    assert from_exception(error, {}).family is Family.RANK_KILLED


# ---- the standard library: real pools ------------------------------------------------------------------------------


def fails():
    raise MemoryError


FORK = multiprocessing.get_context("fork")


def test_the_class_of_an_error_of_a_pool_is_its_own_and_not_that_of_its_messenger():
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=FORK) as pool:
        error = caught(pool.submit(fails).result)
    assert type(error.__cause__).__name__ == "_RemoteTraceback"
    incident = from_exception(error, {})
    assert (incident.family, incident.exc_type) == (Family.HOST, "MemoryError")
    with FORK.Pool(1) as pool:
        error = caught(lambda: pool.apply(fails))
    assert type(error.__cause__).__name__ == "RemoteTraceback"
    assert from_exception(error, {}).exc_type == "MemoryError"


def test_a_pool_whose_process_was_killed_is_read():
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=FORK) as pool:
        error = caught(pool.submit(killed, 0).result)
    assert from_exception(error, {}).family is Family.WORKER_KILLED


# ---- ipyparallel: the attributes of its errors ---------------------------------------------------------------------


class RemoteError(Exception):
    """The attributes of ipyparallel's class of this name. Source: ``ipyparallel/error.py``, 9.2."""

    ename = evalue = traceback = engine_info = None

    def __init__(self, ename, evalue, traceback, engine_info=None):
        self.ename, self.evalue, self.traceback = ename, evalue, traceback
        self.engine_info = engine_info or {}
        self.args = (ename, evalue)

    def __str__(self):
        return f"[{self.engine_info.get('engine_id', 'Engine Exception')}] {self.ename}: {self.evalue}"


class CompositeError(RemoteError):
    def __init__(self, message, elist):
        Exception.__init__(self, message, elist)
        self.msg, self.elist = message, elist

    def __str__(self):  # the real one prints four members
        return "\n".join(
            [self.msg, *(f"[{where['engine_id']}]{name}: {value}" for name, value, _, where in self.elist[:4])]
        )


def engine(number):
    return {"engine_id": number, "method": "execute"}


def test_an_error_of_an_engine_is_read_with_its_class_its_cell_and_its_frame():
    error = RemoteError("OutOfMemoryError", CUDA.format(1), TRACEBACK, engine(3))
    incident = from_exception(error, {})
    assert (incident.family, incident.device, incident.total) == (Family.CUDA, "cuda:1", 4 * GIB)
    assert incident.exc_type == "OutOfMemoryError"
    assert incident.cell is not None
    assert (incident.cell.number, incident.cell.line, incident.cell.source_line) == (5, 2, "y = model(x)")
    assert find_oom(RemoteError("ValueError", "no", "ValueError: no", engine(0))) is None


def test_the_one_engine_of_many_that_ran_out_is_found_where_the_message_does_not_print_it():
    members = [("ValueError", "no", None, engine(at)) for at in range(9)]
    members.append(("OutOfMemoryError", CUDA.format(2), TRACEBACK.replace("GPU 1", "GPU 2"), engine(9)))
    error = CompositeError("one or more exceptions raised in: execute", members)
    assert "GPU 2" not in str(error)
    assert from_exception(error, {}).device == "cuda:2"


@pytest.mark.parametrize("elist", [None, [], [()], [(1, 2)], "text", [("a",)], [[None] * 4], [("E", "v", 7, None)]])
def test_a_composite_of_another_shape_is_no_failure_of_ours(elist):
    error = RemoteError("ValueError", "no", None)
    error.elist = elist
    assert find_oom(error) is None


# ---- Ray: the attributes of its errors -----------------------------------------------------------------------------


class RayTaskError(Exception):
    """The attributes of Ray's class of this name. Source: ``ray/exceptions.py``, 2."""

    def __init__(self, function_name, traceback_str, cause):
        self.function_name, self.traceback_str, self.cause = function_name, traceback_str, cause
        self.args = (function_name, traceback_str, cause)

    def __str__(self):
        return self.traceback_str.replace("Traceback", "\x1b[36mray::f()\x1b[39m (pid=7, ip=10.0.0.1)")


def of_both_classes(cause, written):
    """Return an error of both classes that asks its cause for what it lacks, as Ray makes them."""

    class Both(RayTaskError, type(cause)):
        def __init__(self):
            self.cause, self.args = cause, (cause,)

        def __getattr__(self, name):
            return getattr(self.cause, name)

        def __str__(self):
            return written

    Both.__name__ = Both.__qualname__ = f"RayTaskError({type(cause).__name__})"
    return Both()


WRITTEN = (
    f'Traceback (most recent call last):\n  File "/app/t.py", line 4, in f\ntorch.OutOfMemoryError: {CUDA.format(1)}'
)


def test_an_error_of_a_ray_task_is_the_one_that_it_carries():
    cause = torch.OutOfMemoryError(CUDA.format(1))
    for error in (RayTaskError("f", WRITTEN, cause), of_both_classes(cause, WRITTEN)):
        assert find_oom(error) is cause
        incident = from_exception(error, {})
        assert (incident.device, incident.requested, incident.exc_type) == (
            "cuda:1", 512 * MIB, "torch.OutOfMemoryError",
        )  # fmt: skip


def test_a_ray_task_whose_error_could_not_be_sent_is_read_from_its_text():
    error = RayTaskError("f", WRITTEN, None)
    incident = from_exception(error, {})
    assert (incident.device, incident.exc_type) == ("cuda:1", "torch.OutOfMemoryError")
    assert find_oom(RayTaskError("f", "Traceback\nValueError: no", ValueError("no"))) is None


# ---- groups --------------------------------------------------------------------------------------------------------


def test_each_distinct_failure_of_nested_groups_is_told_the_root_first_and_none_twice():
    first, again = (torch.OutOfMemoryError(CUDA.format(0)) for _ in range(2))
    second = torch.OutOfMemoryError(CUDA.format(1).replace("512.00", "640.00"))
    inner = ExceptionGroup("rank 1", [ValueError("no"), second])
    error = ExceptionGroup("job", [first, inner, again, MemoryError()])
    told = all_from_exception(error)
    assert [(one.family, one.device) for one in told] == [
        (Family.CUDA, "cuda:0"),
        (Family.CUDA, "cuda:1"),
        (Family.HOST, "cpu"),
    ]
    assert find_oom(error) is first


def test_of_an_error_that_is_no_oom_one_incident_is_told():
    (one,) = all_from_exception(ExceptionGroup("job", [ValueError("no"), TypeError("no")]))
    assert not one.is_oom
    stop = KeyboardInterrupt()
    stop.__context__ = MemoryError()
    assert [incident.is_oom for incident in all_from_exception(stop)] == [False]


def test_a_note_on_a_member_of_a_group_is_read():
    member = RuntimeError("worker failed")
    member.add_note(f"torch.OutOfMemoryError: {CUDA.format(3)}")
    assert from_exception(ExceptionGroup("job", [member]), {}).device == "cuda:3"
