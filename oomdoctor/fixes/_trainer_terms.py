"""What a fix promises where it is made through the settings of a trainer, and why it cannot be.

Raising the accumulation keeps the gradients only if the trainer weighs the parts of a batch as the batch does, and
that differs: ``transformers.Trainer`` passes the number of labels to models that take it, whether their loss divides by
it is for the trial to find, and divides by the number of parts where the model takes no such argument; Lightning and
accelerate give each part the same share of a full batch, in the last batch of an epoch too.
Source: ``Trainer.training_step``, ``ClosureResult.from_training_step_output``, ``Accelerator.backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from oomdoctor.fixes._activations import why_not_short
from oomdoctor.fixes._batch_sizes import smaller
from oomdoctor.fixes._chunks import layer, why_not
from oomdoctor.fixes._precision_dtype import kind_of_device
from oomdoctor.fixes._trainer_source import BATCH, owner, setting
from oomdoctor.fixes._unfit import Unfit, need, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, OptimizerFacts, TrainerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size

_PARTS: Final = (2, 4, 8, 16, 32)
_OVERHEAD: Final = 0.02
"""Time lost per part to launching the same kernels again, as a share of a step. A round figure, not measured."""

_ADAMS: Final = frozenset({"adamw_torch", "adamw_torch_fused", "adamw_hf"})
_BY_SAMPLES: Final = ("ForSequenceClassification", "ForImageClassification")
"""Models whose loss is a mean over samples, so that batches of another size leave its mean as it is."""

ADAFACTOR: Final = (
    "Adafactor keeps a row and a column for each matrix and no momentum: it takes other steps than Adam, and its "
    "learning rate has to be found anew"
)


def proposed(fix: str, incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused | None:
    """Return what to propose where a trainer's settings are the way to make ``fix``, None where they are not."""
    code = evidence.code
    trainer = owner(code, fix)
    if trainer is None:
        evaluates = any(one.phase == "evaluate" for one in code.trainers)
        needs_gradients = fix in {"micro_batch", "smaller_batch", "checkpoint_blocks"}
        return Refused("the trainer was evaluating, without gradients") if evaluates and needs_gradients else None
    if fix == "micro_batch" and trainer.library == "accelerate" and trainer.weighs != "parts":
        return None
    return _PROPOSERS[fix](trainer, incident, evidence)


@refusing
def _micro_batch(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    if (why := _couples(trainer, evidence.code) or why_not_short(incident, evidence)) is not None:
        raise Unfit(why)
    size, splittable = _splittable(trainer, incident, evidence)
    return tuple(
        Proposal(
            dose=Dose.of(parts=parts, through=trainer.library),
            effect=Effect.CHANGES_RESULT if caveats else Effect.EQUIVALENT,
            saves=splittable * (parts - 1) // parts,
            slowdown=1 + _OVERHEAD * parts,
            basis=f"analytic estimate: 1/{parts} of {format_size(splittable)} of activations, batch and request",
            caveat="; ".join(caveats) or None,
        )
        for parts in _PARTS
        if size is None or size % parts == 0
        for caveats in [tuple(_differs(trainer, evidence.code, size, parts))]
    ) or Refused(f"a batch of {size} samples has no half")


def _couples(trainer: TrainerFacts, code: CodeFacts) -> str | None:
    """Return why the batch cannot be taken apart."""
    if setting(trainer, "auto_find_batch_size"):
        return "the trainer looks for a batch size itself (`auto_find_batch_size`)"
    devices = setting(trainer, "_n_gpu")
    spread = setting(trainer, "deepspeed") or setting(trainer, "fsdp") or code.distributed
    if spread or (type(devices) is int and devices > 1) or (code.world_size or 1) > 1:
        return "the training is spread over devices: how they would weigh the parts of a batch was not tried"
    if trainer.library == "accelerate":
        loops = [replace(loop, accumulates=False) for loop in code.loops if loop.in_failing_run]
        return next((why for loop in loops if (why := why_not(code, loop))), None)
    if trainer.model is None:
        return "the model that the trainer trains was not found"
    if trainer.model.batch_norm:
        return f"{layer(trainer.model, trainer.model.batch_norm[0])} normalises over the batch in training mode"
    return None


def _splittable(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> tuple[int | None, int]:
    """Return the samples in a batch, None where the cells alone say it, and the bytes that go with them."""
    size = setting(trainer, BATCH[trainer.library])
    if type(size) is not int and (trainer.library != "accelerate" or size is not None):
        raise Unfit("how many samples a batch has is not known")
    if size == 1:
        raise Unfit("the batch has one sample: there is nothing to split")
    held = evidence.census.bytes_of(Role.ACTIVATION) + evidence.census.bytes_of(Role.BATCH)
    if not held + (incident.requested or 0):
        raise Unfit("no activations were found that smaller parts could save")
    return size if type(size) is int else None, held + (incident.requested or 0)


def _differs(trainer: TrainerFacts, code: CodeFacts, size: int | None, parts: int) -> Iterator[str]:
    """Yield what comes out another way in parts."""
    for draws in _draws(trainer, code):
        yield f"{draws} draws other random numbers for parts of a batch than for the whole"
    if trainer.weighs == "parts":
        yield "each part counts the same, as it should only where the loss is a mean over samples"
    leaves_out = setting(trainer, "dataloader_drop_last" if trainer.library == "transformers" else "drop_last")
    rest = trainer.samples % size if trainer.samples is not None and size is not None else None
    if leaves_out:
        if rest is None or size is None or rest >= size // parts:
            yield "samples that `drop_last` leaves out now would make one more step in each epoch"
    elif trainer.weighs == "parts":
        if rest is None or size is None:
            yield "a last batch of an epoch with fewer samples would be weighted otherwise"
        elif rest % (size // parts if trainer.library == "transformers" else size):
            yield f"the last batch of an epoch, of {rest} samples, would be weighted otherwise"


def _draws(trainer: TrainerFacts, code: CodeFacts) -> Iterator[str]:
    if trainer.draws is not None:
        yield trainer.draws
        return
    loops = [loop for loop in code.loops if loop.in_failing_run] if trainer.library == "accelerate" else []
    models = [trainer.model] if trainer.model is not None else list(code.models) if loops else []
    yield from (f"`{loop.draws[0]}`" for loop in loops if loop.draws)
    yield from (layer(model, model.dropout[0]) for model in models if model.dropout)


@refusing
def _smaller_batch(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    size, scales = _splittable(trainer, incident, evidence)
    normalises = trainer.model is not None and bool(trainer.model.batch_norm)
    return smaller(need(size, "how many samples a batch has is not known"), scales, least=2 if normalises else 1)


def _autocast(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> Refused | None:
    del incident
    in_force = setting(trainer, "bf16") or setting(trainer, "fp16")
    named = setting(trainer, "precision") or setting(trainer, "mixed_precision")
    if in_force or named not in {None, "32-true", "no"}:
        return Refused("mixed precision is in force already, or another precision than 32 bits")
    return Refused("most of the weights take 2 bytes already") if evidence.code.half_weights else None


def weights(code: CodeFacts) -> int:
    """Return the bytes of the weights that are trained: of the trainer's model, else of the notebook's."""
    found = [one.model for one in code.trainers if one.model is not None]
    return sum(model.parameter_bytes for model in found or code.models)


def _checkpoint_blocks(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> Refused | None:
    del incident, evidence
    if setting(trainer, "activation_checkpointing") or setting(trainer, "gradient_checkpointing"):
        return Refused("the trainer recomputes activations already")
    return None


def adams(evidence: Evidence) -> tuple[OptimizerFacts, ...] | Refused | None:
    """Return the Adam that a trainer has made by its setting ``optim``, None where no such trainer is running."""
    trainer = owner(evidence.code, "lighter_optimizer")
    if trainer is None:
        return None
    if trainer.given_optimizer:
        return Refused("the trainer was given its optimizer, so its setting `optim` does not decide")
    if setting(trainer, "optim") not in _ADAMS:
        return Refused(f"the trainer steps by `{setting(trainer, 'optim')}`, not by AdamW of torch")
    return (trainer.optimizer,) if trainer.optimizer is not None else Refused("the trainer has made no optimizer yet")


def _chunked_inference(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    size = setting(trainer, "per_device_eval_batch_size")
    room = evidence.census.bytes_of(Role.ACTIVATION) + (incident.requested or 0)
    if type(size) is not int or not room:
        return Refused("no activations were found that smaller batches could save")
    by_samples = trainer.model is not None and trainer.model.type_name.endswith(_BY_SAMPLES)
    caveat = None if by_samples else "`eval_loss` averages over batches, so that smaller ones may change it a little"
    return tuple(
        Proposal(
            dose=Dose.of(chunks=chunks, through=trainer.library),
            effect=Effect.EQUIVALENT if by_samples else Effect.CHANGES_RESULT,
            saves=room * (chunks - 1) // chunks,
            slowdown=1 + _OVERHEAD * chunks,
            basis=f"estimate: 1/{chunks} of {format_size(room)} of activations and request at a time",
            caveat=caveat,
        )
        for chunks in _PARTS
        if size % chunks == 0
    ) or Refused(f"an evaluation batch of {size} samples has no half")


def _offload_predictions(
    trainer: TrainerFacts, incident: Incident, evidence: Evidence
) -> tuple[Proposal, ...] | Refused:
    del incident
    if kind_of_device(evidence) == "cpu":
        return Refused("the predictions of the trainer are in host memory already")
    if setting(trainer, "eval_accumulation_steps") is not None:
        return Refused("the trainer moves predictions to host memory already (`eval_accumulation_steps`)")
    if not trainer.gathered_bytes:
        return Refused("the trainer had gathered no predictions")
    return (
        Proposal(
            effect=Effect.EXACT,
            saves=trainer.gathered_bytes,
            basis=f"measured: the trainer had gathered {format_size(trainer.gathered_bytes)} of predictions",
        ),
    )


_Proposer = Callable[[TrainerFacts, "Incident", Evidence], tuple[Proposal, ...] | Refused | None]
_PROPOSERS: Final[dict[str, _Proposer]] = {
    "micro_batch": _micro_batch,
    "smaller_batch": _smaller_batch,
    "autocast": _autocast,
    "checkpoint_blocks": _checkpoint_blocks,
    "chunked_inference": _chunked_inference,
    "offload_predictions": _offload_predictions,
}
