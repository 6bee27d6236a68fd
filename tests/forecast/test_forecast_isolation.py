"""Whatever the cell does, the process that asked stays as it was."""

import contextlib
import errno
import gc
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forecast_lab import TRAIN, forecast, mlp, namespace, nothing, open_descriptors, session, transformer

from oomdoctor.forecast import dry_run, live_storages, price, roles
from oomdoctor.model.session import Attempt
from oomdoctor.sandbox import restrictions


def _digest(ns):
    return {
        "model": pickle.dumps(ns["model"].state_dict()),
        "optimizer": pickle.dumps(ns["optimizer"].state_dict()),
        "gradients": pickle.dumps([p.grad for p in ns["model"].parameters()]),
        "torch rng": torch.get_rng_state().tolist(),
        "python rng": random.getstate(),
        "numpy rng": pickle.dumps(np.random.get_state()),
        "names": {key: id(value) for key, value in ns.items()},
        "modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "threads": torch.get_num_threads(),
        "descriptors": open_descriptors(),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
    }


def _children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = open_descriptors(), _children()
    yield
    assert (open_descriptors(), _children()) == before


VANDAL = """
model[0].weight.data.zero_()
for p in model.parameters():
    p.grad = torch.ones_like(p)
optimizer.step()
random.seed(1); np.random.seed(1); torch.manual_seed(1)
model = None
loader.dataset.tensors[0].zero_()
torch.Tensor.backward = None
torch.set_num_threads(3)
raw.numpy()[:] = 7
del keep
"""


@pytest.mark.parametrize("busy", [0, 3], ids=["quiet", "busy_threads"])
def test_the_process_stays_as_it_was(busy):
    ns = namespace(mlp, "adamw") | {"random": random, "np": np, "keep": [1, 2, 3], "raw": torch.zeros(10)}
    exec(TRAIN, ns)
    stop = threading.Event()

    def work() -> None:
        values: list[bytes] = []
        while not stop.is_set():
            values = [os.urandom(10), *values[:100]]

    threads = [threading.Thread(target=work) for _ in range(busy)]
    for thread in threads:
        thread.start()
    try:
        before, names = _digest(ns), set(sys.modules)
        for cell in (TRAIN, VANDAL):
            assert forecast(ns, cell).refused is None
            assert _digest(ns) == before
        assert set(sys.modules) - names <= {name for name in sys.modules if not name.startswith("__main__")}
        assert threading.active_count() >= 1 + busy
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert ns["raw"].sum() == 0
    ns["model"](torch.randn(2, 256)).sum().backward()


@pytest.mark.parametrize(
    "cell",
    [
        "while True: pass",
        "import threading; threading.Event().wait()",
        "import select; select.select([], [], [])",
        "while True:\n    try:\n        while True: pass\n    except: pass",
        "import os; os.read(os.pipe()[0], 1)",
    ],
)
def test_a_cell_that_hangs_is_an_answer_in_time(cell):
    forecast({}, "pass")
    begin = time.monotonic()
    found = forecast({}, cell, timeout_s=2.0)
    assert found.refused == "the exact forecast timed out after 2 s"
    assert time.monotonic() - begin < 60.0  # nothing else would end it


def test_one_that_hangs_does_not_take_the_others_with_it():
    attempts = [Attempt(source="x = 1"), Attempt(source="while True: pass"), Attempt(source="y = 2")]
    first, hanging, last = price(session({}, ""), attempts, budget=None, prepare=nothing, timeout_s=10.0, workers=2)
    assert first.refused is last.refused is None
    assert hanging.refused == "the exact forecast timed out after 10 s"


def test_an_endless_loop_without_training_is_priced_once_it_is_steady(monkeypatch):
    # An optimizer that another test left could step yet, for all that a dry run knows.
    def alive_but_optimizers():
        found = roles.Alive()
        found.optimizers.clear()
        return found

    monkeypatch.setattr(dry_run, "Alive", alive_but_optimizers)
    found = forecast({"torch": torch}, "while True: torch.ones(1 << 20) + 1", timeout_s=15.0)
    assert found.refused is None
    assert found.peak >= 8 << 20


def test_a_ledger_in_which_the_time_was_up_frees_nothing_that_it_has_not_counted():
    def events_ended_at(place):
        """Return the events of a storage that is made, resized and freed; the time is up at that line of the ledger."""
        held, book, lines = torch.ones(4).untyped_storage(), live_storages.Ledger(), 0

        def up(frame, event, _arg):
            nonlocal lines
            if frame.f_code.co_filename != live_storages.__file__:
                return None
            lines += event == "line"
            if event == "line" and lines == place:
                raise dry_run.OutOfTime
            return up

        sys.settrace(up)
        try:
            with contextlib.suppress(dry_run.OutOfTime):
                book.hold(held)
                held.resize_(64)
                book.hold(held)
        finally:
            sys.settrace(None)
        del held
        return lines, book.events

    whole, events = events_ended_at(0)
    assert [event[0] for event in events] == ["alloc", "free", "alloc", "free"]
    for place in range(1, whole + 1):
        _, events = events_ended_at(place)
        counted = set()
        for event in events:
            counted.add(event[1]) if event[0] == "alloc" else counted.remove(event[1])


WRITERS = {
    "open": "open(path, 'w').write('x')",
    "append": "with open(path, 'a') as f: f.write('x')",
    "pathlib": "import pathlib; pathlib.Path(path).write_text('x')",
    "numpy": "np.save(path, np.ones(3))",
    "torch_save": "torch.save(torch.ones(3), path)",
    "os_open": "import os; os.open(path, os.O_WRONLY | os.O_CREAT)",
    "c_library": "import ctypes; ctypes.CDLL(None).creat(path.encode(), 0o644)",
    "inherited": "held.write('x'); held.flush()",
    "inherited_descriptor": "import os; os.write(held.fileno(), b'x')",
    "remove": "import os; os.remove(existing)",
    "truncate": "import os; os.truncate(existing, 0)",
    "rename": "import os; os.rename(existing, path)",
    "directory": "import os; os.makedirs(path)",
    "shutil": "import shutil; shutil.copy(existing, path)",
    "process": "import subprocess; subprocess.run(['touch', path])",
    "shell": "import os; os.system('touch ' + path)",
    "sqlite": "import sqlite3; sqlite3.connect(path).execute('create table t (x)')",
    "memory_map": "mapped[:] = 7",
    "shared_tensor": "shared.numpy()[:] = 7",
}


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written(name, tmp_path):
    path, existing, held, mapped = (tmp_path / part for part in ("new", "existing", "held", "mapped"))
    existing.write_text("kept")
    np.zeros(10).tofile(mapped)
    with held.open("w") as stream:
        ns = {
            "np": np,
            "torch": torch,
            "path": str(path),
            "existing": str(existing),
            "held": stream,
            "mapped": np.memmap(mapped, mode="r+"),
            "shared": torch.zeros(10).share_memory_(),
        }
        forecast(ns, WRITERS[name])
        assert ns["shared"].sum() == 0
        assert ns.pop("mapped").sum() == 0
    assert {found.name for found in tmp_path.iterdir()} == {"existing", "held", "mapped"}
    assert existing.read_text() == "kept"
    assert held.read_text() == ""


def test_saving_the_model_does_not_end_the_forecast():
    ns = namespace(mlp)
    save = "import os, json\nos.makedirs('/out', exist_ok=True)\ntorch.save(model, '/out/m.pt')\n"
    save += "json.dump([1], open('/out/x', 'w'))\n"
    assert forecast(ns, save + TRAIN).refused is None


@pytest.mark.parametrize("inherited", [True, False])
def test_nothing_is_sent(inherited):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = server.getsockname()
        if inherited:
            with socket.create_connection(address) as client, server.accept()[0] as peer:
                peer.settimeout(0.2)
                forecast({"client": client}, "client.send(b'x')")
                with pytest.raises(TimeoutError):
                    peer.recv(1)
        else:
            found = forecast({"address": address}, "import socket; socket.create_connection(address)")
            assert "connect to the network" in found.refused
            with pytest.raises(TimeoutError):
                server.accept()


def test_other_processes_get_no_signal():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for cell in (f"import os; os.kill({other.pid}, 9)", f"import ctypes; ctypes.CDLL(None).kill({other.pid}, 9)"):
            forecast({}, cell)
        time.sleep(0.1)
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0


@pytest.mark.parametrize(
    ("cell", "signal_name"),
    [("os._exit(3)", "the cell ends its process, with status 3"), ("ctypes.string_at(0)", "SIGSEGV")],
)
def test_a_dry_run_that_dies_is_an_answer(cell, signal_name):
    assert signal_name in forecast({}, f"import os, ctypes\n{cell}").refused


def test_output_goes_nowhere(capfd):
    forecast({}, "import os, sys\nprint('a'); sys.stderr.write('b'); os.write(1, b'c'); os.write(2, b'd')")
    assert capfd.readouterr() == ("", "")


def test_exit_handlers_do_not_run(tmp_path):
    mark = tmp_path / "mark"
    code = f"""
import atexit, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from forecast_lab import forecast
atexit.register(lambda: open({str(mark)!r}, "a").write("x"))
assert forecast({{}}, "import sys; sys.exit()").refused is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert mark.read_text() == "x"


@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_it_works_under_a_tight_limit(limit):
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from forecast_lab import TRAIN, forecast, namespace, transformer
ns = namespace(transformer, "adamw")
exec(TRAIN, ns)
forecast(ns, TRAIN)
field = {{"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}}[{limit!r}]
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) << 10
resource.setrlimit(resource.{limit}, (used + (4 << 20), resource.RLIM_INFINITY))
try:
    exec("kept = torch.ones(64 << 20)" + TRAIN, ns)  # what is free inside malloc would do for TRAIN alone
except (MemoryError, RuntimeError) as error:
    print(type(error).__name__)
tight = forecast(ns, TRAIN)
assert tight.refused is None, tight.refused
is_kept = resource.getrlimit(resource.{limit})[0] == used + (4 << 20)
resource.setrlimit(resource.{limit}, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(abs(tight.peak / forecast(ns, TRAIN).peak - 1) < 0.2, is_kept)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.split() == ["RuntimeError", "True", "True"]


def test_a_process_at_its_limit_loads_nothing_for_its_forecast():
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from forecast_lab import forecast
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (4 << 20), resource.RLIM_INFINITY))
before = set(sys.modules)
found = forecast({{}}, "import torch; x = torch.ones(100 << 20)")
assert found.peak >= 400 << 20, found
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"


def test_an_interrupt_ends_the_dry_runs_and_goes_on():
    main = threading.main_thread().ident
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT))
    forecast({}, "pass")
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        forecast({}, "while True: pass", timeout_s=30.0)
    timer.join()
    time.sleep(0.2)
    running = subprocess.run(["ps", "-o", "pid=", "-g", str(os.getpid())], capture_output=True, text=True, check=False)
    assert _children() == "" or running.returncode in (0, 1)


def test_twenty_forecasts_leave_nothing_behind():
    ns = namespace(mlp)
    forecast(ns, TRAIN)
    gc.collect()
    before = open_descriptors(), _children(), threading.active_count()
    for cell in [TRAIN, "1 / 0", "import os; os._exit(1)", "while True: pass"] * 5:
        forecast(ns, cell, timeout_s=0.7)
    assert (open_descriptors(), _children(), threading.active_count()) == before


def test_a_parent_that_ignores_its_children_gets_its_answer():
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert forecast({}, "pass").refused is None
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_without_a_fork_that_is_safe_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert forecast({}, "pass").refused is None
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert forecast({}, "pass").refused == "forecasts need fork(), which is not safe on macOS beside Metal"
    monkeypatch.delattr(os, "fork")
    assert forecast({}, "pass").refused == "forecasts need fork(), which this system has not"


def test_a_process_that_the_system_does_not_fork_says_so(monkeypatch):
    def refused() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "fork", refused)
    assert forecast({}, "pass").refused == "this process cannot be forked: Cannot allocate memory"


def test_a_forked_copy_that_crashes_at_once_is_an_answer(monkeypatch):
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGTRAP)  # of which faulthandler says nothing

    monkeypatch.setattr(restrictions, "raise_limits", crash)
    assert forecast({}, "pass").refused == "the dry run was ended by SIGTRAP"


def test_cuda_in_use_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "CUDA is in use" in forecast({}, "pass").refused


def test_the_room_is_light_to_import():
    code = "import sys, oomdoctor.forecast; print('torch' in sys.modules, 'ipywidgets' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.split() == ["False", "False"]


def test_workers_of_a_loader_outlive_the_forecast():
    ns = namespace(transformer)
    ns["loader"] = torch.utils.data.DataLoader(ns["loader"].dataset, 32, num_workers=1, persistent_workers=True)
    iterator = iter(ns["loader"])
    next(iterator)
    ns["held"] = iterator
    assert forecast(ns, "del held\nimport gc; gc.collect()\n" + TRAIN).refused is None
    assert len(list(iterator)) == 3
    del iterator, ns
    gc.collect()
