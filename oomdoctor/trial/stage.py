"""What all runs of a trial begin with, set up once in the process that they are forked from.

It writes, shows and starts nothing (see ``sandbox.silence``), and what is printed or written is kept as part of the end
of a run. How often hooks of the user's run is counted, as a hook may reach what no name leads to. The user's functions
that loop have loops that ask (see ``cut``).
"""

from __future__ import annotations

import builtins
import gc
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from oomdoctor.objects.alive import alive
from oomdoctor.objects.named import is_users_file, own_modules
from oomdoctor.sandbox.silence import keep_to_itself
from oomdoctor.trial.cut import cut_functions

if TYPE_CHECKING:
    from oomdoctor.model.session import Session
    from oomdoctor.trial.on_host import HostCopies


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
        in_loop: whether cells run within an event loop, as those of a kernel do.
    """

    said: io.StringIO = field(default_factory=io.StringIO)
    written: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, int] = field(default_factory=dict)
    autocast: list[bool] = field(default_factory=list)
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    lines: set[str] = field(default_factory=set)
    copies: HostCopies | None = None
    in_loop: bool = False

    @classmethod
    def set_up(cls, session: Session, copies: HostCopies | None, *, in_loop: bool, drops: bool) -> Stage:
        """Set up this process, which is of no use for anything else afterwards."""
        if not drops:
            _drop_nothing()
        stage = cls(copies=copies, in_loop=in_loop)
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
        stage.lines = cut_functions(functions)
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


class _Text(io.StringIO):
    """A file that stays readable when it is closed."""

    def close(self) -> None:
        """Stay open."""


class _Bytes(io.BytesIO):
    """Likewise."""

    def close(self) -> None:
        """Stay open."""


def _keep_what_is_written(files: dict[str, Any]) -> None:
    """Let files that are opened for writing be memory, the same for each path."""
    module, names = vars(io), vars(builtins)
    opened = names["open"]

    def kept(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+") or str(file) == os.devnull:  # where the streams of a copy lead to
            return opened(file, mode, *args, **kwargs)
        made = files.setdefault(str(file), (_Bytes if "b" in mode else _Text)())
        made.seek(0, io.SEEK_END if "a" in mode else io.SEEK_SET)
        if "w" in mode:
            made.truncate()
        return made

    def saved(value: Any, file: Any, *_args: Any, **_kwargs: Any) -> None:
        files.setdefault(str(file), _Text()).write(f"saved {type(value).__name__}\n")

    names["open"] = module["open"] = kept
    vars(torch)["save"] = saved


def _first(given: Any = None, *_args: Any, **kwargs: Any) -> Any:
    return kwargs.get("input", given)


def _drop_nothing() -> None:
    """Have dropout leave everything as it is."""
    names = vars(functional)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        names[name] = _first
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
