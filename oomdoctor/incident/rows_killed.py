"""Rows for processes that were ended for want of host memory: workers, ranks, kernels, containers."""

from __future__ import annotations

from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family

_UNLIMITED: Final = compiled(r"\bOOMKilled\b\"?[:=] ?\"?(?:false|0|no)\b")
"""What a runtime says of a container that did not reach its own limit; the kernel may have ended it all the same."""

ROWS: Final = (
    Format(
        name="dl_killed",
        family=Family.WORKER_KILLED,
        title="A loader's worker was killed from outside, as the kernel's OOM killer does.",
        versions="PyTorch 0.4 on",
        needles=("is killed by signal: killed",),
        pattern=compiled(r"is killed by signal: Killed"),
        device="cpu",
        sample="RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.",
    ),
    Format(
        name="dl_exited",
        family=Family.WORKER_KILLED,
        title="A loader's worker is gone; the text does not say why, and the OOM killer is a common reason.",
        versions="PyTorch 1.0 on",
        needles=("exited unexpectedly",),
        pattern=compiled(
            r"DataLoader worker \(pid(?:\(s\))? [^)\n]{1,200}\) exited unexpectedly(?! with (?!exit code (?:-9|137)\b))"
        ),
        device="cpu",
        sample="RuntimeError: DataLoader worker (pid(s) 31, 32) exited unexpectedly",
    ),
    Format(
        name="ray",
        family=Family.WORKER_KILLED,
        title="Ray killed a worker because its node was low on memory.",
        versions="Ray 1 and 2",
        needles=(
            "rayoutofmemoryerror",
            "node running low on memory",
            "due to memory pressure",
            "ray.exceptions.outofmem",
            "memory on the node",
            "system memory low at node",
        ),
        pattern=compiled(
            r"RayOutOfMemoryError|node running low on memory|killed due to memory pressure"
            r"|(?<!except\s)ray\.exceptions\.OutOfMemoryError|Memory on the node[^\n]{1,400}was running was"
            r"|System memory low at node"
        ),
        clauses=(
            compiled(r"memory used={process}"),
            compiled(r"was running was {used} / {total}"),
            compiled(r"is used \({used@} / {total}\)"),
            compiled(r"Used memory \({used}\) / total capacity \({total}\)"),
        ),
        device="cpu",
        reach=700,
        flows=True,
        sample=(
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on "
            "memory.\nMemory on the node "
            "where the task was running was 30.10GB / 31.20GB (0.96), which exceeds the memory usage threshold of 0.95."
        ),
    ),
    Format(
        name="pool_killed",
        family=Family.WORKER_KILLED,
        title="A worker process was killed from outside, as the kernel's OOM killer does.",
        versions="joblib, Dask, concurrent.futures, Ray",
        needles=(
            "sigkill(-9)",
            "killedworker",
            "memory budget",
            "terminated abruptly",
            "oom killer due to high memory",
            "was sent sigkill",
        ),
        pattern=compiled(
            r"SIGKILL\(-9\)|was sent SIGKILL|\bKilledWorker[:(]|exceeded \d{1,3}% memory budget"
            r"|process pool was terminated abruptly"
            r"|killed by SIGKILL by OOM killer due to high memory usage"
        ),
        device="cpu",
        sample="TerminatedWorkerError: A worker process was unexpectedly terminated. The exit codes are {SIGKILL(-9)}",
    ),
    Format(
        name="loky_ended",
        family=Family.WORKER_KILLED,
        title="A worker process is gone; the text leaves open whether for its memory or for a fault of its own.",
        versions="joblib, loky",
        needles=("causing the operating system to kill the worker",),
        pattern=compiled(
            r"(?:segmentation fault while calling the function or by an )?excessive memory usage causing the "
            r"Operating System to kill the worker"
        ),
        unless=compiled(r"exit codes? of the workers are \{(?!SIGKILL)"),
        device="cpu",
        sample=(
            "TerminatedWorkerError: A worker process managed by the executor was unexpectedly terminated. This could "
            "be caused by a segmentation fault while calling the function or by an excessive memory usage causing the "
            "Operating System to kill the worker."
        ),
    ),
    Format(
        name="torchrun_killed",
        family=Family.RANK_KILLED,
        title="A rank was killed from outside (signal 9), as the kernel's OOM killer does.",
        versions="torchrun",
        needles=(
            "exitcode",
            "exit code: -9",
            "exits with return code = -9",
            "signals.sigkill",
            "signal sigkill",
            "signal: 9",
            "signal: killed",
            "9/kill",
            "code -9",
            "status -9",
            "negsignal.sigkill",
            "signal 9",
        ),
        pattern=compiled(
            r"exitcode ?:? ?-9\b|exit code: -9\b|Signal 9 \((?:SIGKILL|Killed)\)|(?:on|by|with|due to) signal 9\b"
            r"|\bsignal: (?:9\b|killed)|status=9/KILL"
            r"|\b(?:return|exit) ?(?:code|status)[:=]? -9\b|\bexited with code -9\b|Negsignal\.SIGKILL"
            r"|died with <Signals\.SIGKILL|terminated with signal SIGKILL|exits with return code = -9\b"
        ),
        reach=300,
        device="cpu",
        sample=(
            "ERROR:torch.distributed.elastic:failed (exitcode: -9) local_rank: 2 (pid: 99) of binary: /usr/bin/python"
        ),
    ),
    Format(
        name="slurm",
        family=Family.RANK_KILLED,
        title="The scheduler's memory limit was reached, and the kernel killed the job.",
        versions="Slurm",
        needles=(
            "oom-kill event",
            "oom_kill event",
            "out-of-memory handler",
            ": out of memory",
            "exceeded job memory",
            "exceeded step memory",
            "out_of_me",
        ),
        pattern=compiled(
            r"oom[-_]kill event|cgroup out-of-memory handler|task \d{1,5}: Out Of Memory|Exceeded (?:job"
            r"|step) memory limit"
            r"|^[\w. +-]{1,80}\b(?-i:OUT_OF_ME(?:M|MORY|\+))(?=\s|$)|\b(?:Job)?State[:=] ?OUT_OF_MEMORY"
        ),
        device="cpu",
        sample=(
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=123.0. Some of your processes may "
            "have been killed."
        ),
    ),
    Format(
        name="dmesg",
        family=Family.RANK_KILLED,
        title="The kernel's OOM killer ended a process.",
        versions="Linux",
        needles=(
            "out of memory: kill",
            "oom-kill:constraint",
            "invoked oom-killer",
            "anon-rss:",
            "oom_reaper: reaped",
            "result 'oom-kill'",
        ),
        pattern=compiled(
            r"(?:Memory cgroup )?out of memory: Kill(?:ed)? process|oom-kill:constraint|invoked oom-killer"
            r"|Killed process \d{1,9} \([^)\n]{1,40}\)[^\n]{0,60} anon-rss:|oom_reaper: reaped process"
            r"|Failed with result 'oom-kill'"
        ),
        clauses=(compiled(r"anon-rss:{process}"),),
        device="cpu",
        sample="[ 100.5] Out of memory: Killed process 321 (python) total-vm:9000000kB, anon-rss:8000000kB",
    ),
    Format(
        name="killed_below_limit",
        family=Family.RANK_KILLED,
        title=(
            "A container was ended by signal 9; its own memory limit was not the reason, but the machine may have been "
            "short of memory."
        ),
        versions="Docker",
        needles=("137",),
        pattern=compiled(r"\bexit\w{0,7}[\s\"'=:(,]{1,4}(?:code[\s\"'=:(,]{1,4})?137\b"),
        context=_UNLIMITED,
        device="cpu",
        sample='State: {"OOMKilled": false, "ExitCode": 137}',
    ),
    Format(
        name="oom_killed",
        family=Family.RANK_KILLED,
        title="A container was ended because its memory, or that of its node, was used up.",
        versions="Kubernetes, Docker",
        needles=("oomkilled", "oom-killed", "oom killed", "low on resource: memory"),
        pattern=compiled(r"\bOOM[- ]?Killed\b(?!\"?[:=] ?\"?(?:false|0|no)\b|\"\} ?[=<>])|was low on resource: memory"),
        device="cpu",
        sample="Last State: Terminated  Reason: OOMKilled  Exit Code: 137",
    ),
    Format(
        name="container_killed",
        family=Family.RANK_KILLED,
        title="A process was ended by signal 9; a container's memory limit does that.",
        versions="Kubernetes, Docker, CI services",
        needles=("137",),
        pattern=compiled(
            r"(?:\b(?:exit\w{0,7}|return\w{0,2}|status|error|terminated|rc)|code)"
            r"(?:[\s\"'=:(,]{1,4}(?:with|a|an|non-?zero|status|code|value|was|exit|error)){0,5}[\s\"'=:(,]{1,4}137\b"
            r"(?![.:/]\d| ?(?:bytes|[KMG]i?B|ms|s|of)\b)"
        ),
        device="cpu",
        sample="Error: Process completed with exit code 137.",
    ),
    Format(
        name="shell_killed",
        family=Family.RANK_KILLED,
        title="The shell says that the process was killed by signal 9.",
        versions="bash, zsh",
        needles=("killed",),
        pattern=compiled(
            r"^(?:[^\n]{0,80}[:\])|>*-]\x20?)?(?:line \d{1,6}: )?(?:\d{1,8} |\[\d{1,3}\]\+? (?:\d{1,8} )?|zsh: )?"
            r"Killed(?:$| python\S{0,10}[^\n]{0,200}$)"
        ),
        device="cpu",
        sample="run.sh: line 4: 1234 Killed python train.py",
    ),
    Format(
        name="notebook_ram",
        family=Family.KERNEL_KILLED,
        title="The notebook service ended the session because it used all of its memory.",
        versions="Colab, Kaggle",
        needles=("using all available ram", "more memory than is available"),
        pattern=compiled(r"after using all available RAM|allocate more memory than is available"),
        device="cpu",
        sample="Your session crashed after using all available RAM.",
    ),
    Format(
        name="kernel_died",
        family=Family.KERNEL_KILLED,
        title="The kernel's process is gone; the text does not say why, and the OOM killer is a common reason.",
        versions="Jupyter, nbclient, VS Code, Colab",
        needles=("kernel", "session crashed", "execute_request message before replies"),
        pattern=compiled(
            r"kernel (?:for [^\n]{1,200}? )?appears to have died|DeadKernelError|\bKernel died\b(?! before replying)"
            r"|Kernel crashed while executing|kernel has died"
            r"|The kernel died unexpectedly|Your session crashed(?! after using)|Kernel Restarting"
            r"|execute_request message before replies were done|KernelRestarter: restarting kernel"
        ),
        device="cpu",
        sample="The kernel appears to have died. It will restart automatically.",
    ),
)
