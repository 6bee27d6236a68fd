from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oomdoctor.incident import from_text
from oomdoctor.incident.clean import LIMIT
from oomdoctor.incident.formats import FORMATS
from oomdoctor.model.incident import Family
from oomdoctor.model.sizes import GIB, MIB

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 2 has a total capacity of 15.75 GiB "
    "of which 300.50 MiB is free. Including non-PyTorch memory, this process has 15.25 GiB memory in use. Of the "
    "allocated memory 14.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 600.00 MiB (GPU 0; 7.50 GiB total capacity; 5.25 GiB already "
    "allocated; 100.00 MiB free; 6.00 GiB reserved in total by PyTorch)"
)


def numbers(incident):
    return (
        incident.requested,
        incident.total,
        incident.free,
        incident.allocated,
        incident.reserved,
        incident.process_used,
    )


WHOLE = (int(1.25 * GIB), int(15.75 * GIB), int(300.5 * MIB), 14 * GIB, int(14.5 * GIB), int(15.25 * GIB))


def wrapped(text, width, lead=""):
    return "\n".join(lead + text[at : at + width] for at in range(0, len(text), width))


@pytest.mark.parametrize(
    "text",
    [
        NEW,
        f"\x1b[0;31m{NEW[:22]}\x1b[0m{NEW[22:]}",
        wrapped(NEW, 79),
        wrapped(NEW, 33),
        wrapped(NEW, 60, "[rank3]: "),
        wrapped(NEW, 60, "E   "),
        wrapped(NEW, 60, "> "),
        "\n".join(f"│ {line:<60} │" for line in wrapped(NEW, 60).split("\n")),
        f"(EngineCore_DP0 pid=71) ERROR 08-01 10:11:12 [core.py:708] {NEW}",
        f"vllm-1  | {NEW}",
        f" 37%|███▋      | 11/30 [00:01<00:03]\r{NEW}",
        f"{NEW}\n\nDuring handling of the above exception, another exception occurred:\n\n{NEW}",
    ],
    ids=["plain", "ansi", "wrap79", "wrap33", "rank", "pytest", "quote", "box", "vllm", "compose", "bar", "twice"],
)
def test_one_failure_is_read_whole_through_what_tools_do_to_it(text):
    (incident,) = from_text(text)
    assert numbers(incident) == WHOLE
    assert (incident.family, incident.device) == (Family.CUDA, "cuda:2")


def test_no_width_of_a_terminal_hides_the_failure():
    for width in range(20, 120):
        first, *_ = from_text(wrapped(NEW, width))
        assert (first.is_oom, first.family, first.requested) == (True, Family.CUDA, WHOLE[0]), width


def test_a_lost_tail_and_a_lost_head_leave_the_other_numbers():
    (tail,) = from_text(OLD[: OLD.index("free;")])
    assert (tail.requested, tail.allocated, tail.reserved) == (600 * MIB, int(5.25 * GIB), None)
    (head,) = from_text(OLD[OLD.index("Tried") :])
    assert (head.family, head.requested, head.reserved) == (Family.CUDA, 600 * MIB, 6 * GIB)


def test_distinct_failures_come_in_order_and_those_for_memory_first():
    text = f"KeyboardInterrupt\n\n{OLD}\n\nlater\n{NEW}"
    incidents = from_text(text)
    assert [(one.is_oom, one.requested) for one in incidents] == [
        (True, 600 * MIB),
        (True, int(1.25 * GIB)),
        (False, None),
    ]


def test_a_process_of_a_container_is_this_process_when_it_holds_what_the_pool_does():
    process = "Process 811 has 9.25 GiB memory in use. "
    text = NEW.replace("Including non-PyTorch memory, this process has 15.25 GiB memory in use. ", process)
    text = text.replace("14.00 GiB is allocated", "8.50 GiB is allocated")
    assert from_text(text)[0].process_used == int(9.25 * GIB)
    assert from_text(text.replace("9.25 GiB memory in use", "3.00 GiB memory in use"))[0].process_used is None


def test_the_cell_and_the_frame_of_an_ipython_traceback_are_read():
    text = (
        "OutOfMemoryError                          Traceback (most recent call last)\n"
        "Cell In[7], line 3\n      1 model.train()\n      2 for x in data:\n----> 3     y = model(x)\n\n"
        "File /venv/site-packages/torch/nn/modules/linear.py:125, in Linear.forward(self, input)\n"
        "    124 def forward(self, input):\n--> 125     return F.linear(input, self.weight, self.bias)\n\n"
        f"{NEW.removeprefix('torch.')}"
    )
    (incident,) = from_text(text)
    assert incident.cell is not None
    assert (incident.cell.number, incident.cell.line, incident.cell.source_line) == (7, 3, "y = model(x)")
    assert incident.framework_frame is not None
    assert incident.framework_frame.endswith("linear.py:125 Linear.forward")
    assert incident.exc_type == "OutOfMemoryError"


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: please do not run out of memory here",
        "If you encounter CUDA out of memory, try to set --tile with a smaller number.",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "THCudaCheck FAIL file=/x/THCCachingHost.cpp line=2 error=59 : device-side assert triggered",
        "OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376",
        "RuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. It should not be used.",
        "DataLoader worker (pid 9) is killed by signal: Segmentation fault.",
        "ERROR:torch.distributed.elastic:failed (exitcode: -11) local_rank: 0 (pid: 4) of binary: python",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'invalid argument'",
        "OSError: [Errno 28] No space left on device: '/data/x.bin'",
        "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
        "AttributeError: module 'torch' has no attribute 'OutOfMemoryError'",
        "NameError: name 'OutOfMemoryError' is not defined",
        "---> 3 except MemoryError:\n4 print('CUDA out of memory')\nZeroDivisionError: division by zero",
        "---> 3 except torch.cuda.OutOfMemoryError:\n4 pass\nTypeError: no",
        "---> 3 except MemoryError: pass\nTypeError: no",
        "if 'out of memory' in str(error): # CUDA out of memory\nTypeError: no",
        "print('GPU memory: 3 GiB allocated, 1 GiB free')",
        'fprintf(stderr, "Virtual memory exhausted.\\n");',
        'prmsg (1, "SocketOpen: malloc failed\\n");',
        'static const char text[] = "Unable to allocate output buffer.";',
        'std::cout << "Error. Unable to allocate memory in pid: " << pid << std::endl;',
        "/* Support for it */\n/* fatal error, malloc failure */\n#define SSL_MALLOC 0",
        "    case CUFFT_ALLOC_FAILED:\n        return 2;",
        "catch (const std::bad_alloc&)\n{",
        "void CPyError_OutOfMemory(void) {",
        "SOMELIB_STATUS_OUT_OF_MEMORY = 11,",
        "53200    E    ERRCODE_OUT_OF_MEMORY      out_of_memory",
        "ENOMEM - Memory allocation failure for internal buffers",
        "-2: memory allocation failure",
        "'dns.NOMEM': Out of memory. It is an error.",
        "BufferError\nEOFError\nMemoryError\nNameError\nOSError",
        "Kernel died before replying to kernel_info",
        "RuntimeError: unable to mmap 1840 bytes from file </tmp/x>: No such device (19)",
        "free(): invalid pointer\nAborted (core dumped)",
        "",
    ],
)
def test_a_look_alike_is_not_taken_for_a_lack_of_memory(text):
    assert not any(incident.is_oom for incident in from_text(text))


HEADERS = sorted(Path(torch.__file__).parent.glob("include/c10/**/*.h"))


def test_source_code_that_speaks_of_memory_is_no_failure():
    read = [path.read_text(encoding="utf-8") for path in HEADERS]
    speaking = [text for text in read if "alloc" in text or "memory" in text]
    assert len(speaking) > 30
    assert not [incident for text in speaking for incident in from_text(text) if incident.is_oom]


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("python train.py\n已杀死", Family.RANK_KILLED),
        ("run.sh: Zeile 4:  1234 Getötet                python train.py", Family.RANK_KILLED),
        ("OSError: [Errno 12] 不能", Family.HOST),
        ("bash: fork: 无法分配内存", Family.HOST),
        ('{"log": "bash: fork: \\u65e0\\u6cd5\\u5206\\u914d\\u5185\\u5b58\\n"}', Family.HOST),
        ("RuntimeError: out of memory", Family.HOST),
        ("Error: vector memory exhausted (limit reached?)", Family.HOST),
        ("fatal   : Memory allocation failure\nRuntimeError: CUDA error: unknown error", Family.HOST),
        ("[ERROR] rtMalloc failed: Alloc Device Memory Failed!", Family.NPU),
    ],
)
def test_what_is_said_in_other_words_is_a_failure(text, family):
    assert from_text(text)[0].family is family


def test_a_size_is_read_with_all_of_its_digits():
    incident = from_text("somelib.Error: out of device memory, free: 16.00 GiB, total: 61.00 GiB, used: 16.50 GiB")[0]
    assert (incident.free, incident.total, incident.allocated) == (16 * GIB, 61 * GIB, int(16.5 * GIB))


def test_what_is_not_recognised_is_quoted_and_not_guessed_at():
    (incident,) = from_text("Traceback (most recent call last):\n  x\nmy.pkg.OddError: strange\n")
    assert (incident.family, incident.format, incident.exc_type) == (Family.NOT_OOM, None, "my.pkg.OddError")
    assert incident.message == "my.pkg.OddError: strange"


def test_of_a_huge_text_the_head_and_the_tail_are_read_and_the_middle_is_not():
    filler = "step 1 loss 0.5\n" * (LIMIT // 16)
    assert from_text(f"{OLD}\n{filler}{filler}")[0].requested == 600 * MIB
    assert from_text(f"{filler}{filler}\n{OLD}")[0].requested == 600 * MIB
    assert not from_text(f"{filler}{OLD}\n{filler}")[0].is_oom


@pytest.mark.parametrize(
    "unit",
    ["cuda out of memory. tried to allocate ", "killed\n", "9", "memoryerror kernel exitcode 137 ", "\x1b[", " \n"],
)
def test_a_hostile_text_takes_time_linear_in_its_size(unit):
    def seconds(size):
        text = unit * (size // len(unit))
        start = time.process_time()
        from_text(text)
        return time.process_time() - start

    seconds(1 << 16)
    small, large = seconds(1 << 18), seconds(1 << 21)
    assert large < 8 * 3 * small + 0.5


_PIECES = st.one_of(
    st.text(max_size=40),
    st.sampled_from([row.sample for row in FORMATS]),
    st.sampled_from([needle for row in FORMATS for needle in row.needles]),
    st.sampled_from(["\x1b[31m", "\r", "\n", "│", "[rank0]: ", "İ", "\ud800", "\x00", "9" * 400, "1.", ",,,"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_PIECES, max_size=30).map("".join))
def test_any_text_at_all_gives_incidents_and_never_an_error(text):
    incidents = from_text(text)
    assert incidents
    for incident in incidents:
        sizes = [size for size in numbers(incident) if size is not None]
        assert all(isinstance(size, int) and size >= 0 for size in sizes)
        assert incident.is_oom == (incident.family not in (Family.NOT_OOM, Family.TRITON_RESOURCE))
