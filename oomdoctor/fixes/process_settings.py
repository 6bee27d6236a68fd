"""Settings of the process, and switches of a library's pipeline, that are turned on.

``expandable_segments``: the allocator cannot join free pieces of different segments, nor give back a segment that is
partly in use; with this setting segments are mapped page by page and grow at their end. What that is worth, the traces
of dry runs tell, replayed with it. Live, it is made at run time, for segments allocated from then on, and put back on
exit; where torch has no function for that it is advice. The allocator forgets settings that are not said again, so
those in force are said each time. In the source it is the environment variable, before the first import that may bring
torch.

``sharing_strategy``: with ``file_descriptor`` every tensor that came from a worker keeps a descriptor open; a loop that
keeps batches uses up the thousand or so that a process may have. With ``file_system`` tensors are found by their name.
It is no help where /dev/shm is too small. Limit: if a process is killed, files may stay there for a while.

``library_slices``: the switches of a pipeline that the failing run calls, as those of diffusers, and of the models that
it holds: images or heads one by one, each model on the device only while it runs; the doses turn on more and more of
them. ``library_tiles``: an image in tiles, whose seams are blended. What they save is told by a dry run alone.

Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html; that ``PYTORCH_ALLOC_CONF`` did not reach the CUDA
allocator in torch 2.9: https://github.com/pytorch/pytorch/issues/183387;
https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies;
https://huggingface.co/docs/diffusers/optimization/memory
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes._construction_sites import changed, placed
from oomdoctor.fixes._preconditions import check_host, found_or_asked
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.model import Cells, Dose, Edit, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Session
from oomdoctor.model.memory import DeviceMemory
from oomdoctor.model.session import Simulated
from oomdoctor.model.site import Site
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.kinds import members_of, mro_of, plain_dict
from oomdoctor.objects.known import Objects
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.definitions import Program, site
from oomdoctor.program.names import call_name, imports_in, own_nodes

_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_HONOURED: Final = (2, 11)
"""The first torch whose CUDA allocator is known to read ``PYTORCH_ALLOC_CONF``; before it, the older name works."""
_SMALL: Final = 2 << 20
"""Requests are served from the pool of small blocks up to 1 MiB, whose segments of 2 MiB a message prints."""
_SETS: Final = re.compile(r"PYTORCH_\w*ALLOC_CONF|expandable_segments")
_OPTION: Final = "expandable_segments"

_FUTURE: Final = re.compile(r"\s*from __future__\b")

_BY_NAME: Final = "file_system"
_NEAR: Final = 0.8
"""Share of the descriptors from which on they count as used up, as in the rule ``descriptor_limit_near``."""

_TOLD: Final = re.compile(r"too many open files|received \d+ items of ancdata|set_sharing_strategy", re.IGNORECASE)
"""Source: torch/utils/data/dataloader.py; multiprocessing/reduction.py."""
_CHOOSES: Final = re.compile(r"\bset_sharing_strategy\s*\(")


@proposing
def _propose_expandable(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    device = evidence.device
    need(device.name.partition(":")[0] == "cuda", f"{device.name} has no CUDA allocator whose segments could expand")
    need(sys.platform.startswith("linux"), "expandable segments exist on Linux alone")
    if evidence.code.cuda_graphs is not None:
        raise Unfit("CUDA graphs keep pools of their own, which expandable segments do not serve")
    saves, basis = _fragments(incident, device)
    at_once = device.simulated or _setter() is not None
    yield Proposal(
        dose=Dose.of(variable=_variable()),
        effect=Effect.EXACT if at_once else Effect.ADVICE,
        saves=saves,
        basis=basis,
        caveat="it holds for this cell at once, and for the whole notebook when the kernel is started again"
        if at_once
        else "it holds when the kernel is started again: this torch cannot set it at run time",
    )


def _fragments(incident: Incident, device: DeviceMemory) -> tuple[int, str]:
    """Return the unused bytes that would have served the request, had they been in one piece, and how that is known."""
    split, requested = device.inactive_split, incident.requested or 0
    if isinstance(split, Unavailable):
        return 0, f"whether the pool is fragmented is not known: {split.reason}"
    if requested <= _SMALL or split < requested:
        return 0, "the pool is not fragmented: its free pieces together would not have served the request"
    if not isinstance(device.largest_free_block, Unavailable) and device.largest_free_block >= requested:
        return 0, "the pool is not fragmented: one of its free blocks would have served the request"
    return split, f"measured: {format_size(split)} are unused in segments that are partly in use"


def _variable() -> str:
    """Return the environment variable that the allocator of the installed torch reads."""
    with suppress(PackageNotFoundError):
        if tuple(map(int, re.findall(r"\d+", version("torch"))[:2])) >= _HONOURED:
            return _VARIABLES[2]
    return _VARIABLES[0]


def _setter() -> Callable[[str], Any] | None:
    """Return torch's function that changes the settings at run time, None where it has none."""
    import torch

    found = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    return found or getattr(torch.cuda.memory, "_set_allocator_settings", None)


def _settings() -> str:
    """Return the settings in force, as text."""
    import torch

    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    said = str(read()) if read is not None else ""
    return said or next((value for name in _VARIABLES if (value := os.environ.get(name))), "")


def _with_option(settings: str, value: str) -> str:
    """Return ``settings`` with the option set; commas within brackets separate items of a list."""
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", settings) if part.strip()]
    kept = [part for part in parts if part.partition(":")[0].strip() != _OPTION]
    return ",".join([*kept, f"{_OPTION}:{value}"])


@contextmanager
def _apply_expandable(session: Session, dose: Dose) -> Iterator[None]:
    """Have segments expand from here on; the settings that were in force are put back on exit."""
    if isinstance(session.accelerator, Simulated):
        with session.accelerator.allocating(expandable_segments=True):
            yield
        return
    setter, before = _setter(), _settings()
    if re.search(rf"\b{_OPTION}\s*:\s*true\b", before, re.IGNORECASE):
        raise OomDoctorError("segments expand already")
    if setter is None:
        raise OomDoctorError(f"this torch sets it at its start alone, by {dose['variable']}")
    _set(setter, _with_option(before, "True"))
    try:
        yield
    finally:
        _set(setter, before if _OPTION in before else _with_option(before, "False"))


def _set(setter: Callable[[str], Any], settings: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 calls its own function deprecated
            setter(settings)
    except (RuntimeError, ValueError) as error:
        raise OomDoctorError(f"the allocator does not take {settings!r}: {str(error).splitlines()[0]}") from error


@refusing
def _patch_expandable(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    need(not any(_SETS.search(cell.source) for cell in cells.history), "a cell makes settings of the allocator already")
    history = cells.beside(cells.failing).history
    first = next((cell for cell in history if _imports(cell.source)), None)
    first = need(first, "no cell imports what may bring torch: it has to be set before that")
    is_module = import_lines.qualified_name(cells.beside(cells.failing), "os")
    need(is_module, "`os` stands for something else than the module in one of the cells")
    cell = [one for one in cells.history if one.source == first.source][-1]
    parsed, setting = need(rewriting.read(cell.source)), f'os.environ["{dose["variable"]}"] = "{_OPTION}:True"'
    body = list(parsed.module.body)
    imports = [i for i, node in enumerate(body) if rewriting.is_import(node) and not _FUTURE.match(parsed.code(node))]
    bringing = [i for i in imports if _imports(parsed.code(body[i]))]
    at = need(bringing, f"what may bring torch is imported under a condition in {cell}")[0]
    has_os = any(("os", "os") in imports_in(parsed.code(body[i])) for i in imports if i < at)
    start = at if has_os else imports[0]
    new = list(rewriting.statements(("" if has_os else "import os\n\n") + setting + "\n", parsed))
    blank = [cst.EmptyLine(indent=False)]
    new[0] = new[0].with_changes(leading_lines=[*(blank if has_os else []), *getattr(body[start], "leading_lines", ())])
    body[start] = body[start].with_changes(leading_lines=blank)
    module = parsed.module.with_changes(body=[*body[:start], *new, *body[start:]])
    after = need(rewriting.write(parsed, module))
    replay = after if cell is cells.failing else f"import os\n\n{setting}\n"
    return Patch(edits=(Edit(cell=cell.number, before=cell.source, after=after, replay=replay),))


def _imports(source: str) -> bool:
    return any(home.partition(".")[0] not in sys.stdlib_module_names for _, home in imports_in(source))


@proposing
def _propose_by_name(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    check_host(incident)
    if need(evidence.code.sharing_strategy, "no tensors are handed between processes here") == _BY_NAME:
        raise Unfit("tensors are handed between processes by file name already")
    why = "descriptors did not run out, and what is short in /dev/shm is so with either sharing strategy"
    basis = need(_basis(incident, evidence), why)
    if any(loader.spawns and loader.num_workers for loader in evidence.code.loaders):
        raise Unfit("workers that are spawned begin with the strategy of the platform, whatever is set here")
    yield Proposal(
        effect=Effect.EXACT,
        saves=0,
        basis=basis,
        caveat="it frees descriptors and no memory; a worker that is killed may leave files in /dev/shm",
    )


def _basis(incident: Incident, evidence: Evidence) -> str | None:
    """Return how it is known that descriptors ran out, None where it is not."""
    opened, limit = evidence.host.files_open, evidence.host.files_limit
    if isinstance(opened, int) and isinstance(limit, int) and opened >= _NEAR * limit:
        return f"{opened} of {limit} file descriptors are open in this process"
    told = _TOLD.search(incident.message)
    return None if told is None else f"the message says `{told[0]}`"


@refusing
def _patch_by_name(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    for cell in cells.history:
        need(not _CHOOSES.search(cell.source), f"{cell} sets the sharing strategy itself")
    lines = [] if import_lines.knows_torch(cells) else ["import torch"]
    return changed(cells, cells.failing, {}, [*lines, f'torch.multiprocessing.set_sharing_strategy("{_BY_NAME}")'])


_SLICES: Final = {"slicing": 1.05, "attention_slicing": 1.1, "model_cpu_offload": 1.5}
"""The switches that keep the results, mildest first, and how much longer a run takes with each. Round figures."""
_TILES: Final = {"tiling": 1.1}
_SWITCH: Final = re.compile(rf"enable_({'|'.join((*_SLICES, *_TILES))})")


class _Owner(NamedTuple):
    """What a name leads to, for ``placed``: a name of the notebook, of no function."""

    path: str
    scope: None = None


def _detect_switches(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find what the failing run calls that has such switches, or holds a model that does."""
    sites: list[Site] = []
    for scope, node in ((running, node) for running in program.running for node in own_nodes(running.body)):
        name = call_name(node).partition(".")[0] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and (pipeline := objects.namespace.get(name)) is not None:
            parts = {f"{name}.{key}": part for key, part in (plain_dict(pipeline) or {}).items()}
            for path, owner in {name: pipeline, **parts}.items():
                names = {member for base in mro_of(type(owner)) for member in members_of(base)}
                switches = filter(None, map(_SWITCH.fullmatch, sorted(names)))
                sites += [site(one[1], scope, node, (name, f"{path}.{one[0]}")) for one in switches]
    return tuple(sites)


def _propose_switches(
    kinds: Mapping[str, float], effect: Effect, caveat: str | None, incident: Incident, evidence: Evidence
) -> Iterator[Proposal]:
    sites = evidence.code.sites.get("library_slices", ())
    size = found_or_asked(incident, evidence)
    is_device = evidence.device.tensor_device != "cpu" and not evidence.device.simulated
    on, slowdown = list[str](), 1.0
    for kind, slower in kinds.items():
        calls = dict.fromkeys(one.names[1] for one in sites if one.kind == kind)
        if not calls or (kind == "model_cpu_offload" and not is_device):
            continue
        on += calls
        slowdown *= slower
        yield Proposal(
            dose=Dose.of(switches=", ".join(on)),
            effect=effect,
            saves=size * len(on) // (len(on) + 1),
            slowdown=slowdown,
            basis=f"a guess: {len(on)} of {len(on) + 1} parts of what was found and asked for",
            caveat=caveat,
        )
    need(on, "the failing cell calls no pipeline that has switches to save memory")


@refusing
def _patch_switches(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    sites = evidence.code.sites.get("library_slices", ())
    lines: dict[_Owner, str] = {}
    for call in str(dose["switches"]).split(", "):
        owners = [_Owner(one.names[0]) for one in sites if one.names[1] == call]
        owner = need(owners, f"`{call}` is no switch of what the failing cell calls")[0]
        need(not any(f"{call}(" in cell.source for cell in cells.history), f"`{call}` is called already")
        lines[owner] = lines.get(owner, "") + f"{call}()\n"
    return placed(cells, lines.items(), ())


FIXES: Final = (
    Fix(
        id="expandable_segments",
        title="Let allocator segments grow (expandable_segments)",
        effect=Effect.EXACT,
        cost="a little more work to allocate",
        propose=_propose_expandable,
        apply=_apply_expandable,
        patch=_patch_expandable,
        guard=_apply_expandable,
        is_tried=False,
        allocates=((_OPTION, True),),
        leaves=("the environment",),
    ),
    Fix(
        id="sharing_strategy",
        title="Share tensors between processes by file name",
        effect=Effect.EXACT,
        cost="nothing",
        propose=_propose_by_name,
        patch=_patch_by_name,
        is_tried=False,
    ),
    Fix(
        id="library_slices",
        title="Process images and attention heads one at a time (slicing)",
        effect=Effect.EQUIVALENT,
        tolerance=1e-5,
        cost="the same arithmetic in smaller pieces",
        propose=proposing(partial(_propose_switches, _SLICES, Effect.EQUIVALENT, None)),
        patch=_patch_switches,
        detect=_detect_switches,
        leaves=(".use_slicing", ".processor", ".processor as pickled[0]"),
    ),
    Fix(
        id="library_tiles",
        title="Process images in tiles",
        effect=Effect.CHANGES_RESULT,
        cost="the same arithmetic in smaller pieces",
        propose=proposing(
            partial(_propose_switches, _TILES, Effect.CHANGES_RESULT, "tiles are blended at their seams")
        ),
        patch=_patch_switches,
    ),
)
