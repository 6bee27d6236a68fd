"""A cell that asks for a device which this machine lacks is forecast as on one."""

import re
from pathlib import Path

import pytest
import torch
from capabilities import fakes_have_an_index, fakes_know_all, has_accelerator
from device_idioms import ERRORS, IDIOMS, IMPORTS, INFERENCE, LANGUAGE_MODEL, TRAINING
from forecast_lab import TRAIN, forecast, mlp, namespace, nothing, session

from oomdoctor.forecast import device_autocast, device_kernels, price
from oomdoctor.model.session import Attempt
from oomdoctor.model.sizes import MIB
from oomdoctor.sandbox.card import Card, cublas_workspace_bytes

ON_CUDA = "dry run, as on cuda"
WORKSPACE = cublas_workspace_bytes((8, 0))

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The forecasts of all idioms and errors, made in one copy."""
    path = tmp_path_factory.mktemp("files") / "weights.pt"
    torch.save(torch.nn.Linear(4, 4).state_dict(), path)
    sources = {name: f"{IMPORTS}path = {str(path)!r}\n{cell}" for name, cell in IDIOMS.items()}
    sources |= {cell: IMPORTS + cell for cell in ERRORS}
    attempts = [Attempt(source=source) for source in sources.values()]
    found = price(session({}, ""), attempts, budget=None, prepare=nothing, timeout_s=150.0, card=Card())
    return dict(zip(sources, found, strict=True))


_MARKS = {"questions": has_accelerator, "operations": fakes_know_all, "attention": fakes_know_all}


@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS.get(name, ())) for name in IDIOMS])
def test_what_notebooks_do_with_a_device_is_followed(name, followed):
    assert followed[name].refused is None
    assert followed[name].basis == ON_CUDA
    assert followed[name].peak > 0


_OF_ANOTHER = [cell for cell, error in ERRORS.items() if error in ("invalid device ordinal", "there is no device mps")]


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=fakes_have_an_index if cell in _OF_ANOTHER else ()) for cell in ERRORS]
)
def test_what_cuda_would_refuse_is_told(cell, followed):
    refused = followed[cell].refused.replace(
        "Unhandled FakeTensor Device Propagation", "Expected all tensors to be on the same device"
    )  # as older versions say it
    assert ERRORS[cell] in refused


def on_cuda(source):
    return "model.to('cuda')\n" + source.replace("model(x), y", "model(x.to('cuda')), y.to('cuda')")


def test_a_cell_that_asks_in_vain_is_run_as_on_the_device():
    found = forecast(namespace(mlp, "adamw"), on_cuda(TRAIN))
    assert found.refused is None
    assert found.basis == ON_CUDA
    assert found.peak_line is not None
    assert found.error_ratio < 0.15
    assert found.reserved > found.peak > 4 * sum(p.nbytes for p in mlp()[0].parameters())
    temporaries = dict(found.course.temporaries)
    assert temporaries["workspace of cuBLAS"] == 2 * WORKSPACE


@pytest.mark.parametrize(
    "cell",
    [
        "x = torch.ones(1 << 18, device='cuda' if torch.cuda.is_available() else 'cpu')",
        "try:\n    x = torch.ones(1 << 18).cuda()\nexcept Exception:\n    x = torch.ones(1 << 18)",
        "try:\n    x = torch.ones(1 << 18, device='cuda')\nexcept AssertionError:\n    x = torch.ones(1 << 18)",
    ],
)
def test_a_cell_that_can_do_without_is_run_as_here(cell):
    found = forecast({"torch": torch}, cell)
    assert (found.refused, found.basis) == (None, "dry run")
    assert found.peak >= MIB


def test_the_memory_of_the_device_is_counted_apart_from_that_of_the_host():
    cell = "a = torch.ones(1 << 22)\nb = torch.ones(1 << 20, device='cuda')\nc = b.cpu()\nd = a[:10].to(b.device)"
    found = forecast({"torch": torch, "held": torch.ones(1 << 20)}, cell)
    assert found.basis == ON_CUDA
    assert found.peak == 4 * MIB + 512
    assert found.reserved is not None


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_no_other_device_is_emulated(kind):
    found = forecast({"torch": torch}, f"b = torch.ones(1 << 20, device='{kind}')")
    assert found.peak is None
    assert kind in found.refused.lower()


def test_what_lies_on_a_device_goes_when_it_is_moved_back_or_dropped():
    cell = "m = torch.nn.Linear(512, 512, bias=False).cuda()\nm.cpu()\nx = torch.ones(512, 512).cuda()\ndel x\n"
    found = forecast({"torch": torch}, cell + "y = torch.ones(512, 512).cuda()")
    assert found.peak == MIB


def test_a_model_of_the_host_that_was_moved_and_dropped_leaves_nothing_there():
    ns = namespace(mlp, "adamw")
    exec(TRAIN, ns)
    found = forecast(ns, "model.cuda()\ndel model, optimizer, loss\nassert torch.cuda.memory_allocated() == 0")
    assert (found.refused, found.basis) == (None, ON_CUDA)


def test_a_convolution_widens_the_margin():
    found = forecast({"torch": torch}, "torch.nn.Conv2d(3, 8, 3).cuda()(torch.ones(64, 3, 256, 256, device='cuda'))")
    assert found.error_ratio == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("module", "name", "sabotaged"),
    [
        (device_kernels, "_dropout", lambda tensor, p, train: tensor * 1),
        (device_kernels.Workspaces, "follow", lambda _self, func: None),
    ],
)
def test_an_emulation_that_errs_is_refused(module, name, sabotaged, monkeypatch):
    monkeypatch.setattr(module, name, sabotaged)
    found = forecast({"torch": torch}, "x = torch.ones(3, device='cuda')")
    assert found.peak is None
    assert found.refused.startswith("a device of CUDA cannot be emulated with this torch: ")


def test_an_emulation_of_autocast_that_errs_is_refused_to_those_that_use_it(monkeypatch):
    monkeypatch.setattr(device_autocast, "_is_eligible", lambda *_args: False)
    plain, cast = (
        "x = torch.ones(3, device='cuda')",
        "with torch.autocast('cuda'):\n    x = torch.ones(3, device='cuda')",
    )
    assert forecast({"torch": torch}, plain).refused is None
    assert "the dtype of a product under autocast is torch.float32" in forecast({"torch": torch}, cast).refused


AUTOCAST = (
    "with torch.autocast('cuda', torch.bfloat16):\n    x = torch.ones(64, 64, device='cuda')\n    y = x @ x.atan2(x)"
)


def test_an_operator_whose_autocast_tells_nothing_is_named_and_widens_the_margin(monkeypatch):
    rules = device_autocast.rules
    monkeypatch.setattr(device_autocast, "rules", lambda: rules() | {"aten::atan2": None})
    known, unknown = forecast({"torch": torch}, AUTOCAST.replace(".atan2(x)", "")), forecast({"torch": torch}, AUTOCAST)
    assert unknown.refused is None
    assert "autocast of atan2 is not known" in unknown.basis
    assert unknown.error_ratio > known.error_ratio


@pytest.mark.parametrize(
    "capability", [(7, 5), (9, 0), *(pytest.param(one, marks=pytest.mark.thorough) for one in ((7, 0), (8, 0)))]
)
def test_every_card_computes_with_bfloat16(capability):
    found = forecast({"torch": torch}, AUTOCAST, card=Card(capability=capability))
    assert found.refused is None
    precise = forecast(
        {"torch": torch}, "assert not torch.cuda.is_bf16_supported(False)", card=Card(capability=capability)
    )
    assert (precise.refused is None) is (capability < (8, 0))


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_keep_what_cudnn_keeps(layer):
    cell = (
        f"model = torch.nn.{layer}(64, 128, 2).cuda()\nmodel(torch.ones(32, 16, 64, device='cuda'))[0].sum().backward()"
    )
    found = forecast({"torch": torch}, cell)
    assert found.refused is None
    assert found.error_ratio == pytest.approx(0.35)
    assert "what kernels need inside is an estimate" in found.basis


def test_the_rules_of_autocast_are_those_of_torch():
    rules = device_autocast.rules()
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    for policy in ("lower_precision_fp", "fp32", "fp32_set_opt_dtype", "promote"):
        (body,) = re.findall(rf"#define AT_FORALL_{policy.upper()}\(_\)((?:[^\n]*\\\n)+[^\n]*)", header)
        names = [".".join(filter(None, found)) for found in re.findall(r"_\((\w+)(?:, (\w+))?\)", body)]
        assert {name: rules[f"aten::{name}"] for name in names} == dict.fromkeys(names, policy)
    assert rules["aten::binary_cross_entropy"] == "banned"
    assert rules["aten::norm.ScalarOpt_dim"] == "fp32_append_dtype"


@pytest.mark.parametrize(
    ("capability", "setting", "nbytes"),
    [((7, 5), "", 8519680), ((8, 9), "", 8519680), ((9, 0), "", 32 * MIB), ((8, 0), ":16:8:4096:2", 8519680)],
)
def test_the_workspace_of_cublas_depends_on_the_card_and_a_setting(capability, setting, nbytes, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    assert cublas_workspace_bytes(capability) == nbytes


MEASURED = [
    (128, "inference", False, 1656.5, 1682),
    (256, "inference", False, 1710.7, 1778),
    (512, "inference", True, 1859.0, 1890),
    (1024, "inference", False, 2744.1, 3056),
    (128, "training", False, 6688.4, 6900),
    (256, "training", False, 8681.8, 8836),
    (512, "training", True, 11851.0, 12074),
    (1024, "training", True, 23085.8, 24012),
]
"""Context, what was done, whether in bfloat16, and MiB allocated and reserved at most on a real card.

Source: memory snapshots that were published with a course's solution; whether autocast was on was not recorded.
"""
QUICK = [case for case in MEASURED if case[:2] == (512, "inference")]


@pytest.mark.parametrize(
    ("context", "what", "half", "allocated", "reserved"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.thorough) for case in MEASURED],
    ids=lambda value: str(value),
)
def test_the_forecast_is_what_a_real_card_needed(context, what, half, allocated, reserved):
    cell = LANGUAGE_MODEL + {"inference": INFERENCE, "training": TRAINING}[what]
    cell = cell.replace("CONTEXT", str(context)).replace("HALF", str(half))
    found = forecast({}, cell, card=Card())
    assert found.refused is None
    assert found.peak / MIB == pytest.approx(allocated, rel=0.005)
    assert found.reserved / MIB == pytest.approx(reserved, rel=0.015)


ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16")
assert accelerator.device.type == "cuda"
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    assert x.is_cuda
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
"""

TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(64)]
settings = TrainingArguments(output_dir="/out", max_steps=5, bf16=True, report_to=[], save_strategy="no")
trainer = Trainer(model=model, args=settings, train_dataset=data)
assert settings.device.type == "cuda"
trainer.train()
assert next(model.parameters()).is_cuda
"""


@pytest.mark.parametrize(
    "cell", [ACCELERATE, pytest.param(TRAINER, marks=pytest.mark.thorough)], ids=["accelerate", "trainer"]
)
def test_libraries_that_choose_the_device_themselves_are_followed(cell):
    found = forecast(namespace(mlp, "adamw"), cell, card=Card())
    assert found.refused is None
    assert dict(found.course.temporaries)["workspace of cuBLAS"] == 2 * WORKSPACE
