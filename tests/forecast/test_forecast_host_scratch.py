"""What kernels of the CPU need inside, by rules and a margin, against the events of the allocator."""

import pytest
import torch
from forecast_lab import check_margin, forecast_and_rise, measured_rise, rises
from torch import nn

LAST = "y = torch.randn(16, 32, 16, 16).to(memory_format=torch.channels_last)\n"
NET = "net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 10))\n"
X = "x = torch.randn(1024, 128)\n"
CELLS = {
    "batch norm before a layer": f"{X}{NET}net(x).sum().backward()",
    "batch norm of a sum": f"{X}nn.BatchNorm1d(128)(x.requires_grad_()).sum().backward()",
    "batch norm of images": "nn.BatchNorm2d(32)(torch.randn(16, 32, 16, 16).requires_grad_()).sin().sum().backward()",
    "strided": "nn.Conv2d(3, 32, 7, 2, 3)(torch.randn(24, 3, 48, 48)).pow(2).sum().backward()",
    "channels last": f"{LAST}nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last)(y).pow(2).sum().backward()",
    "volume": "nn.Conv3d(8, 16, 3)(torch.randn(10, 8, 12, 12, 12)).pow(2).sum().backward()",
}


def names():
    return {"torch": torch, "nn": nn}


@pytest.mark.parametrize("name", CELLS)
def test_the_peak_is_that_of_the_real_run_within_the_margin_that_is_told(name):
    check_margin(names, CELLS[name])


IMAGES = "x = torch.randn(16, 32, 24, 24).requires_grad_()\n"
LAYERS = {
    "plain": "nn.Conv2d(32, 48, 3, 1, 1)(x)",
    "strided": "nn.Conv2d(32, 64, 4, 2, 1)(x)",
    "few filters": "nn.Conv2d(32, 2, 1)(x)",
    "depthwise": "nn.Conv2d(32, 32, 3, 2, 1, groups=32)(x)",
    "grouped": "nn.Conv2d(32, 64, 3, 1, 1, groups=4)(x)",
    "dilated": "nn.Conv2d(32, 32, 3, 1, 2, dilation=2)(x)",
    "transposed": "nn.ConvTranspose2d(32, 16, 2, 2)(x)",
    "of colours": "nn.Conv2d(3, 32, 7, 2, 3)(x[:, :3])",
    "of doubles": "nn.Conv2d(32, 32, 3, 1, 1).double()(x.double())",
    "channels last": "nn.Conv2d(32, 64, 3)(x.to(memory_format=torch.channels_last))",
}


CONVOLUTIONS = {
    f"{name}, {end}": f"{IMAGES}{layer}.{end}.backward()"
    for name, layer in LAYERS.items()
    for end in ("pow(2).sum()", "sum()")
}


@pytest.fixture(scope="module")
def counted():
    return rises(names(), CONVOLUTIONS)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_copies_of_a_convolution_are_counted(counted, name):
    assert measured_rise(names(), CONVOLUTIONS[name]) == pytest.approx(counted[name], rel=0.02)


MATRIX = "a = torch.randn(200, 200)\n"
ALGEBRA = {
    "singular values and vectors": "found = torch.linalg.svd(a)",
    "eigenvectors of a symmetric matrix": "found = torch.linalg.eigh(a @ a.T)",
    "eigenvectors": "found = torch.linalg.eig(a)",
    "an orthogonal matrix": "found = torch.linalg.qr(a)",
    "an inverse": "found = torch.linalg.inv(a)",
    "a pseudo-inverse": "found = torch.linalg.pinv(a)",
    "an exponential": "found = torch.linalg.matrix_exp(a)",
    "an orthogonal layer": (
        "layer = nn.utils.parametrizations.orthogonal(nn.Linear(200, 200))\nlayer(a).sum().backward()"
    ),
}


@pytest.mark.parametrize("name", ALGEBRA)
def test_what_linear_algebra_needs_is_estimated_and_it_says_so(name):
    ns, cell = {"torch": torch, "nn": nn}, MATRIX + ALGEBRA[name]
    found, rises_by = forecast_and_rise(ns, cell)
    assert found.error_ratio == 0.25
    assert measured_rise(ns, cell) == pytest.approx(rises_by, rel=found.error_ratio)


ALIGNED = """
scores = torch.randn(200, 16, 30, requires_grad=True)
targets = torch.randint(1, 30, (16, 70))
lengths = torch.tensor([70] + [20] * 15)
loss = nn.functional.ctc_loss(scores.log_softmax(-1), targets, torch.full((16,), 200), lengths, zero_infinity=True)
loss.backward()
"""


def test_the_sums_of_a_ctc_loss_count_both_ways():
    check_margin(names, ALIGNED)
