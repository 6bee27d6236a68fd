"""One run of a trial: a program executed on real values in a copy of the process, and the end state that it leaves.

The copy writes, shows and starts nothing (see ``sandbox.silence``), and what it prints is kept as part of its end. How
often hooks of the user's ran is counted, as a hook may reach what no name leads to.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import gc
import inspect
import io
import linecache
import re
import signal
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.objects.homes import is_users_file
from oomdoctor.program.loop_hooks import HOOK_PREFIX, compile_hooked
from oomdoctor.program.magics import mask
from oomdoctor.program.recompiling import importing, put_in_place
from oomdoctor.sandbox.silence import keep_to_itself
from oomdoctor.sandbox.walls import forbid
from oomdoctor.trial.cut import Enough, Progress, cut_functions, cut_loaders, cut_loops
from oomdoctor.trial.ends import Leaf, end_of, names_of

if TYPE_CHECKING:
    from oomdoctor.model.session import Attempt, Session

__all__ = ["End", "run"]

_LAST: Final = f"{HOOK_PREFIX}last"
_HOOKS: Final = "how often hooks ran"
_VALUE: Final = "the value that the cell ends with"
_FILES: Final = "what is written to files"
_RUNS_CODE: Final = re.compile(r"%%?(\w*run|\w+it)\b")
"""Magics that run code of their own: ``%run``, ``%timeit``, ``%prun``, ``%memit``."""
_CELL: Final = "<oomdoctor: cell of a trial>"
_NUDGES: Final = {torch.float64: 2.0**-50, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative size of the last digit of each type."""
_COARSE: Final = 2.0**-9
"""What parameters in float32 are off by in a control where the program computes in 16 bits."""
_NUDGED_BY: Final = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What a run has left.

    Attributes:
        names: the names of the user's at the end.
        steps: how many optimizer steps it took; ``rows``: in the largest batch of its loaders, before it was cut.
        computes: whether it has called a module, or backward, or stepped.
        computes_in_16_bits: autocast was on, or a result has such a type.
        error: what the user's code raised, None where it ran to its end; ``is_ours``: it could not be run, or did
            what a copy of the process may not do.
        known: the lines of the program and of the user's files.
    """

    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    steps: int = 0
    computes: bool = False
    rows: int = 0
    computes_in_16_bits: bool = False
    error: str | None = None
    is_ours: bool = False
    known: frozenset[str] = frozenset()


def run(
    session: Session,
    attempt: Attempt,
    *,
    rows: int,
    known: Collection[str] = (),
    names: Collection[str] = (),
    nudged: str | None = None,
) -> End:
    """Run a program in this process, which is of no use for anything else afterwards.

    Args:
        session: holds the namespace; its start has been brought back.
        attempt: the program.
        rows: how many rows of a batch are taken.
        known: the lines of the unchanged program; empty where it is this one.
        names: what is looked at in the end; all names of the user's where it is empty.
        nudged: begin with parameters that are off in the last digit of ``fine`` or ``coarse`` arithmetic.
    """
    namespace, said = session.namespace, io.StringIO()
    warnings.simplefilter("ignore")  # the start of the cell may have brought other filters back
    keep_to_itself(session.shell)
    _keep_what_is_shown(session.shell, said)
    if hasattr(namespace.get("open"), "__wrapped__"):
        namespace.pop("open", None)  # IPython's, which refuses to open its own streams, has kept Python's
    written = _keep_what_is_written()
    coarse, calls = _watch_autocast(), _count_hooks()
    masked = [mask(text) for text in (*attempt.replays, attempt.source)]
    texts = [cell.text for cell in masked]
    if unrun := [line for cell in masked for _, line in cell.hidden if _RUNS_CODE.match(line)]:
        return End(error=f"`{unrun[0]}` runs code that is not followed", is_ours=True)
    try:
        codes = [_compiled(text, f"{_CELL} {at}", session.shell) for at, text in enumerate(texts)]
    except SyntaxError as fault:
        return End(error=f"the cell is not Python: {fault}", is_ours=True)
    files = {str(module.file): module.source for module in session.cells.modules}
    lines = cut_functions(namespace)
    told = (*texts, *files.values())
    progress = Progress(known or lines.union(line.strip() for text in told for line in text.splitlines()))
    files |= {str(edit.file): edit.after for edit in attempt.modules}
    cut_loops(progress)
    progress.count()
    sizes = cut_loaders(rows)
    if nudged is not None:
        _nudge(_COARSE if nudged == "coarse" else None)
    forbid()
    error, is_ours = None, False
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with _disable_current_modes(), contextlib.redirect_stdout(said), contextlib.ExitStack() as changes:
        try:
            changes.enter_context(importing(files, compile_hooked))
            for edit in attempt.modules:
                _list(str(edit.file), edit.after)
                put_in_place(edit, compile_hooked)
            for change in attempt.live:
                changes.enter_context(change())
            for code in codes:
                _execute(code, namespace)
        except (SystemExit, Enough):
            pass  # the cell ends itself, or has shown enough
        except BaseException as raised:  # noqa: BLE001  border to the user's code, in a process that ends here
            error = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0][:200]}"
            is_ours = isinstance(raised, OSError | EOFError)
    found = tuple(names) or tuple(name for name in names_of(namespace) if not name.startswith(HOOK_PREFIX))
    texts_written = {name: file.getvalue() for name, file in written.items()}
    extra = {_HOOKS: calls, _VALUE: namespace.get(_LAST), _FILES: texts_written}
    leaves = end_of({**namespace, **extra}, (*found, *extra), said.getvalue())
    return End(
        leaves=leaves,
        names=found,
        steps=progress.steps,
        computes=bool(progress.steps or progress.backwards or progress.forwards),
        rows=max(sizes, default=0),
        computes_in_16_bits=bool(coarse) or any(leaf.frame.startswith(_HALVES) for leaf in leaves.values()),
        error=error,
        is_ours=is_ours,
        known=progress.known,
    )


_HALVES: Final = ("torch.bfloat16", "torch.float16")


def _list(name: str, text: str) -> None:
    """Let lines of a file be found in ``text``."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _compiled(text: str, name: str, shell: Any) -> CodeType:
    _list(name, text)
    flags = getattr(getattr(shell, "compile", None), "flags", 0)
    return compile_hooked(text, name, flags, last=_LAST)


def _execute(code: CodeType, namespace: dict[str, Any]) -> None:
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.new_event_loop().run_until_complete(eval(code, namespace))
    else:
        exec(code, namespace)


def _keep_what_is_shown(shell: Any, said: io.StringIO) -> None:
    """Keep what is displayed as text, beside what is printed."""
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


def _keep_what_is_written() -> dict[str, Any]:
    """Let files that are opened for writing be memory, the same for each path; return them by their paths."""
    files: dict[str, Any] = {}
    module, names = vars(io), vars(builtins)
    opened = names["open"]

    def kept(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+"):
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
    return files


def _watch_autocast() -> list[bool]:
    """Return a list that is filled when autocast is entered."""
    seen: list[bool] = []
    cls: Any = torch.autocast
    enter = cls.__enter__

    def entered(context: Any) -> Any:
        if getattr(context, "_enabled", True):
            seen.append(True)
        return enter(context)

    cls.__enter__ = entered
    return seen


def _alive(cls: type) -> list[Any]:
    """Return the objects of a class, told by their types alone: others may answer by code of their own."""
    return [found for found in gc.get_objects() if issubclass(type(found), cls)]


def _count_hooks() -> dict[str, int]:
    """Count how often each hook of the user's runs, by the name of its function; return the counts."""
    calls: dict[str, int] = {}

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

    for tensor in _alive(torch.Tensor):
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
    return calls


def _is_users_hook(function: Any) -> bool:
    """Tell whether a function is the user's: of the notebook, or of a file of theirs."""
    names = getattr(function, "__globals__", None)
    if names is None:
        return False
    home = str(names.get("__name__", ""))
    return home == "__main__" or "get_ipython" in names or is_users_file(names.get("__file__"))


def _nudge(size: float | None) -> None:
    """Put parameters off by their last digit, by numbers of a generator of our own."""
    generator = torch.Generator().manual_seed(_NUDGED_BY)
    with torch.no_grad(), _disable_current_modes():
        for found in _alive(torch.nn.Parameter):
            if found.is_floating_point() and found.device.type == "cpu":
                by = torch.rand(found.shape, generator=generator, dtype=torch.float64) * 2 - 1
                found.data.mul_((1 + by * max(size or 0.0, _NUDGES.get(found.dtype, 0.0))).to(found.dtype))
