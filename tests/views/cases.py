"""Hand-built cases for the tests of the views: one of each ending, and the awkward ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from oomdoctor.model.case import Case, Cause, Finding, Outcome, OutcomeKind, State
from oomdoctor.model.code import CodeFacts, ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Patch
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.memory import (
    Census,
    DeviceMemory,
    DeviceProcess,
    Holding,
    HostMemory,
    HostProcess,
    Pressure,
    PrivatePool,
    Role,
)
from oomdoctor.model.plan import Candidate, Course, Forecast, Plan
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Refused, Unavailable
from oomdoctor.pipeline import unpriced
from oomdoctor.pipeline.failure import with_made
from oomdoctor.views.diagnosis import read, tell
from oomdoctor.views.displayed import Explained
from oomdoctor.views.document import Document
from oomdoctor.views.memory_report import growth_rows, survey
from oomdoctor.views.outcome import aftermath

Kind = TypeVar("Kind")

BUDGET = 8 * GIB
HOSTILE = "<img src=x onerror=\"alert('9')\"> & [bold red]"
CONTROL = "a\x1b[31mred\u202edesrever\nnewline"


def _gib(size: float) -> int:
    return int(size * GIB)


def device(**changes: object) -> DeviceMemory:
    fields = {
        "name": "cuda:0",
        "tensor_device": "cuda:0",
        "total": BUDGET,
        "free": _gib(0.31),
        "allocated": _gib(7.05),
        "reserved": _gib(7.24),
        "inactive_split": _gib(0.19),
        "largest_free_block": 96 * MIB,
        "peak_allocated": _gib(7.05),
        "peak_reserved": _gib(7.24),
    }
    return DeviceMemory(**{**fields, **changes})  # type: ignore[arg-type]


def host(**changes: object) -> HostMemory:
    nothing = Unavailable("no limit is set")
    fields = {
        "total": 64 * GIB,
        "available": _gib(41.5),
        "rss": _gib(5.2),
        "page_cache": _gib(23.4),
        "swap_used": 0,
        "cgroup_limit": nothing,
        "cgroup_used": Unavailable("this process is in no memory cgroup"),
        "process_limit": nothing,
        "process_used": _gib(6.1),
        "shm_total": 32 * GIB,
        "shm_free": _gib(31.9),
    }
    return HostMemory(**{**fields, **changes})  # type: ignore[arg-type]


def census() -> Census:
    return Census(
        device="cuda:0",
        found=_gib(7.02),
        allocated=_gib(7.05),
        roles=(
            (Role.ACTIVATION, _gib(4.98)),
            (Role.OPTIMIZER_STATE, _gib(0.92)),
            (Role.PARAMETER, _gib(0.46)),
            (Role.GRADIENT, _gib(0.42)),
            (Role.BATCH, _gib(0.14)),
            (Role.OUTPUT_CACHE, _gib(0.10)),
        ),
        holdings=(
            Holding(
                bytes=_gib(4.1),
                device="cuda:0",
                role=Role.ACTIVATION,
                path="loss.grad_fn (encoder.layers)",
                count=96,
                dtype="float32",
                shape=(64, 512, 3072),
                frees="del loss, logits",
            ),
            Holding(bytes=_gib(0.92), device="cuda:0", role=Role.OPTIMIZER_STATE, path="optimizer.state", count=298),
            Holding(
                bytes=_gib(0.88),
                device="cuda:0",
                role=Role.ACTIVATION,
                path="logits",
                dtype="float32",
                shape=(64, 512, 7200),
                frees="del logits",
            ),
            Holding(bytes=_gib(0.46), device="cuda:0", role=Role.PARAMETER, path="model", count=149, dtype="float32"),
            Holding(
                bytes=_gib(0.42),
                device="cuda:0",
                role=Role.GRADIENT,
                path="model.parameters().grad",
                count=149,
                frees="optimizer.zero_grad()",
            ),
            Holding(bytes=_gib(0.14), device="cuda:0", role=Role.BATCH, path="batch", count=2, frees="del batch"),
            Holding(bytes=_gib(0.10), device="cuda:0", role=Role.OUTPUT_CACHE, path="Out[3]", frees="%xdel _3"),
        ),
    )


def evidence(**changes: object) -> Evidence:
    fields = {"devices": (device(),), "host": host(), "censuses": (census(),), "code": CodeFacts(failing_cell=5)}
    return Evidence(**{**fields, **changes})  # type: ignore[arg-type]


def incident(**changes: object) -> Incident:
    fields = {
        "is_oom": True,
        "family": Family.CUDA,
        "device": "cuda:0",
        "requested": _gib(2.41),
        "total": BUDGET,
        "free": _gib(0.31),
        "allocated": _gib(7.05),
        "exc_type": "torch.OutOfMemoryError",
        "message": "CUDA out of memory.",
        "cell": CellLine(number=5, line=7, source_line="loss.backward()"),
        "framework_frame": "torch/autograd/graph.py:829 _engine_run_backward",
    }
    return Incident(**{**fields, **changes})  # type: ignore[arg-type]


def forecast(peak: float | None, *, reserved: float | None = None, **changes: object) -> Forecast:
    fields = {
        "basis": "dry run",
        "budget": BUDGET,
        "peak": None if peak is None else _gib(peak),
        "reserved": None if reserved is None else _gib(reserved),
        "slowdown": 1.07,
        "error_ratio": 0.03,
    }
    return Forecast(**{**fields, **changes})  # type: ignore[arg-type]


PATCH = Patch(
    edits=(
        Edit(
            cell=5,
            before="for batch in loader:\n    loss = step(batch)\n    loss.backward()\n",
            after="for batch in loader:\n    for micro in batch.split(16):\n"
            "        loss = step(micro) / 4\n        loss.backward()\n",
            replay="",
        ),
    )
)

MICRO_BATCH = Candidate(
    fix="micro_batch",
    title="Run each batch in micro-batches and accumulate the gradients",
    dose=Dose.of(micro_batch=16),
    effect=Effect.EQUIVALENT,
    forecast=forecast(5.62, reserved=5.9),
    patch=PATCH,
    applies_live=False,
    caveat="Dropout draws other numbers than in one large batch.",
)

CHECKPOINT = Candidate(
    fix="checkpoint_blocks",
    title="Recompute encoder.layers in the backward pass",
    dose=Dose.of(blocks=12),
    effect=Effect.EXACT,
    forecast=forecast(7.8, reserved=7.9, slowdown=1.31),
    patch=Refused("the blocks are called from a library, not from a cell"),
    applies_live=True,
)

AUTOCAST = Candidate(
    fix="autocast",
    title="Compute in bfloat16 under autocast",
    dose=Dose.of(dtype="bfloat16"),
    effect=Effect.CHANGES_RESULT,
    forecast=forecast(7.2, reserved=8.4, slowdown=0.72, basis="analytic estimate", error_ratio=0.2),
    patch=PATCH,
    applies_live=True,
)

SMALLER_MODEL = Candidate(
    fix="shard",
    title="Shard the optimizer state over more ranks",
    dose=Dose(),
    effect=Effect.ADVICE,
    forecast=forecast(None, basis="none", slowdown=None, error_ratio=0.0, refused="there is only one rank here"),
    patch=Refused("this is a change of the launch, not of a cell"),
    applies_live=False,
)

FINDINGS = (
    Finding(
        rule="activation/saved_for_backward",
        title="The activations saved for backward outgrow the device",
        cause=Cause.BATCH_OR_ACTIVATION,
        confidence=0.86,
        because=(
            "4.98 GiB of the 7.02 GiB found are activations, and all but 0.88 GiB of them hang from `loss`.",
            "They grow with the batch: 64 samples take 79.7 MiB each.",
        ),
        fixes=("micro_batch", "checkpoint_blocks"),
    ),
    Finding(
        rule="leak/output_cache",
        title="The output history keeps a tensor of an earlier cell",
        cause=Cause.LEAK_OR_PINNED_GRAPH,
        confidence=0.3,
        because=("`Out[3]` holds 102 MiB.",),
    ),
)

PLAN = Plan(
    unchanged=forecast(9.41, reserved=9.6, slowdown=1.0, peak_line=7),
    candidates=(MICRO_BATCH, CHECKPOINT, AUTOCAST, SMALLER_MODEL),
    refusals=(
        ("chunked_forward", "the model has batch norm in training mode, whose statistics need the whole batch"),
        ("free_cache", "only 195 MiB is reserved and not in use, which would not be enough"),
    ),
)


def offered(**changes: object) -> Case:
    fields = {"number": 3, "incident": incident(), "evidence": evidence(), "findings": FINDINGS, "plan": PLAN}
    return Case(**{**fields, **changes})  # type: ignore[arg-type]


def healed() -> Case:
    outcome = Outcome(
        kind=OutcomeKind.HEALED,
        fixes=(MICRO_BATCH.label,),
        attempts=1,
        state=State.CLEAN,
        peak=_gib(5.55),
        peak_reserved=_gib(5.83),
        measure="the allocator's high-water mark",
        elapsed_s=12.34,
        run_s=8.1,
    )
    case = offered(outcome=outcome)
    return replace(case, plan=with_made(case.plan, MICRO_BATCH, outcome))


def refused() -> Case:
    outcome = Outcome(
        kind=OutcomeKind.REFUSED,
        state=State.UNVERIFIED,
        why="line 3 writes to the file log.csv, which cannot be undone",
        anyway=True,
    )
    return offered(outcome=outcome)


def rolled_back() -> Case:
    outcome = Outcome(
        kind=OutcomeKind.ROLLED_BACK,
        fixes=(CHECKPOINT.label, AUTOCAST.label),
        attempts=2,
        state=State.RESTORED,
        peak=_gib(7.97),
        measure="the allocator's high-water mark",
        elapsed_s=3.1,
        why="the cell ran out of memory again",
    )
    return offered(outcome=outcome)


def failed() -> Case:
    outcome = Outcome(
        kind=OutcomeKind.FAILED,
        fixes=("unheard_of(dose=2)",),
        attempts=1,
        state=State.UNVERIFIED,
        why="the snapshot could not be brought back: the optimizer was replaced",
    )
    return offered(outcome=outcome)


def simulated() -> Case:
    virtual = device(tensor_device="cpu", simulated=True, basis="the size given to simulate")
    return offered(evidence=evidence(devices=(virtual,)))


def unavailable() -> Case:
    """Nothing could be read, and the message has no numbers."""
    nothing = Unavailable("the driver does not answer")
    blind = device(
        total=nothing,
        free=nothing,
        allocated=nothing,
        reserved=nothing,
        inactive_split=nothing,
        largest_free_block=nothing,
        peak_allocated=nothing,
        peak_reserved=nothing,
    )
    names = (
        "total",
        "available",
        "rss",
        "page_cache",
        "swap_used",
        "cgroup_limit",
        "cgroup_used",
        "process_limit",
        "process_used",
        "shm_total",
        "shm_free",
    )
    dark = host(**dict.fromkeys(names, Unavailable("/proc is not mounted")))
    found = evidence(devices=(blind,), host=dark, censuses=(Census(device="cuda:0", found=0, allocated=nothing),))
    return offered(
        incident=incident(requested=None, total=None, free=None, allocated=None),
        evidence=found,
        findings=(),
        plan=Plan(unchanged=forecast(None, basis="none", refused="the cell opens a file")),
    )


COURSE = Course(
    points=(
        *((_gib(1.5 + step / 8), 6) for step in range(40)),
        (_gib(9.41), 7),
        *((_gib(9.41 - step / 8), 7) for step in range(40)),
        (_gib(2.25), 8),
    )
)


def nothing_fits() -> Case:
    """A dry run saw the cell, and no change makes it fit."""
    unchanged = replace(PLAN.unchanged, course=COURSE)
    large = tuple(replace(one, forecast=forecast(8.9, reserved=9.1)) for one in (MICRO_BATCH, AUTOCAST))
    return offered(plan=replace(PLAN, unchanged=unchanged, candidates=large))


def pending() -> Case:
    """Forecasts are still being made."""
    return offered(plan=unpriced(pending=True))


def no_candidates() -> Case:
    return offered(findings=(), plan=replace(PLAN, candidates=()))


def no_cell() -> Case:
    """A failure outside of any cell, of host memory."""
    limit = device(
        name="cpu",
        tensor_device="cpu",
        total=4 * GIB,
        free=_gib(0.9),
        allocated=_gib(2.6),
        reserved=_gib(2.6),
        basis="the limit of the memory cgroup",
        inactive_split=Unavailable("malloc keeps no such count"),
    )
    held = Census(device="cpu", found=_gib(2.6), allocated=_gib(2.6), roles=((Role.USER_TENSOR, _gib(2.6)),))
    in_cgroup = host(cgroup_limit=4 * GIB, cgroup_used=_gib(3.1))
    return offered(
        incident=incident(family=Family.HOST, device="cpu", requested=3 * GIB, total=None, free=None, cell=None),
        evidence=evidence(
            devices=(limit, device(name="cuda:1", tensor_device="cuda:1")), host=in_cgroup, censuses=(held,)
        ),
        plan=Plan(unchanged=forecast(5.6, budget=4 * GIB, basis="analytic estimate")),
    )


def crowded_device() -> DeviceMemory:
    """All that an allocator and a driver can tell."""
    return device(
        free=_gib(0.05),
        allocated=_gib(3.1),
        reserved=_gib(4.0),
        inactive_split=_gib(0.6),
        retries=4,
        ooms=1,
        cap=6 * GIB,
        context=412 * MIB,
        elsewhere=_gib(3.54),
        processes=(
            DeviceProcess(pid=4242, bytes=_gib(4.4), name="python", is_own=True),
            DeviceProcess(pid=4711, bytes=_gib(3.5), name="python train.py --config large.yaml"),
            DeviceProcess(pid=4712, bytes=Unavailable("the driver hides it")),
        ),
        private_pools=(PrivatePool(name="CUDA graph 1", reserved=512 * MIB, allocated=384 * MIB),),
        card="NVIDIA H200, driver 570.86",
        basis="cudaMemGetInfo",
    )


def crowded_host() -> HostMemory:
    """A container near its limit, with workers, kills, swap and pressure."""
    workers = tuple(
        HostProcess(pid=900 + n, label=f"DataLoader worker {n}", rss=_gib(1.4), uss=_gib(0.9), pss=_gib(1.0))
        for n in range(7)
    )
    trainer = HostProcess(
        pid=1007, label="python train.py", rss=Unavailable("it ended"), uss=Unavailable("it ended"), pss=0
    )
    return host(
        uss=_gib(4.8),
        pss=_gib(4.9),
        children=(*workers, trainer),
        reclaimable=_gib(20.0),
        swap_used=_gib(1.5),
        swap_total=8 * GIB,
        pressure=Pressure(some=0.12, full=0.03),
        cgroup_version=2,
        cgroup_limit=16 * GIB,
        cgroup_used=_gib(15.2),
        cgroup_anon=_gib(11.9),
        cgroup_reclaimable=_gib(3.1),
        cgroup_oom_kills=2,
        cgroup_ooms=3,
        files_open=900,
        files_limit=1024,
        maps=1200,
        maps_limit=65530,
        shm_free=4 * GIB,
        overcommit=2,
        committed=40 * GIB,
        commit_limit=64 * GIB,
    )


def crowded() -> Case:
    """A device that others fill, and a host where all is short."""
    batch = Holding(bytes=_gib(2.9), device="cuda:0", role=Role.BATCH, path="batch", count=2, frees="del batch")
    held = replace(census(), holdings=(batch,), allocated=_gib(3.1), found=_gib(2.9), roles=((Role.BATCH, _gib(2.9)),))
    on_host = host_census()
    cpu = device(
        name="cpu", tensor_device="cpu", total=16 * GIB, free=_gib(0.8), basis="the limit of the memory cgroup"
    )
    held = replace(held, notes=("`quantised` is packed by hooks: 3 tensors stand for 1.20 GiB.",))
    return offered(evidence=evidence(devices=(crowded_device(), cpu), host=crowded_host(), censuses=(held, on_host)))


def host_census() -> Census:
    return Census(
        device="cpu",
        found=_gib(1.5),
        allocated=Unavailable("the host's allocator keeps no count of tensors"),
        roles=((Role.USER_TENSOR, _gib(1.0)), (Role.PINNED_HOST, _gib(0.5))),
        holdings=(
            Holding(bytes=GIB, device="cpu", role=Role.USER_TENSOR, path="dataset.tensors[0]", frees="del dataset"),
            Holding(bytes=_gib(0.5), device="cpu", role=Role.PINNED_HOST, path="staging", frees="del staging"),
        ),
    )


def weights_census(*, layers: int = 6) -> Census:
    """A model of equal layers and one large embedding, with gradients and the state of its optimizer."""
    names = [f"model.layers[{n}].weight" for n in range(layers)]
    held = [
        Holding(
            bytes=_gib(1.2),
            device="cuda:0",
            role=Role.PARAMETER,
            path="model.embedding.weight",
            dtype="float32",
            shape=(64000, 5033),
            frees="del model",
        )
    ]
    for name in names:
        shape = {"dtype": "float32", "shape": (1024, 10240)}
        held += [
            Holding(bytes=40 * MIB, device="cuda:0", role=Role.PARAMETER, path=name, frees="del model", **shape),
            Holding(
                bytes=40 * MIB,
                device="cuda:0",
                role=Role.GRADIENT,
                path=f"{name}.grad",
                frees="optimizer.zero_grad(set_to_none=True)",
                **shape,
            ),
            *(
                Holding(
                    bytes=40 * MIB,
                    device="cuda:0",
                    role=Role.OPTIMIZER_STATE,
                    path=f"optimizer.state[{name}][{key!r}]",
                    frees="del optimizer",
                    **shape,
                )
                for key in ("exp_avg", "exp_avg_sq")
            ),
        ]
    roles: dict[Role, int] = {}
    for holding in held:
        roles[holding.role] = roles.get(holding.role, 0) + holding.bytes
    found = sum(roles.values())
    return Census(
        device="cuda:0", found=found, allocated=found + 5 * MIB, roles=tuple(roles.items()), holdings=tuple(held)
    )


MODEL = ModelFacts(path="model", type_name="Net", training=True, parameter_bytes=_gib(1.4))


def weights() -> Case:
    held = weights_census()
    assert isinstance(held.allocated, int)
    free = BUDGET - held.allocated
    card = device(allocated=held.allocated, reserved=held.allocated, inactive_split=0, free=free)
    return offered(evidence=evidence(devices=(card,), censuses=(held,), code=CodeFacts(models=(MODEL,))))


def hostile() -> Case:
    """Every text that a user's program can choose is an attempt to break out of the view."""
    bad = replace(
        census(),
        holdings=(
            Holding(
                bytes=GIB, device="cuda:0", role=Role.USER_TENSOR, path=HOSTILE, dtype=HOSTILE, frees=f"del {HOSTILE}"
            ),
            Holding(bytes=GIB, device="cuda:0", role=Role.USER_TENSOR, path=CONTROL, frees=CONTROL),
        ),
    )
    where = CellLine(number=5, line=7, source_line=f"open('{HOSTILE}') # `{CONTROL}`", function=HOSTILE)
    patch = Patch(edits=(Edit(cell=5, before=f"{HOSTILE}\n", after=f"{HOSTILE}!\n", replay=""),))
    candidate = replace(
        MICRO_BATCH,
        fix=HOSTILE,
        title=HOSTILE,
        dose=Dose.of(name=HOSTILE),
        caveat=HOSTILE,
        patch=patch,
        forecast=forecast(5.0, basis=HOSTILE),
    )
    return offered(
        incident=incident(cell=where, device=None, framework_frame=HOSTILE),
        evidence=evidence(
            devices=(
                device(
                    basis=HOSTILE,
                    free=Unavailable(HOSTILE),
                    elsewhere=GIB,
                    processes=(DeviceProcess(pid=1, bytes=GIB, name=HOSTILE),),
                    private_pools=(PrivatePool(name=HOSTILE, reserved=GIB, allocated=GIB),),
                    card=HOSTILE,
                ),
            ),
            host=host(children=(HostProcess(pid=2, label=HOSTILE, rss=GIB, uss=GIB, pss=GIB),)),
            censuses=(replace(bad, notes=(HOSTILE, CONTROL)),),
        ),
        findings=(replace(FINDINGS[0], title=HOSTILE, because=(HOSTILE, CONTROL)),),
        plan=Plan(unchanged=forecast(None, refused=HOSTILE), candidates=(candidate,), refusals=((HOSTILE, HOSTILE),)),
        outcome=Outcome(
            kind=OutcomeKind.HEALED, fixes=(candidate.label, HOSTILE), why=HOSTILE, measure=HOSTILE, peak=1
        ),
    )


def grown(case: Case) -> Document:
    """The report of ``case`` with all that can be said of what grew."""
    before = evidence(devices=(device(allocated=GIB),), host=host(rss=GIB), censuses=(weights_census(layers=2),))
    growth = growth_rows(before, case.evidence, "the report of In[2]")
    absent = (("NVML", Unavailable("there is no NVIDIA driver")), (HOSTILE, Unavailable("the driver does not answer")))
    return survey(case.evidence, growth=growth, absent=absent, top=30)


def explained(case: Case) -> Explained:
    """What the message of ``case`` alone would tell, with a second failure in the same text."""
    other = incident(cell=None, family=Family.WORKER_KILLED, requested=None)
    return Explained(incident=case.incident, findings=case.findings, others=(other,))


CASES: dict[str, Callable[[], Case]] = {
    "offered": offered,
    "healed": healed,
    "refused": refused,
    "rolled_back": rolled_back,
    "failed": failed,
    "simulated": simulated,
    "unavailable": unavailable,
    "nothing_fits": nothing_fits,
    "pending": pending,
    "no_candidates": no_candidates,
    "no_cell": no_cell,
    "crowded": crowded,
    "weights": weights,
    "hostile": hostile,
}

VIEWS: dict[str, Callable[[Case], Document]] = {
    "case": tell,
    "notice": lambda case: (aftermath(case),),
    "report": lambda case: survey(case.evidence),
    "grown report": grown,
    "explanation": lambda case: read(explained(case)),
}
"""All that is shown of a case."""


def blocks(document: Document, kind: type[Kind]) -> list[Kind]:
    """Return the blocks of a kind, those within others among them."""
    found = [block for block in document if isinstance(block, kind)]
    return found + [inner for block in document for inner in blocks(getattr(block, "blocks", ()), kind)]
