"""What stands beside a message may say that it means something else, or the same once more."""

from __future__ import annotations

import pytest

from oomdoctor.incident import from_text
from oomdoctor.model.sizes import GIB, MIB, parse_size

ASSERTION = (
    "../aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [1,0,0], thread: [7,0,0] Assertion "
    "`srcIndex < srcSelectDimSize` failed.\n"
)
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize("error", [CUBLAS, "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"])
def test_a_handle_that_fails_after_an_assertion_on_the_device_says_nothing_of_memory(error):
    (incident,) = from_text(ASSERTION * 4 + 'Traceback (most recent call last):\n  File "t.py", line 3\n' + error)
    assert (incident.is_oom, incident.format) == (False, "device_assert")
    assert from_text(error)[0].is_oom


def test_an_assertion_far_above_a_full_device_does_not_hide_it():
    text = ASSERTION + "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
    assert [one.is_oom for one in from_text(text)] == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        '"State": {"Status": "exited", "OOMKilled": false, "Dead": false, "ExitCode": 137}',
        "OOMKilled=false exit code: 137",
    ],
)
def test_signal_9_is_not_laid_to_a_limit_that_was_not_reached(text):
    (incident,) = from_text(text)
    assert (incident.is_oom, incident.format) == (False, "killed_below_limit")
    assert from_text(text.replace("false", "true", 1))[0].format == "oom_killed"


NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/ProcessGroupNCCL.cpp:1970, unhandled cuda error, "
    "NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'"
)


def test_the_head_of_ncclss_error_is_not_told_beside_its_last_line():
    (incident,) = from_text(NCCL)
    assert (incident.is_oom, incident.format) == (True, "nccl_oom")


ASYNC = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 6.25 GiB\n"
    "Requested               : 640.00 MiB\n"
)
ENDING = "Device limit            : 8.00 GiB\nFree (according to CUDA): 0 bytes\n"


@pytest.mark.parametrize("texts", [(ASYNC + ENDING, ASYNC), (ASYNC, ASYNC + ENDING)])
def test_a_failure_that_was_printed_again_in_part_is_one(texts):
    (incident,) = from_text(f"!!! {texts[0]}Traceback (most recent call last):\n  File \"x.py\", line 3, in f\n"
                            f"torch.OutOfMemoryError: {texts[1]}")  # fmt: skip
    assert (incident.requested, incident.total, incident.free) == (640 * MIB, 8 * GIB, 0)
    assert incident.exc_type == "torch.OutOfMemoryError"


def test_what_the_kernel_killed_is_told_with_its_size():
    (incident,) = from_text(
        "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n"
        "CPU: 3 PID: 21833 Comm: python3 Tainted: P 5.15.0-91-generic #101-Ubuntu\n"
        + "Call Trace: x\n" * 50
        + "Memory cgroup out of memory: Killed process 21833 (python3) total-vm:81264512kB, anon-rss:33187260kB"
    )
    assert incident.process_used == 33187260 * 1024


def test_ranks_that_fail_alike_on_devices_of_their_own_are_as_many_failures():
    text = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {} has a total capacity of 8 GiB"
    lines = [f"[rank{rank}]: {text.format(rank)}" for rank in (1, 0, 1, 2)]
    assert [one.device for one in from_text("\n".join(lines))] == ["cuda:1", "cuda:0", "cuda:2"]


def test_two_failures_of_one_size_on_devices_of_two_sizes_stay_two():
    text = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU {}; {}.00 GiB total capacity; 1.00 GiB free)\n"
    assert len(from_text(text.format(0, 8) + text.format(1, 16))) == 2


@pytest.mark.parametrize(
    "text",
    [
        "    Handle OutOfMemoryError in trainer",
        "    Catch torch.OutOfMemoryError in the evaluation loop",
        "- Fixed: RuntimeError: CUDA out of memory when resuming from a checkpoint (#1234)",
        "Epoch 137: loss 0.3\nSaved checkpoint with code 137 of 200",
    ],
)
def test_a_line_of_a_history_is_no_failure(text):
    assert not from_text(text)[0].is_oom


def test_a_handle_is_no_verb():
    assert from_text("handle of SYCL: SOMELIB_STATUS_ALLOC_FAILED error")[0].is_oom


@pytest.mark.parametrize(
    ("text", "requested"),
    [
        ("malloc: *** mach_vm_map(size=1073741824, flags: 1) failed\nmalloc: *** error: can't allocate region", "1GiB"),
        ("ClientError: Please use an instance type with more memory, or reduce the size of training data.", None),
        ("Error using gpuArray/mtimes\nOut of memory on device. To view more detail, use 'gpuDevice()'.", None),
    ],
)
def test_other_programs_say_it_in_their_own_words(text, requested):
    (incident,) = from_text(text)
    assert incident.is_oom
    assert incident.requested == (parse_size(requested) if requested else None)


@pytest.mark.parametrize(("above", "killed"), [("y = f(x)", "Killed"), ("model.fit(x)", "MemoryError")])
def test_a_message_of_one_word_does_not_begin_on_the_line_above(above, killed):
    (incident,) = from_text(f"{above}\n{killed}")
    assert incident.message == killed
