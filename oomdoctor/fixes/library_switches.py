"""The switches by which a pipeline of a library takes less memory, as those of diffusers do, turned on.

A pipeline that the failing run calls is looked at, and the models that it holds. ``library_slices``: ``enable_slicing``
(images one by one), ``enable_attention_slicing`` (heads one by one), ``enable_model_cpu_offload`` (each model on the
device only while it runs); the doses turn on more and more of them. ``library_tiles``: ``enable_tiling`` (an image in
tiles, whose seams are blended: another image). What they save is told by a dry run alone; before it there is a guess.

Source: https://huggingface.co/docs/diffusers/optimization/memory
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

from oomdoctor.fixes._placement import placed
from oomdoctor.fixes._terms import Unfit, found_or_asked, proposing, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.session import Cells
from oomdoctor.model.site import Site
from oomdoctor.objects.kinds import members_of, mro_of, plain_dict
from oomdoctor.objects.known import Objects
from oomdoctor.program.definitions import Program, site
from oomdoctor.program.names import call_name, own_nodes

_SLICES: Final = {"slicing": 1.05, "attention_slicing": 1.1, "model_cpu_offload": 1.5}
"""The switches that keep the results, mildest first, and how much longer a run takes with each. Round figures."""
_TILES: Final = {"tiling": 1.1}
_SWITCH: Final = re.compile(rf"enable_({'|'.join((*_SLICES, *_TILES))})")


class _Owner(NamedTuple):
    """What a name leads to, for ``placed``: a name of the notebook, of no function."""

    path: str
    scope: None = None


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find what the failing run calls that has such switches, or holds a model that does."""
    return tuple(_switches(program, objects))


def _switches(program: Program, objects: Objects) -> Iterator[Site]:
    for scope in program.running:
        for node in own_nodes(scope.body):
            name = call_name(node).partition(".")[0] if isinstance(node, ast.Call) else ""
            pipeline = objects.namespace.get(name)
            if not isinstance(node, ast.Call) or pipeline is None:
                continue
            parts = {f"{name}.{key}": part for key, part in (plain_dict(pipeline) or {}).items()}
            for path, owner in {name: pipeline, **parts}.items():
                names = {member for base in mro_of(type(owner)) for member in members_of(base)}
                for found in filter(None, map(_SWITCH.fullmatch, sorted(names))):
                    yield site(found[1], scope, node, (name, f"{path}.{found[0]}"))


def _propose(
    kinds: Mapping[str, float], effect: Effect, caveat: str | None, incident: Incident, evidence: Evidence
) -> Iterator[Proposal]:
    """Propose more and more of the switches that there are, mildest first."""
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
    if not on:
        raise Unfit("the failing cell calls no pipeline that has switches to save memory")


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Put a line for each switch behind the one that makes the pipeline."""
    sites = evidence.code.sites.get("library_slices", ())
    lines: dict[_Owner, str] = {}
    for call in str(dict(dose.values)["switches"]).split(", "):
        owner = next((one.names[0] for one in sites if one.names[1] == call), None)
        if owner is None:
            raise Unfit(f"`{call}` is no switch of what the failing cell calls")
        if any(f"{call}(" in cell.source for cell in cells.history):
            raise Unfit(f"`{call}` is called already")
        lines[_Owner(owner)] = lines.get(_Owner(owner), "") + f"{call}()\n"
    return placed(cells, lines.items(), ())


FIXES: Final = (
    Fix(
        id="library_slices",
        title="Have the pipeline make images and attention heads one by one",
        effect=Effect.EQUIVALENT,
        tolerance=1e-5,
        cost="the same arithmetic in smaller pieces",
        propose=proposing(partial(_propose, _SLICES, Effect.EQUIVALENT, None)),
        patch=patch,
        detect=detect,
        leaves=(".use_slicing", ".processor", ".processor as pickled[0]"),
    ),
    Fix(
        id="library_tiles",
        title="Have the pipeline make images in tiles",
        effect=Effect.CHANGES_RESULT,
        cost="the same arithmetic in smaller pieces",
        propose=proposing(partial(_propose, _TILES, Effect.CHANGES_RESULT, "tiles are blended at their seams")),
        patch=patch,
    ),
)
