"""Many alike fakes are put together by what a few of them make."""

import pytest
import torch
from forecast_lab import rise
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from oomdoctor.forecast.operators import Together

CASES = {
    "stacked": lambda: torch.stack([torch.empty(3, 4) for _ in range(40)]),
    "stacked_last": lambda: torch.stack([torch.empty(3, 4) for _ in range(40)], -1),
    "stacked_numbers": lambda: torch.stack([torch.empty((), dtype=torch.int64) for _ in range(40)]),
    "concatenated": lambda: torch.cat([torch.empty(3, 4)] * 40),
    "concatenated_along": lambda: torch.cat([torch.empty(3, 4) for _ in range(40)], dim=1),
    "channels_last": lambda: torch.cat(
        [torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last) for _ in range(40)]
    ),
    "transposed": lambda: torch.stack([torch.empty(3, 4).t() for _ in range(40)]),
    "unlike": lambda: torch.cat([torch.empty(index, 4) for index in range(40)]),
    "empty": lambda: torch.cat([torch.empty(0) for _ in range(40)]),
    "typed": lambda: torch.cat([torch.empty(2), *(torch.empty(2, dtype=torch.float64) for _ in range(40))]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_all(name):
    real = CASES[name]()
    with FakeTensorMode(), Together():
        found = CASES[name]()
    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)


COLLATES = {
    "default": None,
    "own": lambda samples: (torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])),
}
OVER_DATA_OF_THE_CELL = """
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randint(2, (4096,)))
for x, y in DataLoader(data, batch_size=4096, collate_fn=collate):
    x = x * 2
"""


@pytest.mark.parametrize("name", COLLATES)
def test_a_batch_of_thousands_of_fakes_asks_the_fake_mode_for_few(name, monkeypatch):
    dispatch = FakeTensorMode.dispatch

    def of_few(mode, func, types, args=(), kwargs=None):
        assert not args or not isinstance(args[0], (list, tuple)) or len(args[0]) < 100, func
        return dispatch(mode, func, types, args, kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", of_few)
    namespace = {"torch": torch, "DataLoader": DataLoader, "collate": COLLATES[name]}
    data, batch = 4096 * (8 * 4 + 8), 4096 * 8 * 4
    assert rise(namespace, OVER_DATA_OF_THE_CELL) == pytest.approx(data * 2 + batch, rel=0.05)
