from __future__ import annotations

import gc
import linecache
import mmap
import subprocess
import sys
import time
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oomdoctor.incident import all_from_exception, find_oom, from_exception, recognise
from oomdoctor.incident.formats import FORMATS
from oomdoctor.model.incident import Family
from oomdoctor.model.sizes import GIB, MIB

CUDA = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 4.00 GiB of which 64.00 MiB "
    "is free. Of the allocated memory 3.50 GiB is allocated by PyTorch, and 128.00 MiB is reserved by PyTorch but "
    "unallocated."
)


def caught(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def run_cell(source, number=3, **names):
    """Run a cell as IPython does: compiled under a name of its own, with its text in linecache."""
    name = f"/tmp/ipykernel_1/{number}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    return caught(lambda: exec(compile(source, name, "exec"), names)), {name: number}


def test_a_cells_own_line_is_in_no_function_also_where_its_code_is_named_by_a_line():
    name = "<ipython-input-3-a>"
    code = compile("raise MemoryError", name, "exec").replace(co_name="<cell line: 0>")
    incident = from_exception(caught(lambda: exec(code, {})), {name: 3})
    assert (incident.cell.number, incident.cell.function) == (3, "<module>")


def test_a_real_refusal_of_the_cpu_allocator_is_recognised_with_its_size():
    error, cells = run_cell("import torch\nsize = 1 << 50\nx = torch.empty(size, dtype=torch.uint8)\n")
    incident = from_exception(error, cells)
    assert (incident.is_oom, incident.family, incident.device) == (True, Family.HOST, "cpu")
    assert incident.requested == 1 << 50
    assert incident.cell is not None
    assert (incident.cell.number, incident.cell.line) == (3, 3)
    assert incident.cell.source_line == "x = torch.empty(size, dtype=torch.uint8)"


def test_a_real_refusal_of_numpy_is_recognised_with_its_exact_size():
    incident = from_exception(caught(lambda: np.zeros((1 << 40, 333), dtype=np.float32)), {})
    assert (incident.family, incident.requested) == (Family.NUMPY, 333 * 4 << 40)
    assert incident.exc_type == "numpy._core._exceptions._ArrayMemoryError"


@pytest.mark.parametrize(
    ("error", "family"),
    [
        (MemoryError(), Family.HOST),
        (torch.OutOfMemoryError(CUDA), Family.CUDA),
        (torch.OutOfMemoryError(), Family.CUDA),
        (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 1.00 GiB."), Family.XPU),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous"), Family.CUDA),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Family.CUDNN),
        (OSError(28, "No space left on device", "/psm_8f3a2b1c"), Family.SHM),
        (OSError(28, "No space left on device", "/torch_1234_99_0"), Family.SHM),
        (RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed. "), Family.WORKER_KILLED),
        (OSError(12, "Cannot allocate memory"), Family.HOST),
        (type("MyMemory", (MemoryError,), {})("mine"), Family.HOST),
    ],
)
def test_one_exception(error, family):
    assert find_oom(error) is error
    assert from_exception(error, {}).family is family


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory"),
        KeyboardInterrupt(),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(28, "No space left on device"),
        OSError(28, "No space left on device", "/psm_runs/last.pt"),
        Exception(),
    ],
)
def test_what_is_not_for_want_of_memory(error):
    assert find_oom(error) is None
    assert not from_exception(error, {}).is_oom


def test_the_root_of_a_chain_is_found_through_cause_context_and_groups():
    root = torch.OutOfMemoryError(CUDA)

    def context():
        try:
            raise root
        except RuntimeError:
            {}["while handling it"]

    inner = caught(context)
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = inner
    group = ExceptionGroup("workers", [ValueError("other"), wrapped])
    assert find_oom(group) is root
    assert from_exception(group, {}).requested == 512 * MIB


def test_the_first_of_two_failures_is_the_root():
    first, second = MemoryError(), torch.OutOfMemoryError(CUDA)
    second.__context__ = first
    assert find_oom(second) is first


def test_an_interrupt_during_the_handling_is_an_interrupt():
    stop = KeyboardInterrupt()
    stop.__context__ = MemoryError()
    assert find_oom(stop) is None


def test_notes_and_errors_of_another_process_are_read():
    noted = RuntimeError("job failed")
    noted.add_note(f"torch.OutOfMemoryError: {CUDA}")
    assert from_exception(noted, {}).total == 4 * GIB

    class RemoteError(Exception):
        def __init__(self, ename, evalue):
            super().__init__("remote")
            self.ename, self.evalue = ename, evalue

    assert from_exception(RemoteError("OutOfMemoryError", CUDA), {}).family is Family.CUDA
    assert find_oom(RemoteError("ValueError", "no")) is None


class RaisingStr(RuntimeError):
    def __str__(self):
        raise KeyboardInterrupt


class RaisingEverything(MemoryError):
    def __getattribute__(self, name):
        raise SystemExit(name)


class StrangeStr(RuntimeError):
    def __str__(self):
        return 7


class Recursive(RuntimeError):
    def __str__(self):
        return str(self)


@pytest.mark.parametrize("kind", [RaisingStr, RaisingEverything, StrangeStr, Recursive])
def test_no_exception_object_makes_the_check_raise(kind):
    error = kind("x")
    found = find_oom(error)
    assert (found is not None) == issubclass(kind, MemoryError)
    from_exception(error, {})


def test_a_cycle_and_a_very_long_chain_end():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__context__ = second, first
    assert find_oom(first) is None
    last = root = ValueError("0")
    for number in range(5_000):
        following = ValueError(str(number))
        following.__context__ = last
        last = following
    assert find_oom(last) is None
    root.__context__ = last
    assert find_oom(last) is None


def test_the_cell_line_is_the_outermost_in_a_cell_the_inner_line_the_innermost_the_frame_that_of_all():
    source = (
        "def step(n):\n"
        "    return fail(n)\n"
        "\n"
        "for n in range(3):\n"
        "    step(n)\n"
    )  # fmt: skip

    def fail(n):
        raise torch.OutOfMemoryError(CUDA)

    error, cells = run_cell(source, 9, fail=fail)
    incident = from_exception(error, cells)
    assert incident.cell is not None
    assert (incident.cell.number, incident.cell.line, incident.cell.function) == (9, 5, "<module>")
    assert incident.cell.source_line == "step(n)"
    assert incident.inner is not None
    assert (incident.inner.number, incident.inner.line, incident.inner.function) == (9, 2, "step")
    assert incident.inner.source_line == "return fail(n)"
    assert incident.framework_frame is not None
    assert incident.framework_frame.endswith(" fail")
    assert "test_recognise.py:" in incident.framework_frame


def test_the_cell_line_is_found_when_a_library_caught_the_failure_below_the_cell():
    def library():
        try:
            raise torch.OutOfMemoryError(CUDA)
        except RuntimeError as error:
            raise ValueError("wrapped") from error

    error, cells = run_cell("a = 1\nlibrary()\n", 4, library=library)
    incident = from_exception(error, cells)
    assert incident.cell is not None
    assert (incident.cell.number, incident.cell.line) == (4, 2)
    assert incident.exc_type == "torch.OutOfMemoryError"


def test_nothing_that_the_traceback_holds_is_kept_alive():
    class Big:
        pass

    alive = []

    def fail():
        big = Big()
        alive.append(weakref.ref(big))
        raise torch.OutOfMemoryError(CUDA)

    error, cells = run_cell("fail()\n", 2, fail=fail)
    incident = from_exception(error, cells)
    assert find_oom(error) is error
    assert alive[0]() is not None
    del error
    gc.collect()
    assert alive[0]() is None
    assert incident.is_oom


def test_pinning_and_first_use_are_told_by_the_frames_above_the_same_words():
    def pin_memory():
        raise RuntimeError("CUDA error: out of memory")

    def _lazy_init():
        raise RuntimeError("CUDA error: out of memory")

    assert from_exception(caught(pin_memory), {}).family is Family.PINNED
    assert from_exception(caught(_lazy_init), {}).family is Family.CUDA_INIT


def test_no_torch_is_imported():
    code = (
        "import sys\nfrom oomdoctor.incident import find_oom, from_exception\n"
        "assert find_oom(MemoryError()) is not None\nfrom_exception(ValueError(), {})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


_TEXTS = st.one_of(st.text(max_size=60), st.sampled_from([row.sample for row in FORMATS]))


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.builds(RuntimeError, _TEXTS) | st.builds(KeyError, _TEXTS) | st.builds(RaisingStr, _TEXTS),
        lambda inner: st.builds(ExceptionGroup, _TEXTS, st.lists(inner, min_size=1, max_size=3)),
        max_leaves=6,
    ),
    st.lists(_TEXTS, max_size=2),
)
def test_any_tree_of_exceptions_gives_incidents_and_never_an_error(error, notes):
    for note in notes:
        error.add_note(note)
    told = all_from_exception(error)
    assert told[0] == from_exception(error, {})
    assert (find_oom(error) is not None) == told[0].is_oom
    assert all(one.is_oom for one in told) or len(told) == 1


def _script(tmp_path, monkeypatch, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    monkeypatch.setitem(linecache.cache, str(path), (len(text), None, text.splitlines(keepends=True), str(path)))
    return compile(text, str(path), "exec")


def test_explained_without_a_notebook_the_lines_are_those_of_the_script(tmp_path, monkeypatch):
    code = _script(
        tmp_path,
        monkeypatch,
        "train.py",
        "import numpy\ndef load():\n    return numpy.zeros((1 << 40, 64))\nx = load()\n",
    )
    with pytest.raises(MemoryError) as caught:
        exec(code, {"__name__": "train"})
    (incident,) = all_from_exception(caught.value)
    assert incident.cell is not None
    assert incident.inner is not None
    assert (incident.cell.number, "exec(code" in incident.cell.source_line) == (None, True)
    assert (incident.inner.line, incident.inner.source_line) == (3, "return numpy.zeros((1 << 40, 64))")


def test_a_chain_of_long_messages_takes_hardly_longer_than_ten_of_them(monkeypatch):
    monkeypatch.setattr(recognise, "_TEXT", 2_000)
    monkeypatch.setattr(recognise, "_ALTOGETHER", 20_000)
    monkeypatch.setattr(recognise, "_BRIEF", 30)
    words = "failed to allocate memory and killed, exceeded, out of memory: "
    error, seconds = None, {}
    for number in range(600):
        later = RuntimeError(f"{number} {words}" * 40)
        later.__context__, error = error, later
        if number in (9, 599):
            start = time.perf_counter()
            all_from_exception(error)
            seconds[number] = time.perf_counter() - start
    assert seconds[599] < 15 * seconds[9]


def test_the_root_of_a_long_chain_is_found_where_the_later_ones_have_much_to_say():
    error: BaseException = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    for number in range(200):
        later = ValueError(f"{number} " + "x" * 30_000)
        later.__context__, error = error, later
    assert all_from_exception(error)[0].requested == 2 * GIB


@pytest.mark.parametrize("cells", [{}, {"elsewhere": 3}])
def test_a_function_that_is_running_is_not_taken_for_a_line_of_code(cells):
    def train():
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(RuntimeError) as caught:
        train()
    incident = from_exception(caught.value, cells)
    assert (incident.cell, incident.inner) == (None, None)


LIMITED = """
import resource, torch
import oomdoctor
from oomdoctor.incident import find_oom, from_exception
torch.set_num_threads(1)
model, x = torch.nn.Conv2d(8, 16, 3), torch.randn(4, 8, 16, 16)
oomdoctor.explain("out of memory")  # has all imported
def failure():
    try:
        model(x)
    except RuntimeError as error:
        return error
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 10), resource.RLIM_INFINITY))
short = failure()
found = find_oom(short) is short
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
incident = from_exception(short, {})
print(found, incident.is_oom, incident.family, incident.device, incident.format)
print(failure())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts what a process maps on Linux alone")
def test_a_primitive_that_there_was_no_memory_for_is_host_memory_and_onednn_goes_on():
    done = subprocess.run([sys.executable, "-c", LIMITED], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True True host_oom cpu onednn", "None"]


@pytest.mark.parametrize(("refused", "family"), [(True, Family.HOST), (False, Family.NOT_OOM)])
def test_what_onednn_says_is_for_want_of_memory_where_the_system_refuses_some(refused, family, monkeypatch):
    def answer(*_, **__):
        if refused:
            raise OSError
        return mock.Mock()

    monkeypatch.setattr(mmap, "mmap", answer)
    error = caught(lambda: (_ for _ in ()).throw(RuntimeError("could not create a memory object")))
    assert (find_oom(error) is error) == refused
    assert from_exception(error, {}).family is family
