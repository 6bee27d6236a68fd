"""Trainers of libraries: which of them a failure went through, what it was doing, and with which settings.

What runs a trainer is in no cell. So the frames of the failure are read for it: the modules that they run name the
library and the phase, and their locals lead to the trainer, whose settings are read from its dictionary. ``accelerate``
is another case: its loop is the user's own, and what it does is told by the call of ``Accelerator`` in the cells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias

from oomdoctor.evidence._trainer_objects import Setting, length, of_lightning, of_loader, of_transformers
from oomdoctor.model.code import TrainerFacts, TrainingLoop
from oomdoctor.objects.frames import chained, home_of, locals_of, steps_of, traceback_of
from oomdoctor.objects.kinds import module_of, mro_of, name_of, plain_dict
from oomdoctor.program.calls import Call, calls, imports_of
from oomdoctor.program.definitions import Program
from oomdoctor.program.ground import Ground
from oomdoctor.program.training_loops import steps_within

_HOMES: Final = {
    "transformers": re.compile(r"^transformers\.trainer(_seq2seq)?$"),
    "lightning": re.compile(r"^(lightning\.pytorch|pytorch_lightning)\."),
}
"""The modules of a library's own loop."""

_MAKERS: Final = {
    "transformers": re.compile(r"^transformers(\.\w+)*\.(Seq2Seq)?TrainingArguments$"),
    "lightning": re.compile(r"^(lightning|pytorch_lightning)(\.\w+)*\.Trainer$"),
    "accelerate": re.compile(r"^accelerate(\.\w+)*\.Accelerator$"),
}
"""What is called with the settings."""

_EVALUATES: Final = frozenset({"evaluate", "predict", "evaluation_loop", "prediction_step"})
_EVALUATION_LOOPS: Final = (".loops.evaluation_loop", ".loops.prediction_loop")

_Maker: TypeAlias = tuple[str, Call]


class Passed(NamedTuple):
    """A trainer that a failure went through. Short-lived: it holds the objects."""

    library: str
    phase: str
    trainer: Any
    model: Any
    counts_items: bool
    predictions: Any


def passed(exc: BaseException | None) -> Passed | None:
    """Return the trainer whose own loop ``exc`` came out of."""
    for link in chained(exc):
        frames = [step.tb_frame for step in steps_of(traceback_of(link))]
        for library, home in _HOMES.items():
            own = [frame for frame in frames if home.match(home_of(frame))]
            if own:
                return _passed(library, own)
    return None


def _passed(library: str, frames: Sequence[FrameType]) -> Passed:
    ran = {frame.f_code.co_name for frame in frames}
    is_evaluation = bool(ran & _EVALUATES) if library == "transformers" else _runs(frames, _EVALUATION_LOOPS)
    own = [(frame.f_code.co_name, locals_of(frame)) for frame in frames if _may_hold(library, frame)]
    selves = [values.get("self") for _, values in own]
    steps = [values for name, values in own if name == "training_step"]
    loops = [values for name, values in own if name == "evaluation_loop"]
    return Passed(
        library=library,
        phase="evaluate" if is_evaluation else "train",
        trainer=next((one for one in selves if _is_trainer(library, one)), None),
        model=next((values["model"] for name, values in own if name == "fit" and "model" in values), None),
        counts_items=any(values.get("num_items_in_batch") is not None for values in steps),
        predictions=loops[-1].get("all_preds") if loops else None,
    )


def _runs(frames: Sequence[FrameType], loops: tuple[str, ...]) -> bool:
    return any(home_of(frame).endswith(loops) for frame in frames)


def _may_hold(library: str, frame: FrameType) -> bool:
    return library == "transformers" or home_of(frame).endswith(".trainer.trainer")


def _is_trainer(library: str, value: object) -> bool:
    return any(_HOMES[library].match(module_of(base)) and name_of(base) == "Trainer" for base in mro_of(type(value)))


def trainers(
    program: Program,
    under: Ground,
    found: Passed | None,
    modules: Sequence[tuple[str, Any]],
    loaders: Sequence[tuple[str, Any]],
    loops: Sequence[TrainingLoop],
) -> tuple[TrainerFacts, ...]:
    """Return the trainer that the failure went through, or the ``Accelerator`` that its loop accumulates by."""
    makers = list(_makers(program, under))
    if found is None:
        return _accelerators(under, makers, dict(loaders), loops)
    own = [call for library, call in makers if library == found.library]
    maker = own[0] if len(own) == 1 else None
    facts = _facts(found, modules)
    if any(call.name.endswith("Trainer") and "optimizers" in call.keywords for call in calls(under.basis)):
        facts["given_optimizer"] = True
    return (
        TrainerFacts(
            library=found.library,
            phase=found.phase,
            cell=maker.cell if maker else None,
            line=maker.line if maker else None,
            call=maker.name if maker else "",
            **facts,
        ),
    )


def _facts(found: Passed, modules: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if found.library == "lightning":
        return of_lightning(found.trainer, found.model, modules)
    counts = found.counts_items
    return of_transformers(found.trainer, modules, counts_items=counts, predictions=found.predictions)


def _accelerators(
    under: Ground, makers: Sequence[_Maker], loaders: Mapping[str, Any], loops: Sequence[TrainingLoop]
) -> tuple[TrainerFacts, ...]:
    own = [call for library, call in makers if library == "accelerate"]
    running = [loop for loop in loops if loop.in_failing_run]
    if len(own) != 1 or len(running) != 1:
        return ()
    call = own[0]
    given = {name: _plain(value) for name, value in call.literals.items()}
    path = dict(running[0].stands_for).get(running[0].loader, running[0].loader)
    loader = loaders.get(path)
    return (
        TrainerFacts(
            library="accelerate",
            phase="train",
            cell=call.cell,
            line=call.line,
            call=call.name,
            settings=(
                ("gradient_accumulation_steps", given.get("gradient_accumulation_steps", 1)),
                ("mixed_precision", given.get("mixed_precision")),
                *of_loader(loader),
            ),
            weighs="parts" if steps_within(under.reach, running[0], ".accumulate", "sync_gradients") else "",
            samples=length((plain_dict(loader) or {}).get("dataset")),
        ),
    )


def _plain(value: object) -> Setting:
    return value if value is None or isinstance(value, bool | int | float | str) else "..."


def _makers(program: Program, under: Ground) -> Iterator[_Maker]:
    """Yield the calls that the failing cell rests on and that make settings of a library known here."""
    imports = imports_of(program)
    for call in calls(under.basis):
        head, dot, rest = call.name.partition(".")
        dotted = imports.get(head, head) + dot + rest
        yield from ((name, call) for name, maker in _MAKERS.items() if maker.match(dotted))
