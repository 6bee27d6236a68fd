"""A failure has its own numbers and its own name, whatever stands beside it and wherever its lines were cut."""

from __future__ import annotations

import pytest

from oomdoctor.incident import from_text
from oomdoctor.model.incident import Family
from oomdoctor.model.sizes import GIB, MIB

POOL = (
    "W external/xla/xla/tsl/framework/bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying to "
    "allocate 8.00GiB (rounded to 8589934592)requested by op\n"
)
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB "
    "of which 1.21 GiB is free."
)
TENSOR = (
    "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with "
    "shape[2048,1048576] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc"
)
ARENA = (
    "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:342 void* onnxruntime::BFCArena::"
    "AllocateRawInternal(size_t, bool) Failed to allocate memory for requested buffer of size 9437184"
)
HIP = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 600.00 MiB (GPU 0; 7.50 GiB total capacity; "
    "5.25 GiB already allocated; 100.00 MiB free; 6.00 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize("between", ["", "I bfc_allocator.cc:1100] a chunk in use\n" * 50])
@pytest.mark.parametrize(
    ("error", "name"),
    [
        (
            "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.",
            "jax",
        ),
        (
            TENSOR,
            "tf_oom",
        ),
    ],
)
def test_the_line_of_the_pool_is_not_a_failure_beside_the_error(error, name, between):
    line = POOL if name == "jax" else POOL.replace("external/xla/xla", "external/local_xla/xla")
    (incident,) = from_text(line + between + error)
    assert (incident.format, incident.requested, incident.total) == (name, 8 * GIB, None)


def test_the_line_of_the_pool_alone_names_the_request():
    (incident,) = from_text(POOL)
    assert (incident.is_oom, incident.requested, incident.total) == (True, 8 * GIB, None)


@pytest.mark.parametrize("kind", ["XPU", "HIP"])
def test_no_number_is_taken_from_the_next_message(kind):
    first, second = from_text(f"RuntimeError: {kind} out of memory. Tried to allocate 1.00 GiB.\n{CUDA}")
    assert (first.family.name, first.requested, first.free, first.total) == (kind, GIB, None, None)
    assert (second.family, second.requested, second.total) == (Family.CUDA, 2 * GIB, 15 * GIB)


def test_a_cut_head_does_not_continue_in_another_message():
    head = "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0;"
    first, second = from_text(f"{head}\n2024-01-01 10:00:00 INFO step 3\n{HIP}")
    assert (first.family, first.requested, first.total, first.reserved) == (Family.CUDA, 20 * MIB, None, None)
    assert (second.family, second.requested, second.reserved) == (Family.HIP, 600 * MIB, 6 * GIB)


WHOLE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 98.00 MiB (GPU 0; 15.78 GiB total capacity; 14.21 GiB already "
    "allocated; 96.75 MiB free; 14.53 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize(
    "cuts", [("1|5.78", "14|.53"), ("15|.78", "14.|53"), ("15.7|8", "14.5|3"), ("96|.75", "1|4.21")]
)
def test_a_number_that_a_wrap_cut_is_put_together(cuts):
    text = WHOLE
    for cut in cuts:
        assert text.count(cut.replace("|", "")) == 1
        text = text.replace(cut.replace("|", ""), cut.replace("|", "\n"))
    (cut_up,), (whole,) = from_text(text), from_text(WHOLE)
    for name in ("requested", "total", "free", "allocated", "reserved"):
        assert getattr(cut_up, name) == getattr(whole, name), name


def test_a_pool_that_is_smaller_than_what_it_holds_is_not_told():
    (incident,) = from_text(WHOLE.replace("14.53 GiB reserved", "4.53 GiB reserved"))
    assert (incident.allocated, incident.reserved) == (None, None)
    assert incident.free == 96.75 * MIB


@pytest.mark.parametrize(
    "text",
    [
        "psycopg2.errors.OutOfMemory: out of shared memory\nHINT: You might need to increase max_locks.",
        "(psycopg2.errors.OutOfMemory) out of shared memory",
        "ERROR: out of shared memory\nHINT:  You might need to increase max_locks_per_transaction.",
    ],
)
def test_a_full_table_of_locks_is_no_want_of_memory(text):
    assert [(one.is_oom, one.format) for one in from_text(text)] == [(False, "lock_table")]


@pytest.mark.parametrize(
    ("text", "name", "requested"),
    [
        (
            ARENA,
            "onnxruntime_arena",
            9437184,
        ),
        (
            "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
            "numba",
            None,
        ),
    ],
)
def test_a_library_has_its_own_name(text, name, requested):
    (incident,) = from_text(text)
    assert (incident.format, incident.requested) == (name, requested)


@pytest.mark.parametrize("words", ["not a failure, but may mean", "not a failure, but this may mean"])
def test_what_the_pool_says_is_no_failure_is_none(words: str) -> None:
    text = POOL.replace("requested by op", f" with freed_by_count=0. The caller indicates that this is {words} that")
    assert not any(one.is_oom for one in from_text(text))


def test_memory_of_a_tpu_is_told_by_its_address() -> None:
    text = (
        "RuntimeError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 3.91G. That was not "
        "possible. There are 2.09G free.; (0x0x0_HBM0)"
    )
    assert [one.device for one in from_text(text)] == ["tpu"]
