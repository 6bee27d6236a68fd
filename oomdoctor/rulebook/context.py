"""What rules can see: a fixed, typed table of facts, the context of their expressions, and sentences with facts.

A rule names facts as ``group.name``. Names and types are checked when a rule is loaded, so that a rule with a
misspelt fact is refused and does not just stay silent. A fact that is not known is null: comparing or calculating
with it makes the whole expression false, which is how a rule about the device stays silent when there is only text.
Limits: facts are numbers, words and yes or no. Bytes are numbers without a unit in their name; a share of one
is called ``_ratio``. A sentence names facts in braces, ``{census.activation:size} are activations``; nothing in it is
evaluated: a placeholder is a fact's name and one of four ways to print it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, fields, make_dataclass
from functools import cache
from string import Formatter
from typing import Any, Final, TypeAlias

import rule_engine

from oomdoctor.model.code import CodeFacts
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import DeviceMemory, HostMemory, JittorMemory, Role
from oomdoctor.model.sizes import format_size

Fact: TypeAlias = float | int | str | bool | None
Facts: TypeAlias = Mapping[str, Mapping[str, Fact]]
"""Facts by group and name; one that is not there is not known."""

LONGEST_TEXT: Final = 400
"""Characters of a fact that rules see: how long a search for a pattern takes depends on it."""
_PLAIN: Final[Mapping[str, type]] = {
    **dict.fromkeys(("str | None", "str", "str | Unavailable"), str),
    **dict.fromkeys(("int | None", "int", "Measured"), float),
    **dict.fromkeys(("bool | None", "bool"), bool),
}
"""The types of facts by how the dataclasses write them; what they give in tuples has no single value."""


def _of(source: type, *left_out: str) -> dict[str, type]:
    """Return the fields of a dataclass that have a single value, as the collector gives them."""
    plain = {one.name: _PLAIN[str(one.type)] for one in fields(source) if str(one.type) in _PLAIN}
    return {name: kind for name, kind in plain.items() if name not in left_out}


def _numbers(*names: str) -> dict[str, type]:
    return dict.fromkeys(names, float)


_SHARES: Final = ("unused", "elsewhere", "elsewhere_ratio")
"""What is reserved and holds nothing; what others hold, and this process outside of PyTorch."""
SITES: Final[Mapping[str, str]] = {
    "dataset_on_device": "batch_to_device",
    "eager_attention": "sdpa_attention",
    "loads_on_device": "load_mmap",
    "carries_state": "detach_state",
    "gathers_predictions": "offload_predictions",
    "accumulates_lazily": "jittor_sync",
    "history_append": "detach_history",
    "keeps_gradients": "set_to_none",
    "retain_graph": "drop_retain_graph",
    "undifferentiated": "no_grad_eval",
}
"""Facts that say the first site of what a fix mends, and the id of the fix."""

SYMBOLS: Final[Mapping[str, Mapping[str, type]]] = {
    "incident": {
        **_of(Incident, "message", "framework_frame"),
        **dict.fromkeys(("family", "source_line", "frame", "contradiction"), str),
        "on_host": bool,
        **_numbers(*_SHARES, "request_ratio", "allocated_ratio"),
        # what is unused would have served the request, and what others hold would have
        **dict.fromkeys(("fragmented", "occupied"), bool),
    },
    "device": {
        **_of(DeviceMemory, "tensor_device", "switched_on"),
        # of other processes alone, as the driver tells it; how many they are, and the largest of them
        **_numbers("others", "processes", "other_bytes"),
        **dict.fromkeys(("other_name", "other_pid"), str),
        **_numbers("private_pools", "private_pools_unused", *_SHARES),
        # how many devices this process uses
        **_numbers("devices"),
        "card_that_fits": str,
    },
    "host": {
        **_of(HostMemory),
        # of the limit on this process, what the bare process and what malloc holds free left out
        **_numbers("process_filled", "program_used", "program_limit", "program_ratio"),
        **_numbers("pressure_some_ratio", "pressure_full_ratio", "children", "children_uss"),
    },
    "census": {
        **dict.fromkeys(("device", "largest_path", "largest_role"), str),
        **_numbers("found", "allocated", "accounted_ratio"),
        # on the host: of arrays and other objects of the program, and the name that leads to most of them
        **_numbers("beside", "beside_largest", "beside_arrays"),
        **dict.fromkeys(("beside_path", "beside_grown_by"), str),
        **{role.value: float for role in Role},
        # of the largest holder of each: its path, the line that makes it hold more, the other names that lead there
        **{f"{role.value}_{told}": str for role in Role for told in ("path", "grown_by", "names")},
        **{f"{role.value}_ratio": float for role in Role},
        # of the role that has most beside activations; and what was asked for, where it is more than activations hold
        **_numbers("other_ratio", "outweighed"),
        # of the largest holding, and of the largest that is an activation or a batch
        **_numbers("largest", "largest_count", "largest_last_dim", "largest_ndim", "activation_last_dim"),
        **_numbers("batch_ndim", "batch_last_dim"),
        **dict.fromkeys(("largest_is_square", "largest_is_logits", "activation_is_square"), bool),
        # of the activations, what graphs hold, and of that what names of the program lead to, beside running layers; of
        # all, what no name leads to and what data sets hold; what the failed expression alone held
        **_numbers("saved", "saved_ratio", "left", "left_ratio", "nameless", "nameless_ratio", "nameless_count"),
        **_numbers("data_set", "data_set_ratio", "freed", "freed_ratio", "largest_ratio"),
        # of the parameters: what no name leads to, how many root modules have some, bytes of one number
        **_numbers("unnamed_parameter", "models", "parameter_bytes_each"),
        **dict.fromkeys(("unnamed_parameter_path", "model_names"), str),
        # the model that most activations were saved in
        "activation_model": str,
        **_numbers("activation_of_model"),
        # weights that nothing trains beside a model that is trained: the largest, by one of three names
        **_numbers("second", "second_ratio"),
        **dict.fromkeys(("second_model", "second_copy", "second_average"), str),
        # and copies of its weights that containers hold
        **_numbers("kept_copies", "kept_copies_ratio", "kept_copies_count"),
        **dict.fromkeys(("kept_copies_path", "kept_copies_grown_by"), str),
    },
    "jittor": {
        **_of(JittorMemory, "held", "alive", "operators"),
        # variables that are held and that are alive, and operators of its graph
        **_numbers("held", "alive", "operators", "unused_ratio", "largest"),
        "largest_path": str,
    },
    "code": {
        **_of(CodeFacts),
        **dict.fromkeys((*SITES, "optimizer", "optimizer_path", "stale"), str),
        **dict.fromkeys(("training", "evaluating", "accumulates", "foreach", "batch_norm"), bool),
        # the failing line is of a training and ran with gradients on
        "differentiated": bool,
        **_numbers("models", "parameter_bytes", "optimizers", "history_appends", "stepped_bytes", "most_classes"),
        # dense convolutions, and depthwise separable ones in their place; repeated blocks, half of them, one for all
        **_numbers("convolution_bytes", "separable_bytes", "repeats", "repeated_bytes", "halved_bytes", "shared_bytes"),
        "repeated_path": str,
        # what the parameters would take in 2 bytes each, in 4 bits, and in training with Adam in fp32
        **_numbers("half_bytes", "int4_bytes", "adam_bytes"),
    },
}
"""Every fact that there is, with its type, by group and name."""


@cache
def _groups() -> dict[str, type]:
    return {
        group: make_dataclass(
            group.capitalize() + "Facts",
            [(name, kind, field(default=None)) for name, kind in names.items()],
            frozen=True,
            slots=True,
        )
        for group, names in SYMBOLS.items()
    }


@cache
def _whole() -> type:
    return make_dataclass("AllFacts", list(_groups().items()), frozen=True, slots=True)


@cache
def engine_context() -> rule_engine.Context:
    """Return the context that rules are compiled in: it knows the facts with their types and nothing else."""
    return rule_engine.Context(
        type_resolver=rule_engine.type_resolver_from_dataclass(_whole()), resolver=rule_engine.resolve_attribute
    )


def kind_of(path: str) -> type | None:
    """Return the type of the fact ``group.name``, None where there is no such fact."""
    group, _, name = path.partition(".")
    return SYMBOLS.get(group, {}).get(name)


def bound(facts: Facts) -> Any:
    """Return the facts as the object that compiled rules are matched against."""
    groups = _groups()
    cut = {
        group: {name: fact[:LONGEST_TEXT] if isinstance(fact, str) else fact for name, fact in given.items()}
        for group, given in facts.items()
    }
    return _whole()(**{group: kind(**cut.get(group, {})) for group, kind in groups.items()})


_WAYS: Final[Mapping[str | None, Callable[[float], str]]] = {
    "size": lambda number: format_size(int(number)),
    "percent": lambda number: f"{number:.0%}",
    "count": lambda number: f"{number:,.0f}",
}


def problems(sentence: str) -> list[str]:
    """Return what is wrong with a sentence, one text per fault."""
    try:
        places = [part for part in Formatter().parse(sentence) if part[1] is not None]
        if any(conversion for *_, conversion in places):
            raise ValueError("'!' and a letter in braces mean nothing here")
    except ValueError as error:
        return [f"the sentence does not parse: {error}"]
    return [text for _, path, way, _ in places if (text := _problem(path or "", way or ""))]


def _problem(path: str, way: str) -> str | None:
    kind = kind_of(path)
    if kind is None:
        return f"there is no fact {path!r}"
    if way == "":
        return None if kind is str else f"{path} is a number: write {{{path}:size}}, :percent or :count"
    if way not in _WAYS:
        return f"{path} cannot be printed as {way!r}: there are {', '.join(map(str, _WAYS))}"
    return None if kind is float else f"{path} is not a number and cannot be printed as {way}"


def render(sentence: str, facts: Facts) -> str | None:
    """Return the sentence with the facts in place, None where one of them is not known."""
    out = []
    for literal, path, way, _ in Formatter().parse(sentence):
        out.append(literal)
        if path is not None:
            group, _, name = path.partition(".")
            value = facts.get(group, {}).get(name)
            if value is None:
                return None
            out.append(_WAYS[way](float(value)) if way in _WAYS else str(value))
    return "".join(out)
