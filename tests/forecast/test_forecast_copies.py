"""What kernels of the CPU make for themselves by a rule that is known, against the events of the allocator."""

import pytest
import torch
from forecast_lab import forecast, measured_rise, rise
from torch import nn

NET = "net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), {norm}, nn.Linear(256, 10))\nnet(x).{loss}.backward()"
LAST = "y = torch.randn(16, 32, 16, 16).to(memory_format=torch.channels_last)\n"
CELLS = {
    "batch norm before a layer": NET.format(norm="nn.BatchNorm1d(256)", loss="sum()"),
    "batch norm and another loss": NET.format(norm="nn.BatchNorm1d(256)", loss="pow(2).mean()"),
    "group norm before a layer": NET.format(norm="nn.GroupNorm(8, 256)", loss="sum()"),
    "layer norm before a layer": NET.format(norm="nn.LayerNorm(256)", loss="sum()"),
    "batch norm of a sum": "nn.BatchNorm1d(128)(x.requires_grad_()).sum().backward()",
    "images": "y = torch.randn(16, 32, 16, 16, requires_grad=True)\nnn.BatchNorm2d(32)(y).sin().sum().backward()",
    "images with channels last": f"{LAST}nn.BatchNorm2d(32)(y.requires_grad_()).sin().sum().backward()",
    "short sequences": "nn.GroupNorm(8, 128)(x.view(256, 128, 4).requires_grad_()).sin().sum().backward()",
}


@pytest.mark.parametrize("name", CELLS)
def test_the_peak_is_that_of_the_real_run(name):
    def program():
        return {"torch": torch, "nn": nn, "x": torch.randn(1024, 128)}

    of_threads = 512 * torch.get_num_threads()  # partial sums of 128 channels, which no rule follows
    measured = measured_rise(program(), CELLS[name])
    assert rise(program(), CELLS[name]) == pytest.approx(measured, rel=0.001, abs=of_threads)


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
    found = forecast(ns, cell)
    assert "what kernels need inside is an estimate" in found.basis
    assert measured_rise(ns, cell) == pytest.approx(rise({"torch": torch, "nn": nn}, cell), rel=found.error_ratio)


def test_what_is_no_estimate_is_not_said_to_be():
    assert "estimate" not in forecast({"torch": torch}, "a = torch.randn(200, 200) @ torch.randn(200, 200)").basis


DISTANCES = "points = torch.randn(300, 32)\nnearest = torch.cdist(points, torch.randn(400, 32)).topk(5, largest=False)"


def test_distances_are_those_of_a_product():
    ns = {"torch": torch}
    assert rise(ns, DISTANCES) == pytest.approx(measured_rise(ns, DISTANCES), rel=0.001)


ALIGNED = """
scores = torch.randn(200, 16, 30, requires_grad=True)
targets = torch.randint(1, 30, (16, 70))
lengths = torch.tensor([70] + [20] * 15)
loss = nn.functional.ctc_loss(scores.log_softmax(-1), targets, torch.full((16,), 200), lengths, zero_infinity=True)
loss.backward()
"""


def test_the_sums_of_a_ctc_loss_count_both_ways():
    ns = {"torch": torch, "nn": nn}
    assert rise(ns, ALIGNED) == pytest.approx(measured_rise(ns, ALIGNED), rel=0.005)


def test_signals_are_made_of_their_spectra():
    cell = "back = torch.istft(torch.randn(8, 257, 100, dtype=torch.cfloat), 512, 128, window=torch.hann_window(512))"
    assert rise({"torch": torch}, cell) == pytest.approx(measured_rise({"torch": torch}, cell), rel=0.005)
