from __future__ import annotations

import random
import time

import pytest

from oomdoctor.incident import from_text
from oomdoctor.incident.clean import ANCHORS, LIMIT, STRONG, thin
from oomdoctor.incident.formats import FORMATS

OOM = (
    "Traceback (most recent call last):\n"
    '  File "/app/train.py", line 77, in step\n    loss = model(batch)\n'
    '  File "/venv/site-packages/torch/nn/functional.py", line 12, in linear\n'
    "RuntimeError: CUDA out of memory. Tried to allocate 600.00 MiB (GPU 0; 7.50 GiB total capacity; 5.25 GiB already "
    "allocated; 100.00 MiB free; 6.00 GiB reserved in total by PyTorch)"
)
WORDS = ("loss", "step", "epoch", "learning", "rate", "tokens", "per", "second", "gradient", "norm", "eta", "scale")


def prose(size, seed=0, words=WORDS):
    """Return lines that have no shape in common."""
    draw = random.Random(seed)
    lines, length = [], 0
    while length < size:
        lines.append(" ".join(draw.choices(words, k=14)))
        length += len(lines[-1]) + 1
    return "\n".join(lines)


def progress(count):
    return "\n".join(f"2026-01-01 10:11:12,333 INFO step {at} loss 0.{at} max memory {at} MiB" for at in range(count))


def test_a_short_text_is_left_as_it_is():
    text = progress(100)
    assert thin(text) is text


@pytest.mark.parametrize(
    "lead", [progress(20_000), prose(1 << 20), "\n" * (1 << 20)], ids=["progress", "prose", "empty"]
)
def test_a_failure_in_the_middle_of_megabytes_is_read_whole(lead):
    (incident,) = from_text(f"{lead}\n{OOM}\n{lead}")
    assert (incident.format, incident.requested, incident.total) == ("cuda_reserved", 600 << 20, int(7.5 * (1 << 30)))
    assert incident.framework_frame is not None
    assert incident.framework_frame.endswith("functional.py:12 linear")


@pytest.fixture(scope="module")
def filler():
    return prose(300_000, seed=3)  # twice this is more than a text that is left as it is


def test_each_row_is_found_in_a_long_text(filler):
    for row in FORMATS:
        first = from_text(f"{filler}\n{row.sample}\n{filler}")[0]
        assert (first.format, first.is_oom) == (row.name, row.is_oom)


@pytest.mark.parametrize("strong", STRONG)
def test_what_is_looked_for_first_is_found_by_a_piece_that_is_looked_for_in_any_text(strong):
    assert any(anchor in strong for anchor in ANCHORS)


def full(unit):
    return (unit * (LIMIT // len(unit) + 1))[:LIMIT]


LONG = {
    "distinct lines": lambda: "\n".join(f"{(at * 2654435761) % (1 << 32):x} memory {at:b}" for at in range(480_000))[
        :LIMIT
    ],
    "progress": lambda: progress(200_000)[:LIMIT],
    "words of messages": lambda: prose(LIMIT, words=("memory", "error", "failed", "kernel", "killed", "loss", "alloc")),
    "one line": lambda: full("memory error failed to allocate "),
    "every sample": lambda: full("\n".join(row.sample for row in FORMATS) + "\n"),
    "short lines": lambda: full("\n".join(f"{at:x}" for at in range(1 << 16)) + "\n"),
    "frames and colours": lambda: full("│ ─── \x1b[31m"),
    "another script": lambda: full("ошибка память é\n"),
    "prefixes": lambda: full("[rank0]: [2026-01-02 03:04:05] ERROR - x"),
    "failures": lambda: "\n".join(
        f"RuntimeError: CUDA out of memory. Tried to allocate {at}.00 MiB (GPU 0; 7.50 GiB total capacity)"
        for at in range(180_000)
    )[:LIMIT],
}


def seconds_to_read(text):
    """Seconds of CPU that this thread takes to read `text`."""
    start = time.thread_time()
    from_text(text)
    return time.thread_time() - start


@pytest.mark.parametrize("name", LONG)
def test_sixteen_mebibytes_of_anything_are_read_in_a_time_that_grows_with_them(name):
    text = LONG[name]()
    quarter = seconds_to_read(text[: LIMIT // 4])
    # Twice what a reader without any cost that grows faster would take, and half a second for a busy core.
    assert seconds_to_read(text) < 2 * 4 * quarter + 0.5
