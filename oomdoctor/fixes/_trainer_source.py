"""The settings of trainers, read and written in the cells: what each fix is called there, and what writes it.

A trainer's loop is in no cell, so fixes that rewrite loops find nothing to do. What they stand for is a keyword of the
call that makes its settings. Only that call is changed, and the loader's batch size where the trainer is handed a
loader; what was made from it since is made anew. A setting whose value in the cells is not the one that was in force
is left alone: something else sets it.

The loader that a trainer is handed: where its batch size is written down, and what else its length decides.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

import libcst as cst

from oomdoctor.fixes._batch_sizes import loader_sizes, sizes_of
from oomdoctor.fixes._precision_dtype import kind_of_device
from oomdoctor.fixes._unfit import Unfit, need, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, TrainerFacts, TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Patch
from oomdoctor.model.session import Cells
from oomdoctor.program import arguments, rewriting
from oomdoctor.program.book import Book, Number, Page, Place, calls
from oomdoctor.program.names import call_name
from oomdoctor.program.replay import LOADERS, exchanged, node_of, write
from oomdoctor.program.rewriting import text_of

_COUNTING: Final = ("limit_train_batches", "overfit_batches", "val_check_interval", "fast_dev_run")
_SCHEDULES: Final = re.compile(r"sched|warmup|OneCycle|Cosine", re.IGNORECASE)
_LENGTH: Final = re.compile(r"\blen\(\w*(loader|dl)\w*\)", re.IGNORECASE)
_MANUAL: Final = re.compile(r"\bautomatic_optimization\s*=\s*False\b")


class _Term(NamedTuple):
    """A keyword and what is written for it.

    Attributes:
        does: how what is there is changed: divided (``//``) or multiplied (``*``) by a value of the dose, or replaced.
        by: that value, by its name in the dose; with ``:`` for ``does``, what is written as it stands.
    """

    keyword: str
    does: str
    by: str


_MIXED: Final = {
    "transformers": ("{}", "True"),
    "lightning": ("precision", '"{}-mixed"'),
    "accelerate": ("mixed_precision", '"{}"'),
}
_BITS: Final = {"bfloat16": "bf16", "float16": "fp16"}
_EIGHT_BITS: Final = {"bitsandbytes": '"adamw_8bit"', "torchao": '"adamw_torch_8bit"'}

_Terms: TypeAlias = Callable[[TrainerFacts, Dose], tuple[_Term, ...]]


def _mixed(trainer: TrainerFacts, dose: Dose) -> tuple[_Term, ...]:
    keyword, text = _MIXED[trainer.library]
    bits = _BITS[str(dose["dtype"])]
    bits = bits.replace("fp16", "16") if trainer.library == "lightning" else bits
    return (_Term(keyword.format(bits), ":", text.format(bits)),)


_SETTINGS: Final[Mapping[tuple[str, str], _Terms]] = {
    ("transformers", "micro_batch"): lambda *_: (
        _Term("per_device_train_batch_size", "//", "parts"),
        _Term("gradient_accumulation_steps", "*", "parts"),
    ),
    ("lightning", "micro_batch"): lambda *_: (_Term("accumulate_grad_batches", "*", "parts"),),
    ("accelerate", "micro_batch"): lambda *_: (_Term("gradient_accumulation_steps", "*", "parts"),),
    ("transformers", "smaller_batch"): lambda *_: (_Term("per_device_train_batch_size", "=", "batch_size"),),
    ("lightning", "smaller_batch"): lambda *_: (),
    **{(library, "autocast"): _mixed for library in _MIXED},
    ("transformers", "checkpoint_blocks"): lambda trainer, _: _recomputing(trainer),
    ("transformers", "optimizer_8bit"): lambda _, dose: (_Term("optim", ":", _EIGHT_BITS[str(dose["library"])]),),
    ("transformers", "lighter_optimizer"): lambda *_: (_Term("optim", ":", '"adafactor"'),),
    ("transformers", "chunked_inference"): lambda *_: (_Term("per_device_eval_batch_size", "//", "chunks"),),
    ("transformers", "offload_predictions"): lambda *_: (_Term("eval_accumulation_steps", ":", "1"),),
}
"""What each fix is in the settings of each library.

Source: ``transformers.TrainingArguments``, ``lightning.Trainer`` and ``accelerate.Accelerator``.
"""

BATCH: Final = {"transformers": "per_device_train_batch_size", "lightning": "batch_size", "accelerate": "batch_size"}
"""What the samples in a batch are called among the settings; of a loader where the library has no such setting."""

_DEFAULTS: Final = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "accumulate_grad_batches": 1,
}
_WHEN_EVALUATING: Final = frozenset({"chunked_inference", "offload_predictions"})

_MAKES: Final = re.compile(
    LOADERS.pattern + r"|^(\w+\.){0,2}((Seq2Seq)?(TrainingArguments|Trainer)|Accelerator|\w+Callback|EarlyStopping)$"
)
"""Calls that may run again: a trainer that is made leaves what it is given as it is, but for the seed that it sets."""


def owner(code: CodeFacts, fix: str) -> TrainerFacts | None:
    """Return the trainer through whose settings ``fix`` would be made, None where it would not be."""
    phase = "evaluate" if fix in _WHEN_EVALUATING else "train"
    for one in code.trainers:
        if one.phase != phase or (one.library, fix) not in _SETTINGS:
            continue
        if one.library == "accelerate" and code.grad_disabled:
            continue
        # A plain checkpoint counts a batch twice in running statistics.
        if fix == "checkpoint_blocks" and (not one.recomputes or one.model is None or one.model.batch_norm):
            continue
        return one
    return None


def setting(trainer: TrainerFacts, keyword: str) -> int | float | str | bool | None:
    """Return a setting that was in force, None where it is not known."""
    return dict(trainer.settings).get(keyword)


def _recomputing(trainer: TrainerFacts) -> tuple[_Term, ...]:
    """Return the switch by its name in the version at hand, without the reentrant form that loses frozen inputs.

    Source: ``TrainingArguments``: ``activation_checkpointing`` since 5.23, where the older name is deprecated; before 5
    the form was reentrant if nothing was said.
    """
    known = dict(trainer.settings)
    if "activation_checkpointing" in known:
        return (_Term("activation_checkpointing", ":", "True"),)
    kwargs = _Term("gradient_checkpointing_kwargs", ":", '{"use_reentrant": False}')
    switch = _Term("gradient_checkpointing", ":", "True")
    return (switch, kwargs) if "gradient_checkpointing_kwargs" in known else (switch,)


@refusing
def patched(fix: str, cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused | None:
    """Return the cells with ``fix`` made through the settings of the trainer, None where that is not its way."""
    code = evidence.code
    trainer = owner(code, fix)
    if trainer is None:
        return None
    on_cpu = kind_of_device(evidence) == "cpu" and trainer.library == "transformers"
    if fix == "autocast" and on_cpu and not setting(trainer, "use_cpu"):
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
    if terms := _SETTINGS[trainer.library, fix](trainer, dose):
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
    if trainer.library != "transformers" and fix in {"micro_batch", "smaller_batch"}:
        if (counted := _why_counted(cells, made[0])) is not None:
            raise Unfit(counted)
        found = _numbers_in_loader(book, code, trainer.library, setting(trainer, BATCH[trainer.library]))
        size, odd = found[0].value, 0
        if fix == "smaller_batch":
            size = dose.number("batch_size")
        else:
            size, odd = divmod(size, dose.number("parts"))
        if odd:
            raise Unfit(f"a batch of {found[0].value} does not divide into {dose.number('parts')} parts")
        changes += [(number.page, number.node, cst.Integer(str(size))) for number in found]
    return write(cells, need(exchanged(changes)), _MAKES)


def _value(trainer: TrainerFacts, term: _Term, dose: Dose, given: ast.expr | None, values: set[int]) -> str:
    """Return what is to be written for ``term``.

    Args:
        given: what stands there, and ``values``: the numbers that it may be.
    """
    if term.does == ":":
        if given is not None and ast.unparse(given) == ast.unparse(ast.parse(term.by)):
            raise Unfit(f"the cells say `{term.keyword}={term.by}` already")
        return term.by
    in_force, by = setting(trainer, term.keyword), dose.number(term.by)
    values = values if given is not None else {_DEFAULTS[term.keyword]}
    if values != {in_force} or type(in_force) is not int:
        there = f"`{term.keyword}={ast.unparse(given)}`" if given is not None else f"no `{term.keyword}`"
        raise Unfit(f"the cells say {there}, and {in_force} was in force: something else sets it")
    if term.does == "=":
        return str(by)
    if given is None or isinstance(given, ast.Constant):
        return str(in_force // by if term.does == "//" else in_force * by)
    return f"{ast.unparse(given)} {term.does} {by}"


def _numbers_in_loader(book: Book, code: CodeFacts, library: str, size: object) -> tuple[Number, ...]:
    """Return the numbers that set the batch size of the loader that a trainer of ``library`` goes through.

    Args:
        size: the batch size that was in force, None where that is not known.
    """
    is_loop = library == "accelerate"
    found = need(_of_loop(book, next(loop for loop in code.loops if loop.in_failing_run)) if is_loop else _of_fit(book))
    if any(number.value != (size or found[0].value) for number in found):
        raise Unfit(f"the cells say batches of {found[0].value}, and batches of {size} were in force")
    return found


def _why_counted(cells: Cells, made: ast.Call) -> str | None:
    """Return what counts batches, and would count parts of them or more of them."""
    for keyword in made.keywords:
        if keyword.arg in _COUNTING:
            return f"`{keyword.arg}` counts batches, of which there would be more"
    texts = [cell.source for cell in cells.history]
    if any(_SCHEDULES.search(text) for text in texts) and (found := _LENGTH.search("\n".join(texts))):
        return f"`{found[0]}` may set the length of a schedule, and there would be more batches"
    if any(_MANUAL.search(text) for text in texts):
        return "the module steps its optimizer itself (`automatic_optimization = False`)"
    return None


def _of_loop(book: Book, facts: TrainingLoop) -> tuple[Number, ...] | Refused:
    """Return those of the loader that a loop goes through, from before ``prepare`` of an ``Accelerator``."""
    at = book.loop(facts)
    if at is None:
        return Refused("the loop is not where it was found before")
    inside = at[0].function
    bodies = [(at[0], inside.body)] if inside is not None else [(Place(page=p), p.tree.body) for p in book.pages]
    made: list[tuple[ast.expr, Place]] = []
    for place, body in bodies:
        for node in (one for statement in body for one in ast.walk(statement) if isinstance(one, ast.Assign)):
            names = [ast.unparse(part) for target in node.targets for part in getattr(target, "elts", [target])]
            if facts.loader in names and isinstance(node.value, ast.Call) and _makes_loader(node.value):
                made.append((node.value, place))
    found = loader_sizes(book, *made[-1]) if made else sizes_of(book, facts)
    return found if found is not None else Refused(f"what made the batches of `{facts.loader}` was not found")


def _makes_loader(call: ast.Call) -> bool:
    return call_name(call).rpartition(".")[2] == "DataLoader"


def _of_fit(book: Book) -> tuple[Number, ...] | Refused:
    """Return those of the loader that ``fit`` is given, or that ``train_dataloader`` of a class returns."""
    fits = [(page, call) for page in book.pages for call in calls(page.tree) if call_name(call).endswith(".fit")]
    for page, call in reversed(fits):
        given = [one.value for one in call.keywords if one.arg == "train_dataloaders"] + call.args[1:2]
        if given and (found := loader_sizes(book, given[0], book.place(page, call))) is not None:
            return found
        break
    methods = [(page, node) for page, node in book.functions() if node.name == "train_dataloader"]
    returned = [(p, m, r.value) for p, m in methods for r in ast.walk(m) if isinstance(r, ast.Return) and r.value]
    if len(returned) == 1:
        page, method, value = returned[0]
        found = loader_sizes(book, value, Place(page=page, function=method))
        if found is not None:
            return found
    return Refused("what made the loader that `fit` goes through was not found in the cells")
