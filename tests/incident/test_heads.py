"""A notebook prints the class of an error twice: above its traceback, and before its message."""

from __future__ import annotations

import pytest

from oomdoctor.incident import from_text
from oomdoctor.model.incident import Family
from oomdoctor.model.sizes import GIB

FRAMES = "\n\n".join(
    f"File ~/lib/python3.11/site-packages/nets/m{n}.py:{n + 10}, in Net{n}.forward(self, x)\n"
    f"      {n + 9} x = self.norm(x)\n---> {n + 10} return self.block{n}(x)"
    for n in range(30)
)
TORCH = " out of memory. Tried to allocate 6.25 GiB. GPU 0 has a total capacity of 24.00 GiB of which 5.00 GiB is free."


def _shown(kind: str, message: str) -> str:
    head = f"{'-' * 75}\n{kind}{'Traceback (most recent call last)':>{75 - len(kind)}}\nCell In[7], line 14\n"
    return f"{head}     12 model = GPT().cuda()\n---> 14 y = model(x)\n\n{FRAMES}\n\n{kind}: {message}\n"


@pytest.mark.parametrize(
    ("kind", "message", "family", "requested"),
    [
        ("OutOfMemoryError", f"CUDA{TORCH}", Family.CUDA, int(6.25 * GIB)),
        ("OutOfMemoryError", f"HIP{TORCH}", Family.HIP, int(6.25 * GIB)),
        ("OutOfMemoryError", "Out of memory allocating 8,589,934,592 bytes.", Family.CUPY, 8 * GIB),
        (
            "_ArrayMemoryError",
            "Unable to allocate 8.00 GiB for an array with shape (1073741824,) and data type float64",
            Family.NUMPY,
            8 * GIB,
        ),
        (
            "MemoryError",
            "Unable to allocate 8.00 GiB for an array with shape (1073741824,) and data type float64",
            Family.NUMPY,
            8 * GIB,
        ),
        ("MemoryError", "", Family.HOST, None),
        (
            "ResourceExhaustedError",
            (
                "OOM when allocating tensor with shape[1024,1048576] and type double on "
                "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc"
            ),
            Family.TF,
            8 * GIB,
        ),
    ],
)
def test_a_class_above_a_long_traceback_is_no_failure_of_its_own(kind, message, family, requested):
    (incident,) = from_text(_shown(kind, message))
    assert (incident.family, incident.requested, incident.exc_type) == (family, requested, kind)
    assert incident.inner is not None
    assert incident.inner.source_line == "return self.block29(x)"


def test_two_failing_cells_are_two_failures_and_no_more():
    second = _shown("OutOfMemoryError", f"CUDA{TORCH}").replace("6.25", "5.50")
    incidents = from_text(f"{_shown('OutOfMemoryError', f'CUDA{TORCH}')}\n{second}")
    assert [one.requested for one in incidents] == [int(6.25 * GIB), int(5.5 * GIB)]


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("OutOfMemoryError", Family.CUDA),
        ("MemoryError", Family.HOST),
        ("_ArrayMemoryError", Family.NUMPY),
        ("ResourceExhaustedError", Family.TF),
    ],
)
def test_a_head_whose_message_was_cut_off_is_still_a_failure(kind, family):
    whole = _shown(kind, "")
    (incident,) = from_text(whole[: whole.rindex(kind)])
    assert (incident.is_oom, incident.family, incident.exc_type) == (True, family, kind)


def test_a_head_does_not_borrow_the_message_of_another_class():
    incidents = from_text(f"{_shown('MemoryError', '')[: -len('MemoryError: ')]}\nKeyError: 'x'\n{FRAMES}\n{FRAMES}\n"
                          f"OutOfMemoryError: CUDA{TORCH}")  # fmt: skip
    assert [one.family for one in incidents] == [Family.HOST, Family.CUDA]
