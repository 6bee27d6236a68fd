"""Rows for host memory that was refused: allocators, NumPy, mappings, shared memory."""

from __future__ import annotations

import re
from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family


def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


_ALLOCATOR_ROWS: Final = (
    Format(
        name="cpu_linux",
        family=Family.HOST,
        title="The operating system refused the host memory for a tensor.",
        versions="PyTorch 1.2 on, Linux and macOS",
        needles=("defaultcpuallocator",),
        pattern=compiled(r"DefaultCPUAllocator: can't allocate memory"),
        clauses=(compiled(r"tried to allocate {requested#} bytes"),),
        device="cpu",
        flows=True,
        sample=(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:99] err == 0. DefaultCPUAllocator: can't "
            "allocate memory: you "
            "tried to allocate 6442450944 bytes. Error code 12 (Cannot allocate memory)"
        ),
    ),
    Format(
        name="th_buy_ram",
        family=Family.HOST,
        title="The operating system refused the host memory for a tensor.",
        versions="PyTorch 0.1 to 0.4",
        needles=("torch: not enough memory",),
        pattern=compiled(r"Torch: not enough memory: you tried to (?:re)?alloc"),
        clauses=(compiled(r"tried to (?:re)?allocate {requested}"),),
        device="cpu",
        flows=True,
        sample="RuntimeError: $ Torch: not enough memory: you tried to allocate 12GB. Buy new RAM! at THGeneral.c:200",
    ),
    Format(
        name="cpu_win",
        family=Family.HOST,
        title="The commit limit of the operating system left no host memory for a tensor.",
        versions="PyTorch 1.2 on, Windows and Android",
        needles=("not enough memory: you tried", "defaultcpuallocator"),
        pattern=compiled(r"DefaultCPUAllocator: not enough memory|not enough memory: you tried to allocate"),
        clauses=(compiled(r"tried to allocate {requested#} bytes"), compiled(r"tried to allocate {requested}")),
        device="cpu",
        flows=True,
        sample=(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:88] data. DefaultCPUAllocator: not enough "
            "memory: you tried to "
            "allocate 4194304000 bytes."
        ),
    ),
    Format(
        name="cpu_posix_memalign",
        family=Family.HOST,
        title="The operating system refused the host memory for a tensor; the text has no size.",
        versions="PyTorch 1.0 and 1.1",
        needles=("posix_memalign",),
        pattern=compiled(r"posix_memalign\([^)]{1,60}\) == 0\.? 12 vs 0"),
        device="cpu",
        sample=(
            "RuntimeError: [enforce fail at CPUAllocator.cpp:40] posix_memalign(&data, gAlignment, "
            "nbytes) == 0. 12 vs 0"
        ),
    ),
    Format(
        name="numpy",
        family=Family.NUMPY,
        title="NumPy could not get the host memory for an array.",
        versions="NumPy 1.18 on",
        needles=("unable to allocate",),
        pattern=compiled(r"Unable to allocate {requested} for an array"),
        clauses=(
            compiled(r"with shape \((?P<shape>[\d,\s]{0,160})\)"),
            compiled(r"data type (?P<dtype>[<>|=]?\w{1,20})"),
        ),
        device="cpu",
        flows=True,
        sample=(
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with shape "
            "(2000000, 1000) and data type float64"
        ),
    ),
    Format(
        name="numpy_117",
        family=Family.NUMPY,
        title="NumPy could not get the host memory for an array.",
        versions="NumPy 1.17",
        needles=("unable to allocate array",),
        pattern=compiled(r"Unable to allocate array with shape"),
        clauses=(
            compiled(r"with shape \((?P<shape>[\d,\s]{0,160})\)"),
            compiled(r"data type (?P<dtype>[<>|=]?\w{1,20})"),
        ),
        device="cpu",
        flows=True,
        sample="MemoryError: Unable to allocate array with shape (50000, 50000) and data type float32",
    ),
    Format(
        name="winerror1455",
        family=Family.HOST,
        title="The paging file is too small for what all processes have committed.",
        versions="Windows; the words are translated, the number is not",
        needles=("1455]", "error 1455", "<1455>", "paging file is too small"),
        pattern=compiled(r"(?:\[Win|os )?error 1455\b|error code: <1455>|paging file is too small"),
        device="cpu",
        sample="OSError: [WinError 1455] The paging file is too small for this operation to complete.",
    ),
    Format(
        name="windows_code",
        family=Family.HOST,
        title="Windows refused memory; where a graphics library reports it, the memory of the device.",
        versions="Windows, WSL; the words are translated, the numbers are not",
        needles=(
            "8007000e",
            "-2147024882",
            "e_outofmemory",
            "[winerror 8]",
            "[winerror 14]",
            "[winerror 1450]",
            "not enough memory resources",
            "not enough storage is available",
            "dml allocator out of memory",
            "could not allocate tensor with",
        ),
        pattern=compiled(
            r"\b(?:0x)?8007000E\b|-2147024882\b|\bE_OUTOFMEMORY\b|\[WinError (?:8|14|1450)\]"
            r"|Not enough memory resources are available|Not enough storage is available to (?:complete|process)"
            r"|DML allocator out of memory|Could not allocate tensor with {requested#} bytes"
        ),
        families=(
            (_words(r"(?i:\bdml|directml|d3d12|\bdx\w{0,4}\b|dxgi|\bgpu\b|video memory|allocate tensor)"), Family.CUDA),
            (_words(""), Family.HOST),
        ),
        flows=True,
        sample="OSError: [WinError 8] Not enough memory resources are available to process this command",
    ),
    Format(
        name="shm_mmap",
        family=Family.SHM,
        title="A mapping of shared memory was refused; a few bytes point at the limit on the number of mappings.",
        versions="PyTorch 1 and 2",
        needles=("unable to mmap",),
        pattern=compiled(r"unable to mmap (?:{requested#} bytes from file </?torch_|\d{1,4} bytes from file)"),
        clauses=(compiled(r"unable to mmap {requested#} bytes"),),
        requires=compiled(r"Cannot allocate memory"),
        device="cpu",
        flows=True,
        sample="RuntimeError: unable to mmap 512 bytes from file </torch_77_88>: Cannot allocate memory (12)",
    ),
    Format(
        name="mmap_fail",
        family=Family.HOST,
        title="The operating system refused to map a file that is larger than what it may commit.",
        versions="PyTorch 1 and 2, safetensors",
        needles=("unable to mmap",),
        pattern=compiled(r"unable to mmap {requested#} bytes"),
        requires=compiled(r"Cannot allocate memory"),
        device="cpu",
        flows=True,
        sample=(
            "RuntimeError: unable to mmap 9663676416 bytes from file <model.safetensors>: Cannot allocate memory (12)"
        ),
    ),
    Format(
        name="fork",
        family=Family.FORK,
        title="The operating system refused to fork a process of this size.",
        versions="Python 3",
        needles=("[errno 12]", "fork: cannot allocate memory"),
        pattern=compiled(r"\[Errno 12\]|fork: Cannot allocate memory"),
        context=compiled(r"\bfork\b|_fork\b|forkserver|_fork_exec|fork_exec|popen_fork"),
        device="cpu",
        sample=(
            '  File "popen_fork.py", line 60, in _launch\n    self.pid = os.fork()\nOSError: [Errno 12] '
            "Cannot allocate memory"
        ),
    ),
    Format(
        name="errno12",
        family=Family.HOST,
        title="The operating system refused host memory.",
        versions="any",
        needles=(
            "[errno 12]",
            "os error 12)",
            "cannot allocate memory",
            "libgomp: out of memory",
            "virtual memory exhausted",
        ),
        pattern=compiled(
            r"\[Errno 12\]|\(os error 12\)|Cannot allocate memory$"
            r"|libgomp: Out of memory|virtual memory exhausted"
        ),
        device="cpu",
        sample="OSError: [Errno 12] Cannot allocate memory",
    ),
    Format(
        name="system_memory",
        family=Family.HOST,
        title="The model needs more host memory than is available.",
        versions="Ollama",
        needles=("more system memory",),
        pattern=compiled(r"requires more system memory \({requested}\) than is available \({free}\)"),
        device="cpu",
        flows=True,
        sample="Error: model requires more system memory (9.5 GiB) than is available (6.1 GiB)",
    ),
    Format(
        name="jvm_heap",
        family=Family.HOST,
        title="The heap of a Java process is full: raise its limit, such as spark.driver.memory.",
        versions="Spark, H2O",
        needles=("java.lang.outofmemoryerror", "gc overhead limit"),
        pattern=compiled(r"java\.lang\.OutOfMemoryError|GC overhead limit exceeded"),
        clauses=(compiled(r"allocate an? {requested#} byte"), compiled(r"with {free#} free bytes")),
        device="cpu",
        sample="py4j.protocol.Py4JJavaError: ...\n: java.lang.OutOfMemoryError: Java heap space",
    ),
    Format(
        name="node_heap",
        family=Family.HOST,
        title="The heap of a Node.js process is full: raise --max-old-space-size.",
        versions="Node.js, JupyterLab's build",
        needles=("javascript heap out of memory",),
        pattern=compiled(r"JavaScript heap out of memory"),
        device="cpu",
        sample="FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory",
    ),
    Format(
        name="bad_alloc",
        family=Family.HOST,
        title="The C++ runtime could not get host memory.",
        versions="any",
        needles=("std::bad_alloc",),
        pattern=compiled(r"std::bad_alloc"),
        unless=compiled(r"std::bad_alloc: (?:CUDA|RMM|out_)"),
        device="cpu",
        sample="terminate called after throwing an instance of 'std::bad_alloc'",
    ),
    Format(
        name="malloc_macos",
        family=Family.HOST,
        title="The operating system refused host memory.",
        versions="macOS",
        needles=("mach_vm_map(size", "can't allocate region"),
        pattern=compiled(
            r"mach_vm_map\(size={requested#}[^\n]{0,60}\) failed|malloc: [^\n]{0,40}can't allocate region"
        ),
        device="cpu",
        sample="python(77) malloc: *** mach_vm_map(size=2147483648, flags: 100) failed (error code=3)",
    ),
    Format(
        name="pickled_memoryerror",
        family=Family.HOST,
        title="A worker ran out of host memory and could not send its error.",
        versions="Python 3",
        needles=("<class 'memoryerror'>",),
        pattern=compiled(r"Can't pickle <class 'MemoryError'>"),
        device="cpu",
        sample="_pickle.PicklingError: Can't pickle <class 'MemoryError'>: it's not the same object",
    ),
)

_SHM_ROWS: Final = (
    Format(
        name="dl_bus",
        family=Family.SHM,
        title="A loader's worker met a bus error: as a rule the shared memory is too small.",
        versions="PyTorch 0.4 on",
        needles=("bus error",),
        pattern=compiled(
            r"is killed by signal: Bus error|Unexpected bus error encountered in worker|insufficient shared memory"
        ),
        device="cpu",
        sample=(
            "RuntimeError: DataLoader worker (pid 55) is killed by signal: Bus error. It is possible that dataloader's "
            "workers are out of shared memory."
        ),
    ),
    Format(
        name="shm_write",
        family=Family.SHM,
        title="The shared memory is full; this is /dev/shm and not the disk.",
        versions="PyTorch 0.4 on, NCCL 2, Python 3.8 on",
        needles=("</torch_", "shared memory segment", "/dev/shm", "left on device: '/"),
        pattern=compiled(
            r"unable to (?:write to|resize|allocate shared memory ?\(shm\) for) file </?torch_"
            r"|(?:creating|extend(?:ing)?) (?:a )?shared memory segment|failed to extend /dev/shm"
            r"|/dev/shm[^\n]{0,160}No space left on device"
            r"|No space left on device[^\n]{0,160}/dev/shm"
            # Names of shared memory have one slash; those of multiprocessing are ``psm_`` and ``mp-``.
            r"|No space left on device: '/(?:torch_|psm_|mp-)[^/'\n]{1,80}'"
        ),
        unless=compiled(r"Too many open files"),
        device="cpu",
        sample="RuntimeError: unable to write to file </torch_10_20_0>: No space left on device (28)",
    ),
    Format(
        name="shm_open",
        family=Family.SHM,
        title="A piece of shared memory could not be opened: it is full, or there are too many descriptors.",
        versions="PyTorch 0.4 on",
        needles=("unable to open shared memory object", "open shared file mapping"),
        pattern=compiled(r"unable to open shared memory object|Couldn't open shared file mapping"),
        unless=compiled(r"Too many open files|\(24\)|<1455>"),
        device="cpu",
        sample="RuntimeError: unable to open shared memory object </torch_10_20> in read-write mode",
    ),
)

ROWS: Final = (*_ALLOCATOR_ROWS, *_SHM_ROWS)
