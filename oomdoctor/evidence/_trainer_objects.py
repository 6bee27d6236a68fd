"""What a live trainer is like: its settings, and how it weighs the parts of a batch, read without running it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final, TypeAlias

from oomdoctor.evidence import _models
from oomdoctor.model.code import ModelFacts
from oomdoctor.objects.kinds import Kind, kind_of, members_of, module_of, mro_of, name_of, plain_dict

Setting: TypeAlias = int | float | str | bool | None
Modules: TypeAlias = Sequence[tuple[str, Any]]

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


def of_transformers(trainer: Any, modules: Modules, *, counts_items: bool, predictions: Any) -> dict[str, Any]:
    """Return the facts of a ``transformers.Trainer``.

    Args:
        counts_items: the number of labels of the batch was passed to its last step.
        predictions: what its evaluation has gathered.
    """
    held = plain_dict(trainer) or {}
    settings = plain_dict(held.get("args")) or {}
    model = held.get("model")
    return {
        "settings": tuple((name, _word(settings[name])) for name in _SETTINGS if name in settings),
        "model": _model(model, modules),
        "recomputes": _of_class(model, "supports_gradient_checkpointing") is True,
        "optimizer": next(iter(_models.optimizers(_wrapped(held.get("optimizer")))), None),
        "weighs": "items" if held.get("model_accepts_loss_kwargs") is True and counts_items else "parts",
        "draws": _draws(held, model),
        "samples": length(held.get("train_dataset")),
        "gathered_bytes": _bytes(predictions),
    }


def of_lightning(trainer: Any, model: Any, modules: Modules) -> dict[str, Any]:
    """Return the facts of a Lightning ``Trainer`` and the module that its ``fit`` was called with."""
    held = plain_dict(trainer) or {}
    combined = (plain_dict(held.get("fit_loop")) or {}).get("_combined_loader")
    loaders = (plain_dict(combined) or {}).get("_flattened")
    plugin = plain_dict((plain_dict(held.get("strategy")) or {}).get("_precision_plugin")) or {}
    one = loaders[0] if type(loaders) is list and len(loaders) == 1 else None
    return {
        "settings": (
            ("accumulate_grad_batches", _word(held.get("accumulate_grad_batches"))),
            # The plugin for full precision has its name on the class alone. Source: lightning's ``Precision``.
            ("precision", _word(plugin.get("precision", "32-true"))),
            *of_loader(one),
        ),
        "model": _model(model, modules),
        "weighs": "parts",
        "samples": length((plain_dict(one) or {}).get("dataset")),
    }


def of_loader(loader: Any) -> Iterator[tuple[str, Setting]]:
    """Yield what a ``DataLoader`` says of its batches."""
    held = plain_dict(loader) if kind_of(type(loader)) is Kind.LOADER else None
    if held is not None:
        yield from ((name, _word(held.get(name))) for name in ("batch_size", "drop_last"))


def _word(value: object) -> Setting:
    """Return a setting as a plain value, ``...`` for what is more than a number, a flag or a word."""
    if value is None or type(value) in (bool, int, float):
        return value  # type: ignore[return-value]
    if type(value) in (list, tuple, dict) and not value:
        return ""
    return str.__str__(value) if isinstance(value, str) else "..."


def _of_class(value: object, name: str) -> Any:
    return next((members_of(base)[name] for base in mro_of(type(value)) if name in members_of(base)), None)


def _model(model: Any, modules: Modules) -> ModelFacts | None:
    if kind_of(type(model)) is not Kind.MODULE:
        return None
    path = next((path for path, module in modules if module is model), "trainer.model")
    return next(iter(_models.models([(path, model)])), None)


def _wrapped(optimizer: Any) -> list[tuple[str, Any]]:
    """Return the optimizer, out of the wrapper of accelerate."""
    inner = (plain_dict(optimizer) or {}).get("optimizer", optimizer)
    return [("trainer.optimizer", inner)] if kind_of(type(inner)) is Kind.OPTIMIZER else []


def _draws(held: Mapping[str, Any], model: Any) -> str | None:
    """Return what draws random numbers for each part, or may, beside the layers of the model."""
    for _ in range(2):  # below the wrappers of peft
        if module_of(type(model)).startswith("peft."):
            below = (plain_dict(model) or {}).get("_modules") or {}
            model = below.get("base_model", below.get("model", model))
    config = plain_dict((plain_dict(model) or {}).get("config")) or {}
    for name, value in config.items():
        if "drop" in name and "summary" not in name and type(value) in (int, float) and value > 0:
            return f"`{name}={value}` of the model"
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
    workers = (plain_dict(held.get("args")) or {}).get("dataloader_num_workers")
    return f"each of {workers} workers" if workers else None


def length(dataset: Any) -> int | None:
    """Return how many samples a data set has, where that is known without running code of its own."""
    held = plain_dict(dataset) or {}
    home = module_of(type(dataset)), name_of(type(dataset))
    if type(dataset) in (list, tuple, range):
        return len(dataset)
    if home == ("torch.utils.data.dataset", "TensorDataset"):
        from torch import Tensor

        tensors = held.get("tensors")
        first: Any = tensors[0] if type(tensors) is tuple and tensors else None
        return int(Tensor.size(first, 0)) if kind_of(type(first)) is Kind.TENSOR else None
    if home == ("torch.utils.data.dataset", "Subset") and type(held.get("indices")) in (list, range):
        return len(held["indices"])
    if home == ("datasets.arrow_dataset", "Dataset"):
        table = held.get("_indices") if held.get("_indices") is not None else held.get("_data")
        return getattr(table, "num_rows", None)
    return None


def _bytes(predictions: Any) -> int:
    """Return what the predictions gathered on a device take. Source: ``EvalLoopContainer`` in transformers."""
    found = 0
    todo: list[Any] = [(plain_dict(predictions) or {}).get("tensors")]
    while todo:
        one = todo.pop()
        if kind_of(type(one)) is Kind.TENSOR:
            ((count, each),) = _models.sizes([one])
            found += count * each
        elif type(one) in (list, tuple):
            todo += list(one)
        elif type(one) is dict:
            todo += list(one.values())
    return found
