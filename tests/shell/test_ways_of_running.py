"""Every way to run code in IPython: what runs out of memory is diagnosed, and healed or refused with the reason."""

from __future__ import annotations

import linecache
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any, Final

import ipykernel
import IPython
import nbclient
import nbformat
import papermill
import pexpect
import pytest
from kernels import Kernel, Reply

from oomdoctor.shell.cells import filenames

MODEL: Final = """\
import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import ipywidgets
import numpy as np
import torch
from torch import nn

from oomdoctor.sandbox.fork import is_copy

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


model = nn.Sequential(*(Block() for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
batches = list(torch.randn(3, 1024, 32))
losses, beats, where = [], [], []
"""
TRAIN: Final = """\
for x in batches:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item() + random.random())
"""
BUDGET: Final = "6MiB"
"""What TRAIN does not fit into, and does with its blocks recomputed."""
AS_FUNCTION: Final = "async def train():\n" + indent("await asyncio.sleep(0)\n" + TRAIN, "    ")
IN_THREAD: Final = TRAIN.replace(
    "    loss.backward()",
    "    if 'forward' not in vars(model[0]) and not is_copy(): torch.empty(1 << 60)\n    loss.backward()",
)
"""The virtual accelerator does not count in other threads: there it fails on the host, until blocks are recomputed.

A copy of the process has room, as the few rows of a trial have.
"""
WAYS: Final = {
    "await": "await asyncio.sleep(0)\n" + TRAIN,
    "gather": AS_FUNCTION + "done = await asyncio.gather(train(), asyncio.sleep(0, 7))",
    "%%time": "%%time\n" + TRAIN,
    "%%timeit": "%%timeit -n1 -r1\n" + TRAIN,
    "%%capture": "%%capture captured\nprint('kept')\n" + TRAIN,
    "%%prun": "%%prun -q\n" + TRAIN,
    "%run -i": "%run -i loop.py",
    "nested run_cell": f"ran = get_ipython().run_cell({TRAIN!r})",
    "with Output": "with ipywidgets.Output():\n" + indent(TRAIN, "    "),
    "thread pool": "def work():\n" + indent(IN_THREAD, "    ") + "with ThreadPoolExecutor(1) as pool:\n"
    "    pool.submit(work).result()\n",
}
ANSWERS_OK: Final = {"%%capture", "%run -i", "nested run_cell", "with Output"} | (
    {"%%time"} if IPython.version_info < (8,) else set()
)
"""Ways that show an error and go on, so that the cell answers `ok` all the same."""
UNTRIED: Final = {"%%timeit", "%%prun", "%run -i"}
"""Ways of magics whose code no trial follows: they are healed by hand alone."""
THREADS: Final = [False, True] if ipykernel.version_info >= (7,) else [False]
"""Whether a callback may come on a subshell's thread: an older kernel has no subshells, and is sent none."""
DIGESTS: Final = "__import__('oomdoctor.objects.leaves', fromlist=['x']).state_digests(globals())"
CASE: Final = "__import__('oomdoctor').last_case().to_dict()"
EDITS: Final = (
    "(lambda case: [(e.before, e.after) for c in case.plan.candidates if c.label in case.outcome.fixes"
    " for e in c.patch.edits])"
    "(__import__('oomdoctor').last_case())"
)


@pytest.fixture(scope="module")
def plain() -> Iterator[Kernel]:
    """A kernel without oomdoctor, in which changed cells are run."""
    started = Kernel()
    started.run("pass", ok=True)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def watched() -> Iterator[Kernel]:
    """A kernel with oomdoctor, which knows one fix."""
    started = Kernel({"PYTHONPATH": str(Path(__file__).parent)})
    started.run("%load_ext oomdoctor\n%config OomDoctor.forecast_time_s = 0", ok=True)
    started.run(f"open('loop.py', 'w').write({TRAIN!r})\nopen('whole.py', 'w').write({MODEL + TRAIN!r})", ok=True)
    started.run(MODEL, ok=True)
    started.value("__import__('state_held').know_only('checkpoint_blocks')")
    yield started
    started.stop()


def prepare(kernel: Kernel, auto: str) -> None:
    """Begin anew, on a small device, without the panel."""
    kernel.run("%oomdoctor simulate off", ok=True)
    kernel.run("%reset -f", ok=True)
    kernel.run(MODEL, ok=True)
    kernel.run(f"%oomdoctor simulate {BUDGET}\n%oomdoctor auto {auto}\n%config OomDoctor.panel = False", ok=True)


def fresh(kernel: Kernel, way: str, edits: list[list[str]]) -> dict[str, str]:
    """Return the digests after the cells as they were changed, in a kernel that nothing failed in."""
    changes = {before.strip(): after for before, after in edits}
    assert changes.keys() & {MODEL.strip(), way.strip()}
    kernel.run("%reset -f", ok=True)
    kernel.run(f"open('loop.py', 'w').write({TRAIN!r})", ok=True)
    for cell in (MODEL, way):
        kernel.run(changes.get(cell.strip(), cell), ok=True)
    return digests(kernel)


def digests(kernel: Kernel) -> dict[str, str]:
    return dict(kernel.value(DIGESTS))


def of_the_user(reply: Reply) -> bool:
    """Whether the one traceback that was shown is the user's, with no line of ours that runs cells."""
    (error,) = reply.errors
    return error["ename"] in ("OutOfMemoryError", "RuntimeError") and "oomdoctor/shell" not in reply.text


@pytest.mark.parametrize("way", WAYS)
def test_it_is_healed_by_itself_and_by_hand(watched: Kernel, plain: Kernel, way: str) -> None:
    prepare(watched, "off")
    failed = watched.run(WAYS[way], ok=way in ANSWERS_OK)
    assert of_the_user(failed)
    assert failed.data("text/plain")[0].startswith("Out of memory, case")
    assert f"(In[{failed.content['execution_count']}]" in failed.text
    assert "%oomdoctor fix 1" in failed.text
    by_hand = watched.run("%oomdoctor fix 1", ok=True)
    assert "Healed" in by_hand.text
    expected = fresh(plain, WAYS[way], watched.value(EDITS))
    assert digests(watched) == expected
    prepare(watched, "exact")
    if way in UNTRIED:
        untried = watched.run(WAYS[way], ok=way in ANSWERS_OK)
        assert "could not be tried" in untried.text
        assert "Healed" not in untried.text
        return
    by_itself = watched.run(WAYS[way], ok=True)
    assert "Healed" in by_itself.text
    assert bool(by_itself.errors) is (way in ANSWERS_OK)
    assert digests(watched) == expected


def test_what_a_cell_runs_in_its_turn_is_of_that_cell_where_texts_alone_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython before 8 keeps the text of each file name; that of a cell within a cell is in no history."""
    names = {"again": (5.0, "x = 1"), "inner": (4.0, "inner()"), "outer": (3.0, "outer()")}
    cache = {name: (0, at, [f"{text}\n"], name) for name, (at, text) in names.items()}
    monkeypatch.setattr(linecache, "_ipython_cache", cache, raising=False)
    history = SimpleNamespace(input_hist_parsed=["", "x = 1\n", "outer()\n", "x = 1\n"])
    shell = SimpleNamespace(compile=None, history_manager=history)
    assert filenames(shell) == {"outer": 2, "inner": 2, "again": 3}


def test_a_shown_failure_of_the_retry_is_one_too(watched: Kernel) -> None:
    """`%%capture` answers `ok` whatever happens in it: its retry is not taken for a healed one."""
    prepare(watched, "off")
    before = digests(watched)
    watched.run("%%capture captured\n" + TRAIN + "    torch.empty(2 << 20)\n", ok=True)
    reply = watched.run("%oomdoctor fix 1", ok=False)
    assert "Healed" not in reply.text
    assert watched.value(CASE)["outcome"]["kind"] == "rolled_back"
    assert digests(watched) == before


def test_tasks_beside_the_failed_one_are_ended_before_the_retry(watched: Kernel, plain: Kernel) -> None:
    beside = """\
async def beat():
    for turn in range(40):
        beats.append((turn, random.random()))
        await asyncio.sleep(0.01)
"""
    cell = AS_FUNCTION + beside + "done = await asyncio.gather(train(), beat())\n"
    prepare(watched, "exact")
    assert "Healed" in watched.run(cell, ok=True).text
    expected = fresh(plain, cell, watched.value(EDITS))
    assert watched.value("len(beats)") == 40
    assert digests(watched) == expected


def test_the_script_of_a_run_in_a_namespace_of_its_own_is_refused_in_one_line(watched: Kernel) -> None:
    prepare(watched, "exact")
    reply = watched.run("%run whole.py", ok=True)
    assert of_the_user(reply)
    assert "Not retried" in reply.text
    assert "its own namespace" in watched.value(CASE)["outcome"]["why"]
    assert "unknown fix '1'" in watched.run("%oomdoctor fix 1", ok=True).stderr


def test_a_thread_that_fails_is_diagnosed_and_says_that_there_is_no_cell(watched: Kernel) -> None:
    prepare(watched, "exact")
    cell = "def work():\n    torch.empty(1 << 60)\nthread = threading.Thread(target=work, name='worker')\n"
    reply = watched.run(cell + "thread.start()\nthread.join()\n", ok=True)
    assert "Exception in thread worker" in reply.text
    assert "Out of memory, case" in reply.text
    assert "it ran in the thread worker and not in a cell" in watched.value(CASE)["outcome"]["why"]


def test_a_cell_is_not_taken_back_while_another_thread_runs_the_users_code(watched: Kernel) -> None:
    prepare(watched, "exact")
    watched.run("def wait():\n    over.wait()\nover = threading.Event()\n", ok=True)
    watched.run("threading.Thread(target=wait, name='other').start()", ok=True)
    failed = watched.run(TRAIN, ok=False)
    assert of_the_user(failed)
    assert "the thread other is running `wait` meanwhile" in watched.value(CASE)["outcome"]["why"]
    watched.run("over.set()", ok=True)
    prepare(watched, "exact")
    assert "Healed" in watched.run(TRAIN, ok=True).text


# Buttons -----------------------------------------------------------------------------------------------------------


class Buttons:
    """The frontend's side of the buttons of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._client = kernel._client
        self.kernel, self._subshell = kernel, None

    def open_subshell(self) -> None:
        """Have what follows arrive on the thread of a subshell, as it may in JupyterLab."""
        sent = self._client.session.send(self._client.control_channel.socket, "create_subshell_request", content={})
        while (reply := self._client.get_control_msg(timeout=20))["parent_header"]["msg_id"] != sent["msg_id"]:
            pass
        self._subshell = reply["content"]["subshell_id"]

    def press(self, comm: str) -> Reply:
        """Click a button; return what came of it."""
        data = {"method": "custom", "content": {"event": "click"}, "buffers": []}
        if self._subshell is not None:  # a click goes to the shell that has last sent something to the button
            touch = f"__import__('ipywidgets').widgets.widget._instances[{comm!r}].tooltip = 'touched'"
            self._sent("execute_request", {"code": touch, "silent": True})
        return self._sent("comm_msg", {"comm_id": comm, "data": data})

    def _sent(self, kind: str, content: dict[str, Any]) -> Reply:
        message = self._client.session.msg(kind, content)
        if self._subshell is not None:
            message["header"]["subshell_id"] = self._subshell
        self._client.shell_channel.send(message)
        reply, end = Reply("ok"), time.monotonic() + 60
        while time.monotonic() < end:
            got = self._client.get_iopub_msg(timeout=60)
            if got["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                if got["header"]["msg_type"] == "status" and got["content"]["execution_state"] == "idle":
                    return reply
                reply.messages.append(got)
        raise AssertionError("the click was not answered")


def button_of(reply: Reply, description: str) -> str:
    """Return the comm of a button that was opened."""
    return next(
        str(message["content"]["comm_id"])
        for message in reply.messages
        if message["header"]["msg_type"] == "comm_open"
        and message["content"]["data"]["state"].get("description") == description
    )


def with_button(kernel: Kernel, body: str) -> str:
    cell = "def pressed(_):\n    global x, loss\n" + indent(body, "    ")
    made = kernel.run(cell + "button = ipywidgets.Button(description='go')\nbutton.on_click(pressed)\n", ok=True)
    return button_of(made, "go")


@pytest.mark.parametrize("on_subshell", THREADS, ids="subshell {}".format)
def test_a_callback_is_diagnosed_and_says_that_there_is_no_cell(watched: Kernel, on_subshell: bool) -> None:
    prepare(watched, "exact")
    buttons = Buttons(watched)
    if on_subshell:
        buttons.open_subshell()
    reply = buttons.press(with_button(watched, "where.append(threading.current_thread())\ntorch.empty(1 << 60)\n"))
    assert watched.value("where[0] is threading.main_thread()") is not on_subshell
    assert of_the_user(reply)
    assert "Out of memory, case" in reply.text
    case = watched.value(CASE)
    assert "it ran in a callback and not in a cell" in case["outcome"]["why"]
    assert "not priced yet" not in reply.text
    assert "nothing was priced" in reply.text


def test_a_cell_that_a_button_runs_is_healed(watched: Kernel, plain: Kernel) -> None:
    prepare(watched, "exact")
    reply = Buttons(watched).press(with_button(watched, f"get_ipython().run_cell({TRAIN!r})\n"))
    assert "Healed" in reply.text
    assert watched.value("len(losses)") == 3


@pytest.mark.parametrize("way", ["plain", "await"])
@pytest.mark.parametrize("on_subshell", THREADS, ids="subshell {}".format)
def test_the_retry_button_works_on_whichever_thread_it_comes(watched: Kernel, way: str, on_subshell: bool) -> None:
    prepare(watched, "off")
    watched.run("%config OomDoctor.panel = True", ok=True)
    failed = watched.run(WAYS.get(way, TRAIN), ok=False)
    buttons = Buttons(watched)
    if on_subshell:
        buttons.open_subshell()
    pressed = buttons.press(button_of(failed, "Fix it"))
    if way == "await":  # no button for it is shown
        assert "type `%oomdoctor retry` in a cell of its own" in pressed.text
        watched.run("%oomdoctor retry", ok=True)
    assert watched.value(CASE)["outcome"]["kind"] == "healed", pressed.text
    assert watched.value("len(losses)") == 3


# Notebooks ---------------------------------------------------------------------------------------------------------


def send(kernel: Kernel, *cells: str) -> list[str]:
    """Queue cells at once, as "Run All" does; return how each answers."""
    sent = [kernel._client.execute(cell, store_history=True, stop_on_error=True) for cell in cells]
    answers: dict[str, str] = {}
    while set(sent) - set(answers):
        reply = kernel._client.get_shell_msg(timeout=60)
        answers[reply["parent_header"]["msg_id"]] = reply["content"]["status"]
    return [answers[one] for one in sent]


def test_run_all_stops_at_a_failure_and_goes_on_after_a_healed_one(watched: Kernel) -> None:
    prepare(watched, "off")
    assert send(watched, "first = 1", TRAIN, "second = 2") == ["ok", "error", "aborted"]
    prepare(watched, "exact")
    assert send(watched, "first = 1", TRAIN, "second = 2") == ["ok", "ok", "ok"]
    assert watched.value("(second, len(losses))") == [2, 3]


def notebook(auto: str) -> Any:
    one_fix = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    one_fix += "import state_held; state_held.know_only('checkpoint_blocks')\n"
    first = f"{one_fix}%load_ext oomdoctor\n%config OomDoctor.forecast_time_s = 0\n%oomdoctor auto {auto}"
    cells = [first, MODEL, f"%oomdoctor simulate {BUDGET}", TRAIN, "print(len(losses), 'steps')"]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def outcome_of(made: Any) -> str:
    healed = [at for at, cell in enumerate(made.cells) if "Healed" in str(cell.outputs)]
    return f"healed {healed}, {made.cells[-1].outputs[0].text}"


def test_nbclient_goes_on_after_a_healed_cell_and_stops_at_a_failed_one(tmp_path: Path) -> None:
    made = notebook("exact")
    more = ["%oomdoctor auto off\n%oomdoctor simulate off", MODEL, made.cells[2].source, TRAIN, "print('not reached')"]
    made.cells += [nbformat.v4.new_code_cell(cell) for cell in more]
    client = nbclient.NotebookClient(made, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="OutOfMemoryError"):
        client.execute()
    del made.cells[-1:]
    assert "Out of memory, case 2" in str(made.cells[-1].outputs)
    del made.cells[5:]
    assert outcome_of(made) == "healed [3], 3 steps\n"


def test_a_cell_that_is_healed_by_hand_keeps_its_diagnosis_in_the_notebook(tmp_path: Path) -> None:
    made = notebook("off")
    made.cells.append(nbformat.v4.new_code_cell("%oomdoctor fix 1"))
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(made, kernel_name="python3", allow_errors=True, resources=resources).execute()
    told = str(made.cells[3].outputs)
    assert "Healed, after it ran out of memory" in told
    assert "What holds it" in told


def test_papermill_goes_on_after_a_healed_cell(tmp_path: Path) -> None:
    nbformat.write(notebook("exact"), tmp_path / "in.ipynb")
    papermill.execute_notebook(
        tmp_path / "in.ipynb", tmp_path / "out.ipynb", kernel_name="python3", cwd=tmp_path, progress_bar=False
    )
    assert outcome_of(nbformat.read(tmp_path / "out.ipynb", as_version=4)) == "healed [3], 3 steps\n"


# Terminals ---------------------------------------------------------------------------------------------------------

PROMPT: Final = r"In \[\d+\]: "


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*command: str) -> Terminal:
        started.append(Terminal(command, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.child.close(force=True)


class Terminal:
    """IPython in a terminal."""

    def __init__(self, command: tuple[str, ...], home: Path) -> None:
        files = {"model.py": MODEL, "train.py": TRAIN}
        for name, text in files.items():
            (home / name).write_text(text)
        self.child = pexpect.spawn(
            sys.executable,
            list(command),
            env={**os.environ, "IPYTHONDIR": str(home), "TERM": "dumb", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            cwd=str(home),
            encoding="utf-8",
            timeout=60,
            dimensions=(50, 200),
        )
        self.child.expect(PROMPT)

    def run(self, line: str, until: str = PROMPT) -> str:
        self.child.sendline(line)
        self.child.expect(until)
        return str(self.child.before)


IPYTHON: Final = ("-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=NoColor")
LOOP: Final = "exec(open('train.py').read())"


def test_a_plain_terminal_and_its_debugger(terminal: Callable[..., Terminal]) -> None:
    shell = terminal(*IPYTHON)
    shell.run("%load_ext oomdoctor")
    shell.run("%config OomDoctor.forecast_time_s = 0")
    shell.run("%run -i model.py")
    shell.run(f"%oomdoctor simulate {BUDGET}")
    failed = shell.run(LOOP)
    assert "OutOfMemoryError" in failed
    assert "Out of memory at " in failed
    assert "Healed" in shell.run("%oomdoctor fix 1")
    assert "3" in shell.run("len(losses)")
    shell.run("%run -i model.py")
    failed = shell.run(LOOP.replace("exec", "await asyncio.sleep(0); exec"))
    assert "Out of memory at " in failed
    assert "Healed" in shell.run("%oomdoctor fix 1")
    assert "3" in shell.run("len(losses)")
    shell.run("%config OomDoctor.keep_frames = True")
    shell.run("%run -i model.py")
    shell.run("def work(kept): exec(open('train.py').read(), globals())")
    shell.run("work(41)")
    shell.run("%debug", "ipdb> ")
    for _ in range(30):
        if "41" in shell.run("p kept", "ipdb> "):
            break
        shell.run("up", "ipdb> ")
    else:
        raise AssertionError("no frame has the local")
    shell.run("q")
    assert "Healed" in shell.run("%oomdoctor fix 1")
    assert "3" in shell.run("len(losses)")
    assert "True" in shell.run("hasattr(threading.excepthook, '__wrapped__')")
    shell.run("%unload_ext oomdoctor")
    assert "False" in shell.run("hasattr(threading.excepthook, '__wrapped__')")


def test_an_embedded_shell(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    script = "\nimport IPython\nIPython.embed(simple_prompt=True, banner1='', confirm_exit=False, colors='NoColor')\n"
    (tmp_path / "embeds.py").write_text(MODEL + script)
    shell = terminal("embeds.py")
    shell.run("%load_ext oomdoctor")
    shell.run("%config OomDoctor.forecast_time_s = 0")
    shell.run(f"%oomdoctor simulate {BUDGET}")
    failed = shell.run(LOOP)
    assert "Out of memory at " in failed
    assert "Healed" in shell.run("%oomdoctor fix 1")
    assert "3" in shell.run("len(losses)")
