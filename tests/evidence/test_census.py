"""Who the census says holds what, by which path and in which role. Its completeness is ``test_truth.py``'s."""

from __future__ import annotations

import functools
import gc
import io
import queue
import subprocess
import sys
import warnings
import weakref
from collections import OrderedDict, deque, namedtuple
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from capabilities import tells_saved
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomdoctor.evidence import census
from oomdoctor.evidence.owners import Ledger
from oomdoctor.model.memory import Census, DeviceMemory, Holding, Role
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.alive import keep_apart
from oomdoctor.objects.frames import frames_of, locals_of
from oomdoctor.objects.named import class_attributes, output_cache, user_names
from oomdoctor.program.names import loop_results

_UNKNOWN = Unavailable("not asked in this test")
HOST = DeviceMemory(
    name="cpu", tensor_device="cpu", total=_UNKNOWN, free=_UNKNOWN, allocated=_UNKNOWN, reserved=_UNKNOWN
)


def taken(namespace: dict[str, Any], exc: BaseException | None = None, **more: Any) -> Census:
    program = census.Program(
        passed_over=frozenset({id(namespace), id(namespace.get("_oh"))}),
        names=[*user_names(namespace), *class_attributes(user_names(namespace), namespace.get("__name__"))],
        outputs=list(output_cache(namespace)),
        frames=list(frames_of(exc, {}, namespace)),
        **more,
    )
    (found,) = census.take(program, [(HOST, lambda tensor: tensor.is_cpu)])
    return found


def holding(found: Census, path: str) -> Holding:
    held = {one.path: one for one in found.holdings}
    assert path in held, sorted(held)
    return held[path]


def big(count: int = 4096) -> torch.Tensor:
    return torch.ones(count)


class Slotted:
    __slots__ = ("__private", "kept", "never_set")

    def __init__(self) -> None:
        self.kept = big()
        self.__private = big(100)


class Registry:
    shared = big()


def suspended() -> Any:
    inside = big()
    yield 1
    yield inside


def closed_over() -> Any:
    inside = big()
    return lambda: inside


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("it", big),
        ("it['a'][0]", lambda: {"a": [big()]}),
        ("it[True]", lambda: {True: big()}),
        ("it[0].kept", lambda: [Slotted()]),
        ("it.first", lambda: None),
        ("it[1]", lambda: Pair(0, big())),
        ("it[2]", lambda: deque([1, 2, big()])),
        ("it.args[0]", lambda: functools.partial(print, big())),
        ("it.gi_frame.f_locals['inside']", suspended),
        ("it.cache", lambda: None),
    ],
)
def test_every_path_can_be_typed(path: str, value: Any) -> None:
    namespace: dict[str, Any] = {"it": value()}
    if path == "it.cache":
        namespace["it"] = nn.Linear(1, 1)
        namespace["it"].cache = big()
    elif path == "it.first":
        namespace["it"] = type("Plain", (), {})()
        namespace["it"].first = big()
    elif path.startswith("it.gi_frame"):
        next(namespace["it"])
    found = holding(taken(namespace), path)
    reached = eval(found.expression, {}, namespace)
    assert found.bytes == 4 * 4096
    assert reached is not None
    if isinstance(reached, torch.Tensor):
        assert reached.nbytes == found.bytes


def test_a_name_mangled_slot_and_one_never_set_are_survived() -> None:
    found = taken({"it": Slotted()})
    assert holding(found, "it._Slotted__private").bytes == 400


@pytest.mark.parametrize(
    ("path", "expression", "value"),
    [
        ("it → inside", "it", closed_over),
        ("it → element", "it", lambda: {big()}),
        ("it → value", "it", lambda: {Pair(1, 2): big()}),
        ("it → held", "it", lambda: zip([big()], strict=True)),
    ],
)
def test_where_no_expression_leads_it_is_that_of_the_holder(path: str, expression: str, value: Any) -> None:
    found = [one for one in taken({"it": value()}).holdings if one.path.startswith("it")]
    assert [(one.path[: len(path)], one.expression) for one in found] == [(path, expression)]


def test_the_cache_of_a_function_is_found() -> None:
    @functools.lru_cache
    def made(size: int) -> torch.Tensor:
        return big(size)

    made(5000)
    (found,) = (one for one in taken({"made": made}).holdings if one.bytes == 20000)
    assert (found.path.split(" ")[0], found.expression) == ("made", "made")


def test_classes_of_the_notebook_and_modules_of_the_user_are_looked_into() -> None:
    namespace: dict[str, Any] = {"Registry": Registry, "__name__": __name__, "torch": torch}
    assert holding(taken(namespace), "Registry.shared").bytes == 4 * 4096
    mine = ModuleType("mine")
    mine.__file__ = "/home/somebody/mine.py"
    mine.table = [big()]
    assert holding(taken({"mine": mine}), "mine.table[0]").bytes == 4 * 4096


def test_items_of_a_list_are_one_holding_and_a_few_are_named() -> None:
    found = taken({"many": [big() for _ in range(128)], "few": [big(), big()], "ring": deque(big() for _ in range(30))})
    many = holding(found, "many[0:128]")
    assert (many.count, many.bytes, many.expression, many.frees) == (128, 128 * 4 * 4096, "many[0:128]", "del many")
    assert {"few[0]", "few[1]"} <= {one.path for one in found.holdings}
    assert (holding(found, "ring[0:30]").expression, holding(found, "ring[0:30]").count) == ("ring", 30)


def test_a_dict_of_many_tensors_is_one_holding() -> None:
    found = holding(taken({"state": {f"w{index}": big() for index in range(40)}}), "state.values()")
    assert (found.count, found.bytes) == (40, 40 * 4 * 4096)


def test_a_storage_has_one_owner() -> None:
    base = big()
    model = nn.Linear(64, 64)
    namespace = {"base": base, "view": base[10:20], "again": [base, base.detach()], "model": model}
    namespace |= {"tied": nn.ParameterList([model.weight]), "also": model.weight.data}
    found = taken(namespace)
    assert holding(found, "base").bytes == base.nbytes
    assert not {"view", "again[0]", "again[1]", "tied[0]", "also"} & {one.path for one in found.holdings}
    assert sum(one.count for one in found.holdings if one.role is Role.PARAMETER) == 2


@tells_saved
def test_losses_kept_with_their_graph_are_one_range_with_the_line_that_frees_them() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    losses = [model(torch.randn(256, 64)).pow(2).sum() for _ in range(8)]
    namespace = {"model": model, "losses": losses}
    graph = holding(taken(namespace), "losses[0:8] → graph")
    assert (graph.role, graph.expression, graph.frees) == (Role.GRAPH_KEPT_ALIVE, "losses[0:8]", "del losses")
    assert graph.bytes >= 8 * 256 * 64 * 4
    told = holding(taken(namespace, appends={"losses": "losses.append(loss.detach())"}), "losses[0:8] → graph")
    assert told.frees == "losses.append(loss.item())"


@tells_saved
def test_a_loss_left_by_a_step_is_kept_alive_until_its_backward() -> None:
    model = nn.Linear(64, 64)
    loss = model(torch.randn(32, 64)).exp().sum()
    namespace = {"model": model, "loss": loss}
    before = taken(namespace)
    assert before.bytes_of(Role.GRAPH_KEPT_ALIVE) >= 32 * 64 * 4
    assert taken(namespace, step_names=frozenset({"loss"})).bytes_of(Role.GRAPH_KEPT_ALIVE) == 0
    loss.backward()
    after = taken(namespace)
    assert after.bytes_of(Role.GRAPH_KEPT_ALIVE) == 0
    assert holding(after, "loss").role is Role.ACTIVATION


@tells_saved
def test_what_a_call_returned_in_this_round_is_of_the_step_in_a_container_too() -> None:
    model = nn.Linear(64, 64)
    loss = model(torch.randn(32, 64)).exp().sum()
    namespace = {"model": model, "outputs": {"loss": loss}, "losses": [loss]}
    results = loop_results("losses = []\nfor x in data:\n    outputs = model(x)\n    losses.append(outputs['loss'])\n")
    assert results == {"outputs"}
    assert loop_results("for x in data:\n    history = note(history, x)\n    state, out = model(x, state)\n") == {"out"}
    assert taken(namespace, step_results=results).bytes_of(Role.GRAPH_KEPT_ALIVE) > 0
    del namespace["losses"]
    assert taken(namespace, step_results=results).bytes_of(Role.GRAPH_KEPT_ALIVE) == 0
    assert taken(namespace).bytes_of(Role.GRAPH_KEPT_ALIVE) > 0


@tells_saved
def test_what_the_step_was_given_is_the_batch() -> None:
    model = nn.Linear(64, 64)
    data = big()
    given = torch.randn(32, 64)
    namespace = {"model": model, "data": data, "given": given, "loss": model(given).sum()}
    found = taken(namespace, step_names=frozenset({"loss", "given"}))
    assert holding(found, "given").role is Role.BATCH
    assert holding(found, "data").role is Role.USER_TENSOR


def test_gradients_optimizer_state_and_buffers_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    namespace = {"model": model, "optimizer": optimizer, "torch": torch}
    found = taken(namespace)
    sizes = sum(parameter.nbytes for parameter in model.parameters())
    assert found.bytes_of(Role.PARAMETER) == found.bytes_of(Role.GRADIENT) == sizes
    assert found.bytes_of(Role.OPTIMIZER_STATE) == 2 * sizes + 4 * 4  # and a step count for each of 4 parameters
    assert found.bytes_of(Role.BUFFER) == sum(buffer.nbytes for buffer in model.buffers())
    assert holding(found, "model[0].weight.grad").frees == "optimizer.zero_grad(set_to_none=True)"
    for one in found.holdings:
        if "no name" not in one.path:
            assert eval(one.expression, namespace).untyped_storage().nbytes() == one.bytes


def test_a_module_of_odd_names_has_paths_that_evaluate() -> None:
    model = nn.ModuleDict({"0": nn.Linear(2, 2), "a-b": nn.Linear(2, 2), "plain": nn.Linear(2, 2)})
    parameters = [one for one in taken({"model": model}).holdings if one.role is Role.PARAMETER]
    assert len(parameters) == 6
    assert {id(eval(one.expression, {"model": model})) for one in parameters} == set(map(id, model.parameters()))


def test_a_model_and_an_optimizer_in_a_function_are_told_as_such() -> None:
    def train() -> None:
        model = nn.Linear(32, 32)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        train()
    found = taken({}, caught.value)
    weight = next(one for one in found.holdings if one.role is Role.PARAMETER)
    assert weight.path.startswith("local `model.weight` of train at test_census.py line ")
    assert weight.expression == "model.weight"
    assert found.bytes_of(Role.OPTIMIZER_STATE) > 2 * found.bytes_of(Role.PARAMETER)


def test_outputs_and_earlier_tracebacks_have_roles_of_their_own() -> None:
    def fail() -> None:
        inside = big()
        raise ValueError(len(inside))

    with pytest.raises(ValueError, match="4096") as caught:
        fail()
    out = big()
    found = taken({"_oh": {7: out}, "_": out}, earlier=list(frames_of(caught.value, {}, {})))
    assert holding(found, "Out[7]").role is Role.OUTPUT_CACHE
    assert found.bytes_of(Role.TRACEBACK) == 4 * 4096


def test_a_decoders_cache_is_told_by_its_name() -> None:
    attention = nn.Module()
    attention.register_buffer("k_cache", big())
    found = taken({"attention": attention, "past_key_values": tuple((big(), big()) for _ in range(4))})
    assert found.bytes_of(Role.KV_CACHE) == 9 * 4 * 4096


@tells_saved
def test_a_checkpoint_is_not_run_again_by_looking_and_is_told() -> None:
    calls = []

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin().exp()

    output = checkpoint(run, torch.randn(64, requires_grad=True), use_reentrant=False)
    found = taken({"output": output})
    assert calls == [1]
    assert [note.split(" saved")[0] for note in found.notes] == ["2"]
    assert "torch.utils.checkpoint" in found.notes[0]


@tells_saved
def test_the_random_states_that_a_checkpoint_keeps_are_its_graphs() -> None:
    leaf = torch.randn(64, requires_grad=True)
    output = checkpoint(torch.sin, leaf, use_reentrant=False)
    found = taken({"leaf": leaf, "output": output}).holdings
    held = {one.path: one.bytes for one in found if one.role is Role.GRAPH_KEPT_ALIVE}
    assert held["output → graph"] == torch.get_rng_state().nbytes


@tells_saved
def test_the_graph_of_a_gradient_is_the_gradients() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it makes a cycle
        model(torch.ones(256, 16)).sum().backward(create_graph=True)
    try:
        found = taken({"model": model})
        assert holding(found, "model[0].weight.grad → graph").bytes >= 256 * 64 * 4
        assert {one.role for one in found.holdings if one.path == "model[2].weight"} == {Role.PARAMETER}
        assert found.bytes_of(Role.UNEXPLAINED) < 256 * 64 * 4
    finally:
        model.zero_grad()


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    pass\na = A()",
        "class A:\n    __slots__ = ('x',)\na = A(); a.x = 1",
        "class A:\n    __dict__ = property(lambda self: {})\na = A()",
        (
            "class A(torch.autograd.Function):\n    forward = staticmethod(lambda ctx, x: x * 2)\n"
            "    backward = staticmethod(lambda ctx, g: g)\na = A.apply(torch.ones(3, requires_grad=True))"
        ),
    ],
)
def test_a_class_that_was_looked_at_is_let_go_of(source: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(source, namespace)
    cls = weakref.ref(namespace["A"])
    taken(namespace)
    namespace.clear()
    gc.collect()
    assert cls() is None


@tells_saved
def test_what_a_hook_packs_out_of_sight_is_told() -> None:
    class Packed:
        pass

    leaf = torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Packed(), lambda packed: leaf):
        output = leaf.exp()
    notes = [note for note in taken({"output": output}).notes if "packed by a hook" in note]
    assert [note.split(" are ")[0] for note in notes] == ["1 saved tensors"]


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda: torch.eye(16).to_sparse(), 16 * 2 * 8 + 16 * 4),
        (lambda: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0]), 3 * 8 + 2 * 8 + 2 * 4),
        (lambda: torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.qint8), 64),
        (lambda: torch.ones(64).to_mkldnn(), 256),
        (lambda: torch.nested.nested_tensor([torch.ones(8), torch.ones(8)], layout=torch.jagged), 64 + 3 * 8),
        (lambda: torch.empty(64, device="meta"), 0),
    ],
    ids=["sparse", "csr", "quantised", "mkldnn", "nested", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:.*quantiz:DeprecationWarning", "ignore::UserWarning")
def test_tensors_that_are_not_plain_are_counted_by_what_they_are_made_of(make: Any, nbytes: int) -> None:
    it = make()
    found = taken({"it": it})
    assert sum(one.bytes for one in found.holdings if one.path == "it") == nbytes
    if not nbytes:
        assert "1 fake or meta tensors" in " ".join(found.notes)


def test_a_dtensor_is_counted_by_its_local_shard() -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    import torch.distributed as dist

    dtensor = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(dtensor, "Shard"):
        pytest.skip("this torch has DTensor under a private name")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        it = dtensor.distribute_tensor(big(), dtensor.init_device_mesh("cpu", (1,)), [dtensor.Shard(0)])
        assert sum(one.bytes for one in taken({"it": it}).holdings if one.path == "it") == 4 * 4096
    finally:
        dist.destroy_process_group()


def test_weak_references_that_are_dead_are_survived() -> None:
    class Owner:
        pass

    owner = Owner()
    namespace = {"dead": weakref.ref(owner), "proxy": weakref.proxy(owner), "live": big()}
    del owner
    gc.collect()
    assert holding(taken(namespace), "live").bytes == 4 * 4096


def test_what_is_kept_apart_is_no_part_of_the_program() -> None:
    copy = torch.ones(12345)
    before = taken({})
    keep_apart(copy)
    after = taken({})
    assert before.found - after.found == copy.nbytes


def test_large_containers_are_looked_into_only_when_bytes_are_missing() -> None:
    records = [{"id": index, "tags": (index,)} for index in range(5000)]
    found = taken({"records": records, "it": big()})
    assert holding(found, "it").bytes == 4 * 4096
    records[4321]["hidden"] = big()
    assert holding(taken({"records": records, "it": big()}), "records[4321]['hidden']").bytes == 4 * 4096


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="f_locals is a view of the frame from Python 3.13 on")
def test_reading_locals_leaves_nothing_on_the_frame() -> None:
    frame = sys._getframe()
    inside = big()
    watched = weakref.ref(inside)
    assert locals_of(frame)["inside"] is inside
    del inside
    assert watched() is None


def test_the_programs_own_dict_of_locals_is_left_alone() -> None:
    inside = 1
    mine = locals()
    assert locals_of(sys._getframe())["inside"] == 1
    assert mine["inside"] == inside


def test_the_namespace_by_another_name_and_the_shell_lead_nowhere() -> None:
    def shown() -> None:
        """Has ``__globals__`` and ``__builtins__``, as every function has."""

    out = big()
    namespace: dict[str, Any] = {"shown": shown, "_oh": {3: out}, "it": big()}
    namespace["mine"] = namespace
    namespace["shell"] = type("Shell", (), {"__module__": "IPython.core.interactiveshell"})()
    namespace["shell"].user_ns = {"it": namespace["it"], "lost": big()}
    found = {one.path: one.role for one in taken(namespace).holdings if "no name" not in one.path}
    assert found == {"Out[3]": Role.OUTPUT_CACHE, "it": Role.USER_TENSOR}


def frees(found: Census, path: str) -> set[str]:
    line = holding(found, path).frees
    assert line is not None
    assert line.startswith("del ")
    return set(line.removeprefix("del ").split(", "))


def test_the_line_that_frees_names_all_that_hold() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    z = big()
    namespace: dict[str, Any] = {"model": model, "optimizer": optimizer, "z": z, "za": z, "zb": {"k": z}}
    namespace |= {"alone": big(), "kept": [big()] * 2, "again": None}
    namespace["again"] = namespace["kept"]
    found = taken(namespace)
    assert frees(found, "model.weight") == {"model", "optimizer"}
    assert frees(found, "z") == {"z", "za", "zb"}
    assert frees(found, "alone") == {"alone"}
    assert frees(found, "kept[0]") == {"kept", "again"}
    loss = model(torch.ones(1, 64)).sum()
    assert frees(taken(namespace | {"loss": loss}), "model.weight") == {"model", "optimizer", "loss"}


def test_a_model_that_was_made_anew_is_still_the_optimizers() -> None:
    old = nn.Linear(64, 64)
    namespace = {"optimizer": torch.optim.SGD(old.parameters(), lr=0.1), "model": nn.Linear(64, 64)}
    del old
    found = taken(namespace)
    assert frees(found, "optimizer.param_groups[0]['params'][0]") == {"optimizer"}
    assert frees(found, "model.weight") == {"model"}


def test_a_name_that_a_loop_left_behind_owns_nothing_that_has_another() -> None:
    models = [nn.Linear(64, 64) for _ in range(3)]
    namespace = {"block": models[2], "models": models, "alone": nn.Linear(64, 64)}
    found = taken(namespace, borrowed=frozenset({"block", "alone"}))
    assert frees(found, "models[2].weight") == {"models", "block"}
    assert frees(found, "models[1].weight") == {"models"}
    assert frees(found, "alone.weight") == {"alone"}


def test_a_gradient_is_cleared_by_the_optimizer_of_its_parameter() -> None:
    first, second, third = (nn.Linear(8, 8) for _ in range(3))
    for model in (first, second, third):
        model(torch.ones(1, 8)).sum().backward()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    namespace = {"a": first, "b": second, "c": third, "oa": optimizers[0], "ob": optimizers[1]}
    found = taken(namespace)
    lines = [holding(found, f"{name}.weight.grad").frees for name in "abc"]
    assert lines == [f"{name}.zero_grad(set_to_none=True)" for name in ("oa", "ob", "c")]


def test_what_no_name_leads_to_is_unexplained_unless_a_step_is_under_way() -> None:
    kept = [big(54321)]
    nameless = [one for one in taken({}).holdings if "no name" in one.path]
    assert {one.role for one in nameless} == {Role.UNEXPLAINED}
    assert taken({}).bytes_of(Role.UNEXPLAINED) >= kept[0].nbytes
    assert taken({}, in_step=True).bytes_of(Role.UNEXPLAINED) == 0


def test_a_deep_model_is_told_in_full() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1500)))
    found = taken({"model": model})
    assert sum(one.count for one in found.holdings if one.role is Role.PARAMETER) == 3000


def test_locals_survive_a_report_under_a_trace_function() -> None:
    def traced() -> int:
        inside = 41
        inside += 1
        return inside

    def trace(frame: Any, event: str, arg: Any) -> Any:
        locals_of(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert traced() == 42
    finally:
        sys.settrace(before)


def test_a_very_deep_graph_is_followed_so_far_that_it_can_still_be_freed() -> None:
    code = """
import threading, torch
from oomdoctor.objects.storages import DEEPEST, Graphs
total = torch.ones((), requires_grad=True)
for _ in range(20 * DEEPEST):
    total = total * 1.0001
graphs = Graphs()
assert graphs.behind(total).is_alive and graphs.is_cut
del graphs, total
print("freed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr


def test_tensors_that_refer_to_each_other_and_lazy_modules_are_survived() -> None:
    class Chained(torch.Tensor):
        pass

    first, second = (big().as_subclass(Chained) for _ in range(2))
    first.other, second.other = second, first
    namespace = {"first": first, "lazy": nn.LazyLinear(4), 0: big(), "waiting": queue.Queue()}
    namespace["waiting"].put(big(100))
    found = taken(namespace)
    assert sum(one.bytes for one in found.holdings if one.path in {"first", "first.other", "second"}) == 2 * 4 * 4096
    assert any(one.path.startswith("waiting.queue") for one in found.holdings)


def test_names_that_a_frame_shares_with_the_notebook_are_not_to_be_deleted() -> None:
    def train() -> None:
        model = nn.Linear(32, 32)
        model(torch.ones(1, 32)).sum().backward()
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        train()
    found = taken({"model": nn.Linear(2, 2)}, caught.value)
    lines = {one.frees for one in found.holdings if one.path.startswith("local ")}
    assert lines == {None}


SIZE = (2 * 4096 + 8 * 16) << 10
"""Of a workspace of cuBLAS, on most cards."""


def beside_workspaces(namespace: dict[str, Any], count: int, missing: int) -> Census:
    """The census of a device that has so many blocks of that size, and so many bytes that no tensor shows."""
    program = census.Program(names=list(user_names(namespace)))

    def take(device: DeviceMemory) -> Census:
        (found,) = census.take(program, [(device, lambda tensor: tensor.is_cpu)])
        return found

    shown = take(HOST).found
    return take(replace(HOST, allocated=shown + missing, workspaces=(SIZE,) * count))


@pytest.mark.parametrize(
    ("tensors", "blocks", "missing", "told"),
    [
        (0, 2, 2 * SIZE + 4096, 2),  # one of cuBLAS and one of cuBLASLt
        (1, 3, 2 * SIZE, 2),  # the third is a tensor's
        (70, 71, SIZE, 1),  # so are these
        (1, 1, SIZE, 0),  # what is missing is something else
        (0, 3, SIZE + 4096, 1),  # no more than what is missing
        (0, 9, 9 * SIZE, 4),  # as many may as well be gradients that C++ holds
        (0, 1, 4096, 0),
    ],
)
def test_workspaces_of_cublas_are_told_from_tensors(tensors: int, blocks: int, missing: int, told: int) -> None:
    kept = [torch.empty(SIZE, dtype=torch.uint8) for _ in range(tensors)]
    found = beside_workspaces({"kept": kept}, blocks, missing)
    assert found.bytes_of(Role.WORKSPACE) == told * SIZE
    assert found.allocated - found.found == missing - told * SIZE
    held = [one for one in found.holdings if one.role is Role.WORKSPACE]
    assert [(one.count, one.frees) for one in held] == [(told, "torch._C._cuda_clearCublasWorkspaces()")] * bool(told)


def test_what_has_no_name_and_what_was_not_found_are_both_unexplained() -> None:
    kept = [big(54321)]
    device = replace(HOST, allocated=1 << 40)
    (found,) = census.take(census.Program(names=[]), [(device, lambda tensor: tensor.is_cpu)])
    nameless = sum(one.bytes for one in found.holdings if one.role is Role.UNEXPLAINED)
    assert nameless >= kept[0].nbytes
    assert found.bytes_of(Role.UNEXPLAINED) == nameless + (1 << 40) - found.found
    assert sum(size for _, size in found.roles) == 1 << 40


def test_scripted_modules_are_looked_into() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)))
        saved = io.BytesIO()
        torch.jit.save(scripted, saved)
        saved.seek(0)
        loaded = torch.jit.load(saved)
    found = taken({"loaded": loaded})
    weight = holding(found, "loaded._modules['0'].weight")
    assert (weight.bytes, weight.role) == (4 * 32 * 32, Role.PARAMETER)
    assert holding(found, "loaded._modules['1'].running_var").role is Role.BUFFER


@tells_saved
def test_parts_of_a_traced_module_have_the_paths_of_the_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(Model(), torch.ones(1, 32))
    loss = traced(torch.ones(256, 32)).exp().sum()
    found = taken({"traced": traced, "loss": loss})
    assert eval(holding(found, "traced.layer.weight").expression, {"traced": traced}) is traced.layer.weight
    assert [module for one in found.holdings for module, _ in one.saved_in] == ["traced.layer"]


def test_modules_found_before_large_containers_are_claimed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    claims: list[str] = []
    claim = Ledger.claim

    def counted(self: Ledger, tensors: Any, role: Role, path: Any, **more: Any) -> None:
        claims.append(path.names()[0])
        claim(self, tensors, role, path, **more)

    monkeypatch.setattr(Ledger, "claim", counted)
    found = taken({"model": nn.Linear(32, 32), "rows": [{"x": number, "y": big(2)} for number in range(300)]})
    assert holding(found, "rows[299]['y']").bytes == 8
    assert claims.count("model.weight") == 1


def test_the_one_record_among_many_that_holds_a_tensor_is_found() -> None:
    rows: list[Any] = [{"x": {"y": [number, Slotted]}} for number in range(5000)]
    rows[4321] = {"x": {"y": [0, big()]}}
    assert holding(taken({"rows": rows}), "rows[4321]['x']['y'][1]").bytes == 4 * 4096
    by_key = {f"key {number}": row for number, row in enumerate(rows)}
    assert holding(taken({"rows": by_key}), "rows['key 4321']['x']['y'][1]").bytes == 4 * 4096


@tells_saved
def test_graphs_behind_a_large_container_are_found_though_each_tensor_shares_an_owned_storage() -> None:
    weight, data = torch.ones(64, 64, requires_grad=True), torch.ones(256, 64)
    curve, log = [], []
    for number in range(300):
        loss = (data @ weight).relu().sum()
        curve.append(loss.detach())
        log.append((number, loss))
    found = taken({"weight": weight, "data": data, "curve": curve, "log": log})
    assert found.bytes_of(Role.GRAPH_KEPT_ALIVE) >= 300 * 256 * 64 * 4


def evaluates(found: Census, namespace: dict[str, Any], role: Role) -> list[Any]:
    held = [one for one in found.holdings if one.role is role and one.expression and one.path == one.expression]
    assert held
    return [(one, eval(one.expression, dict(namespace))) for one in held]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48), nn.Linear(48, 32))[1:],
        lambda: nn.Sequential(OrderedDict([("1", nn.Linear(64, 64)), ("0", nn.Linear(64, 8))])),
        lambda: nn.ModuleDict({"in": nn.Linear(64, 64), "class": nn.Linear(64, 8), "7": nn.Linear(9, 9)}),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))),
        lambda: [nn.Linear(64, 64), {"in": nn.ModuleList([nn.Linear(8, 8)])}],
    ],
    ids=["slice", "order", "keywords", "traced", "containers"],
)
def test_a_path_leads_to_the_very_parameter(make: Any) -> None:
    namespace = {"model": make()}
    for one, value in evaluates(taken(namespace), namespace, Role.PARAMETER):
        assert tuple(value.shape) == one.shape


def test_the_line_that_frees_a_gradient_is_one_that_runs() -> None:
    models, lone = [nn.Linear(64, 64)], torch.ones(64, requires_grad=True)
    (models[0](torch.ones(1, 64)).sum() + lone.sum()).backward()
    namespace = {"models": models, "lone": lone, "many": [lone]}
    lines = {one.frees for one in taken(namespace).holdings if one.role is Role.GRADIENT}
    assert lines == {"models[0].zero_grad(set_to_none=True)", "lone.grad = None"}


def test_attributes_are_left_out_of_modules_and_optimizers_alone() -> None:
    class Actor:
        pass

    actor, model = Actor(), nn.Linear(4, 4)
    actor.state, model.state = big(), big(99)
    found = taken({"actor": actor, "model": model})
    assert holding(found, "actor.state").bytes == 4 * 4096
    assert holding(found, "model.state").bytes == 4 * 99


def odd_optimizer(change: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    change(optimizer)
    return optimizer


def odd_names(value: Any) -> Any:
    value.__dict__[5] = big()
    return value


class OddKey:
    def __repr__(self) -> str:
        raise AssertionError("asked for its repr")


@pytest.mark.parametrize(
    "odd",
    [
        lambda: odd_optimizer(lambda one: setattr(one, "state", [1, 2])),
        lambda: odd_optimizer(lambda one: setattr(one, "param_groups", 5)),
        lambda: odd_optimizer(lambda one: one.param_groups[0].pop("params")),
        lambda: odd_optimizer(lambda one: one.param_groups[0]["params"].append(None)),
        lambda: odd_optimizer(lambda one: one.state[one.param_groups[0]["params"][0]].update({OddKey(): big()})),
        lambda: {10**5000: 1, "nested": {10**5000: big()}},
        lambda: type("Odd", (), {"__module__": []})(),
        lambda: type("list", (), {"__module__": "builtins"})(),
        lambda: setattr(one := nn.Module(), "_modules", {5: nn.Linear(4, 4)}) or one,
        lambda: odd_names(nn.Module()),
    ],
)
def test_odd_objects_do_not_cost_the_report(odd: Any) -> None:
    assert holding(taken({"odd": odd(), "kept": big(77)}), "kept").bytes == 4 * 77


def test_an_iterator_of_the_users_is_not_used_up() -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    parameters = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = (one for one in parameters)
    taken({"optimizer": optimizer})
    assert len(list(optimizer.param_groups[0]["params"])) == 2
