"""What a live fix could leave behind: every attribute, hook and setting that can be reached, told apart one by one.

Two looks at the same objects are compared by identity, and two runs of the same program by form (types, shapes, flags,
counts). Values of tensors and floats are no trace: they are the program's results, and are compared as such.
"""

from __future__ import annotations

import gc
import inspect
import os
import random
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import torch
import torch.multiprocessing
import torch.utils.checkpoint
from torch.nn.modules import module as module_home
from torch.optim import optimizer as optimizer_home

from oomdoctor.objects.kinds import Kind, kind_of, plain_dict
from oomdoctor.objects.named import is_users

__all__ = ["Traces", "moved", "other_form", "root_of"]

_DEPTH: Final = 7
_MOST_ITEMS: Final = 24
_HOMES: Final = (
    *(torch, torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.nn.functional, torch.nn.utils),
    *(torch.nn.utils.clip_grad, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.autograd),
    *(torch.utils.data.DataLoader, torch.utils.data.BatchSampler, torch.utils.checkpoint, torch.nn.init, random),
)
_REGISTERS: Final = (module_home, optimizer_home)
_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_WALKED: Final = (Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER, Kind.LOADER, Kind.OBJECT)
_ATOMS: Final = (bool, int, str, type(None))


class Traces:
    """One look at a namespace and at torch.

    Attributes:
        entries: for each path, the object that stood there and its form; holding the objects keeps their identity.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.entries: dict[str, tuple[Any, Any]] = {}
        self._seen: dict[int, str] = {}
        for name, value in namespace.items():
            if is_users(name) and not isinstance(value, types.ModuleType):
                self._look(name, value, _DEPTH)
        self._homes({type(value) for value, _ in list(self.entries.values())})
        for name, value in _settings():
            self.entries[f"({name})"] = (None, value)

    def forms(self, roots: Collection[str]) -> dict[str, Any]:
        """Return the form of everything below these names."""
        return {path: form for path, (_, form) in self.entries.items() if root_of(path) in roots}

    def _look(self, path: str, value: Any, depth: int) -> None:
        kind = kind_of(type(value))
        self.entries[path] = (_atom_or_self(value), _form(value))
        if id(value) in self._seen or depth == 0 or isinstance(value, type | types.ModuleType):
            return
        self._seen[id(value)] = path
        if isinstance(value, torch.Tensor):
            for name in _OF_TENSORS:
                self._table(f"{path}.{name}", getattr(value, name, None) or {}, depth)
            for name, held in vars(value).items():
                self._look(f"{path}.{name}", held, depth - 1)
        elif kind is Kind.MAPPING:
            self._table(path, value, depth)
        elif kind in (Kind.SEQUENCE, Kind.TUPLE):
            self.entries[f"len({path})"] = (None, len(value))
            for at, item in enumerate(list(value)[:_MOST_ITEMS]):
                self._look(f"{path}[{at}]", item, depth - 1)
        elif kind in _WALKED:
            self._table(f"{path} ", plain_dict(value) or {}, depth)

    def _table(self, path: str, table: Mapping[Any, Any], depth: int) -> None:
        # Keys that are objects (parameters, handles) go by their place: their order is part of the state.
        for at, (key, item) in enumerate(list(table.items())):
            name = str(key) if isinstance(key, str | int) else f"#{at}"
            self._look(f"{path}.{name}", item, depth - 1)

    def _homes(self, kinds: set[type]) -> None:
        own = [cls for kind in kinds for cls in kind.__mro__ if kind_of(kind) in _WALKED and cls is not object]
        for home in dict.fromkeys((*_HOMES, *own)):
            for name, value in list(vars(home).items()):
                # A module that is imported late becomes an attribute of its package, and classes keep a cache of ABCs.
                if not isinstance(value, types.ModuleType) and not name.startswith("_abc"):
                    self.entries[f"{home.__name__}:{name}"] = (_atom_or_self(value), None)
        for home in _REGISTERS:
            for name, table in vars(home).items():
                if name.startswith("_global") and isinstance(table, dict):
                    self.entries[f"{home.__name__}:{name} keys"] = (None, tuple(table))


def root_of(path: str) -> str:
    """Return the name of the namespace that ``path`` begins with; empty for what stands in torch."""
    return "" if ":" in path or path.startswith("(") else re.split(r"[ .\[)]", path.removeprefix("len("), maxsplit=1)[0]


def moved(before: Traces, after: Traces) -> dict[str, str]:
    """Return what differs between two looks at the same objects, and how, by path."""
    found = {}
    for path in before.entries.keys() | after.entries.keys():
        old, new = before.entries.get(path), after.entries.get(path)
        if old is None or new is None:
            found[path] = "added" if old is None else "gone"
        elif old[0] is not new[0] and not _same_atom(old[0], new[0]):
            found[path] = "another object" if old[1] == new[1] else f"{old[1]} became {new[1]}"
        elif old[1] != new[1]:
            found[path] = f"{old[1]} became {new[1]}"
    return found


def other_form(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Return where two runs of one program left other types, shapes, flags or counts, by path."""
    paths = expected.keys() | found.keys()
    pairs = {path: (expected.get(path, "nothing"), found.get(path, "nothing")) for path in paths}
    return {path: f"{new}, not {old}" for path, (old, new) in pairs.items() if old != new}


def _atom_or_self(value: Any) -> Any:
    """Return ``value``; of a bound method what is bound, as the method itself is made anew at each look."""
    return (value.__func__, value.__self__) if inspect.ismethod(value) else value


def _same_atom(old: Any, new: Any) -> bool:
    if type(old) in _ATOMS or type(old) is float:
        return type(old) is type(new) and (old == new or type(old) is float)
    if type(old) is tuple and type(new) is tuple:
        return len(old) == len(new) and all(a is b or _same_atom(a, b) for a, b in zip(old, new, strict=True))
    return False


def _form(value: Any) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return type(value).__name__, value.dtype, tuple(value.shape), value.device.type, value.requires_grad
    return type(value).__name__


def hooks_pack() -> bool:
    """Return whether hooks pack what is saved for backward: one that has been packed takes no others."""
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    try:
        node._raw_saved_result.register_hooks(lambda saved: saved, lambda saved: saved)
    except RuntimeError:
        return True
    return False


def _settings() -> Iterator[tuple[str, Any]]:
    """Yield what holds for the whole process."""
    yield "gradients", torch.is_grad_enabled()
    yield "anomaly mode", torch.is_anomaly_enabled()
    yield "autocast", (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    yield "default dtype", torch.get_default_dtype()
    yield "threads", torch.get_num_threads()
    yield "matmul precision", torch.get_float32_matmul_precision()
    yield "modes", (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack())
    yield "saved-tensor hooks", not hooks_pack()
    yield "sharing strategy", torch.multiprocessing.get_sharing_strategy()
    yield "attention kernels", (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    yield "environment", {name: value for name, value in os.environ.items() if name.startswith(("PYTORCH", "CUDA"))}
    yield "hooks of Python", (id(sys.excepthook), id(sys.displayhook), len(gc.callbacks), sys.gettrace())
