"""A message of PyTorch tells all of its numbers wherever its lines are cut, at each width of a terminal."""

from __future__ import annotations

import textwrap

import pytest

from oomdoctor.incident import from_text
from oomdoctor.incident.formats import FORMATS

PROCESSES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 2 has a total capacity of 15.75 GiB "
    "of which 300.50 MiB is free. Process 811 has 14.70 GiB memory in use. Process 9 has 1.20 GiB memory in use. Of "
    "the allocated memory 14.03 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
SENTENCES = {row.name: row.sample for row in FORMATS if row.flows and "PyTorch" in row.versions} | {
    "processes": PROCESSES
}
WIDTHS = range(40, 121)
PARTS = 3
"""Each way of wrapping meets one width in three, and the ways meet different ones."""


def cut(text, width):
    return [line[at : at + width] for line in text.split("\n") for at in range(0, max(1, len(line)), width)]


WAYS = {
    "within words": lambda text, width: "\n".join(cut(text, width)),
    "without the spaces at the ends": lambda text, width: "\n".join(map(str.strip, cut(text, width))),
    "between words": lambda text, width: "\n".join("\n".join(textwrap.wrap(line, width)) for line in text.split("\n")),
    "in a frame": lambda text, width: "\n".join(f"│ {piece:<{width}} │" for piece in cut(text, width)),
}  # fmt: skip


def told(text):
    return [
        (
            (one.family, one.format, one.device),
            (one.requested, one.total, one.free, one.allocated, one.reserved, one.process_used),
        )
        for one in from_text(text)
    ]


def test_there_are_sentences_of_each_time():
    assert {"cuda_cached", "cuda_reserved_hint", "cuda_capacty", "cuda_new_alloc_conf", "mps", "xpu_new"} <= {
        *SENTENCES
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SENTENCES)
def test_every_number_is_read_at_each_width(name, way):
    text = SENTENCES[name]
    wanted = told(text)
    widths = WIDTHS[[*WAYS].index(way) % PARTS :: PARTS]
    assert [width for width in widths if told(WAYS[way](text, width)) != wanted] == []


@pytest.mark.parametrize(
    ("text", "name", "wanted"),
    [
        ("somelib.Error: failed to allocate memory\nstep 5\n12.50 MiB loaded", "refused_allocation", None),
        ("NCCL WARN Failed to CUDA calloc 4194304\n12 bytes sent", "nccl_oom", None),
        ("memory allocation of 4096 bytes failed\n12 GiB free", "refused_allocation", 4096),
        ("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 9437184\n33% done",
         "onnxruntime_arena", 9437184),
        ("cudaErrorMemoryAllocation: out of memory\n- Free memory: 812\n12 Requested memory: 99", "rmm", 99),
    ],
)  # fmt: skip
def test_no_number_is_made_of_two_rows(text, name, wanted):
    first = from_text(text)[0]
    assert (first.format, first.requested) == (name, wanted)
