"""Cells of real notebooks: what they change comes back, so that a second run leaves what one run leaves, or it is told.

Each begins in a namespace where torch, numpy and the like are imported, runs once, and is taken back. Where nothing is
told to be lost it runs again, and what it shows is what it shows in a twin where it ran once.
"""

# ruff: noqa: ISC004 - cells of several lines, beside what they show

from __future__ import annotations

import builtins
import io
import itertools
import logging
import os
import sqlite3
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capabilities import no_default_device
from torch import nn

from oomdoctor.objects.leaves import state_digests
from oomdoctor.retry import Transaction

IMPORTS = """
import collections, io, itertools, logging, os, random, sqlite3, sys, types, warnings
from collections import Counter, OrderedDict, defaultdict, deque
import numpy as np, torch
import torch.nn.functional as F
from torch import nn
random.seed(0); np.random.seed(0); torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(6, 4)

def train(steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()

train()
"""

COMES_BACK = {
    "a counter in a class": (
        "class Meter:\n    def __init__(self): self.sum, self.count = 0.0, 0\n"
        "    def update(self, v): self.sum += v; self.count += 1\nmeter = Meter()",
        "for _ in range(3): meter.update(train())",
        "(meter.sum, meter.count)",
    ),
    "early stopping": (
        "class Stopper:\n    def __init__(self): self.best, self.bad, self.state = 9.0, 0, None\n"
        "    def __call__(self, loss):\n        self.bad = 0 if loss < self.best else self.bad + 1\n"
        "        self.best = min(self.best, loss)\n"
        "        self.state = {k: v.clone() for k, v in model.state_dict().items()}\nstop = Stopper()",
        "for _ in range(3): stop(train())",
        "(stop.best, stop.bad, stop.state['0.bias'].tolist())",
    ),
    "a progress bar": (
        "from tqdm import tqdm\ntqdm.monitor_interval = 0\n"
        "bar = tqdm(total=9, file=io.StringIO(), mininterval=0)\nbar.update(2)",
        "for _ in range(3): bar.update(1); bar.set_postfix(loss=train())",
        "(bar.n, bar.total)",
    ),
    "lists and metrics": (
        "history, metrics, seen = [], {'loss': [], 'acc': 0.0, 'by': {'a': [1]}}, set()",
        "history.append(train()); metrics['loss'].append(train()); metrics['by']['a'].append(2)\n"
        "metrics['acc'] += 0.5; seen.add(len(history))",
        "(history, metrics, seen)",
    ),
    "a global step": (
        "step = 0\ndef advance():\n    global step\n    step += 1\n    return train()",
        "advance(); advance()",
        "step",
    ),
    "schedulers": (
        "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\n"
        "cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)",
        "for _ in range(3): train(); cosine.step(); plateau.step(1.0)",
        "(optimizer.param_groups[0]['lr'], cosine.last_epoch, plateau.num_bad_epochs)",
    ),
    "a replay buffer": (
        "replay = deque([(torch.zeros(2), 0)], maxlen=3)",
        "for i in range(5): replay.append((torch.rand(2), i))\nbatch = random.sample(list(replay), 2)",
        "([(t.tolist(), i) for t, i in replay], [i for _, i in batch])",
    ),
    "shuffled data": ("rows = list(range(20))", "random.shuffle(rows); train()", "rows"),
    "generators of numpy and torch": (
        "rng, gen = np.random.default_rng(1), torch.Generator().manual_seed(2)",
        "a = rng.normal(size=3); b = torch.randn(3, generator=gen); c = np.random.rand(); d = torch.rand(1)",
        "(a.tolist(), b.tolist(), c, d.tolist())",
    ),
    "a seed set in the cell": (
        "", "a = torch.rand(2); torch.manual_seed(3); b = torch.rand(2)", "(a.tolist(), b.tolist())",
    ),
    "a history by default": (
        "log = defaultdict(list); tally = Counter(); order = OrderedDict(a=1, b=2)",
        "log['train'].append(train()); tally['steps'] += 1; order.move_to_end('a'); order['c'] = 3",
        "(dict(log), tally, list(order))",
    ),
    "an average of small tensors": (
        "ema = {k: v.clone() for k, v in model.state_dict().items()}",
        "train()\nfor k, v in model.state_dict().items(): ema[k] = ema[k] * 0.9 + v * 0.1",
        "ema['3.weight'].tolist()",
    ),
    "deleted names": ("junk = [1]; kept = junk", "del junk; train(); kept.append(2)", "('junk' in globals(), kept)"),
    "functions defined anew": (
        "def loss_of(z): return z.square().mean()",
        "loss_of = lambda z: z.abs().mean()\nshown = loss_of(model(x)).item()",
        "shown",
    ),
    "attributes of a function": (
        "def note(): note.calls = getattr(note, 'calls', 0) + 1\nnote()", "note(); note(); train()", "note.calls",
    ),
    "a default that is kept": (
        "def note(v, into=[]):\n    into.append(v)\n    return into", "kept = note(train())", "len(kept)",
    ),
    "a function of a module put in another's place": (
        "", "F.relu = F.gelu if F.relu.__name__ == 'relu' else F.silu\nshown = F.relu.__name__", "shown",
    ),
    "the environment": (
        "os.environ['OOM_STEP'] = '0'",
        "os.environ['OOM_STEP'] = str(int(os.environ['OOM_STEP']) + 1); os.environ['OOM_NEW'] = 'a'",
        "os.environ['OOM_STEP']",
    ),
    "filters of warnings": ("", "warnings.filterwarnings('ignore', message='x'); n = len(warnings.filters)", "n"),
    "settings of torch": (
        "", "a = torch.is_grad_enabled(); torch.set_grad_enabled(False); b = torch.get_default_dtype()\n"
        "torch.set_default_dtype(torch.float64)", "(a, str(b))",
    ),
    "the path of modules": ("", "sys.path.append('/nowhere'); n = sys.path.count('/nowhere')", "n"),
    "frames of pandas": (
        "import pandas as pd\ndf = pd.DataFrame({'step': [0], 'loss': [1.0]})",
        "df.loc[len(df)] = [len(df), train()]; df['extra'] = df['loss'] * 2; df.loc[0, 'loss'] += 1",
        "df.to_dict()",
    ),
    "small arrays and bytes": (
        "import array\nconfusion, raw, ints = np.zeros((3, 3), int), bytearray(b'ab'), array.array('i', [1])",
        "confusion[1, 2] += 1; raw.append(7); ints.append(3); train()",
        "(confusion.tolist(), bytes(raw), list(ints))",
    ),
    "large arrays and bytes": (
        "raw, replay = bytearray(100_000), np.zeros((20_000, 17))\ndef add(at): replay[at] += 1",
        "raw[12345] += 1; add(7); add(10_000); train()",
        "(sum(raw), replay.sum().item(), replay[10_000].tolist())",
    ),
    "an array that a tensor shares, written before a step": (
        "a = np.zeros(100_000); t = torch.from_numpy(a)", "a[5] = 9; train(); t[7] = 1",
        "(a[:9].tolist(), t[:9].tolist())",
    ),
    "dates": ("days = np.arange('2000', '2020', dtype='M8[h]')", "days[5] = np.datetime64('NaT')", "str(days[:9])"),
    "settings of a model of transformers": (
        "from transformers import BertConfig\n"
        "class Wrapped(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.config = BertConfig(use_cache=True, num_labels=3)\nwrapped = Wrapped(); loose = BertConfig()",
        "wrapped.config.use_cache = not wrapped.config.use_cache; loose.step = getattr(loose, 'step', 0) + 1\n"
        "loose.id2label[7] = 'seven'; n = len(loose.id2label)",
        "(wrapped.config.use_cache, loose.step, n)",
    ),
    "metrics of torchmetrics": (
        "import torchmetrics\nacc = torchmetrics.Accuracy('multiclass', num_classes=2)\n"
        "acc.update(torch.ones(2, 2), torch.zeros(2, dtype=int))",
        "acc.update(torch.eye(2), torch.tensor([0, 1])); shown = acc.compute().item()",
        "(shown, acc._update_count)",
    ),
    "an object of one's own module": (
        "keeper = helpers.Keeper()",
        "helpers.count += 1; keeper.steps += 1; helpers.bump(); n = helpers.count",
        "(n, keeper.steps, helpers.seen)",
    ),
    "a function of one's own module": (
        "bump = helpers.bump; del helpers", "bump(); n = bump()", "n",
    ),
    "lists and numbers of a class": (
        "class A:\n    n = 0\n    seen = []\n    def inc(self): type(self).n += 1; self.seen.append(1)\na = A()",
        "A.n += 1; A.seen.append(2); a.inc()", "(A.n, A.seen)",
    ),
    "a class that an object alone leads to": (
        "def make():\n    k = 0\n    class C:\n        n = 0\n        def f(self, kept=[]):\n            nonlocal k\n"
        "            k += 1; type(self).n += 1; kept.append(k)\n"
        "            return k, self.n, kept\n    return C()\nc = make()",
        "n = c.f()", "n",
    ),
    "a method put in another's place": (
        "class A:\n    def f(self): return 1\na = A()", "old = A.f\nA.f = lambda self: old(self) + 1\nn = a.f()", "n",
    ),
    "a method of a library's class": (
        "", "old = nn.Identity.forward\nnn.Identity.forward = lambda self, z, old=old: old(self, z) * 2\n"
        "n = nn.Identity()(x).sum().item()", "n",
    ),
    "a function of a module that no name leads to": (
        "del F", "import torch.nn.functional as fn\nold = fn.selu\nfn.selu = lambda z, old=old: old(z) + 1\n"
        "n = fn.selu(torch.zeros(1)).item()", "n",
    ),
    "a builtin": (
        "", "import builtins\nold = builtins.ascii\nbuiltins.ascii = lambda z, old=old: old(z) * 2\nn = ascii(1)", "n",
    ),
    "slots": (
        "class S:\n    __slots__ = ('h', 'n', 'new')\n    def __init__(self): self.h, self.n = [], 0\ns = S()",
        "s.h.append(1); s.n += 1; s.new = getattr(s, 'new', 0) + 1", "(s.h, s.n, s.new)",
    ),
    "attributes of what derives from builtin classes": (
        "class L(list): pass\nclass D(dict): pass\nclass I(int): pass\nclass T(tuple): pass\n"
        "class R(random.Random): pass\n"
        "class Ts(torch.Tensor): pass\n"
        "many = [L(), D(), I(3), T((1,)), R(1), torch.zeros(2).as_subclass(Ts), torch.ones(1), np.zeros(2)]\n"
        "for one in many[:-1]: one.n = 0",
        "for one in many[:-1]: one.n += 1\nmodel[0].bias.n = getattr(model[0].bias, 'n', 0) + 1",
        "([one.n for one in many[:-1]], model[0].bias.n)",
    ),
    "arrays of objects": ("o = np.array([1, None, []], dtype=object)", "o[0] += 1; o[2].append(1)", "o.tolist()"),
    "objects in a frozenset, an enum, a frame": (
        "import enum, pandas as pd\nclass K: n = 0\nclass E(enum.Enum):\n    A = 1\nE.A.n = 0\n"
        "held = frozenset([K()])\n"
        "df = pd.DataFrame({'a': [[], []]}); df.attrs['n'] = 0",
        "next(iter(held)).n += 1; E.A.n += 1; df.loc[0, 'a'].append(1); df.attrs['n'] += 1",
        "(next(iter(held)).n, E.A.n, df['a'].tolist(), df.attrs)",
    ),
    "what lies deep": (
        "root = None\nfor _ in range(20): root = {'next': root, 'n': 0, 'of': [root]}",
        "at = root\nwhile at: at['n'] += 1; at = at['next']", "str(root).count(\"'n': 1\")",
    ),
    "keys that are tuples": ("q = {(0, 1): 0.5, (1, 0): 0.0}", "q[0, 1] += 1; q[2, 2] = 3.0", "q"),
    "a cache that was empty": (
        "import functools\n@functools.lru_cache\ndef f(i): return random.random()", "a = f(1), random.random()",
        "(a, f.cache_info())",
    ),
    "sources of random bits": ("bits = np.random.PCG64(3)", "a = int(bits.random_raw())", "a"),
    "a class that is exchanged": (
        "class A: v = 1\nclass B: v = 2\na = A()", "a.__class__ = B if a.v == 1 else A\nn = a.v", "n",
    ),
    "weights that are parametrized": (
        "", "nn.utils.parametrizations.weight_norm(model[0])\ny = model.eval()(x).sum().item()",
        "(y, sorted(model.state_dict()))",
    ),
    "hooks of all modules": (
        "calls = []",
        "handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: calls.append(1)); train()\n"
        "n = len(nn.modules.module._global_forward_hooks)", "(calls, n)",
    ),
    "more settings of torch": (
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "a = torch.is_autocast_enabled('cpu'), str(torch.get_autocast_dtype('cpu'))\n"
        "a = *a, torch.get_deterministic_debug_mode()\n"
        "b = str(torch.get_default_device()), torch._C._get_mkldnn_enabled()\n"
        "torch.set_autocast_enabled('cpu', not a[0]); torch.set_autocast_dtype('cpu', torch.float16)\n"
        "torch.use_deterministic_algorithms(False); torch._C._set_mkldnn_enabled(not b[1])\n"
        "torch.set_default_device('meta')",
        "(a, b)",
    ),
    "settings of Python and of libraries": (
        "import os\nfor one in ('a', 'a/a'): (folder / one).mkdir(exist_ok=True)\nos.chdir(folder)",
        "a = os.getcwd(), sys.getrecursionlimit(), np.geterr()['divide'], np.get_printoptions()['precision']\n"
        "b = 0, logging.root.level, len(logging.root.handlers)\n"
        "os.chdir('a'); sys.setrecursionlimit(a[1] + 1); np.seterr(divide='ignore'); np.set_printoptions(a[3] + 1)\n"
        "logging.root.setLevel(b[1] + 1)\n"
        "logging.root.addHandler(logging.NullHandler())",
        "(a, b)",
    ),
    "a module of one's own that the cell imports first": (
        "sys.path.insert(0, str(folder)); name = f'helpers_first{len(list(folder.iterdir()))}'\n"
        "(folder / f'{name}.py').write_text('import torch\\nnoise = torch.rand(1).item()\\ncount = 0\\n')",
        "import importlib\nm = importlib.import_module(name); m.count += 1; r = torch.rand(1).item()",
        "(m.count, m.noise, r)",
    ),
    "slots of a weight": (
        "", "model.epoch = getattr(model, 'epoch', 0) + 1; model.register_buffer('scale', torch.ones(1)); train()",
        "(model.epoch, 'scale' in dict(model.named_buffers()))",
    ),
}  # fmt: skip

TOLD = {
    "an iterator in a class": (
        "class Feed:\n    def __init__(self): self.it = iter(range(9))\n    def get(self): return next(self.it)\n"
        "feed = Feed()", "feed.get()", "`feed.it` is an iterator",
    ),
    "an iterator that a method reads": (
        "source = iter(range(9))\nclass Trainer:\n    def fit(self): return next(source)\ntrainer = Trainer()",
        "trainer.fit()", "`source` is an iterator",
    ),
    "an iterator under two names": (
        "class Feed: pass\nfeed = Feed(); feed.it = iter(range(9)); other = [feed]", "next(other[0].it)",
        "is an iterator",
    ),
    "a counter of itertools": ("steps = itertools.count()", "next(steps)", "`steps` is an iterator"),
    "a generator": (
        "def g():\n    yield 1\n    yield 2\nbatches = g(); next(batches)", "next(batches)", "`batches` is an iterator",
    ),
    "a bound method": ("draw = iter({1: 2}).__next__", "draw()", "is an iterator"),
    "a loader's iterator": (
        "loader = torch.utils.data.DataLoader(torch.arange(8)); batches = iter(loader); next(batches)",
        "next(batches)",
        "`batches` is an iterator",
    ),
    "workers that persist": (
        "loader = torch.utils.data.DataLoader(torch.arange(8)); loader._iterator = iter(loader)\n"
        "next(loader._iterator)",
        "for b in loader: pass", "`loader._iterator` is an iterator",
    ),
    "a file of an object": (
        "class Log:\n    def __init__(self): self.file = open(folder / 'log', 'w')\n"
        "    def __call__(self, v): print(v, file=self.file)\nlog = Log()\ndef step(): log(train())",
        "step()", "`log.file` is an iterator, an open file",
    ),
    "text that is written": ("out = io.StringIO()", "print(1, file=out)", "`out` is an iterator, an open file"),
    "a database": ("db = sqlite3.connect(':memory:')", "db.execute('create table a (b)')", "`db` is"),
    "a socket": ("import socket\na, b = socket.socketpair()", "a.send(b'x')", "`a` is"),
    "a process": (
        "import subprocess\np = subprocess.Popen(['cat'], stdin=subprocess.PIPE)", "p.stdin.write(b'x')", "`p` is",
    ),
    "a log file": (
        "logger = logging.getLogger('odd'); logger.addHandler(logging.FileHandler(folder / 'a.log'))",
        "logger.error('step')", "a.log was written to",
    ),
    "a raw weight": (
        "w = torch.zeros(4, requires_grad=True)",
        "(w * 2).sum().backward()\nwith torch.no_grad(): w -= 0.1 * w.grad", "`w` was written in place",
    ),
    "a very large array": ("hist = np.zeros(9_000_000)", "hist += 1", "`hist` is a large array"),
    "weights that are loaded": (
        "state = {k: v.clone() for k, v in model.state_dict().items()}", "model.load_state_dict(state)",
        "was written in place and no copy was kept",
    ),
    "a part of a library's object": (
        "import fractions, argparse, string\nclass Box(string.Template): pass\nBox.__module__ = 'string'\n"
        "box = Box(''); box.data = torch.ones(1 << 16)",
        "box.data = torch.zeros(2)", "`box.data` was changed by the cell, and cannot be put back",
    ),
    "a cache that was warm": (
        "import functools\n@functools.lru_cache\ndef f(i): return random.random()\nf(0)", "f(1)",
        "`f` remembers other results",
    ),
    "the order of a set": (
        "s = set(range(1000))\nfor i in range(1000):\n    if i not in (8, 1, 16, 300): s.discard(i)", "s.add(3)",
        "its order cannot be brought back",
    ),
    "seeds that are taken": ("rng = np.random.default_rng(1)", "rng.spawn(1)", "seeds were taken"),
    "a mapping of weak references": (
        "import weakref\nclass K: pass\none, two = K(), K()\nw = weakref.WeakValueDictionary(a=one)", "w['a'] = two",
        "`w.data` was changed",
    ),
    "one item of a very large array": ("big = np.zeros(9_000_000)", "big[12345] += 1", "`big` is a large array"),
    "bytes, very many": ("raw = bytearray(68_000_000)", "raw[12345] += 1", "`raw` is a large array"),
    "a list of a library's object": (
        "import string\nbox = string.Template(''); box.parts = [torch.ones(1 << 16)]", "box.parts.append(1)",
        "`box.parts` was changed by the cell",
    ),
}  # fmt: skip


def make_module(name: str, folder: Path) -> types.ModuleType:
    """A module of the user's own, from a file of theirs."""
    (folder / f"{name}.py").write_text(
        "count, seen = 0, []\ndef bump():\n    global count\n    count += 1\n    seen.append(count)\n    return count\n"
        "class Keeper:\n    def __init__(self): self.steps = 0\n"
    )
    module = types.ModuleType(name)
    module.__file__ = str(folder / f"{name}.py")
    sys.modules[name] = module
    exec((folder / f"{name}.py").read_text(), vars(module))
    return module


def settings_kept() -> Callable[[], None]:
    """Keep further settings; returns what puts them back."""
    folder, limit, errors, printed = Path.cwd(), sys.getrecursionlimit(), np.geterr(), np.get_printoptions()
    level, handlers = logging.root.level, logging.root.handlers[:]
    cast, into = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    strict, fast = torch.get_deterministic_debug_mode(), torch._C._get_mkldnn_enabled()
    hooks, patched = nn.modules.module._global_forward_hooks, (nn.Identity.forward, nn.functional.selu, builtins.ascii)

    def put() -> None:
        os.chdir(folder)
        sys.setrecursionlimit(limit)
        np.seterr(**errors)
        np.set_printoptions(**printed)
        logging.root.setLevel(level)
        logging.root.handlers[:] = handlers
        torch.set_autocast_enabled("cpu", cast)
        torch.set_autocast_dtype("cpu", into)
        torch.set_deterministic_debug_mode(strict)
        torch._C._set_mkldnn_enabled(fast)
        no_default_device()
        hooks.clear()
        nn.Identity.forward, nn.functional.selu, builtins.ascii = patched  # type: ignore[method-assign]

    return put


@contextmanager
def process_as_it_is() -> Iterator[None]:
    """Put back what cells change beside their own objects."""
    kept = (os.environ.copy(), warnings.filters[:], sys.path[:], torch.is_grad_enabled(), torch.get_default_dtype())
    put_settings = settings_kept()
    relu, modules = nn.functional.relu, set(sys.modules)
    try:
        yield
    finally:
        for handler in logging.getLogger("odd").handlers[:]:
            handler.close()
            logging.getLogger("odd").removeHandler(handler)
        os.environ.clear()
        os.environ.update(kept[0])
        warnings.filters[:], sys.path[:] = kept[1:3]  # type: ignore[index]
        torch.set_grad_enabled(kept[3])
        torch.set_default_dtype(kept[4])
        put_settings()
        nn.functional.relu = relu
        for name in [name for name in sys.modules if name not in modules and name.startswith("helpers_")]:
            del sys.modules[name]


Begin = Callable[[str], AbstractContextManager[dict[str, Any]]]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    """Makes a namespace after its setup; what is changed beside it is put back."""
    numbers = itertools.count()

    @contextmanager
    def start(setup: str) -> Iterator[dict[str, Any]]:
        namespace: dict[str, Any] = {"__name__": "__main__", "folder": tmp_path}
        with process_as_it_is():
            exec(IMPORTS, namespace)
            if "helpers" in setup:
                namespace["helpers"] = make_module(f"helpers_{next(numbers)}", tmp_path)
            exec(setup, namespace)
            yield namespace
        for value in list(namespace.values()):
            if isinstance(value, (io.IOBase, sqlite3.Connection)) or type(value).__name__ in ("socket", "tqdm"):
                value.close()
            if type(value).__name__ == "Log":
                value.file.close()
            if type(value).__name__ == "Popen":
                value.communicate()
        namespace.clear()

    return start


def fail(cell: str, namespace: dict[str, Any]) -> Transaction:
    transaction = Transaction(namespace, cell, lambda: 1 << 30)
    with transaction.armed(), suppress(MemoryError):
        exec(cell + "\nraise MemoryError", namespace)
    return transaction


@pytest.mark.parametrize("name", COMES_BACK)
def test_a_second_run_leaves_what_one_run_leaves(name: str, begin: Begin) -> None:
    setup, cell, shown = COMES_BACK[name]
    with begin(setup) as once:
        exec(cell, once)
        expected = eval(shown, once)
    with begin(setup) as namespace:
        before = state_digests(namespace)
        transaction = fail(cell, namespace)
        assert eval(shown, namespace) == expected, "it fails after all was done"
        assert transaction.losses() == ()
        transaction.restore()
        after = state_digests(namespace)
        assert {key for key in {**before, **after} if before.get(key) != after.get(key)} == set()
        exec(cell, namespace)
        assert eval(shown, namespace) == expected


@pytest.mark.parametrize("name", TOLD)
def test_what_cannot_be_wound_back_is_told(name: str, begin: Begin) -> None:
    setup, cell, told = TOLD[name]
    with begin(setup) as namespace:
        transaction = fail(cell, namespace)
        assert any(told in sentence for sentence in transaction.losses()), transaction.losses()
    with begin(setup) as namespace:
        untouched = fail("train()", namespace)
        assert untouched.losses() == (), "a cell that leaves it alone is not refused for it"
