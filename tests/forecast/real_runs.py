"""The same cell for real: in a forked process, on a virtual accelerator that nothing can fill."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oomdoctor.allocator.virtual import simulate
from oomdoctor.sandbox.openmp import keep_one_thread


def real_rise(make: Callable[[], dict[str, Any]], source: str, folder: str) -> int:
    """Run ``source`` in the namespace that ``make`` returns, and return how far the allocated bytes rise.

    Args:
        folder: the working directory, for what the cell writes by relative paths.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            keep_one_thread()  # the others of this process did not come along
            gc.freeze()  # collections here pass over what was alive, and leave its pages shared
            os.write(writer, json.dumps(_run(make, source, folder)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    said = json.loads(found or '"the real run died"')
    assert isinstance(said, int), said
    return said


def _run(make: Callable[[], dict[str, Any]], source: str, folder: str) -> int | str:
    os.chdir(folder)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    time.sleep = lambda _seconds: None
    try:
        with simulate("1TiB") as device:
            namespace = make()
            gc.collect()
            device.reset_peak()
            begin = device.read().allocated
            with contextlib.suppress(SystemExit):
                exec(compile(source, "<real run>", "exec"), namespace)
            return device.read().peak_allocated - begin
    except BaseException as error:  # noqa: BLE001  it is the answer of this process
        return repr(error)
