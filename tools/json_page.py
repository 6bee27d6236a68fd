"""``make docs``: writes ``docs/json.md``, one page of what every ``to_dict`` and every ``--json`` gives.

``--check`` writes nothing and answers 1 where the page is not what the package says. Fields, types and descriptions are
those of the dataclasses of ``oomdoctor.model`` and ``views.growth``; what ``oomdoctor/model/jsonable.py`` puts together
beside them is described here, and a test holds it against real objects by way of ``schema()``, which is a JSON Schema.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from oomdoctor.model.fix import Dose
from oomdoctor.model.jsonable import SCHEMA
from oomdoctor.model.unavailable import Refused, Unavailable

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "json.md"

Schema = dict[str, Any]
"""A JSON Schema, in which ``description`` is Markdown."""

_MODULES: Final = (
    *("model.unavailable", "model.case", "model.code", "model.evidence", "model.fix", "model.incident", "model.memory"),
    *("model.peak", "model.plan", "model.session", "views.growth"),
)
_NAMES: Final[dict[str, Any]] = {
    name: value
    for module in _MODULES
    for name, value in vars(import_module(f"oomdoctor.{module}")).items()
    if not name.startswith("_")
}

_COUNTED: Final = {
    "DeviceMemory": {"switched_on", "retries", "ooms"},
    "HostMemory": {
        *("cgroup_version", "cgroup_oom_kills", "cgroup_ooms", "overcommit"),
        *("files_open", "files_limit", "maps", "maps_limit"),
    },
}
"""Fields that are ``Measured`` and no bytes."""

_BYTES: Final = {
    "Holding": {"bytes"},
    "PrivatePool": {"reserved", "allocated"},
    "HostHolding": {"bytes"},
    "JittorMemory": {"pool_used", "pool_unused", "total", "host_total", "limit"},
    "Course": {"at_peak", "lasting", "temporaries", "moved"},
    "Forecast": {"budget", "peak", "reserved"},
    "Incident": {"requested", "total", "free", "allocated", "reserved", "process_used"},
    "Outcome": {"peak", "peak_reserved"},
    "Allocations": {"size"},
    "Peak": {"allocated", "reserved", "requested", "free"},
    "Change": {"bytes"},
    "DeviceGrowth": {"allocated", "reserved", "roles"},
    "Growth": {"rss"},
    "Switch": {"before", "after"},
    "Place": {"total", "budget"},
}
"""Fields that are bytes, where neither the type nor the end of the name says so."""

_UNITS: Final = {
    ("Forecast", "slowdown"): "a factor",
    ("Finding", "confidence"): "0 to 1",
    ("Pressure", "some"): "0 to 1",
    ("Pressure", "full"): "0 to 1",
}

_INTEGER: Final[Schema] = {"type": "integer"}
_STRING: Final[Schema] = {"type": "string"}
_NULL: Final[Schema] = {"type": "null"}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _either(*parts: Schema) -> Schema:
    return {"anyOf": list(parts)}


def _described(shape: Schema, text: str, unit: str = "") -> Schema:
    return {**shape, "description": text, **({"unit": unit} if unit else {})}


def _object(text: str, properties: dict[str, Schema], *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "description": text,
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_FITS: Final = {
    "fits": _described(_either({"type": "boolean"}, _NULL), "null where it is not known or too close to say"),
    "verdict": _described(_ref("Verdict"), "the same in a word"),
}
_SCHEMA: Final = _described(_INTEGER, f"version of this shape: {SCHEMA}")
_REFUSALS: Final = _described(
    {"type": "object", "additionalProperties": _STRING}, "why not, by the ids of fixes left out"
)
_DIAGNOSIS: Final = {
    "schema": _SCHEMA,
    "incident": _described(_ref("Incident"), "the failure, as its message tells it"),
    "findings": _described(_list(_ref("Finding")), "the rules that fired, surest first"),
}


def _documents() -> dict[str, Schema]:
    """Return what the functions give that are called by users, by its name."""
    return {
        "Case": _object(
            "`oomdoctor.last_case().to_dict()`, `oomdoctor run --json PATH`: one failure from its message to its end.",
            {
                **_DIAGNOSIS,
                "evidence": _described(_ref("Evidence"), "what was found when it failed"),
                "unchanged": _described(_ref("Forecast"), "of the cell as it stands"),
                "fixes": _described(_list(_ref("Candidate")), "best first"),
                "refusals": _REFUSALS,
                "outcome": _described(_ref("Outcome"), "how it ended"),
            },
        ),
        "Report": _object(
            "`oomdoctor.report().to_dict()`, `%memreport --json`: what holds memory now.",
            {
                "schema": _SCHEMA,
                "evidence": _described(_ref("Evidence"), "with `--device`, of that device alone"),
                "growth": _described(_ref("Growth"), "with `--diff` alone, and from the second report on"),
            },
            "growth",
        ),
        "Growth": _growth(),
        "Cells": _object(
            "`%memreport --cells --json`: what each of the last cells has left.",
            {"schema": _SCHEMA, "cells": _described(_list(_ref("CellGrowth")), "in the order in which they ended")},
        ),
        "MemPlan": _object(
            "`oomdoctor.plan(…).to_dict()`, `%%memplan --json`: what a cell or a call needs that was not run.",
            {
                "schema": _SCHEMA,
                "cell": _described(_ref("Cell"), "what was planned"),
                "device": _described(_ref("Place"), "the memory that it is planned for"),
                "forecast": _described(_ref("Forecast"), "of the cell there"),
                **_FITS,
                "least": _described(_either(_ref("Least"), _NULL), "where there is no forecast"),
                "cards": _described(_list(_ref("Card")), "well-known cards that nobody else uses, smallest first"),
                "largest_batch": _described(_either(_ref("LargestBatch"), _NULL), "the largest that fits"),
                "largest_batch_why": _why("largest_batch"),
                "fixes": _described(_list(_ref("Candidate")), "best first; empty where none is needed"),
                "refusals": _REFUSALS,
                "elapsed_s": _described({"type": "number"}, "how long the plan took", "seconds"),
            },
            "largest_batch_why",
        ),
        "Explanation": _object(
            "`oomdoctor.explain(…).to_dict()`, `oomdoctor explain --json`: what the text of a failure means.",
            {
                **_DIAGNOSIS,
                "others": _described(_list(_ref("Incident")), "further, distinct failures in the same text"),
                "notes": _described(_list(_STRING), "what could not be taken into account, where there is any"),
            },
            "notes",
        ),
        "Snapshot": _object(
            "`oomdoctor explain --json snapshot.pickle`: what a snapshot of CUDA memory held, by the user's lines.",
            {"schema": _SCHEMA, "peaks": _described(_list(_ref("Peak")), "one a device, the fullest first")},
        ),
    }


def _growth() -> Schema:
    made = _fields(_NAMES["Growth"])
    made["description"] = f"`report.diff(earlier).to_dict()`: {_lowered(made['description'])}"
    return made


def _parts() -> dict[str, Schema]:
    """Return what ``jsonable`` puts together itself, and no dataclass is."""
    place, numbers = _fields(_NAMES["Place"])["properties"], _fields(_NAMES["Forecast"])["properties"]
    return {
        "Evidence": _object(
            "All that was found at one moment, the device in question first.",
            {
                "devices": _described(_list(_ref("DeviceMemory")), "every one in use, and the host's as `cpu`"),
                "host": _described(_ref("HostMemory"), "the memory of the machine"),
                "beside_tensors": _described(_list(_ref("HostHolding")), "largest first"),
                "jittor": _described(_either(_ref("JittorMemory"), _NULL), "null where it is not loaded"),
                "census": _described(_ref("Census"), "who holds what on the device in question"),
                "other_censuses": _described(_list(_ref("Census")), "on the other devices, in their order"),
                "code": _described(_ref("CodeFacts"), "what the cells and their objects show"),
            },
        ),
        "Census": _object(
            "Every storage found on one device, by role and by holder.",
            {
                "device": _described(_STRING, "its name"),
                "accounted_ratio": _described(
                    _either({"type": "number"}, _NULL),
                    "share of the allocated bytes that has a holder; null where the allocator has no count",
                    "0 to 1",
                ),
                "roles": _described(_by_role(), "bytes by [role](#role)", "bytes"),
                "holdings": _described(_list(_ref("Holding")), "largest first"),
                "notes": _described(_list(_STRING), "what holds no memory here but stands for some"),
            },
        ),
        "Candidate": _object(
            "One fix in one dose, priced; or two, where no single one fits: then ` + ` stands between their ids.",
            {
                "number": _described(_INTEGER, "what `%oomdoctor fix N` calls it, the same for the life of the case"),
                "id": _described(_STRING, "as in [fixes.md](fixes.md)"),
                "title": _described(_STRING, "what it does"),
                "dose": _described(_plain(Dose), "how strong"),
                "effect": _described(_ref("Effect"), "what it does to the results"),
                "forecast": _described(_ref("Forecast"), "of the cell with it"),
                "caveat": _described(_either(_STRING, _NULL), "what to know before taking it"),
                "patch": _described(_either(_STRING, _NULL), "the change as a unified diff"),
                "patch_why": _why("patch"),
            },
            "patch_why",
        ),
        "Card": _object(
            "A well-known card, and whether the cell fits it.",
            {**place, **{name: numbers[name] for name in ("peak", "reserved", "error_ratio")}, **_FITS},
        ),
        "Least": _object(
            "The least that a cell needs, where it could not be forecast.",
            {"peak": numbers["peak"], "basis": numbers["basis"]},
        ),
    }


def _by_role() -> Schema:
    return {"type": "object", "propertyNames": _ref("Role"), "additionalProperties": _INTEGER}


def _why(name: str) -> Schema:
    return _described(_STRING, f"why `{name}` is null; absent where it is not")


def schema() -> Schema:
    """Return all of it as one JSON Schema, in which each document and each part of one is among the ``$defs``."""
    found = {**_documents(), **_parts()}
    todo = list(found)
    while todo:
        for name in _references(found[todo.pop()]):
            if name not in found:
                found[name] = _named(_NAMES[name])
                todo.append(name)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": found}


def _references(shape: Any) -> Iterator[str]:
    if isinstance(shape, dict):
        if "$ref" in shape:
            yield shape["$ref"].rpartition("/")[2]
        for value in shape.values():
            yield from _references(value)
    elif isinstance(shape, list):
        for value in shape:
            yield from _references(value)


def _named(kind: Any) -> Schema:
    if issubclass(kind, Enum):
        return {"enum": [member.value for member in kind], "description": _summary(kind)}
    return _fields(kind)


def _fields(kind: Any) -> Schema:
    """Return the shape of a dataclass, as ``jsonable.plain`` makes it."""
    hints = get_type_hints(kind, localns=_NAMES)
    texts = _attributes(kind)
    properties: dict[str, Schema] = {}
    reasons = []
    for field in dataclasses.fields(kind):
        name, hint = field.name, hints[field.name]
        properties[name] = _described(_plain(hint), texts.get(name, ""), _unit(kind.__name__, name, hint))
        if {Unavailable, Refused} & set(get_args(hint)):
            properties[f"{name}_why"] = _why(name)
            reasons.append(f"{name}_why")
    if kind.__name__ == "Forecast":
        properties |= _FITS
    if kind.__name__ == "DeviceGrowth":
        properties["roles"] = _described(_by_role(), "bytes by [role](#role)", "bytes")
    return _object(_summary(kind), properties, *reasons)


def _plain(hint: Any) -> Schema:
    """Return the shape of what ``jsonable.plain`` makes of a value of this type."""
    simple = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
    origin, args = get_origin(hint), get_args(hint)
    if hint in simple:
        return {"type": simple[hint]}
    if hint is Dose:
        return {"type": "object", "additionalProperties": _plain(_NAMES["Value"])}
    if hint in (Unavailable, Refused):
        return _NULL
    if origin in (Union, UnionType):
        return _either(*map(_plain, args))
    if origin is tuple:
        if args[1:] == (Ellipsis,):
            return _list(_plain(args[0]))
        return {"type": "array", "prefixItems": [_plain(part) for part in args], "items": False, "minItems": len(args)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _plain(args[1])}
    if dataclasses.is_dataclass(hint) or issubclass(hint, Enum):
        return _ref(hint.__name__)
    raise TypeError(f"{hint} has no shape in JSON that tools/json_page.py knows of")


def _unit(kind: str, name: str, hint: Any) -> str:
    """Return what a number is counted in, empty where its name or its description says that."""
    if name.endswith("_s"):
        return "seconds"
    if name.endswith("_ratio"):
        return "0 to 1"
    measured = {Unavailable, int} <= set(get_args(hint)) and name not in _COUNTED.get(kind, ())
    if measured or name.endswith("_bytes") or name in _BYTES.get(kind, ()):
        return "bytes"
    return _UNITS.get((kind, name), "")


def _summary(kind: Any) -> str:
    return _markdown((inspect.getdoc(kind) or "").split("\nAttributes:")[0].split("\n\n")[0])


def _attributes(kind: Any) -> dict[str, str]:
    """Return what a docstring says of each field, one that is told of within the entry of another too."""
    _, _, block = (inspect.getdoc(kind) or "").partition("\nAttributes:\n")
    fields = [field.name for field in dataclasses.fields(kind)]
    within = re.compile(rf"; ``({'|'.join(fields)})``: |[,.] ``({'|'.join(fields)})``:? ")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", block):
        heads, _, text = " ".join(entry.split()).partition(": ")
        told, *others = (piece for piece in within.split(text) if piece is not None)
        found |= dict.fromkeys(heads.split(", "), _markdown(told))
        found |= {name: _markdown(words) for name, words in zip(others[::2], others[1::2], strict=True)}
    return found


def _markdown(text: str) -> str:
    """Return a docstring's words on one line, with the names of JSON for those of Python."""
    line = " ".join(text.split()).replace("``", "`").removesuffix(".")
    return re.sub(r"\bTrue\b", "true", re.sub(r"\bNone\b", "null", line))


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


_HEAD: Final = """\
# The JSON shape

<!-- Written by `make docs` from oomdoctor/model/ and tools/json_page.py. Change those, not this page. -->

What each `to_dict()` returns, and each `--json` writes. Sizes are whole bytes. What could not be had is null, never
zero or a text in a number's place; where a reason is known, `<name>_why` stands beside it and says it in a sentence.
Objects have all of the keys below, and no others, but for those that may be missing.

"""


def main(argv: list[str] | None = None) -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="make docs", description="Write docs/json.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is out of date")
    args = parser.parse_args(argv)
    text = page(schema())
    if args.check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date: make docs", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def page(whole: Schema) -> str:
    """Return the page in Markdown: the documents, then their parts by name."""
    shapes = whole["$defs"]
    documents = list(_documents())
    parts = [_HEAD, "| what | |\n| --- | --- |\n"]
    parts += [
        f"| [{name}](#{name.lower()}) | {_cell(shapes[name]['description'].removesuffix('.'))} |\n"
        for name in documents
    ]
    for name in [*documents, *sorted(set(shapes) - set(documents))]:
        parts.append(f"\n## {name}\n\n{shapes[name]['description'].removesuffix('.')}.\n\n")
        parts += _words(shapes[name]) if "enum" in shapes[name] else _table(shapes[name])
    return "".join(parts)


def _words(shape: Schema) -> Iterator[str]:
    yield "One of " + ", ".join(f"`{word}`" for word in shape["enum"]) + ".\n"


def _table(shape: Schema) -> Iterator[str]:
    yield "| key | type | |\n| --- | --- | --- |\n"
    properties = shape["properties"]
    for name, field in properties.items():
        if name.endswith("_why"):
            continue
        unit = f", {field['unit']}" if "unit" in field else ""
        why = f"; else `{name}_why`" if f"{name}_why" in properties else ""
        absent = "" if name in shape["required"] else "; may be missing"
        yield f"| `{name}` | {_cell(_type(field))}{unit}{why}{absent} | {_cell(field['description'])} |\n"


def _type(shape: Schema) -> str:
    """Return a shape in words."""
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in shape:
        return " or ".join(f"({_type(part)})" if "items" in part else _type(part) for part in shape["anyOf"])
    if "prefixItems" in shape:
        return "(" + ", ".join(_type(part) for part in shape["prefixItems"]) + ")"
    if shape["type"] == "array":
        return f"list of {_type(shape['items'])}"
    if shape["type"] == "object":
        return f"object of {_type(shape['additionalProperties'])}"
    return str(shape["type"])


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    sys.exit(main())
