"""``oomdoctor run``: runs a script as Python would, its top level as one cell that is healed should memory run out.

    oomdoctor run train.py --epochs 3

What the script prints, its traceback and its exit status are its own; what oomdoctor has to say goes to the standard
error. A script that is healed was run again from its first line, with the change in place.
"""

from __future__ import annotations

import argparse
import codeop
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from IPython.core.compilerop import CachingCompiler
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from oomdoctor.errors import UsageError
from oomdoctor.language import say
from oomdoctor.model.case import OutcomeKind
from oomdoctor.objects.frames import steps_of
from oomdoctor.program.compiled import source_of

_FAILED: Final = 1
_INTERRUPTED: Final = 130
_UNREADABLE: Final = "is not a Python script that can be read"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    options = "[--auto off|exact|any] [--anyway] [--simulate SIZE] [--diff PATH] [--json PATH]"
    parser.usage = f"%(prog)s [-h] {options} SCRIPT.py [ARGS]"
    parser.add_argument(
        "--auto",
        choices=("off", "exact", "any"),
        default="exact",
        help="heal never, with fixes that keep the result (the default), or with any fix",
    )
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="run it again also where something that it did cannot be undone, such as a file that it wrote",
    )
    parser.add_argument("--simulate", metavar="SIZE", help="behave as a machine with a GPU of that much memory")
    parser.add_argument(
        "--diff",
        metavar="PATH",
        help="write the change that healed the script there, as a diff; of ranks, each its own",
    )
    parser.add_argument(
        "--json",
        metavar="PATH",
        help="write the failure and its outcome there, null if there was none; of ranks, each its own",
    )
    parser.add_argument("script", metavar="SCRIPT.py", help="the script to run")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="what the script is given")
    rest.required = False  # argparse would name it among what is missing


def run(args: argparse.Namespace) -> int:
    """Run the script and return its exit status; a ``UsageError`` where it cannot be read, or a size is none."""
    path = Path(args.script)
    source = _read(path)
    for target in filter(None, (args.diff, args.json)):
        _check_writable(_of_rank(target))
    main = _become_main(path, args.arguments)
    shell = _shell_for(path, main)
    shell.anyway, shell.joins_job = args.anyway, args.auto != "off"
    if args.simulate is not None:
        from oomdoctor.allocator import virtual

        virtual.switch_on(args.simulate)
    shell.run_line_magic("load_ext", "oomdoctor")
    shell.run_line_magic("oomdoctor", f"auto {args.auto}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="To exit: use 'exit'")  # the script's own SystemExit
        result = shell.run_cell(shell.source or source, store_history=True)  # type: ignore[no-untyped-call]
    _write(args, path)
    return _status(result.error_before_exec or result.error_in_exec)


def _read(path: Path) -> str:
    try:
        return source_of(path)
    except OSError as exc:
        raise UsageError(f"{path} {_UNREADABLE}: {exc.strerror or exc}") from None
    except (SyntaxError, UnicodeError, ValueError) as exc:
        raise UsageError(f"{path} {_UNREADABLE}: {exc}") from None


def _of_rank(target: str) -> Path:
    """Return the file that this process writes: its own where several ranks run the script, ``case.rank1.json``.

    Source: torchrun gives each of its processes ``RANK`` and ``WORLD_SIZE``.
    """
    path, rank = Path(target), os.environ.get("RANK")
    if rank is None or os.environ.get("WORLD_SIZE", "1") == "1":
        return path
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _check_writable(target: Path) -> None:
    """Refuse a file that cannot be written, before the script has run for hours."""
    folder = target.parent
    if target.is_dir() or not folder.is_dir() or not os.access(target if target.exists() else folder, os.W_OK):
        raise UsageError(f"{target} cannot be written: it takes a file in a folder that exists")


def _become_main(path: Path, arguments: list[str]) -> ModuleType:
    """Make this process look to the script as one that was started with it."""
    main = ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.resolve().parent)
    return main


def _shell_for(path: Path, main: ModuleType) -> ScriptShell:
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.ast_node_interactivity = "none"
    config.InteractiveShell.autoindent = False
    return ScriptShell.instance(script=path, config=config, user_module=main, user_ns=vars(main))


def _write(args: argparse.Namespace, script: Path) -> None:
    """Write down what was asked for of the last failure, and say how a script is run again that was not."""
    from oomdoctor import pipeline
    from oomdoctor.model.unavailable import Refused

    case = pipeline.last_case()
    if args.json is not None:
        _of_rank(args.json).write_text(json.dumps(case and case.to_dict(), indent=2) + "\n", encoding="utf-8")
    if case is None:
        return
    is_written = args.diff is not None and case.outcome.kind is OutcomeKind.HEALED
    for patch in (one.patch for one in case.plan.candidates if is_written and one.label in case.outcome.fixes):
        if isinstance(patch, Refused):
            print(say(f"oomdoctor run: no diff: {patch.reason}"), file=sys.stderr)
        else:
            _of_rank(args.diff).write_text(patch.diff(script.name), encoding="utf-8")
    if case.outcome.anyway and pipeline.admitted(case, args.auto):
        again = f"`oomdoctor run --anyway {script}` runs it again; what is named stays as it is"
        print(f"  {say('Anyway')}  {say(again)}", file=sys.stderr)


def _status(error: Any) -> int:
    """Return the exit status that Python would have ended with."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    if not isinstance(error, SystemExit):
        return _FAILED
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return _FAILED


class _Compiler(CachingCompiler):
    """Compiles code under the name of the script, so that tracebacks and ``inspect`` find the script's lines."""

    def __init__(self, script: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._script = script
        # A cell that ends too early may be going on; of a script that does, Python says what it never closed.
        self.flags &= ~(codeop.PyCF_ALLOW_INCOMPLETE_INPUT | codeop.PyCF_DONT_IMPLY_DEDENT)  # type: ignore[attr-defined]

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return self._script


class _Publisher(DisplayPublisher):
    def publish(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "text/plain" in data:
            print(data["text/plain"], file=sys.stderr)


class ScriptShell(InteractiveShell):
    """Runs the top level of one script as a cell.

    Attributes:
        anyway: whether it is run again although something of the failed run cannot be undone.
        source: the changed text that a restarted job begins with, None where it is the script's own.
        joins_job: whether the ranks of a job that a launcher has started are healed together.
    """

    display_pub_class = Type(_Publisher)

    def __init__(self, script: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.script, self.anyway, self.joins_job = script, False, False
        self.source: str | None = None
        self.compile = _Compiler(str(script))

    def transform_cell(self, raw_cell: str) -> str:
        """Return the script as it is: it has no magics, and its lines keep their numbers."""
        return raw_cell

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Print a traceback as Python does; nothing for ``SystemExit``, which ends a script in silence."""
        kind, value, frames = exc_tuple or sys.exc_info()
        if kind is not None and not issubclass(kind, SystemExit):
            own = self._of_script(frames)
            if own is None and not issubclass(kind, SyntaxError):  # which is all that its compiler had to say
                own = frames
            self._showtraceback(kind, value, traceback.format_exception(kind, value, own))

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        """Print what is wrong with the script's syntax as Python does."""
        kind, value, _ = sys.exc_info()
        self._showtraceback(kind, value, traceback.format_exception_only(kind, value))

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        print("".join(stb), end="", file=sys.stderr)

    def _of_script(self, frames: TracebackType | None) -> TracebackType | None:
        """Return the traceback from the script's first line on, without what ran the script; None if it has none."""
        own = (step for step in steps_of(frames) if step.tb_frame.f_code.co_filename == str(self.script))
        return next(own, None)
