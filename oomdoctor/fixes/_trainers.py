"""Fixes made through the settings of a trainer: what each is called there, what it promises, and what writes it.

What fixes do to a loop in the cells is, for a trainer, a keyword of the call that makes its settings. Only that call is
changed, and the loader's batch size where the trainer is handed a loader. A setting whose value in the cells is not the
one that was in force is left alone: something else sets it.

Raising the accumulation keeps the gradients only if the trainer weighs the parts of a batch as the batch does, and that
differs: ``transformers.Trainer`` passes the number of labels to models that take it, and divides by the number of parts
where the model takes no such argument; Lightning gives each part the same share of a full batch.
Source: ``Trainer.training_step``, ``ClosureResult.from_training_step_output``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

import libcst as cst

from oomdoctor.fixes._batch_sizes import check_not_counted, sizes_of_fit, smaller
from oomdoctor.fixes._preconditions import check_short, kind_of_device, layer, passing
from oomdoctor.fixes._refusals import OVERHEAD, PARTS, Unfit, check, in_parts_of, need, refusing
from oomdoctor.model import Cells, Dose, Effect, Evidence, Incident, Patch, Proposal, Refused
from oomdoctor.model.code import CodeFacts, OptimizerFacts, TrainerFacts
from oomdoctor.model.sizes import format_size
from oomdoctor.program import arguments, rewriting
from oomdoctor.program.earlier_cells import LOADERS, exchanged, node_of, write
from oomdoctor.program.literals import Book, Page, calls
from oomdoctor.program.names import call_name
from oomdoctor.program.rewriting import text_of

_ADAMS: Final = frozenset({"adamw_torch", "adamw_torch_fused", "adamw_hf"})
_BY_SAMPLES: Final = ("ForSequenceClassification", "ForImageClassification")
"""Models whose loss is a mean over samples, so that batches of another size leave its mean as it is."""


class _Term(NamedTuple):
    """A keyword and what is written for it.

    What is there is divided (``//``) or multiplied (``*``) by a value of the dose, or replaced by it (``=``); with
    ``:``, ``by`` is written as it stands.
    """

    keyword: str
    does: str
    by: str


_MIXED: Final = {
    "transformers": ("{}", "True", {"bfloat16": "bf16", "float16": "fp16"}),
    "lightning": ("precision", '"{}-mixed"', {"bfloat16": "bf16", "float16": "16"}),
}
_EIGHT_BITS: Final = {"bitsandbytes": '"adamw_8bit"', "torchao": '"adamw_torch_8bit"'}


def _mixed(trainer: TrainerFacts, dose: Dose) -> tuple[_Term, ...]:
    keyword, text, bits = _MIXED[trainer.library]
    named = bits[str(dose["dtype"])]
    return (_Term(keyword.format(named), ":", text.format(named)),)


def _recomputing(trainer: TrainerFacts, _: Dose) -> tuple[_Term, ...]:
    """Return the switch by its name in the version at hand, without the reentrant form that loses frozen inputs."""
    known = dict(trainer.settings)
    if "activation_checkpointing" in known:
        return (_Term("activation_checkpointing", ":", "True"),)
    kwargs = _Term("gradient_checkpointing_kwargs", ":", '{"use_reentrant": False}')
    return (_Term("gradient_checkpointing", ":", "True"), *([kwargs] if kwargs.keyword in known else []))


_SETTINGS: Final[Mapping[tuple[str, str], tuple[_Term, ...] | Callable[[TrainerFacts, Dose], tuple[_Term, ...]]]] = {
    ("transformers", "micro_batch"): (
        _Term("per_device_train_batch_size", "//", "parts"),
        _Term("gradient_accumulation_steps", "*", "parts"),
    ),
    ("lightning", "micro_batch"): (_Term("accumulate_grad_batches", "*", "parts"),),
    ("transformers", "smaller_batch"): (_Term("per_device_train_batch_size", "=", "batch_size"),),
    ("lightning", "smaller_batch"): (),
    **{(library, "autocast"): _mixed for library in _MIXED},
    ("transformers", "checkpoint_blocks"): _recomputing,
    ("transformers", "optimizer_8bit"): lambda _, dose: (_Term("optim", ":", _EIGHT_BITS[str(dose["library"])]),),
    ("transformers", "lighter_optimizer"): (_Term("optim", ":", '"adafactor"'),),
    ("transformers", "chunked_inference"): (_Term("per_device_eval_batch_size", "//", "chunks"),),
    ("transformers", "offload_predictions"): (_Term("eval_accumulation_steps", ":", "1"),),
}
"""What each fix is in the settings of each library.

Source: ``transformers.TrainingArguments`` and ``lightning.Trainer``.
"""

_BATCH: Final = {"transformers": "per_device_train_batch_size", "lightning": "batch_size"}
"""What the samples in a batch are called among the settings; of a loader where the library has no such setting."""
_DEFAULTS: Final = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "accumulate_grad_batches": 1,
}
_WHEN_EVALUATING: Final = frozenset({"chunked_inference", "offload_predictions"})
_MAKES: Final = re.compile(
    LOADERS.pattern + r"|^(\w+\.){0,2}((Seq2Seq)?(TrainingArguments|Trainer)|\w+Callback|EarlyStopping)$"
)
"""Calls that may run again: a trainer that is made leaves what it is given as it is, but for the seed that it sets."""


def owner(code: CodeFacts, fix: str) -> TrainerFacts | None:
    """Return the trainer through whose settings ``fix`` would be made, None where it would not be."""
    phase = "evaluate" if fix in _WHEN_EVALUATING else "train"
    for one in code.trainers:
        # A plain checkpoint counts a batch twice in running statistics.
        can_recompute = one.recomputes and one.model is not None and not one.model.batch_norm
        if one.phase == phase and (one.library, fix) in _SETTINGS and (fix != "checkpoint_blocks" or can_recompute):
            return one
    return None


def _set(trainer: TrainerFacts, keyword: str) -> int | float | str | bool | None:
    """Return a setting that was in force, None where it is not known."""
    return dict(trainer.settings).get(keyword)


@refusing
def patched(fix: str, cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused | None:
    """Return the cells with ``fix`` made through the settings of the trainer, None where that is not its way."""
    code = evidence.code
    trainer = owner(code, fix)
    if trainer is None:
        return None
    on_cpu = kind_of_device(evidence) == "cpu" and trainer.library == "transformers"
    if fix == "autocast" and on_cpu and not _set(trainer, "use_cpu"):
        raise Unfit("`TrainingArguments` takes `bf16` on a CPU only with `use_cpu=True`")
    if trainer.cell is None or trainer.line is None:
        raise Unfit("where the cells make the settings of the trainer was not found, or they do so more than once")
    book = Book.read(cells)
    page = book.page(trainer.cell)
    made = [call for call in calls(page.tree) if (call.lineno, call_name(call)) == (trainer.line, trainer.call)]
    old = node_of(need(rewriting.read(page.cell.source)), made[0]) if made else None
    if not isinstance(old, cst.Call):
        raise Unfit(f"`{trainer.call}` is not called where it was found before")
    changes: list[tuple[Page, ast.expr, rewriting.New]] = []
    terms = _SETTINGS[trainer.library, fix]
    if terms := terms if isinstance(terms, tuple) else terms(trainer, dose):
        given = {one.arg: one.value for one in made[0].keywords}
        if None in given or len(made[0].args) > 1:
            raise Unfit(f"`{trainer.call}` takes settings by position or from a dictionary: set it there")
        new, after, place = old, None, book.place(page, made[0])
        is_single = "'" in text_of(old) and '"' not in text_of(old)
        for term in terms:
            value = given.get(term.keyword)
            numbers = {number.value for number in book.numbers(value, place)} if value is not None else set[int]()
            text = _value(trainer, term, dose, value, numbers)
            text = text.replace('"', "'") if is_single else text
            new, after = arguments.with_keyword(new, term.keyword, text, after), term.keyword
        changes.append((page, made[0], new))
    if trainer.library == "lightning" and fix in {"micro_batch", "smaller_batch"}:
        check_not_counted(cells, made[0])
        found, in_force = sizes_of_fit(book), _set(trainer, _BATCH[trainer.library])
        if any(number.value != in_force for number in found):
            raise Unfit(f"the cells say batches of {found[0].value}, and batches of {in_force} were in force")
        parts = dose.number("parts") if fix == "micro_batch" else 1
        size = dose.number("batch_size") if fix == "smaller_batch" else found[0].value // parts
        if found[0].value % parts:
            raise Unfit(f"a batch of {found[0].value} does not divide into {parts} parts")
        changes += [(number.page, number.node, cst.Integer(str(size))) for number in found]
    return write(cells, need(exchanged(changes)), _MAKES)


def _value(trainer: TrainerFacts, term: _Term, dose: Dose, given: ast.expr | None, values: set[int]) -> str:
    """Return what is to be written for ``term`` in the place of what is ``given``, which may be one of ``values``."""
    if term.does == ":":
        if given is not None and ast.unparse(given) == ast.unparse(ast.parse(term.by)):
            raise Unfit(f"the cells say `{term.keyword}={term.by}` already")
        return term.by
    in_force, by = _set(trainer, term.keyword), dose.number(term.by)
    values = values if given is not None else {_DEFAULTS[term.keyword]}
    if values != {in_force} or type(in_force) is not int:
        there = f"`{term.keyword}={ast.unparse(given)}`" if given is not None else f"no `{term.keyword}`"
        raise Unfit(f"the cells say {there}, and {in_force} was in force: something else sets it")
    if term.does == "=":
        return str(by)
    if given is None or isinstance(given, ast.Constant):
        return str(in_force // by if term.does == "//" else in_force * by)
    return f"{ast.unparse(given)} {term.does} {by}"


_Propose: TypeAlias = Callable[[Incident, Evidence], tuple[Proposal, ...] | Refused]


def first(fix: str) -> Callable[[_Propose], _Propose]:
    """Have ``fix`` proposed through the settings of a trainer where that is its way, and else as it is in a loop."""

    def proposing(otherwise: _Propose) -> _Propose:
        @refusing
        def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
            trainer = owner(evidence.code, fix)
            evaluates = trainer is None and any(one.phase == "evaluate" for one in evidence.code.trainers)
            if evaluates and fix in {"micro_batch", "smaller_batch", "checkpoint_blocks"}:
                raise Unfit("the trainer was evaluating, without gradients")
            found = None if trainer is None else _PROPOSERS[fix](trainer, incident, evidence)
            return otherwise(incident, evidence) if found is None else tuple(found)

        return propose

    return proposing


def _micro_batch(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    check(_couples(trainer, evidence.code))
    check_short(incident, evidence)
    size, splittable = _splittable(trainer, incident, evidence)
    caveats = tuple(_differs(trainer))
    yield from in_parts_of(
        _whole_parts(size, "a batch"),
        "parts",
        splittable,
        "activations, batch and request",
        effect=Effect.CHANGES_RESULT if caveats else Effect.EQUIVALENT,
        each=OVERHEAD,
        caveat="; ".join(caveats) or None,
        through=trainer.library,
    )


def _whole_parts(size: int, what: str) -> list[int]:
    found = [parts for parts in PARTS if size % parts == 0]
    return need(found, f"{what} of {size} samples has no half")


def _couples(trainer: TrainerFacts, code: CodeFacts) -> str | None:
    """Return why the batch cannot be taken apart."""
    if _set(trainer, "auto_find_batch_size"):
        return "the trainer looks for a batch size itself (`auto_find_batch_size`)"
    devices = _set(trainer, "_n_gpu")
    spread = _set(trainer, "deepspeed") or _set(trainer, "fsdp") or code.distributed
    if spread or (type(devices) is int and devices > 1) or (code.world_size or 1) > 1:
        return "the training is spread over devices: how they would weigh the parts of a batch was not tried"
    if trainer.model is None:
        return "the model that the trainer trains was not found"
    if trainer.model.batch_norm:
        return f"{layer(trainer.model, trainer.model.batch_norm[0])} normalises over the batch in training mode"
    return None


def _splittable(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> tuple[int, int]:
    """Return the samples in a batch, and the bytes that go with them."""
    size = _set(trainer, _BATCH[trainer.library])
    if type(size) is not int:
        raise Unfit("how many samples a batch has is not known")
    need(size != 1, "the batch has one sample: there is nothing to split")
    return size, need(passing(incident, evidence), "no activations were found that smaller parts could save")


def _differs(trainer: TrainerFacts) -> Iterator[str]:
    """Yield what comes out another way in parts."""
    model = trainer.model
    if draws := trainer.draws or (layer(model, model.dropout[0]) if model is not None and model.dropout else None):
        yield f"{draws} draws other random numbers for parts of a batch than for the whole"
    if trainer.weighs == "parts":
        yield "each part counts the same, as it should only where the loss is a mean over samples, and batches are full"
    if _set(trainer, "dataloader_drop_last") or _set(trainer, "drop_last"):
        yield "samples that `drop_last` leaves out now may make one more step in each epoch"


def _smaller_batch(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    size, scales = _splittable(trainer, incident, evidence)
    normalises = trainer.model is not None and bool(trainer.model.batch_norm)
    return smaller(size, scales, least=2 if normalises else 1)


def _autocast(trainer: TrainerFacts, _: Incident, evidence: Evidence) -> None:
    in_force = _set(trainer, "bf16") or _set(trainer, "fp16")
    if in_force or _set(trainer, "precision") not in {None, "32-true"}:
        raise Unfit("mixed precision is in force already, or another precision than 32 bits")
    need(not evidence.code.half_weights, "most of the weights take 2 bytes already")


def _checkpoint_blocks(trainer: TrainerFacts, *_: object) -> None:
    if _set(trainer, "activation_checkpointing") or _set(trainer, "gradient_checkpointing"):
        raise Unfit("the trainer recomputes activations already")


def adams(evidence: Evidence) -> tuple[OptimizerFacts, ...] | None:
    """Return the Adam that a trainer has made by its setting ``optim``, None where no such trainer is running."""
    trainer = owner(evidence.code, "lighter_optimizer")
    if trainer is None:
        return None
    need(not trainer.given_optimizer, "the trainer was given its optimizer, so its setting `optim` does not decide")
    if _set(trainer, "optim") not in _ADAMS:
        raise Unfit(f"the trainer steps by `{_set(trainer, 'optim')}`, not by AdamW of torch")
    return (need(trainer.optimizer, "the trainer has made no optimizer yet"),)


def _chunked_inference(trainer: TrainerFacts, incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    size, room = _set(trainer, "per_device_eval_batch_size"), passing(incident, evidence, batch=False)
    if type(size) is not int or not room:
        raise Unfit("no activations were found that smaller batches could save")
    by_samples = trainer.model is not None and trainer.model.type_name.endswith(_BY_SAMPLES)
    caveat = None if by_samples else "`eval_loss` averages over batches, so that smaller ones may change it a little"
    yield from in_parts_of(
        _whole_parts(size, "an evaluation batch"),
        "chunks",
        room,
        "activations and request",
        effect=Effect.EQUIVALENT if by_samples else Effect.CHANGES_RESULT,
        each=OVERHEAD,
        caveat=caveat,
        through=trainer.library,
    )


def _offload_predictions(trainer: TrainerFacts, _: Incident, evidence: Evidence) -> Iterator[Proposal]:
    need(kind_of_device(evidence) != "cpu", "the predictions of the trainer are in host memory already")
    if _set(trainer, "eval_accumulation_steps") is not None:
        raise Unfit("the trainer moves predictions to host memory already (`eval_accumulation_steps`)")
    size = need(trainer.gathered_bytes, "the trainer had gathered no predictions")
    basis = f"measured: the trainer had gathered {format_size(size)} of predictions"
    yield Proposal(effect=Effect.EXACT, saves=size, basis=basis)


_Proposer: TypeAlias = Callable[[TrainerFacts, Incident, Evidence], Iterator[Proposal] | None]
_PROPOSERS: Final[dict[str, _Proposer]] = {
    "micro_batch": _micro_batch,
    "smaller_batch": _smaller_batch,
    "autocast": _autocast,
    "checkpoint_blocks": _checkpoint_blocks,
    "chunked_inference": _chunked_inference,
    "offload_predictions": _offload_predictions,
}
