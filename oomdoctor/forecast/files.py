"""``torch.save`` and ``torch.load`` in a shadow, where nothing is written.

What a cell saves and loads again comes back with tensors of the same shapes; what it loads from a file that is there is
read, and counts from then on. Limits: objects that are not made of dicts, lists and tensors are loaded as what they
are at that time, if they are still alive; what is in them is the same memory then.
"""

from __future__ import annotations

import copy
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from oomdoctor.model.memory import Role

if TYPE_CHECKING:
    from oomdoctor.forecast.tracker import Tracker

_torch: Any = torch


@dataclass(slots=True)
class _Shape:
    """A tensor without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Files:
    """What was saved under which path, or into which buffer."""

    def __init__(self) -> None:
        self._by_path: dict[str, Any] = {}
        self._by_buffer: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def _place(self, file: Any) -> tuple[Any, Any]:
        if isinstance(file, (str, os.PathLike)):
            return self._by_path, os.path.realpath(file)
        name = getattr(file, "name", None)
        return (self._by_buffer, file) if type(name) is not str else (self._by_path, os.path.realpath(name))

    def put(self, found: Any, file: Any) -> None:
        places, key = self._place(file)
        is_one = isinstance(found, (torch.Tensor, dict, list, tuple))
        places[key] = tree_map(_shape_of, found) if is_one else weakref.ref(found)

    def has(self, file: Any) -> bool:
        places, key = self._place(file)
        return key in places

    def get(self, file: Any, device: Any) -> Any:
        places, key = self._place(file)
        kept = places[key]
        if not isinstance(kept, weakref.ref):
            return tree_map(lambda leaf: _made(leaf, device), kept)
        found = kept()
        if found is None:
            raise FileNotFoundError("what was saved here is not kept in a forecast")
        return copy.deepcopy(found)


def _shape_of(leaf: Any) -> Any:
    return _Shape(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def _made(leaf: Any, device: Any) -> Any:
    if not isinstance(leaf, _Shape):
        return leaf
    where = device if isinstance(device, (str, torch.device)) else leaf.device
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=where)


def keep_files(tracker: Tracker) -> None:
    """Put stand-ins into the place of ``torch.save`` and ``torch.load``."""
    files, load = _Files(), torch.load

    def saved(obj: Any, f: Any, *_args: Any, **_kwargs: Any) -> None:
        files.put(obj, f)

    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if files.has(f):
            return files.get(f, map_location)
        found = load(f, map_location, *args, **kwargs)
        for leaf in tree_iter(found):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                tracker.hold_real(leaf, Role.USER_TENSOR)
        return found

    _torch.save, _torch.load = saved, loaded
