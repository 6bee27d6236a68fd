"""What cells do to tensors and files that fakes do not take by themselves."""

import gc
from textwrap import dedent

import pytest
import torch
from forecast_lab import measured_rise, mlp, namespace, rise
from torch import nn

STEP = "    optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()\n"

CELLS = {
    "a subclass of tensors": """
        class Named(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                return super().__torch_function__(func, types, args, kwargs or {})
        a = torch.randn(1000, 500).as_subclass(Named)
        b = (a * 2).relu() @ torch.randn(500, 300)
        assert isinstance(b, Named)
        c = torch.stack([b, b])
    """,
    "a subclass that is made": """
        class Boxes(torch.Tensor):
            @staticmethod
            def __new__(cls, data, size):
                made = torch.Tensor._make_subclass(cls, data)
                made.size_of_image = size
                return made
        boxes = Boxes(torch.randn(1000, 500), (10, 10))
        moved = boxes + 1
    """,
    "lazy modules": """
        net = nn.Sequential(nn.LazyLinear(256), nn.ReLU(), nn.LazyLinear(10))
        net(data[:2])
        adam = torch.optim.Adam(net.parameters())
        for x, y in loader:
            adam.zero_grad()
            F.cross_entropy(net(x), y).backward()
            adam.step()
    """,
    "lazy modules of an earlier cell": """
        lazy(data[:2])
        adam = torch.optim.Adam(lazy.parameters())
        for x, y in loader:
            adam.zero_grad()
            F.cross_entropy(lazy(x), y).backward()
            adam.step()
    """,
    "an empty model is given memory": """
        with torch.device("meta"):
            big = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
        big = big.to_empty(device="cpu")
        for module in big.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        big(torch.randn(64, 512)).sum().backward()
    """,
    "a file of weights": """
        loaded = torch.load(path, map_location="cpu")
        product = loaded["w"] @ loaded["w"]
    """,
    "weights that the cell itself has saved": """
        for x, y in loader:
        STEP
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
        best = torch.load(new)
        model.load_state_dict(best["model"])
        out = model(data.repeat(64, 1))
    """,
    "weights in a buffer": """
        import io
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        other = torch.load(buffer)
        out = model(data.repeat(16, 1))
    """,
    "an iterator with workers": """
        for x, y in begun:
        STEP
    """,
    "parametrisations": """
        from torch.nn.utils.parametrizations import spectral_norm
        net = nn.Sequential(spectral_norm(nn.Linear(256, 512)), nn.ReLU(), nn.Linear(512, 10))
        assert torch.allclose(model(data[:8]), model(data[:8]), atol=10.0)
        F.cross_entropy(net(data), torch.zeros(1024, dtype=torch.long)).backward()
    """,
}


def _namespace(folder):
    torch.manual_seed(0)
    ns = namespace(mlp, "adamw") | {"data": torch.randn(1024, 256), "path": folder / "w.pt", "new": folder / "new.pt"}
    torch.save({"w": torch.randn(500, 500)}, ns["path"])
    ns["lazy"] = nn.Sequential(nn.LazyLinear(256), nn.ReLU(), nn.LazyLinear(10))
    return ns


def _with_workers(ns):
    loader = torch.utils.data.DataLoader(ns["loader"].dataset, batch_size=128, num_workers=1)
    return iter(loader)


@pytest.mark.parametrize("name", CELLS)
def test_the_peak_is_that_of_the_real_run(name, tmp_path):
    source = dedent(CELLS[name]).replace("STEP\n", STEP)
    ns = _namespace(tmp_path)
    if "begun" in source:
        ns["begun"] = _with_workers(ns)
        next(ns["begun"])
    found = rise(ns, source)
    assert not (tmp_path / "new.pt").exists()
    ns = _namespace(tmp_path)
    ns["begun"] = iter(ns["loader"])
    source = source.replace("begun", "DataLoader(loader.dataset, batch_size=128)")
    ns["DataLoader"] = torch.utils.data.DataLoader
    gc.collect()
    assert found == pytest.approx(measured_rise(ns, source), rel=0.02)


THREADED = """
import threading
found = []
def work():
    found.append(model(data).sum())
CALL
found[0].backward()
"""


def test_what_a_thread_of_the_cell_does_counts(tmp_path):
    started = "thread = threading.Thread(target=work); thread.start(); thread.join()"
    here, there = (rise(_namespace(tmp_path), THREADED.replace("CALL", call)) for call in ("work()", started))
    assert there == pytest.approx(here, rel=0.001)


def test_a_lazy_module_that_nobody_uses_stands_in_nobody_s_way(tmp_path):
    assert rise(_namespace(tmp_path), "big = torch.ones(1 << 20)") == 4 << 20
