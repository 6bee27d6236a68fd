"""What cannot fit is refused before the host works for it."""

import gc
import subprocess
import sys

import pytest
import torch

from oomdoctor.allocator import mode
from oomdoctor.allocator.mode import foreseen_bytes, most_bytes
from oomdoctor.allocator.virtual import simulate
from oomdoctor.model.sizes import GIB

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.zeros.default, ([3, 5],), {}),
        (aten.mm.default, (torch.zeros(30, 1), torch.zeros(1, 40)), {}),
        (aten.add.Tensor, (torch.zeros(30, 1), torch.zeros(1, 40)), {}),
        (aten.embedding.default, (torch.zeros(10, 7), torch.zeros(20, dtype=torch.int64)), {}),
        (aten.cat.default, ([torch.zeros(3), torch.zeros(4)],), {}),
        (aten.sort.default, (torch.zeros(9),), {}),
        (aten.repeat.default, (torch.zeros(9), [4, 1]), {}),
        (aten._to_copy.default, (torch.zeros(9),), {"dtype": torch.float64}),
        (aten.arange.default, (100,), {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_foresees_what_comes_and_its_bound_is_above(func, args, kwargs):
    results = func(*args, **kwargs)
    made = sum(part.numel() * part.element_size() for part in (results if isinstance(results, tuple) else (results,)))
    assert sum(foreseen_bytes(func, args, kwargs)) == made
    assert most_bytes(func, args) >= made / 2  # two results of a sort


def test_products_of_matrices_are_bounded_by_their_result():
    for func, left, right in (
        (aten.mm.default, torch.zeros(2000, 3000), torch.zeros(3000, 500)),
        (aten.bmm.default, torch.zeros(4, 500, 3000), torch.zeros(4, 3000, 200)),
    ):
        assert most_bytes(func, (left, right)) == func(left, right).numel() * 16
    bias = torch.zeros(500)
    assert most_bytes(aten.addmm.default, (bias, torch.zeros(2000, 300), torch.zeros(300, 500))) == 2000 * 500 * 16


def test_elementwise_work_is_bounded_by_what_it_broadcasts_to():
    rows, columns = torch.zeros(2000, 1), torch.zeros(3000)
    assert most_bytes(aten.add.Tensor, (rows, columns)) == 2000 * 3000 * 16
    assert most_bytes(aten.threshold_backward.default, (rows, rows, 0)) == 2000 * 16


def test_views_and_work_in_place_make_nothing():
    tensor = torch.zeros(8)
    assert most_bytes(aten.expand.default, (tensor, [1 << 40, 8])) == 0
    assert most_bytes(aten.add_.Tensor, (tensor, tensor)) == 0
    # Each linear layer makes such a view of its result, and its schema says that it is new.
    assert foreseen_bytes(aten._unsafe_view.default, (tensor, [2, 4]), {}) == ()


def test_what_depends_on_values_is_not_foreseen():
    assert foreseen_bytes(aten.nonzero.default, (torch.ones(3),), {}) == ()


def test_it_draws_no_random_numbers():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert foreseen_bytes(aten.native_dropout.default, (torch.zeros(8), 0.5, True), {}) == (32, 8)
    assert foreseen_bytes(aten.randn.default, ([1000],), {}) == (4000,)
    assert torch.get_rng_state().equal(state)


def test_a_huge_request_is_refused_without_the_host_having_the_memory():
    code = f"""
import torch
torch.set_num_threads(1)
from oomdoctor.allocator.virtual import simulate
column = torch.zeros(1 << 17, 1)
import resource
resource.setrlimit(resource.RLIMIT_DATA, (2 * {GIB}, 2 * {GIB}))
with simulate("512MiB") as device:
    before = device.read()
    for make in (lambda: torch.zeros(1 << 36), lambda: column @ column.T, lambda: column + column.T,
                 lambda: torch.randn(1 << 18, 1 << 18), lambda: column.repeat(1, 1 << 17),
                 lambda: torch.cdist(column, column)):
        try:
            make()
        except torch.OutOfMemoryError as error:
            assert "CUDA out of memory" in str(error), error
        else:
            raise AssertionError("it fitted")
    after = device.read()
    assert after.peak_allocated - before.allocated <= 1 << 20, after
# Not ``ru_maxrss``: a child that was forked takes its parent's peak with it.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 1 * GIB


def test_what_the_host_refuses_and_the_device_would_have_had_stays_the_hosts_failure():
    code = f"""
import torch, resource
from oomdoctor.allocator.virtual import simulate
with simulate("8GiB"):
    resource.setrlimit(resource.RLIMIT_DATA, (2 * {GIB}, 2 * {GIB}))
    try:
        torch.empty(4 * {GIB}, dtype=torch.uint8)
    except torch.OutOfMemoryError:
        raise AssertionError("the device had room")
    except RuntimeError as error:
        assert "DefaultCPUAllocator" in str(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_result_that_fits_is_not_refused_by_a_bound_that_does_not():
    gc.collect()
    with simulate("256MiB"):
        wide = torch.zeros(4096, 1024)  # times its transpose the bound is 256 TiB, the result 64 MiB
        assert (wide @ wide.T).shape == (4096, 4096)


def test_sizes_are_foreseen_once_for_the_same_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(mode, "foreseen_bytes", lambda func, *given: seen.append(func) or foreseen_bytes(func, *given))
    with simulate(64 << 20):
        left, right = torch.zeros(2048, 2048), torch.zeros(2048, 2048)
        for _ in range(3):
            left @ right
        assert seen.count(aten.mm.default) == 1
        left[:1024] @ right
        assert seen.count(aten.mm.default) == 2
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                torch.zeros(2048, 1) @ torch.zeros(1, 40_000)
        assert seen.count(aten.mm.default) == 3
