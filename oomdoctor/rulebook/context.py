"""What rules can see: a fixed, typed table of facts, and the context that their expressions are compiled in.

A rule names facts as ``group.name``. Names and types are checked when a rule is loaded, so that a rule with a
misspelt fact is refused and does not just stay silent. A fact that is not known is null: comparing or calculating
with it makes the whole expression false, which is how a rule about the device stays silent when there is only text.
Limits: facts are numbers, words and yes or no. Bytes are numbers without a unit in their name; a share of one
is called ``_ratio``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import rule_engine

from oomdoctor.model.code import CodeFacts
from oomdoctor.model.memory import Role

Fact: TypeAlias = float | int | str | bool | None
Facts: TypeAlias = Mapping[str, Mapping[str, Fact]]
"""Facts by group and name; one that is not there is not known."""

LONGEST_TEXT: Final = 400
"""Characters of a fact that rules see: how long a search for a pattern takes depends on it."""
_INCIDENT: Final[dict[str, type]] = {
    "is_oom": bool,
    "family": str,
    "format": str,
    "device": str,
    "exc_type": str,
    "source_line": str,
    "frame": str,
    "requested": float,
    "total": float,
    "free": float,
    "allocated": float,
    "reserved": float,
    "process_used": float,
    # derived
    "on_host": bool,
    "unused": float,
    "elsewhere": float,
    "request_ratio": float,
    "allocated_ratio": float,
    "elsewhere_ratio": float,
    "contradiction": str,
}
_DEVICE: Final[dict[str, type]] = {
    "name": str,
    "simulated": bool,
    "total": float,
    "free": float,
    "allocated": float,
    "reserved": float,
    "inactive_split": float,
    "largest_free_block": float,
    "peak_allocated": float,
    "peak_reserved": float,
    "retries": float,
    "ooms": float,
    "cap": float,
    "context": float,
    "basis": str,
    "card": str,
    # of other processes alone, as the driver tells it
    "others": float,
    # of what is no single number: pools kept apart; how many other processes, and the largest of them
    "private_pools": float,
    "private_pools_unused": float,
    "processes": float,
    "other_name": str,
    "other_pid": str,
    "other_bytes": float,
    # how many devices this process uses
    "devices": float,
    # derived: of others and of this process outside of PyTorch
    "unused": float,
    "elsewhere": float,
    "elsewhere_ratio": float,
    "card_that_fits": str,
    "card_that_fits_memory": float,
}
_HOST: Final[dict[str, type]] = {
    "total": float,
    "available": float,
    "rss": float,
    "page_cache": float,
    "swap_used": float,
    "cgroup_limit": float,
    "cgroup_used": float,
    "process_limit": float,
    "process_limit_name": str,
    "process_used": float,
    "shm_total": float,
    "shm_free": float,
    "uss": float,
    "pss": float,
    "reclaimable": float,
    "dirty": float,
    "tmpfs": float,
    "swap_total": float,
    "cgroup_version": float,
    "cgroup_file": float,
    "cgroup_reclaimable": float,
    "cgroup_anon": float,
    "cgroup_tmpfs": float,
    "cgroup_oom_kills": float,
    "cgroup_ooms": float,
    "files_open": float,
    "files_limit": float,
    "maps": float,
    "maps_limit": float,
    "overcommit": float,
    "committed": float,
    "commit_limit": float,
    "malloc_free": float,
    "bare": float,
    "kept_back": float,
    "process_filled": float,
    # derived: of the limit on this process, what the bare process and what malloc holds free left out
    "program_used": float,
    "program_limit": float,
    "program_ratio": float,
    # of what is no single number
    "pressure_some_ratio": float,
    "pressure_full_ratio": float,
    "children": float,
    "children_uss": float,
}
_CENSUS: Final[dict[str, type]] = {
    "device": str,
    "found": float,
    "allocated": float,
    "accounted_ratio": float,
    # on the host: of arrays and other objects of the program
    "beside": float,
    "largest": float,
    "largest_count": float,
    "largest_path": str,
    **{role.value: float for role in Role},
    **{f"{role.value}_path": str for role in Role},
    # of the largest holding, and of the largest that is an activation
    "largest_role": str,
    "largest_last_dim": float,
    "largest_ndim": float,
    "largest_is_square": bool,
    "largest_is_logits": bool,
    "activation_last_dim": float,
    "activation_is_square": bool,
    "batch_ndim": float,
    "batch_last_dim": float,
    # of the activations, what graphs hold; of all, what no name leads to
    "saved": float,
    "nameless": float,
    "nameless_count": float,
    # of the parameters: what no name leads to, how many root modules have some, bytes of one number
    "unnamed_parameter": float,
    "models": float,
    "parameter_bytes_each": float,
    # derived
    **{f"{role.value}_ratio": float for role in Role},
    **dict.fromkeys(("saved_ratio", "nameless_ratio"), float),
}
_PLAIN: Final[Mapping[str, type]] = {
    **dict.fromkeys(("str | None", "str"), str),
    **dict.fromkeys(("int | None", "int"), float),
    **dict.fromkeys(("bool | None", "bool"), bool),
}
"""The types of facts by how ``CodeFacts`` writes them; what it gives in tuples has no single value."""
SITES: Final[Mapping[str, str]] = {
    "dataset_on_device": "batch_to_device",
    "eager_attention": "sdpa_attention",
    "loads_on_device": "load_mmap",
    "carries_state": "detach_state",
    "gathers_predictions": "offload_predictions",
    "history_append": "detach_history",
    "keeps_gradients": "set_to_none",
    "retain_graph": "drop_retain_graph",
    "undifferentiated": "no_grad_eval",
}
"""Facts that say the first site of what a fix mends, and the id of the fix."""
_CODE: Final[dict[str, type]] = {
    # as the collector gives them; see CodeFacts
    **{one.name: _PLAIN[str(one.type)] for one in fields(CodeFacts) if str(one.type) in _PLAIN},
    # told by the sites that fixes detect
    **dict.fromkeys(SITES, str),
    "training": bool,
    "evaluating": bool,
    "accumulates": bool,
    "models": float,
    "parameter_bytes": float,
    "optimizers": float,
    "optimizer": str,
    "history_appends": float,
    "stepped_bytes": float,
    "foreach": bool,
    "most_classes": float,
    "batch_norm": bool,
    "stale": str,
    # derived: what the same parameters would take in 2 bytes each, in 4 bits, and in training with Adam in fp32
    **dict.fromkeys(("half_bytes", "int4_bytes", "adam_bytes"), float),
}

SYMBOLS: Final[Mapping[str, Mapping[str, type]]] = {
    "incident": _INCIDENT,
    "device": _DEVICE,
    "host": _HOST,
    "census": _CENSUS,
    "code": _CODE,
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
    cut = {group: {name: _cut(fact) for name, fact in given.items()} for group, given in facts.items()}
    return _whole()(**{group: kind(**cut.get(group, {})) for group, kind in groups.items()})


def _cut(fact: Fact) -> Fact:
    return fact[:LONGEST_TEXT] if isinstance(fact, str) else fact
