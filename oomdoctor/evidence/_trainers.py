"""Trainers of libraries: which of them a failure went through, what it was doing, and with which settings.

What runs a trainer is in no cell. So the frames of the failure are read for it: the modules that they run name the
library and the phase, and their locals lead to the trainer, whose settings are read from its dictionary. The loop of a
program that goes by ``accelerate`` is the user's own, and no case of this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import FrameType, FunctionType
from typing import Any, Final, NamedTuple, TypeAlias

from oomdoctor.evidence import _models
from oomdoctor.evidence._models import held
from oomdoctor.model.code import ModelFacts, TrainerFacts
from oomdoctor.objects.frames import chained, home_of, locals_of, steps_of, traceback_of
from oomdoctor.objects.kinds import Kind, kind_of, module_of, mro_of, name_of, plain_dict
from oomdoctor.objects.walk import tensors_in
from oomdoctor.program.definitions import Call, Program, calls, imports_of
from oomdoctor.program.dependencies import Ground

Setting: TypeAlias = int | float | str | bool | None
Modules: TypeAlias = Sequence[tuple[str, Any]]  # and other objects, each with its path

_SETTINGS: Final = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("activation_checkpointing", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("bf16", "fp16", "optim", "eval_accumulation_steps", "dataloader_drop_last", "auto_find_batch_size"),
    *("use_cpu", "deepspeed", "fsdp", "_n_gpu"),
)
"""Those that fixes change or depend on. Others, a token of a hub for one, are nobody's business."""

_COLLATORS: Final = frozenset(
    {"default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding", "DataCollatorForSeq2Seq"}
    | {"DataCollatorForTokenClassification"}
)
"""They put samples together and draw no random numbers. Source: transformers/data/data_collator.py."""


def _of_transformers(found: Passed, modules: Modules) -> dict[str, Any]:
    trainer = found.trainer
    settings, model = plain_dict(held(trainer, "args")) or {}, held(trainer, "model")
    optimizer, gathered = held(trainer, "optimizer"), held(found.predictions, "tensors")
    inner = held(optimizer, "optimizer") or optimizer  # out of the wrapper of accelerate
    given = [("trainer.optimizer", inner)] if kind_of(type(inner)) is Kind.OPTIMIZER else []
    counts_items = held(trainer, "model_accepts_loss_kwargs") is True and found.counts_items
    return {
        "settings": tuple((name, _word(settings[name])) for name in _SETTINGS if name in settings),
        "model": _model(model, modules),
        "recomputes": _models.of_class(type(model), "supports_gradient_checkpointing") is True,
        "optimizer": next(iter(_models.optimizers(given)), None),
        "weighs": "items" if counts_items else "parts",
        "draws": _draws(trainer, model),
        # Source: ``EvalLoopContainer`` in transformers.
        "gathered_bytes": sum(count * each for count, each in _models.sizes(tensors_in(gathered))),
    }


def _of_lightning(found: Passed, modules: Modules) -> dict[str, Any]:
    trainer = found.trainer
    loaders = held(trainer, "fit_loop", "_combined_loader", "_flattened")
    precision = held(trainer, "strategy", "_precision_plugin", "precision")
    one = loaders[0] if type(loaders) is list and len(loaders) == 1 else None
    one = one if kind_of(type(one)) is Kind.LOADER else None
    return {
        "settings": (
            ("accumulate_grad_batches", _word(held(trainer, "accumulate_grad_batches"))),
            # The plugin for full precision has its name on the class alone. Source: lightning's ``Precision``.
            ("precision", _word(precision or "32-true")),
            *((name, _word(held(one, name))) for name in ("batch_size", "drop_last") if one is not None),
        ),
        "model": _model(found.model, modules),
        "weighs": "parts",
    }


def _word(value: object) -> Setting:
    """Return a setting as a plain value, ``...`` for what is more than a number, a flag or a word."""
    if value is None or type(value) in (bool, int, float):
        return value  # type: ignore[return-value]
    if type(value) in (list, tuple, dict) and not value:
        return ""
    return str.__str__(value) if isinstance(value, str) else "..."


def _model(model: Any, modules: Modules) -> ModelFacts | None:
    if kind_of(type(model)) is not Kind.MODULE:
        return None
    path = next((path for path, module in modules if module is model), "trainer.model")
    return next(iter(_models.models([(path, model)])), None)


def _draws(trainer: Any, model: Any) -> str | None:
    """Return what draws random numbers for each part, or may, beside the layers of the model."""
    for _ in range(2):  # below the wrappers of peft
        if module_of(type(model)).startswith("peft."):
            below = held(model, "_modules") or {}
            model = below.get("base_model", below.get("model", model))
    for name, value in (plain_dict(held(model, "config")) or {}).items():
        if "drop" in name and "summary" not in name and type(value) in (int, float) and value > 0:
            return f"`{name}={value}` of the model"
    if held(trainer, "neftune_noise_alpha"):
        return "`neftune_noise_alpha`"
    collator = held(trainer, "data_collator")
    home, name = module_of(type(collator)), name_of(type(collator))
    if type(collator) is FunctionType:
        home, name = collator.__module__, collator.__name__
    masks_none = name == "DataCollatorForLanguageModeling" and held(collator, "mlm") is False
    if not home.startswith("transformers.") or not (name in _COLLATORS or masks_none):
        return f"`{name}` is called for each part and"
    workers = held(trainer, "args", "dataloader_num_workers")
    return f"each of {workers} workers" if workers else None


_HOMES: Final = {
    "transformers": re.compile(r"^transformers\.trainer(_seq2seq)?$"),
    "lightning": re.compile(r"^(lightning\.pytorch|pytorch_lightning)\."),
}
"""The modules of a library's own loop."""

_MAKERS: Final = {
    "transformers": re.compile(r"^transformers(\.\w+)*\.(Seq2Seq)?TrainingArguments$"),
    "lightning": re.compile(r"^(lightning|pytorch_lightning)(\.\w+)*\.Trainer$"),
}
"""What is called with the settings."""

_EVALUATES: Final = frozenset({"evaluate", "predict", "evaluation_loop", "prediction_step"})
_EVALUATION_LOOPS: Final = (".loops.evaluation_loop", ".loops.prediction_loop")


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
    if library == "transformers":
        is_evaluation, held_in = bool(ran & _EVALUATES), frames
    else:
        is_evaluation = any(home_of(frame).endswith(_EVALUATION_LOOPS) for frame in frames)
        held_in = [frame for frame in frames if home_of(frame).endswith(".trainer.trainer")]
    own = [(frame.f_code.co_name, locals_of(frame)) for frame in held_in]
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


def _is_trainer(library: str, value: object) -> bool:
    return any(_HOMES[library].match(module_of(base)) and name_of(base) == "Trainer" for base in mro_of(type(value)))


def trainers(program: Program, under: Ground, found: Passed | None, modules: Modules) -> tuple[TrainerFacts, ...]:
    """Return the trainer that the failure went through."""
    if found is None:
        return ()
    made, makers, imports = list(calls(under.basis)), list[Call](), imports_of(program)
    for call in made:
        head, dot, rest = call.name.partition(".")
        makers += [call] if _MAKERS[found.library].match(imports.get(head, head) + dot + rest) else []
    maker = makers[0] if len(makers) == 1 else None
    facts = (_of_lightning if found.library == "lightning" else _of_transformers)(found, modules)
    if any(call.name.endswith("Trainer") and "optimizers" in call.keywords for call in made):
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
