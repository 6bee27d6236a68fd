"""The shell command ``oomdoctor``: one module a verb, found by the table below and imported when it is called.

A verb's module has ``add_arguments(parser)`` and ``run(args) -> int``, the exit status. Only ``main`` prints errors.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from oomdoctor import __version__
from oomdoctor.errors import OomDoctorError, UsageError
from oomdoctor.language import say

__all__ = ["main"]

_VERBS: Final = {
    "explain": "say what a failure in a text was and why it happened",
    "run": "run a script, and heal it should memory run out",
    "rules": "list, show and check the rules",
    "env": "say what this machine has and what its limits are",
    "demo": "heal a real out-of-memory failure, in a kernel of its own",
}
"""Each verb has a module of its name in this package."""

_FAILED: Final = 1
_USAGE: Final = 2
_UNTOLD: Final = 2
"""The answer could not be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` and return its exit status: what the verb says, 2 for bad usage or no output."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments)
    try:
        args = parser.parse_args(arguments)
    except SystemExit as leave:  # argparse has printed its own line
        return int(leave.code or 0)
    if args.verb is None:
        parser.print_help()
        return _USAGE
    if args.verb != "run":  # whose output is the script's own
        _take_all_characters()
    try:
        status = int(import_module(f"{__name__}.{args.verb}").run(args))
        sys.stdout.flush()
        return status
    except OomDoctorError as error:
        print(f"oomdoctor {args.verb}: {say(str(error))}", file=sys.stderr)
        return _USAGE if isinstance(error, UsageError) else _FAILED
    except OSError as error:  # what is left to say has nowhere to go: the reader has gone, the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"oomdoctor {args.verb}: {error}", file=sys.stderr)
        return _UNTOLD


def _take_all_characters() -> None:
    """Have a ``?`` written where the output's encoding lacks a character, as in a locale without UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        if encoding.lower() not in ("utf-8", "utf8") and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; only the verb that is called is imported for its arguments."""
    parser = argparse.ArgumentParser(
        prog="oomdoctor",
        description="What filled the memory, why, and what to change.",
        epilog="%load_ext oomdoctor in a notebook heals the cells that run out of memory.",
    )
    parser.add_argument("--version", action="version", version=f"oomdoctor {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    called = next((word for word in arguments if word in _VERBS), None)
    for verb, summary in _VERBS.items():
        below = verbs.add_parser(verb, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if verb == called:
            import_module(f"{__name__}.{verb}").add_arguments(below)
            _translate(below)
    _translate(parser)
    return parser


def _translate(parser: argparse.ArgumentParser) -> None:
    """Have the help of a parser and of those below it shown in the language of the reader."""
    parser.description, parser.epilog = say(parser.description or ""), say(parser.epilog or "")
    for group in parser._action_groups:
        group.title = group.title and say(group.title)
    for action in parser._actions:
        action.help = action.help and say(action.help)
        if isinstance(action, argparse._SubParsersAction):
            for below in (*action._choices_actions, *action.choices.values()):
                if isinstance(below, argparse.ArgumentParser):
                    _translate(below)
                else:
                    below.help = below.help and say(below.help)
