"""Rows for wordings that no other row knows: the grammar that refusals of memory have in common.

A refusal is a code (``..._OUT_OF_MEMORY``), a statement that memory ran out, or a verb of allocation that failed, with
a size or a word for memory beside it. Which family it is, the words on its line tell. Statements that are conditions,
advice or source code are left alone. These rows come last and are vague: whatever says more about the same lines
replaces them.

Limits: a sentence of prose that reports a failure reads as one.
"""

from __future__ import annotations

import re
from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family


def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


FAMILIES: Final = (
    (_words(r"(?i:pinned|page-locked|on host: CUDA|cudaHost|hipHost|mlock\b)"), Family.PINNED),
    (_words(r"(?i:\bhip|\brocm|\bmiopen)"), Family.HIP),
    (
        _words(r"(?i:\bnpu\b|ascend|\bacl(?:rt|nn)|\brtMalloc|\bGE module|mindspore/(?!\S{0,80}gpu))|\(EL\d{4}\)"),
        Family.NPU,
    ),
    (_words(r"(?i:\bxpu\b|sycl|level[_ ]zero|opencl)|\b(?:UR|ZE|PI|CL|DPCPP)_[A-Z]|Native API"), Family.XPU),
    (_words(r"(?i:\bmps\b|metal\b|\bmlx\b|malloc_or_wait)|MTL[A-Z]|IOGPU"), Family.MPS),
    (_words(r"(?i:\bxla\b|\bjax|\btpu\b|\bpjrt)"), Family.JAX),
    (_words(r"(?i:tensorflow|bfc_allocator|op_requires|tf_status)"), Family.TF),
    (_words(r"(?i:cupy|\brmm\b|rmm_|numba|cudf|cuml)|cuMemAlloc results"), Family.CUPY),
    (_words(r"(?i:cublas|cusolver|cusparse|cufft|curand)"), Family.CUBLAS),
    (_words(r"(?i:cudnn)"), Family.CUDNN),
    (
        _words(
            r"(?i:\bcuda|\bgpus?\b|gpu[_ ]|\bvram\b|device[_ ]?memory|nvinfer|tensorrt|\bvulkan|\bvk::|\bnccl"
            r"|memory on device|\w\.cuh?\b|device\(id|thrust|PT_DEVMEM|\bHPU\b|habana|parallel_for|paddle|mindspore)"
            r"|\bcu[A-Z]|\bTRT\b|\bVK_|CUDA|::nvml|CachingAllocator"
        ),
        Family.CUDA,
    ),
    (_words(r"(?i:/dev/shm|shmget|shm_open|shmat|shared[_ ]memory)"), Family.SHM),
    (
        _words(
            r"(?i:\bhost|\bsystem\b|\bram\b|heap|malloc|realloc|calloc|mmap|\bcpu\b|bad[_ ]alloc|\bjava|opencv|arrow"
            r"|swap|numpy|pandas"
            r"|system memory|virtual memory|physical memory|memory allocation|allocation of|enomem|os error"
            r"|errno|\brust"
            r"|fatal|cannot allocate|memoryerror|bytes|\d ?[kmgt]i?b\b)"
        ),
        Family.HOST,
    ),
)
"""Who refused, by the words around the refusal; the more particular before the more general."""

DENIED: Final = re.compile(
    # a condition, a possibility or advice
    r"(?i:\b(?:if|when|whenever|in case|to avoid|avoid\w{0,4}|prevent\w{0,4}|may|might|can(?!'t|not)|could(?! not)"
    r"|would"
    r"|should|consider|unless|how to|likely|risk\w{0,3}|not run|no longer|never|won't|instead of|address the"
    r"|such as|e\.g\.|for example|possible that|fix(?:e[sd])?|skipping|checks? for|we (?:can't|cannot)"
    r"|has no attribute|is not defined|cannot import|not a failure|try(?:ing)? (?:to )?(?:re|again))\b)[^\n]{0,120}$"
    r"|(?i:\b(?:an?|any|for|check|on)\s{1,3}$)"
    # a line of a history
    r"|(?i:^\W{0,8}(?:handles?|catch(?:es)?)\s[^\n:]{0,80}$)"
    # the meaning of a code
    r"|^\W{0,4}(?:-\d{1,3}|E(?!RROR\b|XCEPTION\b)[A-Z]{3,9})\s?[:-]\s?$|^['\"`][\w.]{1,40}['\"`]:\s?$|\*\*\w{2,12}\*\*:\s?$"
    # source code and its comments
    r"|\b[a-z]\w{1,30}\s\((?:[\w.&*>-]{1,30}\s?,\s?){0,3}\"[^\"\n]{0,120}$"
    r"|\b(?:f?puts|f?printf|print|echo|log\w{0,4}\.\w{1,10}|\w{0,10}[rR]aises|assert\w{0,20}|die"
    r"|throw)\s?\([^\n]{0,120}$"
    r"|^\s{0,40}(?:-{0,6}>\s?)?(?:\d{1,6}\s{1,20})?(?:except|raise|if|elif|assert|print|return|def|class|import|from"
    r"|catch|throw)\b[^\n]{0,200}$"
    r"|^\s{0,40}(?:-{0,6}>\s?)?(?:\d{1,6}\s{1,20})?(?:#|//|/\*|\*\s)[^\n]{0,200}$"
    r"|\w\s?=\s?[\w.]{0,60}$",
)
"""What stands before a refusal that did not happen."""
_TONE: Final = re.compile(
    r"(?i:error|exception|fail|fatal|panic|abort|terminat|crash|kill|unable|cannot|could not|exit|severe"
    r"|\braised?\b|what\(\)"
    r"|\[e\]|refus|status|returned|exceed|insufficient|exhausted|\bran out\b|more than total"
    r"|request(?:ed)? (?:memory )?size)"
    r"|(?m:(?:^|[\]:>]\s?)(?:\w{1,8}\s)?(?i:out of memory)(?=[.!:;]|$))"
)
_SIZES: Final = (
    compiled(
        r"(?:request\w{0,5}|tr(?:ied|ying) to allocate|need(?:ed|s)?|requires?|of size|size of"
        r"|allocat\w{0,5})[ :=]{requested}"
    ),
    compiled(r"(?:request\w{0,5}|tr(?:ied|ying) to allocate|needed|size|memory|buffer)[ :=]{1,3}{requested#}(?![\d.])"),
    compiled(r"(?:alloc\w{0,8}|reserve|map|mmap)(?: \w{1,12}){0,3} {requested}"),
    compiled(r"{requested#}[- ]?bytes?\b"),
    compiled(r"(?:free|available)(?: \w{1,10})?(?: memory)?(?: is(?: only)?)?[ :=]{1,3}{free}"),
    compiled(r"free memory[ :=]{1,3}{free#}(?![\d.])"),
    compiled(r"(?:in use|used|allocated)[ :=]{1,3}{allocated}"),
    compiled(r"(?:total|limit|capacity)[ :=]{1,3}{total}"),
    compiled(r"(?:\bGPU|device|cuda:) ?{device#}\b(?! ?(?:[KMGT]i?B|bytes))"),
)


_ANY: Final = ((_words(""), Family.HOST),)
"""For statements that speak of memory themselves: the memory of the host, where no word tells of another."""
_SAID: Final = (
    (
        _words(
            r"(?:Runtime|Internal|System|OS|Fatal|\w{0,20}Memory)(?:Error|Exception): [^\n]{0,24}"
            r"\b(?i:out of|not enough|insufficient)"
            r"|(?:^|[\s\]|}>])(?:\w{1,12} )?(?i:error) ?:\s[^\n]{0,24}"
            r"\b(?i:not enough|insufficient|memory exhausted|memory limit)"
            r"|\w(?:Error|Exception): [^\n]{0,80}\bOutOfMemory",
        ),
        Family.HOST,
    ),
)
"""For those that do not: a class that speaks for a system, or a bare "Error", with little before the statement."""


def _row(
    name: str,
    title: str,
    needles: tuple[str, ...],
    shape: str,
    sample: str,
    *,
    tone: bool = False,
    beside: tuple[str, ...] = (),
    window: tuple[int, int] = (400, 600),
) -> Format:
    return Format(
        name=name,
        family=Family.HOST,
        title=title,
        versions="any",
        needles=needles,
        beside=beside,
        window=window,
        pattern=compiled(shape),
        clauses=_SIZES,
        on_line=_TONE if tone else None,
        denied=DENIED,
        families=FAMILIES + (_SAID if tone else _ANY),
        vague=True,
        reach=300,
        sample=sample,
    )


ROWS: Final = (
    Format(
        name="other_accelerator",
        family=Family.CUDA,
        title="The caching allocator of an accelerator could not get the memory for a tensor.",
        versions="PyTorch with a backend of its own: MUSA, MLU, HPU, GCU and the like",
        needles=("out of memory",),
        pattern=compiled(
            r"(?<![\w-])(?-i:(?!RAN|WENT|IS|WAS|SYSTEM|PROCESS|HOST|DEVICE|HEAP|GPU|CPU|RAM|CUDA|HIP|XPU|NPU)"
            r"[A-Z]{3,8}) out of memory\b"
        ),
        clauses=_SIZES,
        denied=DENIED,
        device="cuda:{}",
        vague=True,
        sample="RuntimeError: MUSA out of memory. Tried to allocate 1.25 GiB",
    ),
    _row(
        "refused_allocation",
        "An allocation of memory failed.",
        ("alloc", "reserve", "to map", "memalign", "mmap"),
        r"(?:(?:fail(?:ed|ure|s|ing)?|unable|could not|couldn't|cannot|can't|can ?not|not able) (?:to )?(?:re|c"
        r"|m)?(?:alloc\w{0,6}|reserve"
        r"|map)\b[^\n]{0,60}(?:memory|bytes?\b|buffer|tensor|arrays?\b|heap|workspace|\d ?[KMGT](?:i?B)?\b)"
        r"|(?:memory\w{0,3}|device|buffer|tensor|heap|host|m|re|c)[ _]?alloc(?:ation|ator)?s?"
        r"(?: error| failure| failed| fail\b)"
        r"|(?:(?<=[_mce])alloc|(?-i:(?<=[a-z])Alloc)|memalign|mmap)\w{0,20}(?:\([^()\n]{0,60}\))?:? "
        r"(?:has )?fail(?:ed|ure)\b"
        r"|\balloc\w{0,6} (?:\w{1,12} ){0,2}(?:memory|buffer|tensor)s? (?:has |was )?fail(?:ed|ure)\b"
        r"|(?:memory|space) (?:is )?not available (?:to|for) (?:alloc|reserv)\w{0,8}"
        r"|alloc(?:ation)? of(?: size)? [\d.,]{1,24} ?(?:[KMGT]i?B|bytes)? ?(?:has )?failed"
        r"|\b[mrc]e?alloc of size \d{1,20} failed"
        r"|(?:memory|bytes\)?|buffer|tensor) could not be allocated"
        r"|\bbad allocation\b|::BadAlloc\b|\bmemory error in alloc|\bmemory object alloc\w{0,6} fail(?:ed|ure)"
        r"|not enough space (?:for|to) alloc)"
        r"(?![^\n]{0,160}\n?[^\n]{0,60}"
        r"(?:No such|Permission|Invalid argument|Bad file|busy|not permitted|Too many|No space left))",
        "somelib.Error: failed to allocate 3.50 GiB for the workspace",
        beside=("fail", "unable", "not ", "n't", "cannot", "error", "bad"),
        window=(80, 360),
    ),
    _row(
        "memory_ran_out",
        "Memory ran out.",
        (
            "out of",
            "n't enough",
            "not enough",
            "no gpu memory",
            "more than total mem",
            "insufficient",
            "insuficient",
            "exhausted",
            "memory limit",
            "exceeded",
            "not available",
            "memory left",
            "memory available",
        ),
        r"\b(?:ran |run |running )?out of (?:\w{1,10} ){0,2}memory\b(?![\s\S]{0,300}?not a failure)"
        r"|\bnot enough (?:free |available )?(?:\w{1,10} ){0,2}memory\b"
        r"|\binsuff?icient (?:\w{1,10} ){0,2}memory\b|\bno (?:more |free )?memory (?:left|available)\b"
        r"|\binsufficient (?:system )?resources\b[^\n]{0,120}\bof memory"
        r"|\bmemory (?:isn't|is not) (?:enough|sufficient)|is more than total mem size"
        r"|\bmemory (?:is )?(?:exhausted|insufficient|not available)\b|\bexhausted (?:\w{1,10} ){0,2}memory\b"
        r"|\bexceed\w{0,3} (?:the )?(?:\w{1,10} ){0,2}memory limit"
        r"|\bmemory limit (?:of [\d.]{1,12} ?[KMGT]i?B )?(?:was )?(?:exceeded|reached)",
        "somelib.Error: out of device memory",
        tone=True,
    ),
    _row(
        "memory_code",
        "A code for memory that ran out was returned.",
        ("memory", "alloc_fail", "allocation_fail", "enomem", "memoryerror", "outof"),
        r"(?<![\w.'])(?:\w{1,40}(?:\.|::)){0,5}\w{0,40}?(?:OUT_?OF_?(?:DEVICE_?|HOST_?|GPU_?|POOL_?)?MEMORY"
        r"|ALLOC(?:ATION)?_FAIL(?:ED|URE)|MEMORY_?ALLOCATION|INSUFFICIENT_MEMORY|NO_?MEMORY|ENOMEM"
        r"|(?<!Error)(?<=[a-z])MemoryError)\w{0,24}"
        r"(?=[:)\],;'\"\s(*]|$)"
        r"(?! (?:handl|support|option|flag|check|test|docs?\b|is\b|are\b|can\b|may\b|will\b|if\b))"
        r"(?!\(\w{0,20}\):)(?!\((?!['\"\d-]))(?! = \d)(?! - [A-Z][a-z])",
        "somelib.Error: SOMELIB_STATUS_OUT_OF_DEVICE_MEMORY",
        tone=True,
    ),
    Format(
        name="oom_word",
        family=Family.CUDA,
        title="Somebody wrote that memory ran out.",
        versions="programs and people",
        needles=("oom",),
        pattern=compiled(
            r"\b(?:got|hits?|ran into|caught|raised|encountered|threw|detected) (?:an? |the |a possible )?(?:\w{1,8} )?"
            r"OOM\b(?![-_])"
            r"|^(?:[^\n]{0,60}[:\]>|!] ?)?(?:(?:CUDA|GPU|HIP|XPU|NPU|MPS|host|CPU|torch|device|VRAM|RAM) )?OOM"
            r"(?: (?:error|exception|detected|occurred|encountered|again|crash))?"
            r"(?=\s?$|\s?[!,(.-]{1,3}(?: |$|\n)|: |! | (?:at|with|for|on|when|in|while|after|during|even|despite)\b)"
        ),
        denied=DENIED,
        families=(
            *FAMILIES[:-1],
            (_words(r"(?i:\bhost|\bcpu\b|\b(?<!v)ram\b|system memory)"), Family.HOST),
            (_words(""), Family.CUDA),
        ),
        vague=True,
        reach=200,
        sample="Epoch 3: OOM at batch size 32, halving it",
    ),
)
