"""On and off: what is there already, what is left behind, and what is refused."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from oomdoctor.allocator.virtual import VirtualAccelerator, active, simulate, switch_off, switch_on, uncounted
from oomdoctor.errors import SizeError, UsageError
from oomdoctor.model.sizes import MIB


@pytest.fixture(autouse=True)
def _off_again():
    gc.collect()
    yield
    switch_off()
    assert_nothing_is_left()


def assert_nothing_is_left():
    assert active() is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not is_in_torch_dispatch_mode()


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_block():
    with simulate("64MiB") as device:
        assert isinstance(device, VirtualAccelerator)
        assert active() is device
    assert_nothing_is_left()
    assert torch.zeros(100 * MIB, dtype=torch.uint8).numel() == 100 * MIB


def test_a_block_that_fails_is_left_clean():
    with pytest.raises(torch.OutOfMemoryError), simulate("64MiB"):
        torch.zeros(100 * MIB, dtype=torch.uint8)
    assert_nothing_is_left()


def test_what_is_alive_is_taken_over_once():
    tensor = torch.zeros(5 * MIB, dtype=torch.uint8)
    views, parameter = [tensor[1:], tensor.view(5, MIB)], torch.nn.Parameter(torch.zeros(MIB))
    with simulate("512MiB") as device:
        taken = device.read().allocated
        assert device.block_of(tensor) is device.block_of(views[1])
        assert device.block_of(parameter).size == 4 * MIB
        del tensor, views
        assert device.read().allocated == taken - 5 * MIB


def test_what_is_no_memory_of_the_cpu_is_not_taken_over():
    import torch._subclasses.fake_tensor as fakes

    with simulate("64MiB") as device:
        floor = device.read().allocated
    with fakes.FakeTensorMode():
        fake = torch.empty(1 << 30)
    kept = [fake, torch.empty(1 << 30, device="meta")]
    seen = []

    def within(row):
        with simulate("64MiB") as inner:
            seen.append(inner.read().allocated)
        return row

    torch.func.vmap(within)(torch.zeros(2, 2))
    with simulate("64MiB") as device:
        assert device.read().allocated == floor
    assert seen[0] - floor <= 512
    del kept


def test_taking_over_runs_no_code_of_the_user():
    class Trap(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("user code ran")

        @property
        def __class__(self):
            raise AssertionError("user code ran")

    trap = torch.Tensor._make_subclass(Trap, torch.zeros(3))
    with simulate("64MiB"):
        pass
    del trap


def test_what_is_alive_must_fit():
    tensor = torch.zeros(80 * MIB, dtype=torch.uint8)
    with pytest.raises(UsageError, match="do not fit into a simulated GPU of 64"), simulate("64MiB"):
        pass
    assert_nothing_is_left()
    device = switch_on("512MiB")
    with pytest.raises(UsageError, match="do not fit"):
        switch_on("64MiB")
    assert active() is device
    before = device.read().allocated
    del tensor
    assert device.read().allocated == before - 80 * MIB


def test_blocks_do_not_nest():
    with simulate("64MiB") as device:
        with pytest.raises(UsageError, match=r"of 64.0 MiB is on already"), simulate("32MiB"):
            pass
        assert active() is device
        with pytest.raises(UsageError, match="ends with its block"):
            switch_on("32MiB")
        with pytest.raises(UsageError, match="ends with its block"):
            switch_off()
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(100 * MIB)
    switch_on("64MiB")
    with pytest.raises(UsageError, match="is on already"), simulate("32MiB"):
        pass


def test_switching_on_again_replaces():
    first = switch_on("64MiB")
    tensor = torch.zeros(MIB)
    second = switch_on(128 * MIB)
    assert active() is second
    assert torch._C._len_torch_dispatch_stack() == 1
    assert second.block_of(tensor).size == 4 * MIB
    counted = first.read()
    more = torch.zeros(MIB)
    assert first.read() == counted
    switch_off()
    switch_off()
    del tensor, more


def test_it_can_be_switched_off_below_a_mode_that_goes_on():
    switch_on("64MiB")
    with Passing() as passing:
        switch_off()
        assert torch._C._get_dispatch_stack_at(0) is passing
        assert torch._C._len_torch_dispatch_stack() == 1
        assert is_in_torch_dispatch_mode()
        torch.zeros(100 * MIB, dtype=torch.uint8)


def test_our_own_work_leaves_every_mode_and_comes_back_to_it():
    with Passing(), simulate("64MiB"), Passing():
        with uncounted():
            assert torch._C._len_torch_dispatch_stack() == 0
        with pytest.raises(ZeroDivisionError), uncounted():
            1 / 0  # noqa: B018
        assert torch._C._len_torch_dispatch_stack() == 3
    with uncounted():
        pass


def test_it_is_switched_off_where_it_was_switched_on():
    switch_on("64MiB")
    refused = []

    def elsewhere():
        try:
            switch_off()
        except UsageError as error:
            refused.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert refused == ["the simulated GPU was switched on in another thread: switch it off there"]
    assert active() is not None


@pytest.mark.parametrize("size", ["much", "0", "-1GiB"])
def test_a_size_that_is_none(size):
    with pytest.raises(SizeError):
        simulate(size)
    with pytest.raises(SizeError):
        switch_on(size)


def test_off_means_nothing_is_patched():
    code = """
import torch, gc
def state():
    return {name: id(value) for module in (torch, torch.cuda, torch.Tensor, torch.optim.Optimizer, torch.nn.Module,
            torch.autograd, torch.utils.checkpoint) for name, value in vars(module).items() if callable(value)}
import torch.utils.checkpoint
before, callbacks = state(), list(gc.callbacks)
from oomdoctor.allocator.virtual import simulate
with simulate("64MiB"):
    torch.zeros(3)
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert state() == before, "patched while on"
assert state() == before and gc.callbacks == callbacks
assert torch._C._len_torch_dispatch_stack() == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_storages_outlive_the_device_without_a_trace():
    with simulate("64MiB") as device:
        tensor = torch.zeros(MIB)
        assert device.read().allocated >= 4 * MIB
    last = device.read()
    del tensor
    assert device.read() == last
