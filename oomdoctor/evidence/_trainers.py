"""Trainers of libraries: which of them a failure went through, what it was doing, and with which settings.

What runs a trainer is in no cell. So the frames of the failure are read for it: the modules that they run name the
library and the phase, and their locals lead to the trainer, whose settings are read from its dictionary. ``accelerate``
is another case: its loop is the user's own, and what it does is told by the call of ``Accelerator`` in the cells.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from oomdoctor.evidence import _models, _optimizers
from oomdoctor.evidence._ground import Ground
from oomdoctor.evidence._program import Program, Scope, call_name, own_nodes
from oomdoctor.evidence.frames import locals_of
from oomdoctor.model.chain import chained, traceback_of
from oomdoctor.model.evidence import ModelFacts, TrainerFacts, TrainingLoop
from oomdoctor.model.kinds import Kind, kind_of, members_of, module_of, mro_of, name_of, plain_dict

__all__ = ["Passed", "passed", "trainers"]

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
_DECIDES: Final = (
    "compute_loss",
    "training_step",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "get_train_dataloader",
)
"""Methods of ``transformers.Trainer`` that decide over batches and their weights."""

_BY_ITEMS: Final = (None, "ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")
"""Losses that are divided by the labels of the whole batch where that number is passed. Source: ``LOSS_MAPPING`` and
``fixed_cross_entropy`` in transformers/loss/loss_utils.py; without a type it is the first."""

_COLLATORS: Final = frozenset(
    {"default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding", "DataCollatorForSeq2Seq"}
    | {"DataCollatorForTokenClassification"}
)
"""They put samples together and draw no random numbers. Source: transformers/data/data_collator.py."""


Setting: TypeAlias = int | float | str | bool | None


class Passed(NamedTuple):
    """A trainer that a failure went through. Short-lived: it holds the objects."""

    library: str
    phase: str
    trainer: Any
    counts_items: bool
    predictions: Any


def passed(exc: BaseException | None) -> Passed | None:
    """Return the trainer whose own loop ``exc`` came out of."""
    for link in chained(exc):
        frames = list(_frames(link))
        for library, home in _HOMES.items():
            own = [frame for frame in frames if home.match(_home_of(frame))]
            if own:
                return _passed(library, own)
    return None


def _frames(exc: BaseException) -> Iterator[FrameType]:
    traceback = traceback_of(exc)
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _home_of(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else ""


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
        counts_items=any(values.get("num_items_in_batch") is not None for values in steps),
        predictions=loops[-1].get("all_preds") if loops else None,
    )


def _runs(frames: Sequence[FrameType], loops: tuple[str, ...]) -> bool:
    return any(_home_of(frame).endswith(loops) for frame in frames)


def _may_hold(library: str, frame: FrameType) -> bool:
    return library == "transformers" or _home_of(frame).endswith(".trainer.trainer")


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
    calls = list(_calls(program, under))
    if found is None:
        return _accelerators(under, calls, dict(loaders), loops)
    makers = [(scope, call) for library, scope, call in calls if library == found.library]
    place = makers[0] if len(makers) == 1 else None
    held = plain_dict(found.trainer) or {}
    read = _of_transformers if found.library == "transformers" else _of_lightning
    facts = read(found, held, modules)
    return (
        TrainerFacts(
            library=found.library,
            phase=found.phase,
            cell=place[0].cell if place else None,
            line=place[1].lineno if place else None,
            call=call_name(place[1]) if place else "",
            **facts,
            given_optimizer=any("optimizers" in {k.arg for k in call.keywords} for call in _named_trainer(under)),
        ),
    )


def _of_transformers(found: Passed, held: Mapping[str, Any], modules: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    settings = plain_dict(held.get("args")) or {}
    model = held.get("model")
    return {
        "settings": tuple((name, _word(value)) for name, value in settings.items()),
        "model": _model(model, modules),
        "recomputes": any(
            members_of(base).get("supports_gradient_checkpointing") is True for base in mro_of(type(model))
        ),
        "optimizer": next(iter(_optimizers.optimizers(_wrapped(held.get("optimizer")))), None),
        "weighs": _weighs(found, held, model),
        "own": _own(held, found.trainer),
        "draws": _draws(held, model),
        "samples": _length(held.get("train_dataset")),
        "gathered_bytes": _bytes(found.predictions),
    }


def _of_lightning(found: Passed, held: Mapping[str, Any], modules: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    del found
    model = (plain_dict(held.get("strategy")) or {}).get("_lightning_module")
    combined = (plain_dict(held.get("fit_loop")) or {}).get("_combined_loader")
    loaders = (plain_dict(combined) or {}).get("_flattened")
    plugin = plain_dict((plain_dict(held.get("strategy")) or {}).get("_precision_plugin")) or {}
    one = loaders[0] if type(loaders) is list and len(loaders) == 1 else None
    return {
        "settings": (
            ("accumulate_grad_batches", _word(held.get("accumulate_grad_batches"))),
            # The plugin for full precision has its name on the class alone. Source: lightning's ``Precision``.
            ("precision", _word(plugin.get("precision", "32-true"))),
            *_of_loader(one),
        ),
        "model": _model(model, modules),
        "weighs": "parts",
        "samples": _length((plain_dict(one) or {}).get("dataset")),
    }


def _of_loader(loader: Any) -> Iterator[tuple[str, Setting]]:
    held = plain_dict(loader) if kind_of(type(loader)) is Kind.LOADER else None
    if held is not None:
        yield from ((name, _word(held.get(name))) for name in ("batch_size", "drop_last"))


def _word(value: object) -> Setting:
    """Return a setting as a plain value, ``...`` for what is more than a number, a flag or a word."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return str.__str__(value) if issubclass(type(value), str) else "..."  # type: ignore[arg-type]


def _accelerators(
    under: Ground,
    calls: Sequence[tuple[str, Scope, ast.Call]],
    loaders: Mapping[str, Any],
    loops: Sequence[TrainingLoop],
) -> tuple[TrainerFacts, ...]:
    makers = [(scope, call) for library, scope, call in calls if library == "accelerate"]
    running = [loop for loop in loops if loop.in_failing_run]
    if len(makers) != 1 or len(running) != 1:
        return ()
    scope, call = makers[0]
    given = {k.arg: k.value.value if isinstance(k.value, ast.Constant) else "" for k in call.keywords if k.arg}
    path = dict(running[0].stands_for).get(running[0].loader, running[0].loader)
    loader = loaders.get(path)
    accumulates = any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "accumulate"
        for one in under.reach
        for node in own_nodes(one.body)
    )
    return (
        TrainerFacts(
            library="accelerate",
            phase="train",
            cell=scope.cell,
            line=call.lineno,
            call=call_name(call),
            settings=(
                ("gradient_accumulation_steps", given.get("gradient_accumulation_steps", 1)),
                ("mixed_precision", given.get("mixed_precision")),
                *_of_loader(loader),
            ),
            weighs="parts" if accumulates else "",
            samples=_length((plain_dict(loader) or {}).get("dataset")),
        ),
    )


def _calls(program: Program, under: Ground) -> Iterator[tuple[str, Scope, ast.Call]]:
    """Yield the calls that the failing cell rests on and that make settings of a library known here."""
    imports = dict(_imports(program.scopes))
    for scope in under.basis:
        for node in own_nodes(scope.body):
            if isinstance(node, ast.Call):
                head, dot, rest = call_name(node).partition(".")
                dotted = imports.get(head, head) + dot + rest
                yield from ((name, scope, node) for name, maker in _MAKERS.items() if maker.match(dotted))


def _named_trainer(under: Ground) -> Iterator[ast.Call]:
    for scope in under.basis:
        for node in own_nodes(scope.body):
            if isinstance(node, ast.Call) and call_name(node).endswith("Trainer"):
                yield node


def _imports(scopes: Iterable[Scope]) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, and what it stands for."""
    for node in (node for scope in scopes for node in own_nodes(scope.body)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _model(model: Any, modules: Sequence[tuple[str, Any]]) -> ModelFacts | None:
    if kind_of(type(model)) is not Kind.MODULE:
        return None
    path = next((path for path, module in modules if module is model), "trainer.model")
    return next(iter(_models.models([(path, model)])), None)


def _wrapped(optimizer: Any) -> list[tuple[str, Any]]:
    """Return the optimizer, out of the wrapper of accelerate."""
    inner = (plain_dict(optimizer) or {}).get("optimizer", optimizer)
    return [("trainer.optimizer", inner)] if kind_of(type(inner)) is Kind.OPTIMIZER else []


def _weighs(found: Passed, held: Mapping[str, Any], model: Any) -> str:
    """Return how a ``transformers.Trainer`` adds up the gradients of the parts of a batch.

    Source: ``Trainer.training_step`` and ``compute_loss``: where the model takes keyword arguments and the batch has
    labels, the number of labels is passed and the loss is taken to be divided by it; otherwise it is divided by the
    number of parts.
    """
    accepts = held.get("model_accepts_loss_kwargs")
    if type(accepts) is not bool:
        return ""
    if not accepts or not found.counts_items:
        return "parts"
    inner = _adapted(model)
    type_of_loss = (plain_dict(inner) or {}).get("loss_type")
    known = type_of_loss in _BY_ITEMS and "_loss_function" not in (plain_dict(inner) or {})
    return "items" if known and _passes_on(type(inner)) else "sums"


def _adapted(model: Any) -> Any:
    """Return the model below the wrapper of peft."""
    for _ in range(2):
        if module_of(type(model)).startswith("peft."):
            below = (plain_dict(model) or {}).get("_modules") or {}
            model = below.get("base_model", below.get("model", model))
    return model


def _passes_on(cls: type) -> bool:
    """Whether the model's ``forward`` passes what it is given to a loss that divides by the number of labels."""
    forward = next((members_of(base)["forward"] for base in mro_of(cls) if "forward" in members_of(base)), None)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    losses = [call for call in calls if ast.unparse(call.func) == "self.loss_function"]
    return bool(losses) and all(any(k.arg is None for k in call.keywords) for call in losses)


def _own(held: Mapping[str, Any], trainer: Any) -> str | None:
    """Return what the user has put in the place of the trainer's own way to weigh a batch."""
    for base in mro_of(type(trainer)):
        if _HOMES["transformers"].match(module_of(base)):
            break
        if found := next((name for name in _DECIDES if name in members_of(base)), None):
            return f"{name_of(base)}.{found}"
    scaled = [members_of(base).get("loss_is_scaled_for_ga") for base in mro_of(type(trainer))]
    if held.get("loss_is_scaled_for_ga", next((one for one in scaled if one is not None), None)) is not None:
        return "loss_is_scaled_for_ga"
    return next((name for name in ("compute_loss_func", "label_smoother") if held.get(name) is not None), None)


def _draws(held: Mapping[str, Any], model: Any) -> str | None:
    """Return what draws random numbers for each part, or may, beside the layers of the model; None where nothing does."""
    config = plain_dict((plain_dict(_adapted(model)) or {}).get("config")) or {}
    for name, value in config.items():
        if "drop" in name and "summary" not in name and type(value) in (int, float) and value > 0:
            return f"`{name}={value}` of the model"
    if config.get("output_router_logits"):
        return "`output_router_logits` balances experts over the batch and"
    if held.get("neftune_noise_alpha"):
        return "`neftune_noise_alpha`"
    collator = held.get("data_collator")
    home, name = (
        (collator.__module__, collator.__name__)
        if type(collator) is FunctionType
        else (module_of(type(collator)), name_of(type(collator)))
    )
    masks_none = name == "DataCollatorForLanguageModeling" and (plain_dict(collator) or {}).get("mlm") is False
    if not home.startswith("transformers.") or not (name in _COLLATORS or masks_none):
        return f"`{name}` is called for each part and"
    if held_by_workers := (plain_dict(held.get("args")) or {}).get("dataloader_num_workers"):
        return f"each of {held_by_workers} workers"
    return None


def _length(dataset: Any) -> int | None:
    """Return how many samples a data set has, where that is known without running code of its own."""
    held = plain_dict(dataset) or {}
    home = module_of(type(dataset)), name_of(type(dataset))
    if type(dataset) in (list, tuple, range):
        return len(dataset)
    if home == ("torch.utils.data.dataset", "TensorDataset"):
        return int(torch.Tensor.size(held["tensors"][0], 0))
    if home == ("torch.utils.data.dataset", "Subset") and type(held.get("indices")) in (list, range):
        return len(held["indices"])
    if home == ("datasets.arrow_dataset", "Dataset"):
        return int((held["_indices"] if held.get("_indices") is not None else held["_data"]).num_rows)
    return None


def _bytes(predictions: Any) -> int:
    """Return what the predictions gathered on a device take. Source: ``EvalLoopContainer`` in transformers."""
    todo, found = [(plain_dict(predictions) or {}).get("tensors")], 0
    while todo:
        one = todo.pop()
        if kind_of(type(one)) is Kind.TENSOR:
            found += torch.Tensor.numel(one) * torch.Tensor.element_size(one)
        elif type(one) in (list, tuple):
            todo += list(one)
        elif type(one) is dict:
            todo += list(one.values())
    return found
