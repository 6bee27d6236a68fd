"""What the virtual accelerator counts, against what is really alive."""

import contextlib
import copy
import gc
import io
import pickle
import warnings
from unittest import mock

import pytest
import torch

from oomdoctor.allocator.virtual import simulate, uncounted
from oomdoctor.model.sizes import KIB, MIB


@pytest.fixture
def device():
    gc.collect()
    with contextlib.ExitStack() as stack:
        with mock.patch("oomdoctor.allocator.device.storages_alive", return_value=()):  # those of other tests
            device = stack.enter_context(simulate("256MiB"))
        yield device


@pytest.fixture
def added(device):
    """Return a function that tells the bytes allocated since the test began."""
    before = device.read().allocated
    return lambda: device.read().allocated - before


def mebibytes(count):
    return torch.empty(int(count * MIB), dtype=torch.uint8)


def test_a_tensor_counts_until_it_dies(added):
    tensor = mebibytes(3)
    assert added() == 3 * MIB
    del tensor
    assert added() == 0


def test_sizes_are_rounded_as_on_the_device(added):
    kept = [torch.ones(3), torch.ones(200)]
    assert added() == 512 + 1024
    del kept


def test_a_view_is_not_counted_again_and_keeps_its_storage(added):
    tensor = mebibytes(3)
    view = tensor[10:20].reshape(2, 5).t()
    assert added() == 3 * MIB
    del tensor
    assert added() == 3 * MIB
    del view
    assert added() == 0


def test_tied_parameters_count_once(added):
    first, second = torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 512, bias=False)
    assert added() == 2 * MIB
    second.weight = first.weight
    assert added() == MIB
    del first
    assert added() == MIB
    del second
    assert added() == 0


def test_growing_in_place_counts_the_new_size_and_both_copies_at_the_peak(device, added):
    tensor = mebibytes(2)
    device.reset_peak()
    tensor.resize_(5 * MIB)
    assert added() == 5 * MIB
    assert device.read().peak_allocated - device.read().allocated == 2 * MIB
    del tensor
    assert added() == 0


def test_an_out_argument_that_grows_is_counted(added):
    out = torch.empty(0)
    torch.add(torch.zeros(MIB), 1, out=out)
    assert added() == 4 * MIB
    del out


def test_a_storage_that_is_emptied_behind_the_dispatcher_is_seen_at_the_next_reading(added):
    tensor = mebibytes(4)
    tensor.untyped_storage().resize_(0)
    assert added() == 0
    tensor.untyped_storage().resize_(4 * MIB)
    tensor.zero_()
    assert added() == 4 * MIB
    del tensor


def test_a_storage_that_was_emptied_makes_room_before_a_request_is_refused(device):
    emptied = mebibytes(200)
    emptied.untyped_storage().resize_(0)
    assert mebibytes(200).numel() == 200 * MIB
    assert device.read().allocated < MIB


def test_saved_tensors_count_and_die_in_backward(added):
    weight = torch.ones(MIB // 4, requires_grad=True)
    loss = weight.exp().exp().sum()  # each exp saves its result: 1 MiB twice
    assert added() == 3 * MIB + 512
    loss.backward()
    assert added() == 2 * MIB + 512  # weight, gradient, loss
    del loss
    weight.grad = None
    assert added() == MIB
    del weight
    assert added() == 0


def test_cyclic_garbage_counts_until_it_is_collected(added):
    gc.collect()
    gc.disable()
    try:
        ring = [mebibytes(3)]
        ring.append(ring)
        del ring
        assert added() == 3 * MIB
    finally:
        gc.enable()
    gc.collect()
    assert added() == 0


def test_setting_data_lets_go_of_the_old_storage(added):
    parameter = torch.nn.Parameter(torch.zeros(MIB))
    parameter.data = torch.zeros(MIB // 4)
    assert added() == MIB
    del parameter


def test_tensors_made_from_python_and_numpy_count_when_an_operation_returns_them(added):
    numpy = pytest.importorskip("numpy")
    made, shared = torch.tensor([1.0] * 1024), torch.from_numpy(numpy.zeros(MIB))
    assert added() == 4 * KIB + 8 * MIB
    del made, shared
    assert added() == 0


def test_sparse_results_count_their_parts(added):
    embedding = torch.nn.Embedding(1000, 64, sparse=True)
    table = added()
    embedding(torch.arange(128)).sum().backward()
    assert embedding.weight.grad.is_sparse
    assert added() - table == 128 * 64 * 4 + 128 * 8
    del embedding
    assert added() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its CSR support a beta
        square = torch.eye(512).to_sparse_csr()
    indices = square.col_indices().untyped_storage().nbytes()  # all of them in newer versions, 2 * 512 * 8
    assert added() == 512 * 4 + indices + 513 * 8 + 504  # values, indices, row ends rounded up
    del square


def test_deep_copies_and_pickles_count_as_what_they_are(added):
    model = torch.nn.Linear(512, 512, bias=False)
    twin = copy.deepcopy(model)
    assert added() == 2 * MIB
    assert pickle.loads(pickle.dumps(model.state_dict()))["weight"].equal(twin.weight)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    del twin
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert added() == 2 * MIB
    del loaded, model
    assert added() == 0


@pytest.mark.parametrize("foreach", [True, False])
def test_optimizer_state_counts(added, foreach):
    model = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    assert added() == 4 * MIB + 512  # weight, gradient, two moments, the step count
    optimizer.zero_grad()
    assert added() == 3 * MIB + 512
    del model, optimizer
    gc.collect()
    assert added() == 0


def test_a_refusal_is_cudas_and_leaves_the_numbers_as_they_were(device):
    held = mebibytes(200)
    before = device.read()
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 has"):
        mebibytes(100)
    after = device.read()
    assert (after.allocated, after.reserved, after.peak_allocated) == (
        before.allocated,
        before.reserved,
        before.peak_allocated,
    )
    assert device.allocator.retries == device.allocator.failures == 1
    del held
    assert mebibytes(100).numel() == 100 * MIB
    assert device.read().allocated == before.allocated - 200 * MIB


def test_a_refusal_pins_neither_operands_nor_result(device, added):
    operands = [torch.zeros(MIB), torch.zeros(MIB)]
    with pytest.raises(torch.OutOfMemoryError) as failure:
        (operands.pop() + operands.pop()).repeat(100)
    assert failure.value.__traceback__ is not None
    assert added() == 0
    assert failure.value.__context__ is None


def test_an_error_that_is_dropped_frees_the_frames_that_it_came_through(added):
    def program():
        held = mebibytes(20)
        return mebibytes(300), held

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            program()
        assert added() == 0
    finally:
        gc.enable()


def test_several_results_are_counted_up_to_the_one_that_does_not_fit(device, added):
    source = torch.arange(12 * MIB, dtype=torch.float32)  # 48 MiB; sort makes 48 MiB of values, 96 MiB of indices
    held = mebibytes(100)
    with pytest.raises(torch.OutOfMemoryError):
        torch.sort(source)
    assert added() == 148 * MIB
    assert device.read().peak_allocated >= 196 * MIB  # the values were there when the indices found no room
    del held
    values, indices = torch.sort(source)
    assert added() == 48 * MIB + 48 * MIB + 96 * MIB
    del values, indices, source


def test_fragmentation_is_real(device):
    parts = [mebibytes(2) for _ in range(120)]
    del parts[::2]
    memory = device.read()
    assert memory.allocated <= 122 * MIB
    assert memory.inactive_split >= 118 * MIB
    assert memory.largest_free_block == 2 * MIB or memory.largest_free_block < 20 * MIB
    with pytest.raises(torch.OutOfMemoryError) as failure:
        mebibytes(40)  # far less than what is free in pieces
    assert "is reserved by PyTorch but unallocated" in str(failure.value)
    del parts


def test_reading_peaks_and_emptying_the_cache(device):
    floor = device.read().allocated
    tensor = mebibytes(50)
    del tensor
    memory = device.read()
    assert memory.simulated
    assert (memory.name, memory.tensor_device, memory.total) == ("cuda:0", "cpu", 256 * MIB)
    assert memory.peak_allocated == floor + 50 * MIB
    assert memory.free == memory.total - memory.reserved
    device.empty_cache()
    assert device.read().reserved == memory.reserved - 50 * MIB
    device.reset_peak()
    assert device.read().peak_allocated == floor


def test_work_of_ours_is_not_counted_but_what_it_lets_go_of_is(device, added):
    tensor = mebibytes(5)
    with uncounted():
        snapshot = tensor.clone()
        assert torch._C._len_torch_dispatch_stack() == 0
        del tensor
    assert added() == 0
    assert torch._C._len_torch_dispatch_stack() == 1
    used = snapshot[:10]  # the program uses it: from here on it counts
    assert added() == 5 * MIB
    del snapshot, used


def test_a_block_can_be_told_from_its_tensor(device):
    tensor = mebibytes(5)
    assert device.block_of(tensor[3:]).size == 5 * MIB
    with uncounted():
        assert device.block_of(torch.ones(3)) is None


def test_a_finalizer_that_runs_tensor_code_does_no_harm(device, added):
    class Untidy:
        def __init__(self):
            self.ring, self.kept = self, mebibytes(1)

        def __del__(self):
            torch.ones(1000).sum()

    for _ in range(50):
        Untidy()
        gc.collect(0)
        mebibytes(1)
    gc.collect()
    assert added() == 0
    assert device.allocator.reserved == sum(block.size for block in device.allocator.free_blocks()) + (
        device.allocator.allocated
    )


def test_the_peak_is_that_of_a_step_worked_out_by_hand(device):
    weight = torch.nn.Parameter(torch.zeros(1024, 1024))  # 4 MiB
    batch = torch.ones(1024, 1024)  # 4 MiB
    floor = device.read().allocated
    device.reset_peak()
    hidden = batch @ weight  # 4 MiB
    loss = hidden.relu().sum()  # 4 MiB saved for backward
    del hidden
    loss.backward()  # gradient of sum expands without memory; that of relu 4 MiB, the result saved still there; weight
    peak = device.read().peak_allocated - floor
    assert 8 * MIB <= peak <= 12 * MIB + 1024
    assert device.read().allocated - floor == 4 * MIB + 512
