"""Rows for processes that a scheduler, a service or a watchdog ended for the memory that they took.

Limits: what is ended without a word on memory is read by ``rows_killed``, where its signal or its exit code is told.
"""

from __future__ import annotations

from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.incident.rows_structure import DENIED
from oomdoctor.model.incident import Family

_ENDED: Final = (
    r"(?:kill(?:ed|ing)?|terminat(?:ed|ing)|evict(?:ed|ing)|abort(?:ed|ing)|stopp(?:ed|ing)|restart(?:ed|ing)?"
    r"|cancell?ed|shut(?:ting)? down|held|removed|preempted)\b"
)
_MEMORY: Final = r"(?:memory|RAM|[vp]?mem|rss)\b"
_OVER: Final = r"(?:exceed(?:s|ed|ing)?|reach(?:ed|ing)|beyond|over|above|us(?:ed|ing) (?:too much|more))\b"
_LIMIT: Final = r"(?:(?:usage |use )?(?:limits?|quota|budget|allocation|request|threshold)\b)"
_MEMORY_LIMIT: Final = rf"\b{_MEMORY}(?: {_LIMIT})?"
_SHORT_OF_IT: Final = rf"(?:{_MEMORY} pressure|(?:low|lack of|insufficient|out of|excessive|high) {_MEMORY})"
_BECAUSE: Final = r"(?:for|due to|because(?: of| it| they)?|after|when it|as it|since it)\b"
_WATCHDOG: Final = (
    r"(?:(?:the )?(?:kernel'?s? |linux )?(?:OOM[- _]?killer|out[- ]of[- ]memory killer)|(?:systemd-)?oomd|earlyoom)\b"
)

ROWS: Final = (
    Format(
        name="instance_too_small",
        family=Family.RANK_KILLED,
        title="The service ended the job because the memory of its instance was used up.",
        versions="Amazon SageMaker",
        needles=("instance type with more memory",),
        pattern=compiled(r"\buse an instance type with more memory"),
        denied=DENIED,
        device="cpu",
        sample="ClientError: Please use an instance type with more memory, or reduce the size of training data.",
    ),
    Format(
        name="memory_limit_killed",
        family=Family.RANK_KILLED,
        title="A process was ended because it went over a memory limit, or because the machine was short of memory.",
        versions="YARN, LSF, PBS, SGE, HTCondor, systemd-oomd, earlyoom, Cloud Run, Heroku and others",
        needles=(
            "memory",
            "vmem",
            "oomd",
            "oom killer",
            "oom-killer",
            "oom_killer",
            "oomkiller",
            " ram ",
            "memlimit",
            "killed: mem",
            "h_rss",
        ),
        beside=(
            "kill",
            "terminat",
            "evict",
            "abort",
            "stopp",
            "restart",
            "cancel",
            "shut",
            "exceed",
            "held",
            "low mem",
            "gone over",
        ),
        window=(300, 300),
        pattern=compiled(
            rf"\b{_ENDED}[^\n]{{0,120}}?{_BECAUSE}[^\n.]{{0,40}}?"
            rf"(?:{_OVER}[^\n.]{{0,40}}?{_MEMORY_LIMIT}|{_SHORT_OF_IT})"
            rf"|\b{_ENDED}(?: \w{{1,12}}){{0,3}} by {_WATCHDOG}|\boomd killed \d{{1,6}} process"
            rf"|\b{_OVER}[^\n.]{{0,40}}?{_MEMORY_LIMIT}[\s\S]{{0,200}}?\b{_ENDED}"
            rf"|\b{_ENDED}: [^\n.]{{0,20}}{_MEMORY}[^\n.]{{0,40}}exceed\w{{0,3}} (?:its )?limit"
            r"|\bexceed\w{0,3} (?:the |its )?(?:job |queue )?(?:hard |soft )?limit \"?[hs]_(?:vmem|rss|data)"
            rf"|\b{_MEMORY} (?:limit|quota)(?: of [\d.]{{1,12}} ?[KMGT]i?B?)? (?:vastly )?(?:was )?exceeded"
            rf"|\bgone over (?:\w{{1,8}} )?{_MEMORY} limit"
            r"|\bmemory usage exceeded request_memory"
            r"|TERM_MEMLIMIT|low memory! at or below SIG(?:TERM|KILL) limits"
        ),
        clauses=(
            compiled(r"Current usage: {process} of {total} physical memory used"),
            compiled(r"memory limits\. {process} of {total} physical memory used"),
            compiled(r"limit of {total} exceeded with {process} used"),
            compiled(r"VmRSS {process}"),
        ),
        denied=DENIED,
        device="cpu",
        sample=(
            "Container [pid=12,containerID=c_01] is running beyond physical memory limits. Current usage: 8.1 GB of "
            "8 GB physical memory used; 10 GB of 17 GB virtual memory used. Killing container."
        ),
    ),
)
