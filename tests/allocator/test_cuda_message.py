"""The text of the failure, compared with what real devices printed."""

import json
import re
from pathlib import Path

import pytest

from oomdoctor.allocator.device import cuda_out_of_memory, cuda_size
from oomdoctor.model.sizes import GIB, KIB, MIB

REPORTED = Path(__file__).parents[3] / "shared" / "corpus" / "oom_messages.jsonl"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (1002 * MIB, "1002.00 MiB"),
        (GIB, "1024.00 MiB"),
        (25393994138, "23.65 GiB"),
    ],
)
def test_sizes_are_printed_as_cuda_prints_them(size, text):
    assert cuda_size(size) == text


def test_the_whole_text():
    assert cuda_out_of_memory(tried=20 * MIB, total=8 * GIB, allocated=7 * GIB, reserved=8 * GIB - 12 * MIB) == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 12.00 MiB is "
        "free. Including non-PyTorch memory, this process has 7.99 GiB memory in use. Of the allocated memory 7.00 GiB "
        "is allocated by PyTorch, and 1012.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def test_a_limit_of_the_process_is_told_before_what_is_allocated():
    text = cuda_out_of_memory(tried=MIB, total=8 * GIB, allocated=GIB, reserved=2 * GIB, allowed=4 * GIB)
    assert "this process has 2.00 GiB memory in use. 4.00 GiB allowed; Of the allocated memory 1024.00 MiB is" in text


@pytest.mark.skipif(not REPORTED.is_file(), reason=f"the reported texts are not at {REPORTED}")
def test_only_the_numbers_differ_from_texts_that_users_reported():
    ours = shape(cuda_out_of_memory(tried=1, total=1, allocated=1, reserved=1))
    reported = [json.loads(line) for line in REPORTED.read_text().splitlines()]
    assert ours in {shape(record["text"]) for record in reported if record["format"] == "cuda_new"}


def shape(text):
    """Return a message without its exception class and its numbers."""
    return re.sub(r"[\d.]+ (bytes|[KMG]iB)", "SIZE", text[text.index("CUDA out of memory") :]).replace("  ", " ")


def test_the_parts_add_up():
    text = cuda_out_of_memory(tried=2 * KIB, total=64 * MIB, allocated=10 * MIB, reserved=24 * MIB)
    for part in (
        "of which 40.00 MiB is free",
        "this process has 24.00 MiB",
        "and 14.00 MiB is reserved by PyTorch",
    ):
        assert part in text
