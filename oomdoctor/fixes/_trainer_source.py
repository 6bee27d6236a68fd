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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import libcst as cst

from oomdoctor.fixes._batch_sizes import loader_sizes, sizes_of
from oomdoctor.fixes._precision_dtype import kind_of_device
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """A keyword and what is written for it.

    Attributes:
        takes: the value in the dose that divides (``//``) or multiplies (``*``) what is there, or takes its place.
        text: what is written, for every dose.
    """

    keyword: str
    does: str = "="
    takes: str = ""
    text: str = ""


_MIXED: Final = {
    ("transformers", "bfloat16"): _Term(keyword="bf16", text="True"),
    ("transformers", "float16"): _Term(keyword="fp16", text="True"),
    ("lightning", "bfloat16"): _Term(keyword="precision", text='"bf16-mixed"'),
    ("lightning", "float16"): _Term(keyword="precision", text='"16-mixed"'),
    ("accelerate", "bfloat16"): _Term(keyword="mixed_precision", text='"bf16"'),
    ("accelerate", "float16"): _Term(keyword="mixed_precision", text='"fp16"'),
}
_EIGHT_BITS: Final = {"bitsandbytes": '"adamw_8bit"', "torchao": '"adamw_torch_8bit"'}

_Terms: TypeAlias = Callable[[TrainerFacts, Dose], tuple[_Term, ...]]

_SETTINGS: Final[Mapping[tuple[str, str], _Terms]] = {
    ("transformers", "micro_batch"): lambda _, dose: (
        _Term(keyword="per_device_train_batch_size", does="//", takes="parts"),
        _Term(keyword="gradient_accumulation_steps", does="*", takes="parts"),
    ),
    ("lightning", "micro_batch"): lambda _, dose: (_Term(keyword="accumulate_grad_batches", does="*", takes="parts"),),
    ("accelerate", "micro_batch"): lambda _, dose: (
        _Term(keyword="gradient_accumulation_steps", does="*", takes="parts"),
    ),
    ("transformers", "smaller_batch"): lambda _, dose: (
        _Term(keyword="per_device_train_batch_size", takes="batch_size"),
    ),
    ("lightning", "smaller_batch"): lambda _, dose: (),
    **{
        (library, "autocast"): lambda trainer, dose: (_MIXED[trainer.library, str(dose["dtype"])],)
        for library in ("transformers", "lightning", "accelerate")
    },
    ("transformers", "checkpoint_blocks"): lambda trainer, _: _recomputing(trainer),
    ("transformers", "optimizer_8bit"): lambda _, dose: (
        _Term(keyword="optim", text=_EIGHT_BITS[str(dose["library"])]),
    ),
    ("transformers", "lighter_optimizer"): lambda _, dose: (_Term(keyword="optim", text='"adafactor"'),),
    ("transformers", "chunked_inference"): lambda _, dose: (
        _Term(keyword="per_device_eval_batch_size", does="//", takes="chunks"),
    ),
    ("transformers", "offload_predictions"): lambda _, dose: (_Term(keyword="eval_accumulation_steps", text="1"),),
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
        return (_Term(keyword="activation_checkpointing", text="True"),)
    kwargs = _Term(keyword="gradient_checkpointing_kwargs", text='{"use_reentrant": False}')
    switch = _Term(keyword="gradient_checkpointing", text="True")
    return (switch, kwargs) if "gradient_checkpointing_kwargs" in known else (switch,)


def patched(fix: str, cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused | None:
    """Return the cells with ``fix`` made through the settings of the trainer, None where that is not its way."""
    code = evidence.code
    trainer = owner(code, fix)
    if trainer is None:
        return None
    on_cpu = kind_of_device(evidence) == "cpu" and trainer.library == "transformers"
    if fix == "autocast" and on_cpu and not setting(trainer, "use_cpu"):
        return Refused("`TrainingArguments` takes `bf16` on a CPU only with `use_cpu=True`")
    if trainer.cell is None or trainer.line is None:
        return Refused("where the cells make the settings of the trainer was not found, or they do so more than once")
    book = Book.read(cells)
    page = book.page(trainer.cell)
    made = [call for call in calls(page.tree) if (call.lineno, call_name(call)) == (trainer.line, trainer.call)]
    parsed = rewriting.read(page.cell.source)
    if isinstance(parsed, Refused):
        return parsed
    old = node_of(parsed, made[0]) if made else None
    if not isinstance(old, cst.Call):
        return Refused(f"`{trainer.call}` is not called where it was found before")
    changes: list[tuple[Page, ast.expr, rewriting.New]] = []
    terms = _SETTINGS[trainer.library, fix](trainer, dose)
    if terms:
        call = _written(
            _Call(trainer=trainer, book=book, place=book.place(page, made[0]), old=made[0]), old, terms, dose
        )
        if isinstance(call, Refused):
            return call
        changes.append((page, made[0], call))
    if trainer.library != "transformers" and fix in {"micro_batch", "smaller_batch"}:
        if (counted := _why_counted(cells, made[0])) is not None:
            return Refused(counted)
        numbers = _numbers_in_loader(book, code, trainer.library, setting(trainer, BATCH[trainer.library]))
        if isinstance(numbers, Refused):
            return numbers
        size, odd = numbers[0].value, 0
        if fix == "smaller_batch":
            size = dose.number("batch_size")
        else:
            size, odd = divmod(size, dose.number("parts"))
        if odd:
            return Refused(f"a batch of {numbers[0].value} does not divide into {dose.number('parts')} parts")
        changes += [(number.page, number.node, cst.Integer(str(size))) for number in numbers]
    changed = exchanged(changes)
    return changed if isinstance(changed, Refused) else write(cells, changed, _MAKES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The call that makes the settings, as it stands."""

    trainer: TrainerFacts
    book: Book
    place: Place
    old: ast.Call

    def given(self, keyword: str) -> ast.expr | None:
        """Return what is written for ``keyword``."""
        return next((one.value for one in self.old.keywords if one.arg == keyword), None)


def _written(made: _Call, old: cst.Call, terms: Iterable[_Term], dose: Dose) -> cst.Call | Refused:
    """Return the call with each of ``terms`` in it."""
    if any(one.arg is None for one in made.old.keywords) or len(made.old.args) > 1:
        return Refused(f"`{made.trainer.call}` takes settings by position or from a dictionary: set it there")
    new = old
    after: str | None = None
    for term in terms:
        value = _value(made, term, dose)
        if isinstance(value, Refused):
            return value
        quotes = text_of(old)
        if "'" in quotes and '"' not in quotes:
            value = value.replace('"', "'")
        new, after = arguments.with_keyword(new, term.keyword, value, after), term.keyword
    return new


def _value(made: _Call, term: _Term, dose: Dose) -> str | Refused:
    """Return what is to be written for ``term``, or why it cannot be told from what is there."""
    given, in_force = made.given(term.keyword), setting(made.trainer, term.keyword)
    if term.text:
        if given is not None and ast.unparse(given) == ast.unparse(ast.parse(term.text)):
            return Refused(f"the cells say `{term.keyword}={term.text}` already")
        return term.text
    known = [given] if isinstance(given, ast.Constant) else []
    values = {number.value for number in made.book.numbers(given, made.place)} if given is not None else set[int]()
    if given is None:
        values = {_DEFAULTS[term.keyword]}
    if values != {in_force} or type(in_force) is not int:
        there = f"`{term.keyword}={ast.unparse(given)}`" if given is not None else f"no `{term.keyword}`"
        return Refused(f"the cells say {there}, and {in_force} was in force: something else sets it")
    by = dose.number(term.takes)
    if term.does == "=":
        return str(by)
    if given is None or known:
        return str(in_force // by if term.does == "//" else in_force * by)
    return f"{ast.unparse(given)} {term.does} {by}"


def _numbers_in_loader(book: Book, code: CodeFacts, library: str, size: object) -> tuple[Number, ...] | Refused:
    """Return the numbers that set the batch size of the loader that a trainer of ``library`` goes through.

    Args:
        size: the batch size that was in force, None where that is not known.
    """
    if library == "accelerate":
        found = _of_loop(book, next(loop for loop in code.loops if loop.in_failing_run))
    else:
        found = _of_fit(book)
    if isinstance(found, Refused):
        return found
    if any(number.value != (size or found[0].value) for number in found):
        return Refused(f"the cells say batches of {found[0].value}, and batches of {size} were in force")
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
