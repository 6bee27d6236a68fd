"""What the report says: one sentence for each memory, weights by model, limits that are near, and what is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import cases
import pytest
from seen import Seen

from oomdoctor.errors import UsageError
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.memory import Census, Holding, HostMemory, Role
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.views import html, text
from oomdoctor.views.displayed import Report
from oomdoctor.views.document import Document
from oomdoctor.views.growth import compare
from oomdoctor.views.holders import Holders, holders
from oomdoctor.views.host_card import host_bar, process_bar
from oomdoctor.views.memory_report import absences, cards, focus, growth_rows, survey


def _of(found: Evidence, **options: object) -> list[str]:
    return [card.headline for card in cards(found, **options)]  # type: ignore[arg-type]


def _facts(found: Evidence, card: int, **options: object) -> dict[str, tuple[str, str]]:
    rows = cards(found, **options)[card].facts  # type: ignore[arg-type]
    assert len({fact.name for fact in rows}) == len(rows), "each fact has a name of its own"
    return {fact.name: (fact.figure, fact.why) for fact in rows}


def test_the_headline_tells_how_full_it_is_and_what_of() -> None:
    assert _of(cases.evidence()) == [
        "cuda:0: 7.50 GiB of 8.00 GiB in use; 66 % is activations, most of it in `loss.grad_fn (encoder.layers)`.",
        "host memory: 22.5 GiB of 64.0 GiB in use, 5.20 GiB of it by this process.",
    ]


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        (
            {"allocated": 0, "reserved": 7 * GIB, "free": GIB},
            "0 B of 8.00 GiB in use and 7.00 GiB more reserved, not in use.",
        ),
        ({"allocated": 0, "reserved": 0, "free": GIB, "elsewhere": 6 * GIB}, "86 % is used by other processes."),
        ({"allocated": 0, "reserved": 0, "free": 7 * GIB, "context": GIB}, "100 % is the CUDA context and libraries."),
        ({"allocated": 0, "reserved": 0, "free": 8 * GIB}, "0 B of 8.00 GiB in use."),
    ],
)
def test_the_headline_blames_whoever_has_most(changes: dict[str, object], share: str) -> None:
    empty = Census(device="cuda:0", found=0, allocated=0)
    found = cases.evidence(devices=(cases.device(**changes),), censuses=(empty,))
    assert _of(found)[0].endswith(share)


@pytest.mark.parametrize(
    ("reserved", "clause"),
    [
        (4 * GIB - MIB, "3.00 GiB of 8.00 GiB in use;"),
        (4.2 * GIB, "3.00 GiB of 8.00 GiB in use and 1.20 GiB more reserved, not in use;"),
    ],
)
def test_the_headline_names_a_role_and_its_holder_and_the_cache_only_beside_it(reserved: float, clause: str) -> None:
    acts = tuple(
        Holding(bytes=size * MIB, device="cuda:0", role=Role.ACTIVATION, path=path)
        for path, size in (("acts[0:12]", 600), ("a", 500), ("b", 436))
    )
    held = Census(
        device="cuda:0", found=1536 * MIB, allocated=3 * GIB, roles=((Role.ACTIVATION, 1536 * MIB),), holdings=acts
    )
    card = cases.device(allocated=3 * GIB, reserved=int(reserved), free=8 * GIB - int(reserved))
    (first, _) = _of(cases.evidence(devices=(card,), censuses=(held,)))
    assert first == f"cuda:0: {clause} 50 % is activations, the largest share in `acts[0:12]`."


def test_the_headline_names_the_largest_role_beside_others_who_have_more() -> None:
    assert _of(cases.crowded().evidence)[0].endswith(
        "in use; 50 % is used by other processes, 41 % is the batch in `batch`."
    )


def test_without_a_total_the_headline_says_what_is_held() -> None:
    unknown = Unavailable("no driver")
    found = cases.evidence(devices=(cases.device(total=unknown, free=unknown),))
    assert _of(found)[0].startswith("cuda:0: 7.05 GiB in use; 71 % is activations")
    assert _of(cases.unavailable().evidence)[0] == "cuda:0: how much is in use is not known."


def test_the_tensors_of_the_host_stand_below_the_device() -> None:
    titles = [card.title for card in cards(cases.crowded().evidence)]
    assert titles == ["cuda:0", "host memory"]
    host = cards(cases.crowded().evidence)[1]
    assert [row.path for row in host.holders.rows] == ["dataset.tensors[0]", "staging"]
    assert "5.20 GiB of it by this process (3.70 GiB of that is no tensor)" in host.headline
    assert "; tensors take 1.50 GiB, 67 % of it your tensors in `dataset.tensors[0]`" in host.headline
    assert host.aside == "strictest limit: the limit of the memory cgroup"


def test_this_process_has_a_bar_of_its_own_with_its_tensors_and_the_rest() -> None:
    bar = process_bar(cases.crowded_host(), cases.host_census(), simulated=GIB)
    assert bar is not None
    assert [(segment.kind, segment.size) for segment in bar.segments] == [
        ("user_tensor", "1.00 GiB"),
        ("pinned_host", "512 MiB"),
        ("simulated", "1.00 GiB"),
        ("process", "2.70 GiB"),
    ]
    assert bar.budget == "5.20 GiB"
    assert process_bar(cases.crowded_host(), None) is None
    assert [bar.title for bar in cards(cases.crowded().evidence)[1].bars] == [
        "host memory (memory cgroup)",
        "this process",
    ]


def test_the_hosts_bar_shows_this_process_as_one() -> None:
    bar = host_bar(cases.crowded_host())
    assert bar is not None
    assert [(segment.kind, segment.size) for segment in bar.segments] == [
        ("process", "5.20 GiB"),
        ("children", "6.30 GiB"),
        ("outside", "3.70 GiB"),
        ("free", "819 MiB"),
    ]
    assert bar.budget == "16.0 GiB"
    assert sum(segment.ratio for segment in bar.segments) == pytest.approx(1)


def _weights(top: int = 10, layers: int = 6) -> Holders:
    return holders(cases.weights_census(layers=layers), (cases.MODEL,), top=top)


def test_weights_are_one_row_for_each_role_and_a_large_one_stands_by_itself() -> None:
    assert [(row.size, row.role, row.path, row.detail) for row in _weights().rows] == [
        ("1.20 GiB", "parameters", "model.embedding.weight", "float32 [64000, 5033]"),
        ("480 MiB", "optimizer state", "optimizer.state", "12 tensors float32"),
        ("240 MiB", "parameters", "model, the rest", "6 parameters float32"),
        ("240 MiB", "gradients", "model", "6 gradients float32"),
    ]
    assert _weights().rows[3].frees == "optimizer.zero_grad(set_to_none=True)"


def test_who_asks_for_more_sees_each_weight() -> None:
    paths = [row.path for row in _weights(top=40).rows]
    assert len(paths) == 25
    assert "model.layers[3].weight.grad" in paths
    assert _weights(top=2).more == "and 2 smaller holders, 480 MiB in all"


@pytest.mark.parametrize("layers", [2, 3, 8, 40])
def test_the_rows_of_a_model_do_not_depend_on_how_deep_it_is(layers: int) -> None:
    census = cases.weights_census(layers=layers)
    equal = replace(census, holdings=census.holdings[1:], found=census.found - census.holdings[0].bytes)
    rows = holders(equal, (cases.MODEL,)).rows
    assert [(row.path, row.detail) for row in rows] == [
        ("optimizer.state", f"{2 * layers} tensors float32"),
        ("model", f"{layers} parameters float32"),
        ("model", f"{layers} gradients float32"),
    ]


def test_a_weight_that_outweighs_a_small_group_gets_no_row_of_its_own() -> None:
    census = cases.weights_census(layers=60)
    assert "model" in [row.path for row in holders(census, (cases.MODEL,)).rows]
    assert "model.embedding.weight" not in [row.path for row in holders(census, (cases.MODEL,)).rows]


def _rows(*held: Holding) -> list[tuple[str, str]]:
    census = Census(device="cuda:0", found=sum(one.bytes for one in held), allocated=0, holdings=held)
    return [(row.path, row.detail) for row in holders(census, ()).rows]


def _items(role: Role, *paths: str) -> list[Holding]:
    return [Holding(bytes=MIB, device="cuda:0", role=role, path=path, dtype="float16", shape=(1,)) for path in paths]


def test_a_cache_is_one_row_and_so_are_the_many_items_of_a_container() -> None:
    cache = _items(Role.KV_CACHE, "kv[0][0]", "kv[0][1]")
    many = _items(Role.USER_TENSOR, *(f"acts[{n}]['x']" for n in range(4)))
    few = _items(Role.USER_TENSOR, "pair[0]", "pair[1]", "pair[2]")
    graphs = _items(Role.GRAPH_KEPT_ALIVE, *(f"losses[{n}] → graph" for n in range(4)))
    local = _items(Role.ACTIVATION, *(f"local `xs[{n}]` of forward at In[5] line 3" for n in range(4)))
    nameless = _items(Role.ACTIVATION, "(no name leads here)")
    assert sorted({path for path, _ in _rows(*cache, *many, *few, *graphs, *local, *nameless)}) == [
        "(no name leads here)",
        "acts[…]",
        "kv",
        "local `xs[…]` of forward at In[5] line 3",
        "losses[…] → graph",
        "pair[0]",
        "pair[1]",
        "pair[2]",
    ]
    assert dict(_rows(*cache, *many))["kv"] == "2 tensors float16"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["del model, h", "del model, b, h"], "del model, h, b"),
        (["del model", "del model"], "del model"),
        (["del model", None], None),
        (["del model", "%xdel _7"], None),
        (["del model, a, b, c", "del model, d, e, f"], None),
        (["del model", "del b; x.grad = None"], None),
    ],
)
def test_a_row_for_several_holders_has_the_line_that_frees_all_of_them(
    lines: list[str | None], told: str | None
) -> None:
    paths = ("model.a", "model.b")
    held = [replace(one, frees=line) for one, line in zip(_items(Role.PARAMETER, *paths), lines, strict=True)]
    census = Census(device="cuda:0", found=2 * MIB, allocated=0, holdings=tuple(held))
    assert [row.frees for row in holders(census, (cases.MODEL,)).rows] == [told]


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"model.up.a": 40, "model.up.b": 31, "model.down": 25}, "model.up (71 %), model.down (25 %)"),
        ({"model.h[0].up": 30, "model.h[1].up": 30, "model.h[2].up": 30}, "90 % of it saved in model.h"),
        ({"model.h[0].up": 96, "model.head": 4}, "96 % of it saved in model.h[0].up"),
        ({"model.h[0].up": 40, "model.head": 4}, None),
        ({"other.up": 100}, None),
        ({}, None),
    ],
)
def test_a_row_for_a_graph_names_the_modules_that_most_of_it_was_saved_in(
    saved: dict[str, int], told: str | None
) -> None:
    graph = Holding(
        bytes=100 * MIB,
        device="cuda:0",
        role=Role.ACTIVATION,
        path="loss → graph",
        count=100,
        dtype="float16",
        shape=(512, 1024),
        saved_in=tuple((module, size * MIB) for module, size in saved.items()),
    )
    rows = []
    for held in (graph, replace(graph, path="local `h` of forward at In[5] line 3")):
        census = Census(device="cuda:0", found=100 * MIB, allocated=0, holdings=(held,))
        rows += [row.detail for row in holders(census, (cases.MODEL,)).rows]
    tensors = "100 tensors float16 [512, 1024]"
    listed = "" if told is None else f"; {told}" if "of it" in told else f"; most of it saved in {told}"
    assert rows == [f"{tensors}{listed}", tensors]


def test_graphs_in_one_row_were_saved_in_the_modules_of_each() -> None:
    graphs = _items(Role.GRAPH_KEPT_ALIVE, *(f"losses[{n}] → graph" for n in range(4)))
    parts = [(("model.a", MIB * 3 // 4), ("model.b", MIB // 4))] * 3 + [(("model.b", MIB),)]
    held = tuple(replace(one, saved_in=saved) for one, saved in zip(graphs, parts, strict=True))
    census = Census(device="cuda:0", found=4 * MIB, allocated=0, holdings=held)
    (row,) = holders(census, (cases.MODEL,)).rows
    assert row.path == "losses[…] → graph"
    assert row.detail == "4 tensors float16; most of it saved in model.a (56 %), model.b (44 %)"


@pytest.mark.parametrize("view", [html.render, text.render])
def test_names_of_modules_stay_text(view: Callable[[Document], str]) -> None:
    module = f"model._modules[{cases.HOSTILE!r}].of[{cases.CONTROL}]"
    graph = Holding(bytes=MIB, device="cuda:0", role=Role.ACTIVATION, path="loss → graph", saved_in=((module, MIB),))
    census = Census(device="cuda:0", found=MIB, allocated=MIB, roles=((Role.ACTIVATION, MIB),), holdings=(graph,))
    shown = view(survey(cases.evidence(censuses=(census,), code=CodeFacts(models=(cases.MODEL,)))))
    assert "of it saved in" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    if view is html.render:
        assert "img" not in Seen(shown).tags


def test_what_hangs_on_a_nameless_parameter_belongs_to_the_optimizer_as_well() -> None:
    state = _items(
        Role.OPTIMIZER_STATE, *["opt → state of a parameter of opt['exp_avg']"] * 3, "opt.state[w]['exp_avg']"
    )
    assert _rows(*state) == [("opt.state", "4 tensors float16")]


@pytest.mark.parametrize(
    ("count", "size", "dtype", "says"),
    [
        (1, 4 * MIB, "float32", "float32 [1024, 1024]"),
        (4, 16 * MIB, "float32", "4 tensors float32 [1024, 1024]"),
        (11, 20 * MIB, "float32", "11 tensors, largest float32 [1024, 1024]"),
        (2, 2 * MIB, "mystery", "2 tensors, largest mystery [1024, 1024]"),
        (1, 9 * MIB, "float32", "float32 [1024, 1024], a view of a larger storage"),
        (2, 9 * MIB, "float32", "2 tensors, largest float32 [1024, 1024], a view of a larger storage"),
    ],
)
def test_a_shape_is_said_of_what_has_it(count: int, size: int, dtype: str, says: str) -> None:
    held = Holding(
        bytes=size, device="cuda:0", role=Role.USER_TENSOR, path="x", count=count, dtype=dtype, shape=(1024, 1024)
    )
    assert _rows(held) == [("x", says)]


def test_grouping_loses_no_byte_and_keeps_what_is_no_weight() -> None:
    census = cases.weights_census()
    mine = Holding(bytes=30 * GIB, device="cuda:0", role=Role.USER_TENSOR, path="model_inputs.weight")
    both = replace(census, holdings=(*census.holdings, mine), found=census.found + mine.bytes)
    rows = holders(both, (cases.MODEL,)).rows
    assert rows[0].path == "model_inputs.weight"
    assert len(rows) == 4, "the embedding is below a tenth of all now, and one of the model's parameters"
    assert rows[1].detail == "7 parameters float32"


def test_small_holders_are_summed() -> None:
    tiny = tuple(
        Holding(bytes=MIB, device="cuda:0", role=Role.USER_TENSOR, path=f"tiny_{n}", frees=f"del tiny_{n}")
        for n in range(8)
    )
    census = replace(cases.census(), holdings=(*cases.census().holdings, *tiny))
    assert [row.path for row in holders(census, ()).rows if row.path.startswith("tiny")] == []
    assert [row.share for row in holders(census, (), top=20).rows if row.path == "tiny_0"] == ["<1 %"]


@pytest.mark.parametrize(("found", "says"), [(1 << 40, "100.0 %"), ((1 << 40) - MIB, "99.9 %"), (1 << 39, "50.0 %")])
def test_the_unexplained_rest_is_always_told(found: int, says: str) -> None:
    told = holders(Census(device="cuda:0", found=found, allocated=1 << 40), ()).accounted
    assert told is not None
    assert told.startswith(f"Accounted for {says} of allocated")
    assert ("nothing is unexplained" in told) is (found == 1 << 40)


def test_all_that_the_allocator_and_the_driver_tell_has_a_row() -> None:
    facts = _facts(cases.crowded().evidence, 0)
    assert facts["of it inactive split"][0] == "614 MiB"
    assert "fragmentation" in facts["of it inactive split"][1]
    assert facts["private pool CUDA graph 1"][0] == "512 MiB"
    assert facts["CUDA context and libraries"][0] == "412 MiB"
    assert facts["other processes"] == ("3.54 GiB", "2 processes")
    assert facts["pid 4711"] == ("3.50 GiB", "python train.py --config large.yaml")
    assert facts["pid 4712"] == ("?", "a process that cannot be named")
    assert "pid 4242" not in facts, "this process is not among the others"
    assert facts["retries"][0] == "4"
    assert facts["cap"][0] == "6.00 GiB"
    aside = cards(cases.crowded().evidence)[0].aside
    assert aside == "NVIDIA H200, driver 570.86; total: cudaMemGetInfo"


def test_only_limits_that_are_near_are_told_unless_all_are_asked_for() -> None:
    near, every = _facts(cases.crowded().evidence, 1), _facts(cases.crowded().evidence, 1, top=50)
    assert {"the memory cgroup", "/dev/shm", "open files"} <= near.keys()
    assert not {"memory mappings", "committed memory"} & near.keys()
    assert {"memory mappings", "committed memory"} <= every.keys()
    assert every["open files"] == ("88 %", "900 of 1024")
    assert (
        "near the limit: the memory cgroup (95 %), /dev/shm (88 %), open files (88 %)"
        in _of(cases.crowded().evidence)[1]
    )


def test_what_shows_that_memory_was_short_is_told() -> None:
    facts = _facts(cases.crowded().evidence, 1)
    assert facts["killed for lack of memory"] == ("2", "by the kernel in this memory cgroup, which ran out 3 times")
    assert facts["swap in use"][0] == "1.50 GiB"
    assert facts["memory pressure"][0] == "12 %"
    assert facts["7 DataLoader workers"][0] == "6.30 GiB"
    quiet = _facts(cases.evidence(), 1)
    assert set(quiet) == {"this process"}
    assert "outside tensors" not in quiet, "tensors were not searched for"


def test_the_page_cache_is_spoken_of_where_it_is_in_question() -> None:
    dirty = cases.evidence(host=cases.host(reclaimable=GIB, tmpfs=20 * GIB))
    clean = cases.evidence(host=cases.host(reclaimable=23 * GIB))
    assert "page cache" in _facts(dirty, 1)
    assert "page cache" not in _facts(clean, 1)
    assert "page cache" in _facts(clean, 1, top=11)
    assert "page cache" in _facts(cases.crowded().evidence, 1), "a memory cgroup near its limit counts it as used"


def test_what_is_no_tensor_is_told_where_it_is_most_of_the_process() -> None:
    figure, why = _facts(cases.crowded().evidence, 1)["outside tensors"]
    assert figure == "3.70 GiB"
    assert "NumPy arrays" in why
    small = replace(cases.crowded_host(), rss=2 * GIB)
    assert "outside tensors" not in _facts(replace(cases.crowded().evidence, host=small), 1)


def _blind_host(reason: str) -> HostMemory:
    names = ("uss", "pss", "swap_used", "cgroup_used", "cgroup_limit", "shm_total", "shm_free")
    return cases.host(**dict.fromkeys(names, Unavailable(reason)))


def test_what_is_missing_is_named_once_in_the_whole_report() -> None:
    found = cases.evidence(
        devices=(
            cases.device(context=Unavailable("there is no NVML"), elsewhere=Unavailable("there is no NVML")),
            cases.device(name="cuda:1", context=Unavailable("there is no NVML"), free=Unavailable("it hides")),
            cases.device(name="cuda:2", free=Unavailable("it hides as well")),
        ),
        host=_blind_host("/proc is not mounted"),
    )
    lines = absences(found, (("NVML", Unavailable("there is no NVML")),))
    assert lines == (
        "Not on this machine: NVML (there is no NVML).",
        (
            "Not available: free (it hides); free of cuda:2 (it hides as well); "
            "swap, memory cgroup, /dev/shm, USS, PSS (/proc is not mounted)."
        ),
    )
    for shown in (text.render(survey(found)), Seen(html.render(survey(found))).text):
        assert shown.count("/proc is not mounted") == 1
        assert shown.count("(it hides)") == 1


def test_what_the_machine_lacks_is_one_line_with_each_reason_once() -> None:
    built = "torch 2.13.0+cpu is built without"
    absent = (
        ("CUDA", Unavailable(f"{built} CUDA and ROCm")),
        ("XPU", Unavailable(f"{built} XPU (Intel)")),
        ("NVML", Unavailable("this machine has no NVIDIA driver")),
        ("MPS", Unavailable("this process has not used MPS (Apple) yet")),
    )
    found = cases.evidence(host=cases.host(cgroup_used=0))
    assert absences(found, absent) == (
        "Not on this machine: CUDA, XPU (torch 2.13.0+cpu is built without them); NVML (no NVIDIA driver).",
        "Not available: MPS (this process has not used MPS (Apple) yet).",
    )
    (alone,) = absences(found, absent[:1])
    assert alone == "Not on this machine: CUDA (torch 2.13.0+cpu is built without it)."


def test_that_there_is_no_limit_and_what_nobody_asked_for_is_not_missing() -> None:
    assert absences(cases.evidence(host=cases.host(cgroup_used=0))) == ()


@pytest.mark.parametrize(("name", "title"), [("cuda", "cuda:10"), ("cuda:1", "cuda:1"), ("cuda:10", "cuda:10")])
def test_one_device_alone(name: str, title: str) -> None:
    found = cases.evidence(
        devices=(cases.device(name="cuda:10"), cases.device(name="cuda:1"), cases.device(name="cpu", total=64 * GIB)),
        censuses=(replace(cases.census(), device="cuda:1"), cases.host_census()),
    )
    alone = focus(found, name)
    assert [card.title for card in cards(alone)] == [title, "host memory"]
    assert [card.title for card in cards(focus(found, "cpu"))] == ["host memory"]
    with pytest.raises(UsageError, match=r"no device 'tpu' is in use: there is cuda:10 and cuda:1 and cpu"):
        focus(found, "tpu")


def _losses(steps: int, *, extra: tuple[Holding, ...] = ()) -> Evidence:
    graph = Holding(
        bytes=steps * 2 * MIB, device="cuda:0", role=Role.GRAPH_KEPT_ALIVE, path=f"losses[0:{steps}] → graph"
    )
    held = (graph, *extra)
    roles: dict[Role, int] = {}
    for holding in held:
        roles[holding.role] = roles.get(holding.role, 0) + holding.bytes
    size = sum(roles.values())
    census = Census(device="cuda:0", found=size, allocated=size, roles=tuple(roles.items()), holdings=held)
    card = cases.device(allocated=size, reserved=GIB)
    return cases.evidence(devices=(card,), censuses=(census,), host=cases.host(rss=GIB + steps * MIB))


def test_growth_is_told_by_role_and_by_holder() -> None:
    old = Holding(bytes=8 * MIB, device="cuda:0", role=Role.USER_TENSOR, path="cached")
    new = Holding(bytes=4 * MIB, device="cuda:0", role=Role.BATCH, path="x")
    rows = growth_rows(_losses(64, extra=(old,)), _losses(128, extra=(new,)), "the report of In[3]")
    assert rows.sentence == (
        "Since the report of In[3]: cuda:0 +124 MiB allocated, this process +64.0 MiB resident in host memory."
    )
    assert [(row.change, row.what) for row in rows.rows] == [
        ("+128 MiB", "graphs kept alive: `losses[0:128] → graph`"),
        ("-8.00 MiB", "your tensors: `cached`, gone"),
        ("+4.00 MiB", "the batch: `x`, new"),
    ]


def _mine(*held: tuple[str, int]) -> tuple[Holding, ...]:
    return tuple(Holding(bytes=n * MIB, device="cuda:0", role=Role.USER_TENSOR, path=path) for path, n in held)


def test_a_role_of_several_holders_is_told_apart_from_them() -> None:
    after = _mine(("x", 3), ("y", 2))
    rows = growth_rows(_losses(64), _losses(64, extra=after), "before").rows
    assert [(row.change, row.what) for row in rows] == [
        ("+5.00 MiB", "your tensors"),
        ("+3.00 MiB", "`x`, new"),
        ("+2.00 MiB", "`y`, new"),
    ]


def test_two_of_one_size_are_not_taken_for_a_rename() -> None:
    rows = growth_rows(_losses(64, extra=_mine(("z", 5))), _losses(64, extra=_mine(("a", 5), ("b", 5))), "before").rows
    assert sorted(row.what for row in rows) == ["`a`, new", "`b`, new", "`z`, gone", "your tensors"]


def test_the_first_step_of_a_model_is_a_change_for_each_role() -> None:
    after = cases.weights().evidence
    before = replace(after, censuses=(Census(device="cuda:0", found=0, allocated=0),))
    rows = growth_rows(before, after, "the start").rows
    assert [(row.change, row.what) for row in rows] == [
        ("+1.43 GiB", "parameters: `model`, new"),
        ("+480 MiB", "optimizer state: `optimizer.state`, new"),
        ("+240 MiB", "gradients: `model`, new"),
    ]
    deeper = [row.what for row in growth_rows(before, after, "the start", top=30).rows]
    assert "gradients: `model.layers[…].weight.grad`, new" in deeper
    assert "`model.layers[…].weight` (parameters), new" in deeper


def test_what_fell_off_the_end_of_the_list_is_not_called_gone() -> None:
    small = Holding(bytes=3 * MIB, device="cuda:0", role=Role.USER_TENSOR, path="small")
    before, after = _losses(64, extra=(small,)), _losses(64)
    cut = replace(after.census, found=after.census.found + 3 * MIB, holdings=after.census.holdings)
    assert compare(before, replace(after, censuses=(cut,))).devices[0].holders == ()
    assert [change.path for change in compare(before, after).devices[0].holders] == ["small"]


def test_a_device_that_was_not_in_use_had_nothing_on_it() -> None:
    nothing = cases.evidence(devices=(), censuses=())
    (grown,) = compare(nothing, _losses(64)).devices
    assert (grown.allocated, grown.roles) == (128 * MIB, ((Role.GRAPH_KEPT_ALIVE, 128 * MIB),))
    assert compare(_losses(64), _losses(64)).devices[0].holders == ()


def test_the_page_stands_alone_and_follows_the_theme() -> None:
    page = Report(cases.crowded().evidence).to_html()
    seen = Seen(page.removeprefix("<!doctype html>"))
    assert page.startswith("<!doctype html>")
    assert ("meta", "name", "color-scheme") in seen.attributes
    assert not {"link", "script", "style"} & set(seen.tags)
    assert all(value.startswith("data:") for _, name, value in seen.attributes if name == "src")
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page), "nothing is fetched"


def test_a_report_is_one_line_of_facts_in_a_prompt() -> None:
    assert repr(Report(cases.evidence())) == (
        "<Report: cuda:0 7.50 GiB of 8.00 GiB in use, host 22.5 GiB of 64.0 GiB in use>"
    )
    assert repr(Report(cases.unavailable().evidence)) == "<Report: cuda:0 unknown, host unknown>"
    earlier, later = Report(_losses(64)), Report(_losses(128))
    grown = later.diff(earlier)
    assert repr(grown).startswith("<Grown: Since the earlier report: cuda:0 +128 MiB allocated")


def test_a_report_says_what_grew_since_another() -> None:
    earlier, later = Report(_losses(64)), Report(_losses(128))
    grown = later.diff(earlier)
    assert "+128 MiB" in str(grown)
    assert grown.to_dict()["devices"][0]["roles"] == {"graph_kept_alive": 128 * MIB}
    assert "losses[0:128]" in grown._repr_mimebundle_()["text/html"]
