"""What all runs of a trial begin with, set up once in the process that they are forked from.

It writes, shows and starts nothing (see ``sandbox.restrictions``), and what is printed or written is kept as part of
the end of a run. How often hooks of the user's run is counted, as a hook may reach what no name leads to. The user's
functions that loop have loops that ask (see ``cut``).

A program whose tensors lie on a device is tried in host memory, as a copy of the process must not touch the device.
Before the process is copied, what its tensors hold there is copied to host memory, each storage once. In the copy every
such tensor keeps its Python object and points there, whatever is asked for on the device is made in host memory, and
what is asked of the device itself does nothing. Limits: one device, plain tensors. Kernels that only the device has,
and graphs that were recorded there, end the trial.
"""

from __future__ import annotations

import builtins
import gc
import io
import linecache
import logging
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from oomdoctor.errors import OomDoctorError
from oomdoctor.model.session import Session
from oomdoctor.objects.alive import alive
from oomdoctor.objects.named import is_users_file, own_modules
from oomdoctor.sandbox import device_calls
from oomdoctor.sandbox.attempt import hook_functions
from oomdoctor.sandbox.card import Card, in_use, mend_autograd
from oomdoctor.sandbox.restrictions import keep_to_itself

_CPU = torch.device("cpu")
_kept: list[Any] = []
"""What must not be freed in the copy of the process: that would be a call to the device."""


class HostCopies:
    """Copies in host memory of what lies on the device, made in the user's process.

    Args:
        room: how many bytes they may take.

    Raises:
        OomDoctorError: they cannot be made; the text says why in one sentence.
    """

    def __init__(self, room: int) -> None:
        card = in_use()
        if card is None:
            raise OomDoctorError("only what lies on a CUDA device is copied to the host")
        self._card: Card = card
        self._tensors = list({id(tensor): tensor for tensor in _tensors_on(card.device)}.values())
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors}
        needed = sum(storage.nbytes() for storage in storages.values())
        if needed > room:
            raise OomDoctorError(f"{needed >> 20:,} MiB lie on {card.device}, and the host has room for {room >> 20:,}")
        self._storages = list(storages.values())
        try:
            self._copies = {key: storage.cpu() for key, storage in storages.items()}  # type: ignore[no-untyped-call]
        except (MemoryError, RuntimeError) as error:
            raise OomDoctorError(f"what lies on {card.device} could not be copied: {type(error).__name__}") from error

    def put_in_place(self) -> None:
        """Have the tensors of this process, which was forked, lie in host memory."""
        _kept.extend(self._storages)
        held = self._card.held or 0
        device_calls.replace(SimpleNamespace(live=held, peak=held), self._card)
        if torch.empty(0).device.type != "cpu":
            torch.set_default_device("cpu")
        with torch.no_grad():
            for tensor in self._tensors:
                there = torch.empty(0, dtype=tensor.dtype)
                copy = self._copies[tensor.untyped_storage()._cdata]
                there.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
                tensor.data = there

    def on_host(self) -> TorchDispatchMode:
        """Return the mode that a run in a further copy of the process takes place in."""
        mend_autograd(self._card)
        return _OnHost()


def _tensors_on(device: torch.device) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for tensor in alive(torch.Tensor):
        for one in (tensor, tensor.grad if tensor.is_leaf else None):
            if one is None or one.device.type in ("cpu", "meta"):
                continue
            if one.device != device:
                raise OomDoctorError(f"tensors lie on {one.device} and on {device}")
            if one.layout is not torch.strided or one.is_quantized or one.is_nested:
                raise OomDoctorError(f"a tensor of layout {one.layout} lies on {device}")
            found.append(one)
    return found


class _OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes in host memory what is asked for on a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[int, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten._pin_memory.default, torch.ops.aten.pin_memory.default):
            return args[0]
        given = {name: self._moved(value) for name, value in (kwargs or {}).items()}
        if given.get("pin_memory"):
            given["pin_memory"] = False
        return func(*map(self._moved, args), **given)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return _CPU if value.type != "meta" else value
        if isinstance(value, torch.Generator) and value.device.type != "cpu":
            if id(value) not in self._generators:
                self._generators[id(value)] = torch.Generator().manual_seed(value.initial_seed())
            return self._generators[id(value)]
        return value


_TICK_NS: Final = 1 << 20
"""About a millisecond."""
_CLOCKS: Final = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


class Clock:
    """Tells how often it was asked: a real one tells another time in each run.

    Args:
        namespace: the user's.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._now_ns, self._step_ns, own = time.time_ns(), _TICK_NS, vars(time)
        instead: dict[int, Any] = {id(own[name]): self._in_s for name in _CLOCKS}
        instead |= {id(own[f"{name}_ns"]): self._in_ns for name in _CLOCKS}
        homes = (namespace, *(vars(one) for one in list(sys.modules.values()) if type(one) is ModuleType))
        told = (
            (home, {name: instead[id(value)] for name, value in home.items() if id(value) in instead}) for home in homes
        )
        self._places = [(home, clocks) for home, clocks in told if clocks]

    def take_place(self, ticks: int) -> None:
        """Replace the clocks of ``time``, by whatever name anything has them, as libraries do.

        Args:
            ticks: how far each reading moves it on.
        """
        self._step_ns = ticks * _TICK_NS
        for home, clocks in self._places:
            home.update(clocks)

    def _in_ns(self) -> int:
        self._now_ns += self._step_ns
        return self._now_ns

    def _in_s(self) -> float:
        return self._in_ns() / 1e9


@dataclass(slots=True, kw_only=True)
class Stage:
    """What a run fills while it goes on, empty when the runs are forked.

    Attributes:
        said: what is printed and displayed.
        written: the files that are opened for writing, by their paths.
        hooks: how often each hook of the user's ran, by the name of its function.
        autocast: filled when autocast is entered.
        parameters: those that are alive when a run begins.
        lines: of the files that the user's functions with loops stand in.
        copies: of what lies on a device, where the program uses one: it is tried in host memory.
        clock: what the runs tell the time by.
        in_loop: whether cells run within an event loop, as those of a kernel do.
    """

    said: io.StringIO = field(default_factory=io.StringIO)
    written: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, int] = field(default_factory=dict)
    autocast: list[bool] = field(default_factory=list)
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    lines: set[str] = field(default_factory=set)
    copies: HostCopies | None = None
    clock: Clock
    in_loop: bool = False

    @classmethod
    def set_up(cls, session: Session, copies: HostCopies | None, *, in_loop: bool, drops: bool) -> Stage:
        """Set up this process, which is of no use for anything else afterwards."""
        if not drops:
            _drop_nothing()
        stage = cls(clock=Clock(session.namespace), copies=copies, in_loop=in_loop)
        warnings.simplefilter("ignore")  # the start of the cell may have brought other filters back
        keep_to_itself(session.shell)
        _keep_what_is_shown(session.shell, stage.said)
        if hasattr(session.namespace.get("open"), "__wrapped__"):
            session.namespace.pop("open", None)  # IPython's, which refuses to open its own streams, has kept Python's
        _keep_what_is_written(stage.written)
        _watch_autocast(stage.autocast)
        gc.unfreeze()
        # What refers to something is found without a write to what is alive, which would copy every page of it.
        homes = [session.namespace, *map(vars, own_modules())]
        functions = [found for found in gc.get_referrers(*homes) if type(found) is FunctionType]
        tensors: list[torch.Tensor] = alive(torch.Tensor)
        stage.parameters = [found for found in tensors if isinstance(found, torch.nn.Parameter)]
        lines = (line for name in hook_functions(functions) for line in linecache.getlines(name))
        stage.lines = {line.strip() for line in lines}
        _count_hooks(stage.hooks, tensors)
        return stage


def _keep_what_is_shown(shell: Any, said: io.StringIO) -> None:
    """Keep what is displayed as text, and what the user's code logs, beside what is printed."""

    def logged(_logger: logging.Logger, record: logging.LogRecord) -> None:
        if is_users_file(record.pathname):
            said.write(f"{record.getMessage()}\n")

    logging.disable(logging.NOTSET)
    vars(logging)["Logger"].handle = logged
    publisher = getattr(shell, "display_pub", None)
    if publisher is not None:

        def publish(data: Any = None, *_args: Any, **_kwargs: Any) -> None:
            said.write(f"{data.get('text/plain', '') if isinstance(data, dict) else ''}\n")

        object.__setattr__(publisher, "publish", publish)


def _unclosed(file: Any) -> Any:
    """Return a file that stays readable when it is closed."""
    file.close = lambda: None
    return file


def _keep_what_is_written(files: dict[str, Any]) -> None:
    """Let files that are opened for writing be memory, the same for each path."""
    module, names = vars(io), vars(builtins)
    opened = names["open"]

    def kept(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = bool(set(mode) & set("wax+"))
        if not writes and (own := files.get(str(file))) is not None:  # what the program has written itself
            return type(own)(own.getvalue())
        if not writes or str(file) == os.devnull:  # where the streams of a copy lead to
            return opened(file, mode, *args, **kwargs)
        made = files.setdefault(str(file), _unclosed(io.BytesIO() if "b" in mode else io.StringIO()))
        made.seek(0, io.SEEK_END if "a" in mode else io.SEEK_SET)
        if "w" in mode:
            made.truncate()
        return made

    save, load = torch.save, torch.load

    def at(file: Any, mode: str) -> Any:
        return kept(file, mode) if isinstance(file, str | os.PathLike) else file

    def saved(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        save(value, at(file, "wb"), *args, **kwargs)

    def loaded(file: Any, *args: Any, **kwargs: Any) -> Any:
        return load(at(file, "rb"), *args, **kwargs)

    names["open"] = module["open"] = kept
    vars(torch).update(save=saved, load=loaded)


def read_back(file: Any) -> Any:
    """Return what was written to a file that is memory: its text, or the objects that its bytes are of."""
    raw = file.getvalue()
    if isinstance(raw, bytes):
        arrays: Any = sys.modules.get("numpy")
        readers: list[Callable[[Any], Any]] = [partial(torch.load, weights_only=False), pickle.load]
        readers += [partial(arrays.load, allow_pickle=True)] if arrays is not None else []
        for read in readers:
            with suppress(Exception):  # it is of another form
                return read(io.BytesIO(raw))
    return raw


def _drop_nothing() -> None:
    """Have dropout leave everything as it is."""
    names = vars(functional)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        names[name] = lambda given=None, *_args, **kwargs: kwargs.get("input", given)
    attention = names["scaled_dot_product_attention"]

    def whole(query: Any, key: Any, value: Any, attn_mask: Any = None, _dropout_p: float = 0.0, **kwargs: Any) -> Any:
        return attention(query, key, value, attn_mask, **{**kwargs, "dropout_p": 0.0})

    names["scaled_dot_product_attention"] = whole


def _watch_autocast(seen: list[bool]) -> None:
    cls: Any = torch.autocast
    enter = cls.__enter__

    def entered(context: Any) -> Any:
        if getattr(context, "_enabled", True):
            seen.append(True)
        return enter(context)

    cls.__enter__ = entered


def _count_hooks(calls: dict[str, int], tensors: Iterable[torch.Tensor]) -> None:
    """Count how often each hook of the user's runs: those of ``tensors``, and those that will be registered."""

    def counted(hook: Any) -> Any:
        function = getattr(hook, "__func__", hook)
        if not _is_users_hook(function):
            return hook
        name = function.__qualname__
        calls.setdefault(name, 0)

        @wraps(hook)
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return hook(*args, **kwargs)

        return called

    for tensor in tensors:
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, name, None)
            if hooks:
                for key, hook in list(hooks.items()):
                    hooks[key] = counted(hook)
    owner: Any = torch.Tensor
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        register: Callable[..., Any] = getattr(owner, name)

        def registered(tensor: Any, hook: Any, register: Callable[..., Any] = register) -> Any:
            return register(tensor, counted(hook))

        setattr(owner, name, registered)


def _is_users_hook(function: Any) -> bool:
    """Tell whether a function is the user's: of the notebook, or of a file of theirs."""
    names = getattr(function, "__globals__", None)
    if names is None:
        return False
    home = str(names.get("__name__", ""))
    return home == "__main__" or "get_ipython" in names or is_users_file(names.get("__file__"))
