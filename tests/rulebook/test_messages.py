"""Messages of many programs, each with the rule that comes first for it and the rules that stay silent."""

from __future__ import annotations

import pytest
from observed import site
from scenes import CUDA, evidence, training

from oomdoctor import fixes
from oomdoctor.incident import from_text
from oomdoctor.incident.formats import FORMATS
from oomdoctor.model.case import Cause
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import GIB
from oomdoctor.rulebook import load, locate

BOOK = load([locate()], known_fixes=fixes.ids())
GGML = "alloc_buffer: allocating 512.00 MiB on device 1: cudaMalloc failed: out of memory\n"
DISPATCHED = (
    "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the "
    "quantized model."
)
CAPTURE = (
    '  File "/app/sglang/srt/model_executor/cuda_graph_runner.py", line 269, in __init__\n    self.capture()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 7 has a total capacity of 95.00 GiB "
    "of which 410.00 MiB is free."
)
JITTOR = "GPU memory is overflow, please reduce your batch_size or data size!\nTotal: {} Used: {}"
FREE = "ValueError: Free memory on device cuda:0 ({}/22.0 GiB) on startup is less than desired GPU memory utilization"

FIRST = [
    (f"{GGML}llama_model_load: unable to allocate CUDA1 buffer", "engine_buffer_refused", Cause.MODEL_TOO_LARGE),
    (
        f"{GGML}ggml_gallocr_reserve_n: failed to allocate CUDA1 buffer of size 536870912",
        "engine_compute_buffer_refused",
        Cause.BATCH_OR_ACTIVATION,
    ),
    (
        "alloc fail type Other dev 1 space Device stream 0x5 size 1048576 bytes",
        "index_scratch_refused",
        Cause.BATCH_OR_ACTIVATION,
    ),
    (DISPATCHED, "quantised_model_spills", Cause.MODEL_TOO_LARGE),
    (
        "Error: model requires more system memory (164.5 GiB) than is available (13.5 GiB)",
        "model_exceeds_host_memory",
        Cause.MODEL_TOO_LARGE,
    ),
    (JITTOR.format("79.25GB", "78.5GB"), "jittor_device_full", Cause.BATCH_OR_ACTIVATION),
    (JITTOR.format("4GB", "10.25GB"), "jittor_overflow", Cause.MODEL_TOO_LARGE),
    (f"{FREE.format('19.8')} (0.9, 19.9 GiB).", "share_above_what_is_free", Cause.MEMORY_CAP),
    (f"{FREE.format('3.5')} (0.9, 19.9 GiB).", "occupied_at_start", Cause.OTHER_PROCESS),
    ("c++: fatal error: Killed signal terminated program cc1plus", "compilers_fill_memory", Cause.HOST_RAM),
    (CAPTURE, "graph_capture_refused", Cause.MEMORY_CAP),
    (
        "aclrtSetDevice(deviceId) failed: 507033\nMemory_Allocation_Failure(EL0004): Failed to allocate memory.",
        "ascend_refused",
        Cause.OTHER_PROCESS,
    ),
    (
        (
            "Memory_Allocation_Failure(EL0004): Failed to allocate memory.\n"
            "Call rtMalloc fail, size:3221291008, device_id:0"
        ),
        "accelerator_request_refused",
        Cause.SINGLE_HUGE_TENSOR,
    ),
    (
        (
            "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 5.00 GiB. GPU 0 has a total capacity of "
            "15.00 GiB. Of the allocated memory 3.90 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch "
            "but unallocated."
        ),
        "xpu_block_limit",
        Cause.SINGLE_HUGE_TENSOR,
    ),
    (
        "MemoryError: Unable to allocate 7.90 GiB for an array with shape (1060000000,) and data type float64",
        "one_large_request_refused",
        Cause.SINGLE_HUGE_TENSOR,
    ),
    (
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8482560000 bytes.",
        "one_large_request_refused",
        Cause.SINGLE_HUGE_TENSOR,
    ),
]


@pytest.mark.parametrize(("text", "rule", "cause"), FIRST, ids=[rule for _, rule, _ in FIRST])
def test_the_rule_that_comes_first_for_a_message(text, rule, cause):
    found = BOOK.match(from_text(text)[0], None)
    assert [(finding.rule, finding.cause) for finding in found[:1]] == [(rule, cause)]
    assert found[0].because


def rules_of(text, given=None):
    return {finding.rule for finding in BOOK.match(from_text(text)[0], given)}


def message(*, tried, free, allocated, unallocated):
    return (
        f"CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 32.00 GiB of which {free} is "
        f"free. Of the allocated memory {allocated} is allocated by PyTorch, and {unallocated} is reserved by PyTorch "
        "but unallocated."
    )


@pytest.mark.parametrize(("free", "fires"), [("7.00 GiB", False), ("300.00 MiB", True)])
def test_others_are_not_blamed_where_enough_was_free(free, fires):
    text = message(tried="512.00 MiB", free=free, allocated="4.00 GiB", unallocated="1.00 GiB")
    assert ("other_process" in rules_of(text)) == fires


@pytest.mark.parametrize("allocated", ["26.00 GiB", "28.00 GiB", "30.20 GiB"])
@pytest.mark.parametrize("unallocated", ["100.00 MiB", "1.50 GiB"])
@pytest.mark.parametrize("tried", ["20.00 MiB", "1.00 GiB", "2.00 GiB"])
def test_a_device_that_this_process_fills_always_has_a_finding(allocated, unallocated, tried):
    text = message(tried=tried, free="5.00 MiB", allocated=allocated, unallocated=unallocated)
    assert rules_of(text) & {"pool_fills_device", "fragmentation"}


@pytest.mark.parametrize("tried", [0.01, 0.2, 8, 24, 40])
def test_a_message_with_numbers_always_has_a_finding(tried):
    shares = [(a, u, f) for a in (1, 12, 24, 25.5, 31) for u in (0, 1, 3, 8) for f in (0.02, 0.3, 2, 10)]
    for allocated, unallocated, free in (sizes for sizes in shares if sum(sizes) <= 32):
        sizes = {"free": free, "allocated": allocated, "unallocated": unallocated, "tried": tried}
        assert rules_of(message(**{name: f"{size:.2f} GiB" for name, size in sizes.items()})), sizes


def test_a_sample_of_each_format_has_a_finding():
    assert [row.name for row in FORMATS if row.is_oom and not rules_of(row.sample)] == []


def test_a_neighbour_is_blamed_where_a_little_more_was_free_than_asked_for():
    text = message(tried="20.00 MiB", free="25.00 MiB", allocated="11.00 GiB", unallocated="200.00 MiB")
    assert BOOK.match(from_text(text)[0], None)[0].rule == "other_process"


def test_a_preflight_of_a_whole_model_is_not_read_as_one_tensor():
    text = "Error: model requires more system memory (164.5 GiB) than is available (13.5 GiB)"
    assert "large_host_tensor" not in rules_of(text)


@pytest.mark.parametrize(
    "text", [DISPATCHED, f"{GGML}ggml_gallocr_reserve_n: failed to allocate CUDA1 buffer of size 9"]
)
def test_a_headline_that_names_the_cause_is_not_followed_by_a_guess(text):
    assert "message_without_sizes" not in rules_of(text)


def test_a_kept_graph_comes_before_the_first_state_where_activations_hold_most():
    failed = Incident(
        is_oom=True,
        family=CUDA.family,
        device="cuda:0",
        requested=GIB,
        framework_frame="torch/optim/adam.py:180 _init_group",
    )
    roles = ((Role.ACTIVATION, 6 * GIB), (Role.PARAMETER, GIB))
    kept = {"drop_retain_graph": (site("In[4] line 5: loss.backward(retain_graph=True)"),)}
    for sites, first, silent in (
        (kept, "graph_retained", "first_step_state"),
        ({}, "first_step_state", "graph_retained"),
    ):
        code = training(sites=sites)
        found = [finding.rule for finding in BOOK.match(failed, evidence(roles=roles, code=code))]
        assert found[0] == first
        assert silent not in found


@pytest.mark.parametrize(
    ("tried", "line", "fires"),
    [
        ("20.00 MiB", "weights = scores.softmax(-1)  # attention", False),
        ("6.00 GiB", "weights = attention_scores.softmax(-1)", True),
        ("6.00 GiB", "out = F.scaled_dot_product_attention(q, k, v)", False),
    ],
)
def test_the_square_of_attention_needs_a_large_request_and_no_fused_kernel(tried, line, fires):
    text = (
        f'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in forward\n    {line}\n'
        "torch.OutOfMemoryError: "
        f"{message(tried=tried, free='5.00 MiB', allocated='20.00 GiB', unallocated='1.00 MiB')}"
    )
    assert ("quadratic_attention" in rules_of(text)) == fires


def test_a_difference_larger_than_its_operands_was_broadcast():
    text = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n'
        "    loss = ((pred - target) ** 2).mean()\n"
        "torch.OutOfMemoryError: "
        f"{message(tried='37.25 GiB', free='22.50 GiB', allocated='600.00 MiB', unallocated='9.00 MiB')}"
    )
    assert BOOK.match(from_text(text)[0], None)[0].rule == "shapes_broadcast"
    assert "shapes_broadcast" not in rules_of(text.replace("37.25 GiB", "500.00 MiB"))


def test_where_host_and_device_share_memory_the_page_cache_is_told_first():
    text = message(tried="8.00 GiB", free="3.10 GiB", allocated="38.00 GiB", unallocated="1.00 GiB")
    assert "memory_shared_with_host" not in rules_of(text)
    shared = from_text(text.replace("32.00 GiB", "121.69 GiB"))[0]
    assert BOOK.match(shared, None)[0].rule == "memory_shared_with_host"
