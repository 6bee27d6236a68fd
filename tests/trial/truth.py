"""Measures whether two programs leave the same: each runs in a process of its own, and all that they leave is compared.

A program is a file of cells that ``# %%`` lines part: ``setup`` (one or more), ``before`` (the failing cell), ``after``
(the cell as changed), and for a change in an earlier cell ``setup after``, which stands for the last ``setup``.

``python truth.py [--steps N] FILE ...`` prints a line of JSON for each: its name, the first difference or null, and the
seconds of CPU of both cells. With ``--steps`` both end when each of their optimizers has made that many steps.
"""

import argparse
import collections
import contextlib
import gc
import io
import json
import os
import pickle
import random
import re
import sys
import tempfile
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first step of an optimizer imports it, which takes longer than most programs
from leaves import leaves
from torch.optim.optimizer import register_optimizer_step_post_hook

RTOL, ATOL = 1e-4, 1e-7
ROUNDED = 1e-4
"""Share of the entries of an array of integers that rounding may have moved by one."""
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
Left = tuple[dict[str, Any], str, float]


class Enough(BaseException):
    """The program has made the steps that are wanted of it."""


def cells(path: Path) -> tuple[list[str], list[str]]:
    """Return the cells of the program as it was and as changed, the failing one last."""
    parts = re.split(r"^# %%(.*)\n", path.read_text(), flags=re.MULTILINE)[1:]
    named = [(name.strip(), text) for name, text in zip(parts[::2], parts[1::2], strict=True)]
    setup, rest = [text for name, text in named if name == "setup"], dict(named)
    return [*setup, rest["before"]], [*setup[:-1], rest.get("setup after", setup[-1]), rest["after"]]


def run(program: list[str], steps: int | None) -> Left:
    """Run the cells and return what is left, what the last one printed, and the seconds that it took."""
    random.seed(0)  # a fork seeds it anew
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    made: collections.Counter[int] = collections.Counter()

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        made[id(optimizer)] += 1
        if steps is not None and min(made.values()) >= steps:
            raise Enough

    printed = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for text in program[:-1]:
            exec(compile(text, "<setup>", "exec"), vars(main))
        register_optimizer_step_post_hook(count)
        start = time.process_time()
        with contextlib.redirect_stdout(printed), contextlib.suppress(Enough):
            exec(compile(program[-1], "<cell>", "exec"), vars(main))
    took = time.process_time() - start
    left = dict(leaves((torch.get_rng_state(), random.getstate(), np.random.get_state()), "generators"))
    modes = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))
    left.update(leaves((modes, torch.are_deterministic_algorithms_enabled()), "modes"))
    names = {name: value for name, value in vars(main).items() if not name.startswith("_")}
    for name in sorted(names, key=lambda name: hasattr(names[name], "__next__")):  # reading an iterator may move others
        left.update(leaves(names[name], name))
    for path in sorted(path for path in Path().rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")):
        readers = {".pt": partial(torch.load, weights_only=False), ".pkl": lambda path: pickle.loads(path.read_bytes())}
        left.update(leaves(readers.get(path.suffix, Path.read_text)(path), f"{path}"))
    return left, printed.getvalue(), took


def forked(program: list[str], steps: int | None) -> Left | str:
    """Run the cells in a copy of this process; a text says how they failed."""
    with tempfile.TemporaryDirectory() as folder:
        if (child := os.fork()) == 0:
            os.chdir(folder)
            answer: Any = "it ended the process"
            try:
                answer = run(program, steps)
            except Exception as error:  # noqa: BLE001 - the program's own failure is the answer
                answer = f"{type(error).__name__}: {error}"
            finally:
                Path(folder, "answer").write_bytes(pickle.dumps(answer))
                os._exit(0)
        os.waitpid(child, 0)
        return pickle.loads(Path(folder, "answer").read_bytes())


def alike(one: Any, other: Any) -> bool:
    """Tell whether two values are the same up to rounding."""
    if type(one) is not type(other):
        return False
    if isinstance(one, str):
        return alike_texts(one, other)
    if isinstance(one, np.ndarray | float | np.floating):
        one, other = np.asarray(one), np.asarray(other)
        if one.shape == other.shape and one.dtype == other.dtype and one.dtype.kind in "fc":
            largest = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
            return np.allclose(one, other, rtol=0.0, atol=ATOL + RTOL * largest, equal_nan=True)
        if one.shape == other.shape and one.dtype == other.dtype and one.dtype.kind in "iu":
            apart = np.abs(one.astype(np.int64) - other.astype(np.int64))
            return int(apart.max(initial=0)) <= 1 and float(apart.mean() if apart.size else 0.0) <= ROUNDED
    return np.array_equal(one, other)


def alike_texts(one: str, other: str) -> bool:
    """Tell whether two printed texts are the same but for the last digits of their numbers."""
    numbers = zip(NUMBER.findall(one), NUMBER.findall(other), strict=False)
    return NUMBER.sub("0", one) == NUMBER.sub("0", other) and all(
        a == b or ("." in a + b and abs(float(a) - float(b)) <= RTOL * max(1.0, abs(float(a)))) for a, b in numbers
    )


def difference(before: Left | str, after: Left | str) -> str | None:
    """Return the first thing that the changed program leaves otherwise; a name that only it has is none."""
    if isinstance(before, str) or isinstance(after, str):
        assert not isinstance(before, str), before
        return f"raises {after}"
    if not alike_texts(before[1], after[1]):
        return f"printed {before[1][-60:]!r}, then {after[1][-60:]!r}"
    for place, value in before[0].items():
        if place not in after[0]:
            return f"{place} is missing"
        if not alike(value, after[0][place]):
            return f"{place}: {str(value)[:40]}, then {str(after[0][place])[:40]}"
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int)
    parser.add_argument("files", type=Path, nargs="+")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    gc.freeze()
    for file in asked.files:
        pair = [forked(program, asked.steps) for program in cells(file)]
        seconds = sum(left[2] for left in pair if not isinstance(left, str))
        print(json.dumps([file.name, difference(*pair), seconds]), flush=True)
