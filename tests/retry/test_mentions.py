"""What a cell does not get at is not looked at before it, and what it gets at by hidden ways is put back or told."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ipywidgets
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from oomdoctor.program.code_names import EVERYTHING, mentioned
from oomdoctor.retry import Transaction
from oomdoctor.retry.reachable import held_elsewhere


class Slotted:
    __slots__ = ("x", "y")
    __module__ = "__main__"

    def __init__(self) -> None:
        self.x, self.y = 1, [2]


class Plain:
    __module__ = "__main__"

    def __init__(self) -> None:
        self.x, self.y = 1, "a"


@dataclass
class Data:
    __module__ = "__main__"
    x: int = 1
    y: dict[str, int] = field(default_factory=dict)


MAKERS: dict[str, Callable[[], Any]] = {
    "instances": Plain,
    "slots": Slotted,
    "dataclasses": Data,
    "lists": lambda: [1, [2]],
    "dicts": lambda: {"a": 1, "b": [2]},
    "sets": lambda: {1, "a"},
    "text": lambda: f"{time.time()}",
    "namespaces": SimpleNamespace,
    "modules": lambda: torch.nn.ReLU(),
}


@pytest.mark.parametrize("within", ["a list", "names"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_cell_that_gets_at_nothing_looks_at_nothing(kind: str, within: str) -> None:
    """Counted, not timed: the calls of functions that a snapshot makes do not grow with what there is."""
    few, many = (_calls(kind, within, count) for count in (10, 2_000))
    assert many <= few + 20


def _calls(kind: str, within: str, count: int) -> int:
    import sys

    made = [MAKERS[kind]() for _ in range(count)]
    namespace: dict[str, Any] = {f"v{at}": one for at, one in enumerate(made)} if within == "names" else {"all": made}
    Transaction(namespace, "pass", lambda: 0)
    calls = 0

    def count_calls(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count_calls)
    try:
        Transaction(namespace, "pass", lambda: 0)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


HIDDEN = {
    "a hook of torch's for all modules": (
        ("seen = []\nimport torch\nfrom torch.nn.modules.module import register_module_forward_hook as register\n"
        "layer = torch.nn.Linear(2, 2)\nhandle = register(lambda *given: seen.append(len(seen)))\n"),
        "layer(torch.ones(1, 2))",
        "handle.remove()",
    ),
    "a function that was put in the place of a library's": (
        ("seen = []\nimport json\nkept = json.dumps\n"
        "def own(*given):\n    seen.append(1)\n    return kept(*given)\njson.dumps = own\n"),
        "import json\njson.dumps(1)",
        "json.dumps = kept",
    ),
    "an object of the user's that a library holds": (
        ("import logging\nseen = []\nclass Own(logging.Handler):\n"
        "    def emit(self, record):\n        seen.append(record.msg)\n"
        "own = Own()\nlogging.root.addHandler(own)\n"),
        "import logging\nlogging.error('x')",
        "logging.root.removeHandler(own)",
    ),
    "a backward that leads to weights that nothing names": (
        "import torch\nseen = torch.nn.Parameter(torch.ones(3))\nloss = (seen * 2).sum()\n",
        "loss.backward()",
        "",
    ),
    "a hook of a tensor": (
        ("import torch\nseen = []\nweight = torch.nn.Parameter(torch.ones(3))\n"
        "weight.register_hook(lambda gradient: seen.append(1))\n"),
        "(weight * 2).sum().backward()",
        "",
    ),
    "an object that a library's object holds": (
        ("from concurrent.futures import Future\nseen = []\nwork = Future()\n"
        "work.add_done_callback(lambda of: seen.append(1))\n"),
        "work.set_result(1)",
        "",
    ),
    "a container that a library's object shares": (
        ("import configparser\nseen = [1]\ndeep = {'a': seen}\nholder = configparser.ConfigParser()\n"
        "holder.extra = seen\n"),
        "holder.extra.append(2)",
        "",
    ),
    "a weak reference": (
        "import weakref\nclass Own: pass\nseen = Own()\nseen.items = []\nshort = weakref.ref(seen)\n",
        "short().items.append(1)",
        "",
    ),
    "a name in a text": ("seen = []\n", "__import__('operator').attrgetter('append')(eval('se' 'en'))(1)", ""),
    "the namespace of the program": ("seen = []\n", "import __main__ as here\n", ""),
    "a function of a function": ("seen = []\ndef a():\n    seen.append(1)\ndef b():\n    a()\n", "b()", ""),
    "a method": ("seen = []\nclass Own:\n    def run(self):\n        seen.append(1)\nown = Own()\n", "own.run()", ""),
    "a method of a pair": (
        ("from typing import NamedTuple\nseen = []\nclass Own(NamedTuple):\n    a: int\n"
        "    def run(self):\n        seen.append(1)\nown = Own(1)\n"),
        "own.run()",
        "",
    ),
    "what the shell has shown": ("seen = []\nOut = {1: seen}\n", "Out[1].append(1)", ""),
}  # fmt: skip


@pytest.fixture
def begin() -> Iterator[Callable[[str, str], dict[str, Any]]]:
    ends: list[tuple[str, dict[str, Any]]] = []

    def start(setup: str, end: str) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(setup, namespace)
        ends.append((end, namespace))
        return namespace

    yield start
    for end, namespace in ends:
        exec(end, namespace)


def _shown(value: Any) -> str:
    return repr((value, getattr(value, "grad", None), getattr(value, "__dict__", None)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", HIDDEN)
def test_what_is_got_at_by_a_hidden_way_comes_back_or_is_told(
    way: str, begin: Callable[[str, str], dict[str, Any]]
) -> None:
    setup, cell, end = HIDDEN[way]
    namespace = begin(setup, end)
    before = _shown(namespace["seen"])
    transaction = Transaction(namespace, cell, lambda: 1 << 20)
    with transaction.armed(), suppress(MemoryError):
        exec(cell, namespace)
    changed = _shown(namespace["seen"]) != before
    told = transaction.settle() + transaction.losses()
    assert any("`seen`" in one for one in told) or _shown(namespace["seen"]) == before, told
    assert changed or way == "the namespace of the program"


def test_what_functions_mention_that_the_namespace_alone_holds_is_not_told() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("seen = []\ndef told():\n    seen.append(1)\n", namespace)
    assert held_elsewhere(namespace, (), frozenset({"seen"})) == set()
    beside = [namespace["told"]]
    assert held_elsewhere(namespace, (), frozenset({"seen"})) == {"seen"}
    del beside


def test_what_a_widget_calls_is_no_hidden_code() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("seen = []\ndef pressed(button):\n    seen.append(1)\n", namespace)
    button = ipywidgets.Button()
    button.on_click(namespace.pop("pressed"))
    assert held_elsewhere(namespace, (), frozenset({"seen"})) == set()
    button.close()


def test_a_proxy_of_what_is_gone_is_passed_over() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "bar": SimpleNamespace()}
    exec("seen = []\ndef told():\n    seen.append(1)\n", namespace)
    namespace["bar"].container = weakref.proxy(Plain())
    assert held_elsewhere(namespace, (), frozenset({"seen"})) == set()


def test_a_cell_that_gets_at_the_shell_under_any_name_gets_at_everything() -> None:
    namespace: dict[str, Any] = {"shell": InteractiveShell.__new__(InteractiveShell), "seen": [1]}
    transaction = Transaction(namespace, "shell.user_ns['se' + 'en'].append(2)", lambda: 1 << 20)
    namespace["seen"].append(2)
    transaction.restore()
    assert namespace["seen"] == [1]
    assert transaction.losses() == ()


def test_an_attempt_that_gets_at_more_than_the_cell_is_taken_back_whole() -> None:
    from oomdoctor.model.session import Attempt

    namespace: dict[str, Any] = {"log": [0], "other": {"kept": [1]}, "__name__": "__main__"}
    transaction = Transaction(namespace, "log.append(1)", lambda: 1 << 20)
    exec("log.append(1)", namespace)
    transaction.restore()
    transaction.hold(Attempt(source="log.append(1)", replays=("other['kept'].append(2); other['more'] = 3",)))
    exec("other['kept'].append(2); other['more'] = 3; log.append(1)", namespace)
    assert transaction.settle() == ()
    assert namespace["other"] == {"kept": [1]}
    assert namespace["log"] == [0]


@pytest.mark.parametrize("text", ["%time x", "!ls", "x?", "a = %time x", "eval('x')", "globals()", "_", "_3", "Out[2]"])
def test_texts_that_get_at_anything(text: str) -> None:
    assert mentioned(text) is EVERYTHING


@pytest.mark.parametrize(
    "text", ["pass", "model.eval()", "for _ in range(3): x", "a % b", "torch.compile(f)", "x.vars", "if a != b: x"]
)
def test_texts_that_do_not(text: str) -> None:
    assert mentioned(text) is not EVERYTHING


def test_methods_of_a_module_mention_the_names_of_their_own_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that names itself, as ``super(Net, self)`` does, means that of its module and not the notebook's name."""
    module = ModuleType("own_net")
    module.__file__ = str(tmp_path / "own_net.py")
    monkeypatch.setitem(sys.modules, "own_net", module)
    exec("class Net:\n    def __init__(self):\n        super(Net, self).__init__()\n", vars(module))
    namespace: dict[str, Any] = {"__name__": "__main__", "Net": vars(module)["Net"]}
    namespace["net"] = namespace["Net"]()
    beside = [namespace["net"]]
    assert held_elsewhere(namespace, (), frozenset({"Net"})) == set()
    exec("class Own:\n    def told(self):\n        Net.seen = 1\n", namespace)
    beside.append(namespace["Own"]())
    namespace["own"] = beside[-1]
    assert held_elsewhere(namespace, (), frozenset({"Net"})) == {"Net"}
