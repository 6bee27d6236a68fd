"""What carries a text to us takes nothing from it: log collectors, notebooks' files, loggers, launchers."""

from __future__ import annotations

import html
import json

import pytest

from oomdoctor.incident import from_text
from oomdoctor.incident.clean import log_text, notebook_output
from oomdoctor.model.sizes import GIB

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 77, in <module>\n    loss = step(x)\n'
ERRORS = {
    "device": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 2 has a total capacity of "
        "15.75 GiB of which 300.50 MiB is free. Including non-PyTorch memory, this process has 15.25 GiB memory in "
        "use. Of the allocated memory 14.03 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
        "unallocated."
    ),
    "host": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:99] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 6442450944 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "array": (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with shape "
        "(2000000, 1000) and data type float64"
    ),
    "worker": "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.",
}
PREFIXES = (
    "2026-01-02T03:04:05.678901234Z stderr F ", "2026-01-02T03:04:05.678901234+01:00 stdout F ",
    "2026-01-02T03:04:05.6789012Z ", "2026-01-02T03:04:05.6789012Z ##[error]", "::error::", "Error: ",
    "build\tRun tests\t2026-01-02T03:04:05.6789012Z ", "0: ", " 3: ", "12: ", "node17: ", "[rank0]: ", "[default0]:",
    "[default3]:[rank3]: ", "[rank0]:[rank0]: ", "(RayTrainWorker pid=123, ip=10.0.0.2) ",
    "\x1b[36m(RayTrainWorker pid=123, ip=10.0.0.2)\x1b[0m ", "(func pid=9) [repeated 3x across cluster] ",
    "Jan 02 03:04:05 node17 python3[123]: ", "2026-01-02T03:04:05+0100 node17 train[123]: ", "[ 1234.567890] ",
    "[Fri Jan  2 03:04:05 2026] ", "2026-01-02 03:04:05.678 | ERROR    | __main__:main:42 - ",
    "2026-01-02 03:04:05,678 - trainer - ERROR - ", "2026-01-02 03:04:05,678 ERROR trainer.py:42 ",
    "[ERROR|trainer.py:2926] 2026-01-02 03:04:05,678 >> ", "01/02/2026 03:04:05 - ERROR - trainer -   ",
    "Epoch 0:   3%|▎         | 10/300 [00:05<02:30,  1.93it/s] ", "E0102 03:04:05.678901 140123456789 train.py:99] ",
    "E   ", "> ", ">> ", "> > ", "    - ", "trainer_1   | ", "[pod/train-0/main] ", "train-0 main ", "wandb: ",
    "[1,mpirank:0,algo-1]<stderr>:", "[node17:00123] ", "[2026-01-02, 03:04:05 UTC] {process_utils.py:190} INFO - ",
    "(EngineCore_DP0 pid=123) ERROR 08-01 10:11:12 [core.py:708] ", "[03:04:05][Step 1/2] ", "[rank: 0] ",
)  # fmt: skip


def told(text):
    first, *others = from_text(text)
    assert not [other for other in others if other.is_oom]
    sizes = (first.requested, first.total, first.free, first.allocated, first.reserved, first.process_used)
    return first.is_oom, first.family, first.format, first.exc_type, first.device, *sizes


def prefixed(prefix):
    return lambda text: "\n".join(prefix + line for line in text.split("\n"))


def parts_of_lines(text, width=60):
    """Lines as a container runtime writes those that are longer than its buffer."""
    written = []
    for line in text.split("\n"):
        pieces = [line[at : at + width] for at in range(0, max(1, len(line)), width)]
        written += [f"2026-01-02T03:04:05.6789Z stderr P {piece}" for piece in pieces[:-1]]
        written.append(f"2026-01-02T03:04:05.6789Z stderr F {pieces[-1]}")
    return "\n".join(written)


def docker(text, width=10_000):
    pieces = (line[at : at + width] for line in text.splitlines(keepends=True) for at in range(0, len(line), width))
    return "\n".join(json.dumps({"log": piece, "stream": "stderr", "time": "2026-01-02T03:04:05Z"}) for piece in pieces)


def notebook(text, markdown="# How to mend: RuntimeError: CUDA out of memory"):
    error = text.split("\n")[-1]
    name, _, value = error.partition(": ")
    shown = [f"\x1b[0;31m{line}\x1b[0m" for line in text.split("\n")]
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["step 1\n", "step 2\n"]},
        {"output_type": "error", "ename": name.rpartition(".")[2], "evalue": value, "traceback": shown},
    ]
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": [markdown]},
        {"cell_type": "code", "execution_count": 3, "metadata": {}, "outputs": outputs, "source": ["step(x)"]},
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


CARRIERS = {
    **{repr(prefix): prefixed(prefix) for prefix in PREFIXES},
    "parts of lines": parts_of_lines,
    "Docker's file": docker,
    "Docker's file in parts": lambda text: docker(text, 50),
    "a record": lambda text: json.dumps({"levelname": "ERROR", "message": text}),
    "a nested record": lambda text: json.dumps({"jsonPayload": {"exc_info": text}, "severity": "ERROR"}),
    "a notebook": notebook,
    "bytes": lambda text: repr(text.encode()),
    "HTML": html.escape,
    "HTML with markup": lambda text: f"<div><pre>{html.escape(text)}</pre></div>",
    "no-break spaces": lambda text: text.replace(" ", "\xa0"),
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "two bytes a letter": lambda text: f"{text}\n".encode("utf-16").decode("utf-8", "replace"),
    "curly quotes": lambda text: text.translate({39: 8217, 34: 8221}),
    "YAML": lambda text: "error: |\n" + prefixed("  ")(text),
    "numbered lines": lambda text: "\n".join(f"{at:5d}  {line}" for at, line in enumerate(text.split("\n"), 120)),
    "grep": lambda text: "\n".join(f"logs/a.err:{at}:{line}" for at, line in enumerate(text.split("\n"), 120)),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_carries_a_text_takes_nothing_from_it(carrier):
    for name, error in ERRORS.items():
        text = TRACEBACK + error
        assert told(CARRIERS[carrier](text)) == told(text), name


def test_what_a_notebook_says_outside_of_its_outputs_is_no_failure():
    (incident,) = from_text(notebook(TRACEBACK + "ValueError: too many values to unpack"))
    assert (incident.is_oom, incident.exc_type) == (False, "ValueError")


def test_a_notebook_of_the_third_format_and_one_without_a_traceback_are_read():
    error = {"output_type": "pyerr", "ename": "MemoryError", "evalue": "", "traceback": []}
    old = {"worksheets": [{"cells": [{"outputs": [error, 7]}, None]}], "nbformat": 3}
    assert notebook_output(json.dumps(old)).splitlines() == ["MemoryError: "]


@pytest.mark.parametrize(
    "text",
    [
        '{"nbformat": 4, "cells": [',
        '{"nbformat": 4, "cells": {"a": 1}}',
        '{"nbformat": ' + "[" * 100_000,
        '{"log": ' + "[" * 100_000 + "}",
        '{"log": "a"',
        '{"log": {"log": [1, null]}}',
        '{"a": "b"}',
        "[1]",
    ],
)
def test_what_is_no_such_file_or_record_is_kept_or_empty(text):
    assert notebook_output(text) in (text, "")
    assert log_text(text) == text
    from_text(text)


@pytest.mark.parametrize(
    "record",
    [
        {"OOMKilled": True, "ExitCode": 137, "Error": ""},
        {"state": {"exitCode": 137, "reason": "Error"}, "message": "x"},
    ],
)
def test_a_record_of_how_a_process_ended_stays_whole(record):
    assert log_text(json.dumps(record)) == json.dumps(record)
    assert from_text(json.dumps(record))[0].is_oom


@pytest.mark.parametrize(
    ("printed", "size"),
    [
        ("1,024.00 MiB", GIB), ("1.024,00 MiB", GIB), ("1,024 MiB", GIB), ("1024.00 MiB", GIB), ("1,00 GiB", GIB),
        ("1.000000GB", GIB), ("1. GiB", GIB), ("0,125 GiB", GIB // 8), (".125 GiB", GIB // 8),
    ],
)  # fmt: skip
def test_a_size_is_read_whichever_signs_group_its_digits(printed, size):
    assert (
        from_text(f"RuntimeError: CUDA out of memory. Tried to allocate {printed} (GPU 0; 4 GiB)")[0].requested == size
    )


def test_a_line_that_came_in_parts_is_one_line_again():
    error = ERRORS["device"]
    assert log_text(f"{parts_of_lines(error)}\nnext\n") == f"{error}\nnext\n"
    assert log_text(docker(f"{error}\nnext\n", 50)) == f"{error}\nnext\n"
