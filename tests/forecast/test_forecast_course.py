"""Memory over time on the way: what is alive at the peak, the timeline, and what operations need for themselves."""

import gc
from collections import Counter
from textwrap import dedent

import pytest
import torch
from capabilities import tells_saved
from covering import each_value
from forecast_lab import MICRO_BATCHED, TRAIN, cnn, forecast, mlp, namespace, nothing, session, transformer
from torch import nn

from oomdoctor import pipeline
from oomdoctor.allocator.virtual import simulate
from oomdoctor.evidence.collect import collect
from oomdoctor.forecast import price
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Attempt, Cell, Cells

PROBE = 1 << 30
"""What no budget here has room for: the line at which a cell stops, and at which its forecast has its peak."""


def stopped(ns, before, source):
    """Run a cell on the virtual accelerator until it stops, and return the census of that moment."""
    gc.collect()
    with simulate("900MiB") as device:
        exec(before, ns)
        try:
            exec(compile(source, "<stopped>", "exec"), ns)
        except torch.OutOfMemoryError as error:
            cells = Cells(history=(Cell(number=1, source=source),))
            session = pipeline.open_session(ns, cells, device)
            line = error.__traceback__.tb_next.tb_lineno
            return collect(session, error, {"<stopped>": 1}, line=line).census, line
    raise AssertionError("the cell was to run out of memory")


STOPPED = {
    "after the forward": """
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            probe()
            loss.backward()
    """,
    "after the backward": """
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            probe()
    """,
    "after the step": """
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        probe()
    """,
    "gradients are let go of": """
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        probe()
    """,
    "gradients add up": """
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        probe()
    """,
    "inference that is kept": """
        kept = []
        with torch.no_grad():
            for i in range(5):
                x = torch.randn(256, 256)
                kept.append(model(x))
        probe()
    """,
    "tensors by name": """
        a = torch.randn(300, 300)
        b = a @ a
        c = [b + 1, b * 2]
        a = None
        probe()
    """,
    "a batch by name": """
        x = torch.randn(256, 256)
        loss = model(x).sum()
        probe()
    """,
    "a model of the cell": """
        big = nn.Sequential(nn.Linear(256, 1000), nn.BatchNorm1d(1000), nn.Dropout(0.5), nn.Linear(1000, 10))
        adam = torch.optim.Adam(big.parameters())
        x = torch.randn(64, 256)
        for i in range(3):
            adam.zero_grad()
            loss = big(x).pow(2).mean()
            if i == 1:
                probe()
            loss.backward()
            adam.step()
    """,
    "a detached state": """
        state = torch.zeros(512, 256)
        for i in range(3):
            state = torch.tanh(state @ square).detach()
        probe()
    """,
    "a reentrant checkpoint": """
        x = torch.randn(512, 256, requires_grad=True)
        hidden = torch.utils.checkpoint.checkpoint(model[:3], x, use_reentrant=True)
        out = model[3:](hidden)
        probe()
    """,
    "momentum": """
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            sgd.step()
        probe()
    """,
    "in half precision": """
        model.bfloat16()
        out = model(data.bfloat16())
        probe()
    """,
}


def names():
    torch.manual_seed(0)
    return namespace(mlp, "adamw") | {
        "data": torch.randn(512, 256),
        "square": torch.randn(256, 256, requires_grad=True),
    }


def cell(name):
    return dedent(STOPPED[name]).replace("probe()", f"torch.empty({PROBE // 4})")


@pytest.fixture(scope="module")
def forecasts():
    attempts = [Attempt(source=cell(name)) for name in STOPPED]
    found = price(session(names(), ""), attempts, budget=None, prepare=nothing, timeout_s=100)
    return dict(zip(STOPPED, found, strict=True))


def check_roles(found, ns, before, source):
    census, line = stopped(ns, before, source)
    assert found.refused is None
    assert found.peak_line == line
    roles, expected = Counter(dict(found.course.at_peak)), Counter(dict(census.roles))
    assert sum(roles.values()) == found.peak
    roles[Role.ACTIVATION] -= PROBE
    for role in {*roles, *expected}:
        assert roles[role] == pytest.approx(expected[role], rel=0.01, abs=16384), role


@pytest.mark.parametrize("name", STOPPED)
def test_the_roles_are_those_of_a_census_of_the_real_run_at_that_line(forecasts, name):
    check_roles(forecasts[name], names(), "", cell(name))


@tells_saved
def test_the_graph_that_an_earlier_cell_keeps_has_its_role():
    ns, before, source = names(), "kept = model(data).sum()", f"torch.empty({PROBE // 4})"
    exec(before, ns)
    found = forecast(ns, source)
    del ns["kept"]
    check_roles(found, ns, before, source)


SOURCES = {"train": TRAIN, "micro_batched": MICRO_BATCHED}


@pytest.mark.parametrize(("make", "source"), each_value([mlp, cnn, transformer], SOURCES))
def test_what_is_alive_at_the_peak_adds_up_to_it_and_the_timeline_passes_through_it(make, source):
    found = forecast(namespace(make, "adamw"), SOURCES[source])
    course = found.course
    assert sum(nbytes for _, nbytes in course.at_peak) == found.peak
    assert [nbytes for _, nbytes in course.at_peak] == sorted((nbytes for _, nbytes in course.at_peak), reverse=True)
    assert 100 < len(course.points) <= 256
    assert max(course.points)[0] == found.peak
    assert (found.peak, found.peak_line) in course.points
    assert [sum(column) for column in zip(*(sizes for _, sizes in course.by_role), strict=True)] == [
        nbytes for nbytes, _ in course.points
    ]
    highest = course.points.index((found.peak, found.peak_line))
    assert [(role, sizes[highest]) for role, sizes in course.by_role if sizes[highest]] == list(course.at_peak)
    lines = {line for _, line in course.points[1:]}
    assert {4, 5, 6, 7} & lines == lines - {None, 3, 8, 9}
    assert course.flops > 0
    assert course.moved > 0


def test_the_timeline_of_few_operations_has_one_point_each():
    course = forecast({"torch": torch}, "a = torch.ones(1000)\nb = torch.ones(2000)\ndel a\n").course
    start = course.points[0]
    assert start[1] is None
    rises = [(nbytes - start[0], line) for nbytes, line in course.points[1:]]
    assert rises[:3] == [(4000, 1), (12000, 2), (8000, 2)]


def test_the_work_of_a_product_is_counted():
    course = forecast({"torch": torch, "a": torch.ones(100, 200), "b": torch.ones(200, 300)}, "a @ b").course
    assert course.flops == 2 * 100 * 200 * 300
    assert course.moved == 4 * (100 * 200 + 200 * 300 + 100 * 300)


STEPS = """
for i in range(3):
    model(x).sum().backward()
    optimizer.step()
"""


def test_the_buffers_of_an_optimizer_are_named_and_are_the_size_of_the_parameters():
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    size = sum(p.nbytes for p in model.parameters())
    for foreach, copies in ((True, 1), (False, 0)):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        ns = {"torch": torch, "model": model, "x": torch.ones(2, 300), "optimizer": optimizer}
        found = forecast(ns, STEPS)
        needed = dict(found.course.temporaries).get("buffers of AdamW.step()", 0)
        assert needed == pytest.approx(copies * size, abs=size / 3)
        roles = dict(found.course.at_peak)
        assert roles[Role.OPTIMIZER_STATE] == pytest.approx(2 * size, rel=0.01)
        assert roles[Role.ACTIVATION] >= needed


def test_the_workspace_of_a_layer_is_named():
    source = "nn.LSTM(100, 200, 2)(torch.randn(30, 16, 100))[0].sum().backward()"
    temporaries = dict(forecast({"torch": torch, "nn": nn}, source).course.temporaries)
    assert any("mkldnn_rnn_layer" in name for name in temporaries)


def test_buffers_of_a_module_that_moves_to_another_precision_keep_their_role():
    ns = {"torch": torch, "norm": nn.BatchNorm1d(100_000)}
    roles = dict(forecast(ns, "norm.double()\nbig = torch.empty(10_000_000)").course.at_peak)
    assert roles[Role.BUFFER] == pytest.approx(2 * 8 * 100_000, abs=64)
    assert roles[Role.PARAMETER] == 2 * 8 * 100_000
