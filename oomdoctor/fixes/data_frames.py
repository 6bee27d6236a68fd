"""What pandas makes larger than it has to be: dense indicator columns, texts beside one another, numbers of 64 bits.

``sparse_dummies``: ``get_dummies`` makes a column for each value that occurs, of a byte for each row. With
``sparse=True`` only the entries that are not zero are kept, five bytes for each row. ``category_columns``: texts that a
reader of pandas makes are objects; as a category each is kept once, and a row takes one to four bytes.
``narrow_columns``: numbers with a point are read as float64; as float32 they take half and keep 7 digits instead of 16.
Which columns these are is told by the first 10,000 rows of a file, which the changed line reads before. What each
saves: `benchmarks/results/data_frames.txt`. None keeps the result bit for bit, so none is taken without asking.
Sources: https://pandas.pydata.org/docs/user_guide/sparse.html, https://pandas.pydata.org/docs/user_guide/scale.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeAlias

import libcst as cst

from oomdoctor.fixes._construction_sites import keyword
from oomdoctor.fixes._preconditions import asking_line, check_host, is_opened
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.fixes.host_loads import calls_in_line
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import with_keyword
from oomdoctor.program.rewriting import text_of

Propose: TypeAlias = Callable[[Incident, Evidence], tuple[Proposal, ...] | Refused]

_DUMMIES: Final = frozenset({"pd.get_dummies", "pandas.get_dummies"})
_READERS: Final = frozenset(f"{root}.{name}" for root in ("pd", "pandas") for name in ("read_csv", "read_table"))
_MAKES_NONE: Final = "the line that ran out of memory makes no indicator columns that are dense"
_READS_NONE: Final = "the line that ran out of memory reads no text file whose types are left to pandas"
_SHAPE: Final = re.compile(r"with shape \((\d+), (\d+)\)")
_SPARSE_BYTES: Final = 5
"""Of an entry that is kept: a value of one byte and a place of four. Source: ``SparseArray`` with an ``IntIndex``."""
_ROWS: Final = 10_000
_TYPES: Final = {
    "category_columns": (
        '{{name: "category" for name, texts in {head}.select_dtypes(exclude=["number", "bool"]).items() '
        f"if texts.nunique() < {_ROWS // 2}}}}}"
    ),
    "narrow_columns": '{{name: "float32" for name in {head}.select_dtypes("float64")}}',
}
_CAVEATS: Final = {
    "category_columns": "columns of texts become categories, which compare and join as such",
    "narrow_columns": "numbers keep 7 digits instead of 16, and what is computed from them becomes float32 as well",
}


@proposing
def _propose_sparse(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    check_host(incident)
    dose = need(asking_line(incident, evidence, lambda text: _calls(text, _DUMMIES)), _MAKES_NONE)
    shape = _SHAPE.search(incident.message)
    if not incident.requested or shape is None:
        raise Unfit("how many indicator columns were asked for is not known")
    rows, columns = sorted(map(int, shape.groups()), reverse=True)
    saves = max(0, incident.requested - _SPARSE_BYTES * rows)
    need(saves, f"sparse columns of {columns} values take no less than dense ones")
    yield Proposal(
        dose=dose,
        effect=Effect.CHANGES_RESULT,
        saves=saves,
        basis=f"{format_size(incident.requested)} were asked for; five bytes a row are kept",
        caveat="the numbers stay, in columns of a sparse type",
    )


def _propose_types(fix_id: str) -> Propose:
    @proposing
    def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
        check_host(incident)
        dose = asking_line(incident, evidence, lambda text: _calls(text, _READERS) and "dtype" not in text)
        yield Proposal(
            dose=need(dose, _READS_NONE),
            effect=Effect.CHANGES_RESULT,
            saves=(incident.requested or 0) // 2,
            basis="estimate: half of what was asked for; what it saves depends on the columns",
            caveat=_CAVEATS[fix_id],
        )

    return propose


def _calls(text: str, names: frozenset[str]) -> bool:
    return any(f"{name}(" in text for name in names)


def _only_call(
    cells: Cells, dose: Dose, names: frozenset[str], none: str, *said: str
) -> tuple[rewriting.EditPlace, cst.Call]:
    """Return the one call of these functions in the line of the dose, which says none of some settings."""
    place, _, calls = calls_in_line(cells, dose, names, none)
    if len(calls) != 1 or any(keyword(calls[0], name) is not None for name in said):
        raise Unfit(none)
    return place, calls[0]


@refusing
def _patch_sparse(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    place, call = _only_call(cells, dose, _DUMMIES, _MAKES_NONE, "sparse")
    return rewriting.edited(cells, place, {call: with_keyword(call, "sparse", "True")})


@refusing
def _patch_types(fix_id: str, cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    said = ("dtype", "nrows", "chunksize", "iterator", "engine", "dtype_backend")
    place, call = _only_call(cells, dose, _READERS, _READS_NONE, *said)
    source = text_of(call.args[0].value)
    if call.args[0].keyword is not None or re.search(r"open\(|BytesIO|StringIO", source) or is_opened(cells, source):
        raise Unfit("the file is open already: the first rows could not be read before the others")
    head = text_of(with_keyword(call, "nrows", str(_ROWS)))
    return rewriting.edited(cells, place, {call: with_keyword(call, "dtype", _TYPES[fix_id].format(head=head))})


FIXES: Final = (
    Fix(
        id="sparse_dummies",
        title="Keep only the indicators that are set",
        effect=Effect.CHANGES_RESULT,
        cost="columns of a sparse type",
        propose=_propose_sparse,
        patch=_patch_sparse,
    ),
    Fix(
        id="category_columns",
        title="Read columns of repeated texts as categories",
        effect=Effect.CHANGES_RESULT,
        cost="columns of another type",
        propose=_propose_types("category_columns"),
        patch=partial(_patch_types, "category_columns"),
    ),
    Fix(
        id="narrow_columns",
        title="Read numbers as float32 instead of float64",
        effect=Effect.CHANGES_RESULT,
        cost="7 digits instead of 16",
        propose=_propose_types("narrow_columns"),
        patch=partial(_patch_types, "narrow_columns"),
    ),
)
