"""Shorter sequences: what is beyond a length is cut off.

Activations grow with the length of the sequences, and those of plain attention with its square. The length is changed
where a tokenizer is told it, if everything that was made with it can be made anew; else the batch is cut in the loop,
before the model is given it. What stands beyond the cut is not learnt from: for texts of which the beginning tells most
that is a small loss, for others it is not.

There is no live form: whether a model may be given less than it asks for is in the code that calls it.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from oomdoctor.fixes._activations import why_not_training
from oomdoctor.fixes._batch_step import before_model
from oomdoctor.fixes._chunks import layer, model_facts
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program.book import Book, Number, calls
from oomdoctor.program.replay import LOADERS, exchange_numbers

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_DIVISORS: Final = (2, 4, 8)
_SHORTEST: Final = 16
_WHOLE: Final = re.compile(r"^(torch\.)?(u?int(8|16|32|64)|long|bool)$")
_TOKENIZER: Final = re.compile(r"(^|\.|_)(tokenizer|tok|processor)$|\.(batch_encode_plus|encode_plus)$", re.IGNORECASE)
_MAKES: Final = re.compile(
    LOADERS.pattern + r"|^(\w*tokenizer|tok)(\.(batch_encode_plus|encode_plus))?$|^torch\.(tensor|stack|cat)$"
)


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose a half, a quarter and an eighth of the longest sequence in the batch."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    if (why := why_not_training(evidence) or _why_not(evidence, loops)) is not None:
        return Refused(why)
    length = _length(evidence)
    if length is None:
        return Refused("the census found no batch of token numbers, samples by length")
    scales = evidence.census.bytes_of(Role.ACTIVATION) + (incident.requested or 0)
    if not scales:
        return Refused("no activations were found that shorter sequences could save")
    return tuple(
        Proposal(
            dose=Dose.of(length=length // one),
            effect=Effect.CHANGES_RESULT,
            saves=scales - scales // one,
            slowdown=1 / one,
            basis=f"analytic estimate: {format_size(scales)} of activations and request grow with the length: "
            f"1/{one} of it remains",
            caveat=f"what stands beyond {length // one} of {length} tokens is cut off and not learnt from",
        )
        for one in _DIVISORS
        if length // one >= _SHORTEST
    ) or Refused(f"sequences of {length} tokens are short already")


def _why_not(evidence: Evidence, loops: list[TrainingLoop]) -> str | None:
    if not loops:
        return "no training loop was found in what the failing cell runs"
    for loop in loops:
        for text in loop.models:
            model = model_facts(evidence.code, loop, text)
            if model is not None and model.sequence_first:
                return (
                    f"{layer(model, model.sequence_first[0])} takes the batch in dimension 1, where the length would be"
                )
    return None


def _tokens(evidence: Evidence) -> list[Holding]:
    """Return the tensors of the batch that hold whole numbers, samples by length."""
    batch = [held for held in evidence.census.holdings if held.role is Role.BATCH]
    return [held for held in batch if _WHOLE.match(held.dtype or "") and len(held.shape or ()) == 2]


def _length(evidence: Evidence) -> int | None:
    return max((held.shape[1] for held in _tokens(evidence) if held.shape), default=None)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with sequences of ``dose["length"]`` tokens at most."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    if (why := _why_not(evidence, loops)) is not None:
        return Refused(why)
    length = dose.number("length")
    if any(f"[:, :{length}]" in cell.source for cell in cells.history):
        return Refused(f"the batch is cut to {length} already")
    told = _told(Book.read(cells))
    if told and max(number.value for number in told) <= length:
        return Refused(f"the tokenizer cuts to {length} or less already")
    if told:
        made = exchange_numbers(cells, {number: length for number in told if number.value > length}, _MAKES)
        if isinstance(made, Patch):
            return made
    return before_model(cells, loops, lambda loop, names: _cut(evidence, loop, names, length))


def _told(book: Book) -> list[Number]:
    """Return the numbers that tokenizers are given as ``max_length`` with truncation on."""
    found: dict[int, Number] = {}
    for page in book.pages:
        for call in calls(page.tree):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            cuts = "truncation" in given and ast.unparse(given["truncation"]) not in {"False", "None"}
            if _TOKENIZER.search(ast.unparse(call.func)) and cuts and "max_length" in given:
                for number in book.numbers(given["max_length"], book.place(page, call)):
                    found[id(number.node)] = number
    return list(found.values())


def _cut(evidence: Evidence, loop: TrainingLoop, names: set[str], length: int) -> str | Refused:
    """Return the line that cuts the batch of ``loop``, of which the model is given ``names``."""
    longest = _length(evidence)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for held in evidence.census.holdings:
        if held.role is Role.BATCH and held.shape:
            root = re.match(r"(?:local `)?(\w+)", held.path)
            shapes.setdefault(root[1] if root else "", []).append(held.shape)
    # A name that was moved to a device has the batch under the name that it was given then.
    batch = [name for name in dict.fromkeys((*loop.batch, *sorted(names))) if name in shapes]
    if len(loop.batch) == 1 and batch == [loop.batch[0]] and len(shapes[batch[0]]) > 1:
        (name,) = batch
        if all(len(shape) == 2 and shape[1] == longest for shape in shapes[name]):
            return f"{name} = {{key: value[:, :{length}].contiguous() for key, value in {name}.items()}}"
        if all(len(shape) == 1 or (len(shape) == 2 and shape[1] == longest) for shape in shapes[name]):
            value = f"value[:, :{length}].contiguous() if value.dim() > 1 else value"
            return f"{name} = {{key: {value} for key, value in {name}.items()}}"
        return Refused(f"`{name}` holds tensors of other lengths, which may belong to the tokens one by one")
    missing = [name for name in loop.batch if name not in shapes and name not in {"_", "i", "step", "idx"}]
    if missing or not batch:
        return Refused(f"the shape of `{(missing or ['the batch'])[0]}` was not seen, so how to cut it is not known")
    long = [name for name in batch if any(len(shape) == 2 and shape[1] == longest for shape in shapes[name])]
    if not set(long) & names or any(len(s) > 1 for name in batch if name not in long for s in shapes[name]):
        return Refused("the tensors of the batch differ in their length, so how to cut them is not known")
    # Contiguous, as the whole batch was: what comes after may call ``view``.
    return f"{', '.join(long)} = {', '.join(f'{name}[:, :{length}].contiguous()' for name in long)}"


FIX: Final = Fix(
    id="truncate_sequence",
    title="Train on shorter sequences",
    effect=Effect.CHANGES_RESULT,
    cost="what is cut off is not learnt from; faster",
    propose=propose,
    apply=None,
    patch=patch,
)
