"""Facts of the machine: what was measured and is no single number, and what the driver tells beside what is derived."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from observed import site

from oomdoctor.model.code import CodeFacts, ModelFacts, OptimizerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import (
    Census,
    DeviceMemory,
    DeviceProcess,
    Holding,
    HostHolding,
    HostMemory,
    HostProcess,
    Measured,
    Pressure,
    PrivatePool,
    Role,
)
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.rulebook.context import SYMBOLS, Fact, bound, kind_of
from oomdoctor.rulebook.facts import complete, facts_of

NONE = Unavailable("not read here")


def facts(
    device: dict[str, Any] | None = None,
    holdings: tuple[Holding, ...] = (),
    code: CodeFacts | None = None,
    requested: int = MIB,
    **host: Any,
) -> dict[str, dict[str, Fact]]:
    memory = {"total": 8 * GIB, "free": GIB, "allocated": 4 * GIB, "reserved": 5 * GIB} | (device or {})
    evidence = Evidence(
        devices=(DeviceMemory(name="cuda:0", tensor_device="cuda:0", **memory),),
        host=HostMemory(**{field.name: NONE for field in fields(HostMemory)} | host),
        censuses=(Census(device="cuda:0", found=0, allocated=0, holdings=holdings),),
        code=code or CodeFacts(),
    )
    incident = Incident(is_oom=True, family=Family.CUDA, device="cuda:0", requested=requested)
    found = facts_of(incident, evidence)
    bound(found)
    return {group: dict(values) for group, values in found.items()}


def worker(uss: Measured) -> HostProcess:
    return HostProcess(pid=1, label="DataLoader worker 0", rss=GIB, uss=uss, pss=NONE)


@pytest.mark.parametrize("kind", [HostMemory, DeviceMemory])
def test_every_measured_number_is_a_fact(kind: type) -> None:
    group, renamed = ("host", {}) if kind is HostMemory else ("device", {"elsewhere": "others"})
    measured = [field.name for field in fields(kind) if field.type == "Measured"]
    assert len(measured) > 10
    assert not [name for name in measured if kind_of(f"{group}.{renamed.get(name, name)}") is not float]


def test_what_was_measured_is_told_and_what_was_not_is_null() -> None:
    host = facts(cgroup_oom_kills=2, tmpfs=3 * GIB, overcommit=2)["host"]
    assert (host["cgroup_oom_kills"], host["tmpfs"], host["overcommit"], host["dirty"]) == (2, 3 * GIB, 2, None)
    assert set(host) <= set(SYMBOLS["host"])


def test_pressure_is_two_ratios() -> None:
    host = facts(pressure=Pressure(some=0.5, full=0.25))["host"]
    assert (host["pressure_some_ratio"], host["pressure_full_ratio"]) == (0.5, 0.25)
    assert facts()["host"].get("pressure_some_ratio") is None


def test_children_are_their_number_and_what_is_theirs_alone() -> None:
    host = facts(children=(worker(GIB), worker(NONE), worker(2 * GIB)))["host"]
    assert (host["children"], host["children_uss"]) == (3, 3 * GIB)
    assert facts(children=())["host"]["children"] == 0
    assert facts()["host"].get("children") is None


def test_what_others_hold_is_told_beside_all_that_is_outside_of_the_pool() -> None:
    device = facts({"elsewhere": GIB, "context": 512 * MIB, "retries": 3, "ooms": 1})["device"]
    assert (device["others"], device["elsewhere"], device["context"]) == (GIB, 2 * GIB, 512 * MIB)
    assert (device["retries"], device["ooms"], device["cap"]) == (3, 1, None)
    assert facts()["device"]["others"] is None


def holding(role: Role, size: int, **more: Any) -> Holding:
    return Holding(bytes=size, device="cuda:0", role=role, **{"path": "x", "expression": "x", **more})


def test_every_fact_of_the_code_is_told() -> None:
    told = {field.name: str(field.type) for field in fields(CodeFacts)}
    words = {name: name for name, kind in told.items() if kind == "str | None"}
    flags = {name: True for name, kind in told.items() if kind in {"bool", "bool | None"}}
    numbers = {name: at for at, (name, kind) in enumerate(told.items(), 2) if kind in {"int", "int | None"}}
    given = words | flags | numbers
    assert len(given) > 20
    assert {kind.partition("[")[0] for name, kind in told.items() if name not in given} == {"Mapping", "tuple"}
    code = facts(code=CodeFacts(**given))["code"]
    assert {name: code[name] for name in given} == given
    assert {name: kind_of(f"code.{name}") for name in given} == (
        dict.fromkeys(words, str) | dict.fromkeys(flags, bool) | dict.fromkeys(numbers, float)
    )
    plain = facts()["code"]
    assert (plain["retain_graph"], plain["num_workers"], plain["autocast"], plain["reruns"]) == (None, None, False, 0)


def test_the_largest_holding_is_described() -> None:
    scores = holding(Role.ACTIVATION, GIB, path="scores", shape=(8, 12, 512, 512))
    weight = holding(Role.PARAMETER, 2 * GIB, path="head.weight", shape=(50257, 768))
    first = facts(holdings=(scores,))["census"]
    assert (first["largest_role"], first["largest_last_dim"], first["largest_ndim"]) == ("activation", 512, 4)
    assert (first["largest_is_square"], first["activation_last_dim"]) == (True, 512)
    both = facts(holdings=(weight, scores))["census"]
    assert (both["largest_role"], both["largest_path"], both["largest_last_dim"]) == ("parameter", "head.weight", 768)
    assert (both["largest_is_square"], both["activation_last_dim"]) == (False, 512)
    assert facts()["census"].get("largest_role") is None


@pytest.mark.parametrize(
    ("shape", "square"),
    [((512, 512), False), ((4, 255, 255), False), ((4, 256, 256), True), ((4, 256, 257), False), (None, None)],
)
def test_scores_of_attention_are_square(shape: tuple[int, ...] | None, square: bool | None) -> None:
    assert facts(holdings=(holding(Role.ACTIVATION, GIB, shape=shape),))["census"]["largest_is_square"] is square


STEPPED = "opt.param_groups[0]['params'][0]"


def test_parameters_that_only_an_optimizer_or_a_graph_holds_have_no_name() -> None:
    held = (
        holding(Role.PARAMETER, 4 * MIB, path="model.fc.weight", expression="model.fc.weight"),
        holding(Role.PARAMETER, MIB, path="net.ema.w", expression="net.ema.w"),
        holding(Role.PARAMETER, MIB, path="net.body.w", expression="net.body.w"),
        holding(Role.PARAMETER, 8 * MIB, path=STEPPED, expression="opt.param_groups[0]", frees="del opt"),
        holding(Role.PARAMETER, 64 * MIB, path=STEPPED, expression="opt.param_groups[0]", frees=None),
        holding(Role.PARAMETER, 128 * MIB, path=STEPPED, expression="opt.param_groups[0]", frees="del opt, image"),
        holding(Role.PARAMETER, 16 * MIB, path="losses[0:9] → graph", expression="losses[0:9]"),
        holding(Role.PARAMETER, 32 * MIB, path="(no name leads here)", expression=None),
        holding(Role.ACTIVATION, GIB, path="(no name leads here)", expression=None),
    )
    roots = [ModelFacts(path=p, type_name="N", training=True, parameter_bytes=1) for p in ("net.ema", "net.body")]
    census = facts(holdings=held, code=CodeFacts(models=tuple(roots)))["census"]
    assert (census["unnamed_parameter"], census["models"]) == (56 * MIB, 3)
    assert facts(holdings=held)["census"]["models"] == 2


def test_width_of_the_parameters_is_that_of_most_of_them() -> None:
    half = holding(Role.PARAMETER, 4 * MIB, dtype="bfloat16")
    single = holding(Role.PARAMETER, 6 * MIB, dtype="float32")
    assert facts(holdings=(half, single))["census"]["parameter_bytes_each"] == 2
    assert facts(holdings=(single,))["census"]["parameter_bytes_each"] == 4
    assert facts(holdings=(holding(Role.ACTIVATION, GIB, dtype="float16"),))["census"]["parameter_bytes_each"] is None


def test_neighbours_on_the_device() -> None:
    own = DeviceProcess(pid=7, bytes=4 * GIB, name="python", is_own=True)
    small = DeviceProcess(pid=8, bytes=MIB, name="Xorg")
    large = DeviceProcess(pid=9, bytes=2 * GIB, name="python3")
    untold = DeviceProcess(pid=10, bytes=NONE)
    device = facts({"processes": (own, small, untold, large)})["device"]
    assert (device["processes"], device["other_name"], device["other_pid"]) == (3, "python3", "9")
    assert device["other_bytes"] == 2 * GIB
    assert facts({"processes": (own,)})["device"]["processes"] == 0
    assert facts({"processes": (untold,)})["device"]["other_bytes"] is None
    assert facts()["device"].get("processes") is None


def test_private_pools_are_summed() -> None:
    pools = (
        PrivatePool(name="graph", reserved=3 * MIB, allocated=MIB),
        PrivatePool(name="b", reserved=MIB, allocated=0),
    )
    device = facts({"private_pools": pools, "card": "NVIDIA L4"})["device"]
    assert (device["private_pools"], device["private_pools_unused"], device["card"]) == (4 * MIB, 3 * MIB, "NVIDIA L4")
    assert facts()["device"]["private_pools"] == 0


def test_the_card_that_fits_is_told_where_this_one_does_not() -> None:
    device = facts({"total": 8 * GIB, "allocated": 7 * GIB}, requested=4 * GIB)["device"]
    assert device["card_that_fits"] == "T4 16 GB"
    assert facts({"total": 16 * GIB, "allocated": 7 * GIB}, requested=4 * GIB)["device"].get("card_that_fits") is None
    assert facts({"allocated": 7 * GIB}, requested=4000 * GIB)["device"].get("card_that_fits") is None
    assert facts({"allocated": NONE}, requested=4 * GIB)["device"].get("card_that_fits") is None


# What is sold is not what there is to use.
@pytest.mark.parametrize(
    ("need_gib", "sold"), [(14.0, "T4 16 GB"), (14.5, "L4 24 GB"), (38.0, "A100 40 GB"), (79.0, "H200 141 GB")]
)
def test_a_card_is_taken_for_what_can_be_used_of_it(need_gib: float, sold: str) -> None:
    incident: dict[str, Fact] = {"total": need_gib * GIB / 2, "allocated": need_gib * GIB / 2}
    found = complete({"incident": incident | {"requested": need_gib * GIB / 2}})["device"]
    assert found["card_that_fits"] == sold


def test_the_card_that_fits_is_found_from_the_text_alone() -> None:
    incident: dict[str, Fact] = {"total": 8 * GIB, "allocated": 7 * GIB, "requested": 4 * GIB}
    assert complete({"incident": incident})["device"]["card_that_fits"]
    assert complete({"incident": {**incident, "device": "cpu"}})["device"].get("card_that_fits") is None


def test_what_was_saved_for_backward_is_told_apart_from_what_only_runs() -> None:
    saved = holding(Role.ACTIVATION, 3 * MIB, path="loss → graph")
    running = holding(Role.ACTIVATION, MIB, path="local `x` of forward")
    garbage = holding(Role.ACTIVATION, 2 * MIB, path="(no name leads here)", count=5)
    census = facts(holdings=(saved, running, garbage))["census"]
    assert (census["saved"], census["nameless"], census["nameless_count"]) == (3 * MIB, 2 * MIB, 5)
    assert facts(holdings=(running,))["census"]["saved"] == 0
    assert facts()["census"].get("saved") is None


def test_shapes_speak_for_scores_logits_and_images() -> None:
    scores = holding(Role.ACTIVATION, GIB, shape=(8, 12, 512, 512))
    images = holding(Role.BATCH, MIB, shape=(8, 3, 512, 512), count=2)
    census = facts(holdings=(scores, images), code=CodeFacts(classes=(512, 10)))["census"]
    assert (census["activation_is_square"], census["largest_is_logits"], census["largest_count"]) == (True, True, 1)
    assert (census["batch_ndim"], census["batch_last_dim"]) == (4, 512)
    plain = facts(holdings=(holding(Role.ACTIVATION, GIB, shape=(8, 100)), images), code=CodeFacts(classes=(10,)))
    assert (plain["census"]["activation_is_square"], plain["census"]["largest_is_logits"]) == (False, False)
    assert facts(holdings=(scores,))["census"]["largest_is_logits"] is None


STALE = tuple(site("In[5] line 1: net = Net()", "rebound", name) for name in ("net", "opt"))


def test_facts_that_come_in_tuples_are_told_by_their_first_or_their_sum() -> None:
    stepper = OptimizerFacts(
        path="o", type_name="Adam", home="torch.optim.adam", parameter_bytes=MIB, largest_bytes=1, foreach=True
    )
    normed = ModelFacts(path="net", type_name="Net", training=True, parameter_bytes=1, batch_norm=("net.bn",))
    given = CodeFacts(
        steppers=(stepper, stepper),
        sites={"no_grad_eval": (site("In[5] line 3: out = net(x)"), site("In[5] line 9: pass")), "free_stale": STALE},
        classes=(10, 50257),
        models=(normed,),
    )
    code = facts(code=given)["code"]
    assert (code["stepped_bytes"], code["foreach"], code["most_classes"]) == (2 * MIB, True, 50257)
    assert (code["undifferentiated"], code["stale"]) == ("In[5] line 3: out = net(x)", "net, opt")
    assert code["batch_norm"] is True
    plain = facts()["code"]
    assert (plain["stepped_bytes"], plain["most_classes"], plain["stale"], plain["batch_norm"]) == (
        None,
        None,
        None,
        False,
    )


def test_devices_in_use_are_counted() -> None:
    assert facts()["device"]["devices"] == 1


def on_host(*, total: int = 8 * GIB, found: int, beside: int = 0, **host: Any) -> dict[str, dict[str, Fact]]:
    memory = DeviceMemory(name="cpu", tensor_device="cpu", total=total, free=GIB, allocated=found, reserved=found)
    held = Holding(bytes=found, device="cpu", role=Role.PARAMETER, path="model.weight")
    evidence = Evidence(
        devices=(memory,),
        host=HostMemory(**{field.name: NONE for field in fields(HostMemory)} | host),
        censuses=(
            Census(device="cpu", found=found, allocated=NONE, roles=((Role.PARAMETER, found),), holdings=(held,)),
        ),
        code=CodeFacts(),
        beside_tensors=(HostHolding(path="data", bytes=beside, array_bytes=beside, arrays=1, objects=0),),
    )
    found_facts = facts_of(Incident(is_oom=True, family=Family.HOST, device="cpu"), evidence)
    return {group: dict(values) for group, values in found_facts.items()}


def test_what_this_very_process_takes_of_the_host_is_not_held_by_others() -> None:
    assert on_host(found=GIB)["device"]["elsewhere"] is None


def test_a_few_tensors_are_not_what_filled_the_host() -> None:
    shares = [on_host(found=40 << 10), on_host(found=GIB, beside=3 * GIB), on_host(found=6 * GIB)]
    few, beside_arrays, alone = (one["census"]["parameter_ratio"] for one in shares)
    assert isinstance(few, float)
    assert few < 0.01
    assert (beside_arrays, alone) == (0.25, 1)


def test_of_a_limit_the_program_has_what_the_bare_process_leaves() -> None:
    host = on_host(found=GIB, process_limit=4 * GIB, process_used=3 * GIB, bare=GIB, malloc_free=GIB // 2)["host"]
    assert (host["program_used"], host["program_limit"], host["program_ratio"]) == (1.5 * GIB, 3 * GIB, 0.5)
