"""What a cell changes where a look at names and attributes does not see it: put back, or told."""

# ruff: noqa: ISC004 - cells of several lines, beside what they show

from __future__ import annotations

import decimal
import gc
import linecache
import locale
import logging
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from capabilities import keeps_weak_references, no_default_device
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from oomdoctor.program import code_names
from oomdoctor.retry import Transaction, release

IMPORTS = """
import abc, array, collections, contextvars, ctypes, decimal, functools, gc, io, logging, random, signal, sys
import threading, types
from collections import Counter, OrderedDict, deque
import numpy as np, torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
"""

LONG = "numbers, texts = list(range(30_000)), [str(at) for at in range(30_000)]\n"

PUT_BACK = {
    "the keywords of a partial": (
        "p, q = functools.partial(print, sep='a'), [functools.partial(print, sep=[1])]",
        "p.keywords['sep'] = 'b'; p.keywords['end'] = 'c'; del q[0].keywords['sep']", "(p.keywords, q[0].keywords)",
    ),
    "an attribute of a function of a library": (
        "F = torch.nn.functional", "F.relu.calls = 1; F.dropout.__defaults__ = ()",
        "(vars(F.relu), F.dropout.__defaults__)",
    ),
    "a new attribute that a function sets": ("def f(): torch.noted = 1", "f()", "getattr(torch, 'noted', 0)"),
    "an attribute of a class that a function sets": (
        "def f(): nn.Linear.noted = 1; nn.Linear.forward = print", "f()",
        "(getattr(nn.Linear, 'noted', 0), nn.Linear.forward.__qualname__)",
    ),
    "a number of a library that a method adds to": (
        "class Setup:\n    def go(self): np.pi += 1; torch.inf = 1.0\nsetup = Setup()", "setup.go()",
        "(np.pi, torch.inf)",
    ),
    "what a function sets by what it imports": (
        "def g():\n    import torch.nn.functional as H\n    H.gelu = print\n"
        "def f():\n    from torch import nn as N\n    setattr(N.functional, 'silu', g)\n    g()",
        "f()", "(torch.nn.functional.gelu.__name__, torch.nn.functional.silu.__name__)",
    ),
    "one item of a long list": (LONG, "numbers[7] = -1; texts[8] += 'a'", "(numbers[7], texts[8])"),
    "the order of a long list": (LONG, "random.shuffle(numbers); texts.sort()", "(numbers[:9], texts[:9])"),
    "a list that loses one and gains one": (LONG, "numbers.pop(3); numbers.append(1)", "(numbers[3], numbers[-1])"),
    "one value of a long dict": (
        "q = dict.fromkeys(range(30_000), 0.0)", "q[7] += 1; del q[9]; q[9] = 1", "list(q.items())",
    ),
    "a long counter": ("tally = Counter(range(30_000))", "tally[7] += 1; tally.update([9])", "(tally[7], tally[9])"),
    "a long ordered dict": ("order = OrderedDict.fromkeys(range(30_000))", "order.move_to_end(3)", "list(order)"),
    "a long set": (
        "seen = set(range(30_000))", "seen.remove(3); seen.add(-1)", "(3 in seen, -1 in seen, list(seen)[:9])",
    ),
    "a long deque": ("ring = deque(range(30_000), maxlen=30_000)", "ring.append(1); ring.rotate(2)", "list(ring)"),
    "a long list of objects": (
        "rows = [(at, 'a') for at in range(30_000)]", "swap = rows; swap[1], swap[2] = swap[2], swap[1]", "rows[:4]",
    ),
    "a long list in an object": (
        "class Data: pass\ndata = Data(); data.rows = list(range(30_000))\n"
        "def bump(data): data.rows[3] += 1", "bump(data)", "data.rows[3]",
    ),
    "a long list in a closure": (
        "def make():\n    rows = list(range(30_000))\n    def bump(): rows[3] += 1; return rows[3]\n    return bump\n"
        "bump = make()", "n = bump()", "bump.__closure__[0].cell_contents[3]",
    ),
    "a list that the cell writes to, however long": (
        "table = list(range(300_000)); other = list(range(300_000))",
        "other[3] = table[3] = -1", "(table[3], other[3])",
    ),
    "a long array of objects": (
        "objects = np.empty(30_000, object); objects[:] = 'a'", "objects[7] = 'b'", "objects[7]",
    ),
    "the defaults of a function": (
        "def f(a, b=[], *, c=1): return a, b, c", "f.__defaults__ = (3,); f.__kwdefaults__ = {'c': 4}",
        "(f.__defaults__, f.__kwdefaults__)",
    ),
    "defaults that are filled": ("def f(a=None, *, c=1): return a", "f.__kwdefaults__['c'] = 4", "f.__kwdefaults__"),
    "defaults and attributes of a function that had none": (
        "def f(a): return a", "f.__defaults__ = (3,); f.__kwdefaults__ = {}; f.calls = 1",
        "(f.__defaults__, f.__kwdefaults__, f.__dict__)",
    ),
    "the dict of a function": ("def f(): pass\nf.calls = 1", "f.__dict__ = {'other': 2}", "f.__dict__"),
    "the code of a function": (
        "def f(): return 1\ndef g(a=1): return 1",
        "f.__code__ = (lambda: 2).__code__; g.__code__ = (lambda a: 2).__code__", "(f(), g())",
    ),
    "what a context variable holds": (
        "kept = contextvars.ContextVar('kept'); kept.set([1])", "kept.get().append(2)", "kept.get()",
    ),
    "what a thread keeps": (
        "class Own(threading.local): pass\nlocal, own = threading.local(), Own()\n"
        "local.n, local.seen, own.n, own.gone = 1, [], 1, 1",
        "local.n += 1; local.seen.append(1); own.n += 1; own.new = 1; del own.gone",
        "(local.n, local.seen, vars(own))",
    ),
    "the arguments of an exception": (
        "class Failed(Exception): pass\nfirst, second, third = ValueError('a', 1), Failed('b'), OSError(2, 'c')",
        "first.args = (*first.args, 2); second.args = (); first.step = second.step = 3; third.errno = 5\n"
        "third.add_note('d')",
        "[(one.args, vars(one)) for one in (first, second, third)], third.errno",
    ),
    "a scripted module": (
        "scripted = torch.jit.script(Scripted())\n"
        "traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))",
        "optimizer = torch.optim.SGD([*scripted.parameters(), *traced.parameters()])\n"
        "traced(scripted(torch.ones(1, 2))).sum().backward(); optimizer.step(); scripted.eval(); traced.eval()",
        "(scripted.training, scripted.inner.training, traced.training, scripted.n, scripted.seen,\n"
        "[[(weight.tolist(), weight.grad) for weight in one.parameters()] for one in (scripted, traced)])",
    ),
    "the streams": (
        "kept = sys.stdout, sys.stderr", "sys.stdout = sys.stderr = io.StringIO()", "(sys.stdout, sys.stderr)",
    ),
    "more settings of torch": (
        "",
        "torch.set_autocast_cache_enabled(False); torch.utils.deterministic.fill_uninitialized_memory = False\n"
        "torch.backends.cudnn.allow_tf32 = False\n"
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False\n"
        "torch.set_warn_always(True); torch.backends.mha.set_fastpath_enabled(False)\n"
        "torch.autograd.set_multithreading_enabled(False); torch.__future__.set_swap_module_params_on_conversion(True)",
        "(torch.is_autocast_cache_enabled(), torch.utils.deterministic.fill_uninitialized_memory,\n"
        "torch.backends.cudnn.allow_tf32, torch.is_warn_always_enabled(),\n"
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,\n"
        "torch.backends.mha.get_fastpath_enabled(),\n"
        "torch._C._is_multithreading_enabled(), torch.__future__.get_swap_module_params_on_conversion())",
    ),
    "that oneDNN is deterministic": (
        "", "torch.backends.mkldnn.deterministic = True", "torch.backends.mkldnn.deterministic",
    ),
    "the precision that is set for all of a backend": (
        "", "torch.set_float32_matmul_precision('medium')",
        "(torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision,\n"
        "torch.backends.cuda.matmul.fp32_precision)",
    ),
    "denormal numbers": ("", "torch.set_flush_denormal(True)", "float(torch.tensor(1e-40) * torch.tensor(1.0))"),
    "loggers that no name leads to": (
        "logging.getLogger('seen before').setLevel(10)",
        "logging.getLogger('seen before').setLevel(40); logging.getLogger('seen before').propagate = False\n"
        "logging.getLogger('asyncio').disabled = True\n"
        "made = logging.getLogger('made by the cell'); made.addHandler(logging.NullHandler()); made.setLevel(30)\n"
        "logging.disable(10)",
        "(logging.getLogger('asyncio').disabled, logging.getLogger('seen before').level,\n"
        "logging.getLogger('seen before').propagate,\n"
        "logging.getLogger('made by the cell').handlers, logging.getLogger('made by the cell').level,\n"
        "logging.root.manager.disable)",
    ),
    "a logger with a name": (
        "log = logging.getLogger('a name'); log.addHandler(logging.NullHandler())",
        "logging.getLogger('a name of its own').setLevel(10); log.addHandler(logging.NullHandler()); log.setLevel(10)",
        "(len(log.handlers), log.level, logging.getLogger('a name of its own').level)",
    ),
    "a dict that is shown to be read": (
        "shown = types.MappingProxyType({'a': [1]})", "shown['a'].append(2)", "dict(shown)",
    ),
    "an array that is not to be written to": (
        "table = np.arange(3); table.flags.writeable = False; other = np.arange(3)",
        "table.flags.writeable = True; table[0] = 9; other[1] = 9; other.flags.writeable = False",
        "(table, table.flags.writeable, other, other.flags.writeable)",
    ),
    "an array of records": (
        "rows = np.zeros(2, [('x', 'f4'), ('y', 'i4')])", "rows['x'][0] = 3; rows[1] = (1, 2)", "rows.tolist()",
    ),
    "an element of XML": (
        "from xml.etree import ElementTree as ET; tree = ET.fromstring('<a x=\"1\"><b>c</b></a>')",
        "tree[0].text = 'd'; tree.set('x', '2'); tree[0].append(ET.Element('e')); tree.tag = 'f'; tree.append(tree[0])",
        "ET.tostring(tree)",
    ),
    "attributes that the cell makes names for": (
        "import torch", "for name in ['noted', 'relu']: setattr(torch.nn.functional, name, 1)",
        "(hasattr(torch.nn.functional, 'noted'), torch.nn.functional.relu)",
    ),
    "the collector": (
        "", "gc.disable(); gc.set_threshold(7); gc.callbacks.append(lambda *_: None)",
        "(gc.isenabled(), gc.get_threshold(), len(gc.callbacks))",
    ),
}  # fmt: skip

TOLD = {
    "a context variable": (
        "step = contextvars.ContextVar('step'); step.set(1)", "step.set(2)",
        "`step` is a context variable that was set",
    ),
    "a context variable that had no value": (
        "step = contextvars.ContextVar('step', default=0)", "step.set(1)", "`step` is a context variable that was set",
    ),
    "what lies in a long list": (
        "rows = [{'n': 0} for _ in range(30_000)]",
        "for row in rows: row['n'] += 1", "`rows` has more than 20000 items",
    ),
    "attributes of what lies in a long list": (
        "errors = [ValueError(1) for _ in range(30_000)]", "errors[0].args = (2,)", "`errors` has more than 20000",
    ),
    "objects in a long list, by their method": (
        "class Row:\n    n = 0\n    def bump(self): self.n += 1\nrows = [Row() for _ in range(30_000)]",
        "for row in rows: row.bump()", "`rows` has more than 20000 items, and the cell has changed what lies in them",
    ),
    "objects in a long dict, by a function": (
        "rows = {at: types.SimpleNamespace(n=0) for at in range(30_000)}\ndef bump(row): row.n += 1",
        "bump(rows[7])", "`rows` has more than 20000 items, and the cell has changed what lies in them",
    ),
    "lists in a long list, by a function": (
        "rows = [[0] for _ in range(30_000)]\ndef grow(row): row.append(1)",
        "grow(rows[7])", "`rows` has more than 20000 items, and the cell has changed what lies in them",
    ),
    "tensors in a long list, by a function": (
        "rows = [torch.zeros(1) for _ in range(30_000)]\ndef bump(row): row += 1",
        "bump(rows[7])", "`rows` has more than 20000 items, and the cell has changed what lies in them",
    ),
    "a hash": ("import hashlib; h = hashlib.sha256(b'a')", "h.update(b'b')", "`h` is an object of HASH, made in C"),
    "a hash in an object": (
        "import hashlib\nclass Log: pass\nlog = Log(); log.h = hashlib.md5(b'a')", "log.h.update(b'b')",
        "`log.h` is an object of HASH, made in C",
    ),
    "a compressor": (
        "import zlib; press = zlib.compressobj()", "press.compress(b'b' * 9999)", "`press` is an object of Compress,",
    ),
    "a long list of tensors": (
        "outputs = [torch.zeros(1)] * 30_000", "outputs[3] = None", "`outputs` has more than 20000 items",
    ),
    "a very long dict": (
        "long = dict.fromkeys(range(300_000))\ndef put(): globals()['lo' + 'ng'].update({-1: 1})", "put()",
        "`long` has more than",
    ),
    "a list in an item of a long list": (
        "rows = [{'n': [0]} for _ in range(30_000)]", "rows[5]['n'].append(1)", "`rows` has more than 20000 items",
    ),
    "a list in an object in a long list": (
        "errors = [ValueError([1]) for _ in range(30_000)]", "errors[5].args[0].append(1)", "`errors` has more than",
    ),
    "lists in a long list": (
        "rows = [[0] for _ in range(30_000)]", "for row in rows[:3]: row.append(1)", "`rows` has more than 20000 items",
    ),
    "the shape of an array": (
        "grid = np.arange(6)", "np.ndarray.shape.__set__(grid, (2, 3))", "`grid` is an array that was given another",
    ),
    "the shape of a large array": (
        "grid = np.zeros(1_000_000)", "np.ndarray.shape.__set__(grid, (1000, 1000))",
        "`grid` is an array that was given another shape",
    ),
    "one item of a very large array": (
        "big = np.zeros((3000, 3000))", "big[3, 4] += 1", "`big` is a large array",
    ),
    "one item of its view": (
        "big = np.zeros((3000, 3000))", "row = big[5:].T\nfor one in row: one[3] = 2", "`big` is a large array",
    ),
    "one item of what a function is given": (
        "big = np.zeros((3000, 3000))\ndef fix(a): a[3, 4] = 1", "fix(big)", "`big` is a large array",
    ),
    "one item of an array that a function knows": (
        "big = np.zeros((3000, 3000))\ndef fix(): big[3, 4] = 1", "fix()", "the cell may have written to, and no copy",
    ),
    "what stands below a mask": (
        "big = np.ma.masked_array(np.zeros(100_000), np.arange(100_000) == 7)", "big.data[7] = 1",
        "`big` is a large array",
    ),
    "a file that another array maps": (
        "import tempfile; raw = tempfile.mkstemp()[1]\n"
        "np.zeros(100_000).tofile(raw); old = np.memmap(raw, float, 'r')",
        "new = np.memmap(raw, float, 'r+'); new += 1; n = old[0]", "`old` is a large array",
    ),
    "an array that a function within changes": (
        "big = np.zeros((3000, 3000))\ndef fix():\n    def within(): big.fill(1)\n    within()", "fix()",
        "`big` is a large array",
    ),
    "an array that is shuffled": (
        "big = np.arange(9_000_000)", "np.random.shuffle(big[:9_000])", "`big` is a large array",
    ),
    "an array that a tensor shares": (
        "big = np.zeros((3000, 3000))", "shared = torch.from_numpy(big)\nshared[3, 4] = 1", "`big` is a large array",
    ),
    "one letter of an array of texts": (
        "words = np.full(6_000_000, 'abc')", "words[12345] = 'b'", "`words` is a large array",
    ),
    "memory of ctypes": ("number = ctypes.c_int(1)", "number.value += 1", "`number` is memory of c_int"),
    "a default that is let go of": (
        "def make():\n    def f(a=torch.zeros(1 << 16)): return a\n    return f\nf = make()",
        "f.__defaults__ = (1,)",
        "`f.__defaults__[0]` was replaced by the cell, and the old one is gone",
    ),
    "running statistics that nobody counts": (
        "mean, var, x = torch.zeros(4), torch.ones(4), torch.randn(8, 4)\n"
        "def f(): return torch.nn.functional.batch_norm(x, mean, var, training=True)",
        "f()", "`mean` may have been written to by a batch_norm",
    ),
    "a deque of an object of a library": (
        "import contextlib; stack = contextlib.ExitStack()", "stack.callback(print, 1)",
        "`stack._exit_callbacks` was changed",
    ),
    "a lock that was taken": ("lock = threading.Lock()", "lock.acquire()", "`lock` is a lock that was taken"),
    "a lock of a thread that was taken again": (
        "lock = threading.RLock(); lock.acquire()", "lock.acquire()", "`lock` is a lock that was taken",
    ),
    "a lock that was let go of": (
        "class Job: pass\njob = Job(); job.lock = threading.Lock(); job.lock.acquire()", "job.lock.release()",
        "`job.lock` is a lock that was taken or let go of",
    ),
    "a mode that was left": (
        "mode = TorchFunctionMode(); mode.__enter__()", "mode.__exit__(None, None, None)", "the modes of torch were",
    ),
    "a mode of functions": (
        "torch.set_default_device('cpu')", "TorchFunctionMode().__enter__()", "the modes of torch were changed",
    ),
    "a mode of the dispatcher": (
        "from torch._subclasses import FakeTensorMode; mode = FakeTensorMode()", "mode.__enter__()",
        "the modes of torch were changed, and are not put back",
    ),
}  # fmt: skip

DOUBTED = {
    "settings of compilation": (
        "import torch._dynamo, torch._inductor.config as inductor", "torch._dynamo.config.cache_size_limit = 99",
        "the settings of torch._dynamo.config",
    ),
    "settings of compilation that a module within holds": (
        "import torch._inductor.config as inductor", "inductor.triton.cudagraphs = not inductor.triton.cudagraphs",
        "the settings of torch._inductor.config",
    ),
    "the context of decimals": (
        "", "decimal.getcontext().traps[decimal.FloatOperation] = True", "the context of decimals",
    ),
    "options of pandas": ("import pandas as pd", "pd.options.display.max_rows = 7", "the options of pandas"),
    "the locale": ("import locale", "locale.setlocale(locale.LC_ALL, 'C.UTF-8')", "the locale"),
    "a class that is registered": (
        "class Shape(abc.ABC): pass\nclass Ring: pass\ndef note(): Shape.register(Ring)", "note()",
        "the classes that are registered with abstract ones",
    ),
    "a class that is registered with a library's": (
        "class Ring: pass", "collections.abc.Sized.register(Ring)", "the classes that are registered",
    ),
    "a handler of a signal": ("", "signal.signal(signal.SIGUSR1, lambda *_: None)", "the handlers of signals"),
    "a function of one's own for interrupts": (
        "", "signal.signal(signal.SIGINT, lambda *_: None)", "the handler of SIGINT",
    ),
    "the handler of interrupts": ("", "signal.signal(signal.SIGINT, signal.SIG_IGN)", "the handler of SIGINT"),
}  # fmt: skip


class Scripted(torch.nn.Module):
    """Scripting asks for the text of a class, which one of a cell of a test does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.inner = 1, torch.nn.Linear(2, 2)
        self.seen = [1, 2]

    def forward(self, x):  # type: ignore[no-untyped-def]
        """Count, and go on."""
        self.n += 1
        self.seen.append(self.n)
        return self.inner(x)


@contextmanager
def begun(setup: str) -> Iterator[dict[str, Any]]:
    """Run a setup; what it or a cell changes of the process is put back by hand."""
    streams, threshold, callbacks = (sys.stdout, sys.stderr), gc.get_threshold(), gc.callbacks[:]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    context, spoken = decimal.getcontext().copy(), locale.setlocale(locale.LC_ALL)
    namespace: dict[str, Any] = {"__name__": "__main__", "Scripted": Scripted}
    text = IMPORTS + setup
    linecache.cache["<setup>"] = len(text), None, text.splitlines(keepends=True), "<setup>"
    exec(compile(text, "<setup>", "exec"), namespace)
    try:
        yield namespace
    finally:
        sys.stdout, sys.stderr = streams
        gc.enable()
        gc.set_threshold(*threshold)
        gc.callbacks[:] = callbacks
        for number, handler in handlers.items():
            signal.signal(number, handler)
        decimal.setcontext(context)
        locale.setlocale(locale.LC_ALL, spoken)
        no_default_device()
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack():
            torch.utils._python_dispatch.TorchDispatchMode.__exit__(
                torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1), None, None, None
            )


def failed(cell: str, namespace: dict[str, Any]) -> Transaction:
    transaction = Transaction(namespace, cell, lambda: 1 << 30)
    with transaction.armed(), suppress(MemoryError):
        exec(cell + "\nraise MemoryError", namespace)
    return transaction


def named(name: str) -> Any:
    """Return a case with the mark that it is skipped where this torch lacks the setting."""
    setting = {
        "that oneDNN is deterministic": "deterministic",
        "the precision that is set for all of a backend": "matmul",
    }
    lacks = name in setting and not hasattr(torch.backends.mkldnn, setting[name])
    marks = [pytest.mark.skipif(lacks, reason="this torch has no such setting")]
    return pytest.param(name, marks=[*marks, keeps_weak_references] if name == "a scripted module" else marks)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", [named(name) for name in PUT_BACK])
def test_it_is_put_back(name: str) -> None:
    setup, cell, shown = PUT_BACK[name]
    with begun(setup) as namespace:
        before = eval(shown, namespace)
        kept = repr(before)
        transaction = failed(cell, namespace)
        assert repr(eval(shown, namespace)) != kept, "the cell changed it"
        assert transaction.losses() == ()
        transaction.restore()
        assert repr(eval(shown, namespace)) == kept


@pytest.mark.parametrize("name", TOLD)
def test_it_is_told(name: str) -> None:
    setup, cell, told = TOLD[name]
    with begun(setup) as namespace:
        transaction = failed(cell, namespace)
        assert any(told in sentence for sentence in transaction.losses()), transaction.losses()
    with begun(setup) as namespace:
        assert failed("n = 1 + 1", namespace).losses() == (), "a cell that leaves it alone is not refused for it"


@pytest.mark.parametrize("name", DOUBTED)
def test_it_is_no_reason_to_refuse_and_named(name: str) -> None:
    setup, cell, told = DOUBTED[name]
    with begun(setup) as namespace:
        transaction = failed(cell, namespace)
        assert transaction.losses() == ()
        assert [one.startswith(told) for one in transaction.doubts()] == [True], transaction.doubts()
    with begun(setup) as namespace:
        assert failed("n = 1 + 1", namespace).doubts() == (), "a cell that leaves it alone is not told of"


def test_statistics_that_became_a_models_are_copied_before_its_first_forward() -> None:
    with begun("net = nn.BatchNorm1d(4); kept = {k: v.clone() for k, v in net.state_dict().items()}") as namespace:
        before = repr(namespace["kept"])
        transaction = failed("net.load_state_dict(kept, assign=True); net(torch.randn(8, 4))", namespace)
        assert repr(namespace["kept"]) != before, "the cell changed it"
        assert transaction.losses() == ()
        transaction.restore()
        assert repr(namespace["kept"]) == before


def own_module(folder: Path, text: str) -> ModuleType:
    """A module of the user's own, whose functions' texts can be read."""
    module = ModuleType("own_rows")
    module.__file__ = str(folder / "own_rows.py")
    (folder / "own_rows.py").write_text(text)
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


ROWS = """
class Rows:
    def __init__(self, count):
        self.texts, self.labels = ["a"] * count, [0] * count
    def __getitem__(self, at):
        item = {"text": self.texts[at]}
        item["labels"] = self.labels[at]
        return item
    def relabel(self, at):
        labels = self.labels
        labels[at] = 1
"""


@pytest.mark.parametrize("cell", ["rows.append([1])", "same = rows; same.extend([[1]])"])
def test_a_long_list_that_grows_is_put_back(cell: str) -> None:
    with begun("rows = [[0] for _ in range(30_000)]") as namespace:
        transaction = failed(cell, namespace)
        assert transaction.losses() == ()
        transaction.restore()
        assert len(namespace["rows"]) == 30_000


def test_what_is_too_long_to_copy_is_told_where_a_function_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = own_module(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, "own_rows", module)
    namespace: dict[str, Any] = {"__name__": "__main__", "rows": module.Rows(300_000)}
    reading = failed("batch = [rows[at] for at in range(3)]", namespace)
    assert [one for one in reading.losses() if "texts" in one] == []
    told = failed("rows.relabel(3)", namespace).losses()
    assert told == ("`rows.labels` has more than 20000 items, and the cell may have changed them",)


def test_a_loop_of_training_over_much_data_is_no_reason() -> None:
    setup = (
        "texts, labels = ['a'] * 400_000, [0] * 400_000\nimages = np.zeros((9_000, 800), 'f4')\n"
        "class Rows(torch.utils.data.Dataset):\n    def __len__(self): return 8\n    def __getitem__(self, at):\n"
        "        item = {'x': images[at]}\n        item['y'] = labels[at]\n        return item\n"
        "model = nn.Linear(800, 1); optimizer = torch.optim.SGD(model.parameters()); history = []\n"
        "loader = torch.utils.data.DataLoader(Rows(), 4)"
    )
    cell = (
        "for batch in loader:\n    batch['x'] = batch['x'] * 2\n    loss = model(batch['x']).sum()\n"
        "    loss.backward(); optimizer.step(); optimizer.zero_grad(); history.append(loss.item())"
    )
    with begun(setup) as namespace:
        assert failed(cell, namespace).losses() == ()


def test_what_a_cell_replaces_in_a_long_list_of_tensors_is_freed() -> None:
    import weakref

    outputs = [torch.zeros(1) for _ in range(30_000)]
    gone = weakref.ref(outputs[3])
    transaction = Transaction({"outputs": outputs}, "outputs[3] = None", lambda: 1 << 30)
    outputs[3] = None
    assert gone() is None
    assert transaction.losses() != ()


def test_a_stream_that_another_cell_exchanged_is_left_alone() -> None:
    with begun("") as namespace:
        transaction = failed("n = 1", namespace)
        sys.stdout = later = StringIO()
        transaction.restore()
        assert sys.stdout is later


def test_a_stream_that_the_failed_cell_exchanged_and_a_later_one_after_it_is_the_later_ones() -> None:
    tee = "class Tee:\n    def write(self, text): pass\n    def flush(self): pass\nmine = Tee()"
    with begun(tee) as namespace:
        transaction = failed("sys.stdout = mine", namespace)
        for cell in ("sys.stdout = sys.__stdout__", "sys.stdout = mine"):
            later = Transaction(namespace, cell, lambda: 1 << 30)
            with later.armed():
                exec(cell, namespace)
            assert transaction.moved_on_by(later) is None
        transaction.restore()
        assert sys.stdout is namespace["mine"], "a later cell chose it"
        other = failed("sys.stderr = mine", namespace)
        later = Transaction(namespace, "n = 1", lambda: 1 << 30)
        with later.armed():
            exec("n = 1", namespace)
        assert other.moved_on_by(later) is None
        other.restore()
        assert sys.stderr is not namespace["mine"], "a later cell has left it as it found it"


def test_an_attribute_of_a_library_that_a_later_cell_sets_is_left_alone() -> None:
    with begun("") as namespace:
        transaction = failed("nn.Linear.noted = 1; nn.Conv2d.noted = 1", namespace)
        nn.Linear.noted = later = object()
        transaction.restore()
        assert nn.Linear.noted is later
        assert not hasattr(nn.Conv2d, "noted")
        del nn.Linear.noted


SET = """
import os, warnings
os.environ['OOM_TEST'] = {0!r}; os.environ['OOM_TEST_' + {0!r}.upper()] = '1'
warnings.filterwarnings('ignore', message={0!r})
torch.set_printoptions(precision={1}); torch.set_num_threads({1})
logging.getLogger('a test').setLevel({1}); np.set_printoptions(precision=8)
"""


def test_what_a_later_cell_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OOM_TEST", "OOM_TEST_FIRST", "OOM_TEST_LATER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    first, second = (SET.format(*given) for given in (("first", 5), ("later", 6)))
    with begun("") as namespace:
        outer = Transaction(namespace, second, lambda: 1 << 30)
        transaction = failed(first + "np.set_printoptions(precision=3)", namespace)
        later = Transaction(namespace, second, lambda: 1 << 30)
        with later.armed():
            exec(second, namespace)
        assert transaction.moved_on_by(later, is_healed=True) is None
        transaction.restore()
        assert os.environ["OOM_TEST"] == "later"
        assert "OOM_TEST_FIRST" not in os.environ
        assert os.environ["OOM_TEST_LATER"] == "1"
        filtered = [str(one[1]) for one in warnings.filters]
        assert any("later" in one for one in filtered)
        assert not any("first" in one for one in filtered)
        assert torch.get_num_threads() == torch._tensor_str.PRINT_OPTS.precision == 6
        assert logging.getLogger("a test").level == 6
        outer.restore()
        logging.getLogger("a test").setLevel(0)


def test_a_cell_is_not_run_again_under_a_setting_of_torch_that_a_later_one_has_changed() -> None:
    with begun("") as namespace:
        transaction, before = failed("n = 1", namespace), torch.get_default_dtype()
        later = Transaction(namespace, "", lambda: 1 << 30)
        with later.armed():
            torch.set_default_dtype(torch.float64)
        told = transaction.moved_on_by(later)
        torch.set_default_dtype(before)
        assert told == "changed a setting of torch's (default dtype), and the failed cell ran under the other"


def test_a_logger_of_a_library_that_the_cell_loads_stays_as_the_library_made_it() -> None:
    with begun("") as namespace:
        cell = "sys.modules['a loaded one'] = types.ModuleType('a loaded one'); logging.getLogger('mine').setLevel(10)"
        transaction = failed(cell, namespace)
        logging.getLogger("made when it was loaded").setLevel(30)
        transaction.restore()
        assert logging.getLogger("mine").level == 0
        assert logging.getLogger("made when it was loaded").level == 30
        del sys.modules["a loaded one"]
        logging.getLogger("made when it was loaded").setLevel(0)


def test_a_thread_that_waits_for_an_event_is_no_reason() -> None:
    with begun("done = threading.Event(); waiting = threading.Thread(target=done.wait, args=(60,))") as namespace:
        transaction = failed("waiting.start()\nwhile not done._cond._waiters: pass", namespace)
        told = transaction.losses()
        namespace["done"].set()
        namespace["waiting"].join()
        assert [one for one in told if "done" in one] == []


def test_an_alarm_of_the_failed_attempt_is_switched_off() -> None:
    left, handler = signal.setitimer(signal.ITIMER_REAL, 0), signal.getsignal(signal.SIGALRM)
    try:
        with begun("") as namespace:
            failed("signal.alarm(600)", namespace).restore()
            assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
            signal.alarm(600)
            failed("n = 1", namespace).restore()
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0, "one that was set before goes on"
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *left)


def test_a_class_that_answers_nothing_is_named() -> None:
    meta = "class Shy(type):\n    def __getattribute__(cls, name): raise RuntimeError(name)\n"
    with begun(f"{meta}class C(metaclass=Shy): pass") as namespace:
        transaction = failed("taken = C", namespace)
        assert transaction.losses() == ("`C` could not be looked at (RuntimeError)",)
        transaction.restore()
        assert "taken" not in namespace
        assert {"C", "taken"} <= transaction._snapshot.uses()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x[0] = 1; y.z[3][4] += 1; del a.b[0]", {"x", "z", "b"}),
        ("x += 1; y.sort(); np.copyto(a.b, c); t.add_(1); nn.init.zeros_(w)", {"x", "y", "b", "c", "t", "w", "init"}),
        ("v = x[3:].T\nfor at, row in enumerate(v): row[at] = 1", {"row", "v", "x"}),
        ("np.add(a, b, out=c); z = torch.from_numpy(a); z.data = b", {"np", "c", "z", "a", "b", "torch"}),
        ("def f(): self.rows.append(1); return x[0], y.sum()", set()),
        ("not a text of Python", set()),
    ],
)
def test_the_names_that_a_text_writes_into(text: str, names: set[str]) -> None:
    assert code_names.written_names(text) == names


@pytest.mark.parametrize(
    ("path", "name"), [("rows", "rows"), ("data.rows[3]['a.b']", "rows"), ("f → rows", "rows"), ("a['b']", "a")]
)
def test_the_last_name_of_a_path(path: str, name: str) -> None:
    assert code_names.last_name(path) == name


def test_a_module_is_named_by_a_word_of_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the functions of a module may set is told by a cell that names it, not by one with a longer word."""
    (tmp_path / "odd_part.py").write_text("import torch\ndef put(name): setattr(torch.nn.functional, name, 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_part", raising=False)
    for cell, is_told in (("odd_parts = 1", False), ("import odd_part", True)):
        __import__("odd_part")
        transaction = Transaction({"__name__": "__main__"}, cell, lambda: 1 << 30)
        sys.modules["odd_part"].put("odd")
        transaction.restore()
        assert hasattr(torch.nn.functional, "odd") is not is_told
        vars(torch.nn.functional).pop("odd", None)
    del sys.modules["odd_part"]


def test_a_stream_that_leads_to_the_shell_leads_to_none_of_its_names() -> None:
    """IPython puts a function of the shell into ``sys.stderr``, which the handler of a logger of the user's holds."""
    namespace: dict[str, Any] = {"it": iter(range(9)), "log": logging.Logger("mine")}
    stream, shell = StringIO(), InteractiveShell.instance()

    def write(text: str, held: Any = (shell, namespace)) -> None:
        """As IPython's own."""

    write.__module__ = "IPython.core.interactiveshell"
    stream.tee = write  # type: ignore[attr-defined]
    namespace["log"].addHandler(logging.StreamHandler(stream))
    transaction = Transaction(namespace, "log.info(1)", lambda: 1 << 30)
    next(namespace["it"])
    assert transaction.losses() == ()


@pytest.mark.parametrize(
    ("setup", "cell"),
    [
        ("ip = get_ipython()", "ip.user_ns['it']"),
        (
            "import traitlets\nclass Watched(traitlets.HasTraits):\n    x = traitlets.Int()\n"
            "    @traitlets.observe('x')\n    def seen(self, change): next(it)\nwatched = Watched()",
            "watched.x += 1",
        ),
        (
            "import traitlets\na, b = traitlets.HasTraits(), traitlets.HasTraits()\n"
            "a.add_traits(x=traitlets.Int()); b.add_traits(y=traitlets.Int())\n"
            "link = traitlets.dlink((a, 'x'), (b, 'y'), lambda x: next(it))",
            "a.x += 1",
        ),
    ],
)
def test_what_the_users_code_reaches_by_objects_of_the_notebook_is_reached(setup: str, cell: str) -> None:
    namespace: dict[str, Any] = {"it": iter(range(9)), "get_ipython": InteractiveShell.instance}
    exec(setup, namespace)
    transaction = Transaction(namespace, cell, lambda: 1 << 30)
    next(namespace["it"])
    assert any(why.startswith("`it` ") for why in transaction.losses()), transaction.losses()


class Failing(torch.autograd.Function):
    """Runs out of memory in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError


def test_what_a_failed_backward_pass_leaves_in_the_queue_of_its_thread_is_let_go_of() -> None:
    x = torch.ones(64, requires_grad=True)
    held, first, second = weakref.ref(x), x.sin(), x.cos()
    with suppress(MemoryError):
        (Failing.apply(first) + second.exp()).sum().backward()
    del x, first, second
    gc.collect()
    assert held() is not None, "torch lets go of it by itself"
    passes: list[str] = []
    with pytest.MonkeyPatch.context() as users:
        users.setattr(torch.Tensor, "backward", lambda *_: passes.append("backward"))
        users.setattr(torch, "ones", lambda *_: passes.append("ones"))
        release(MemoryError())
    assert held() is None
    assert passes == []
