"""Programs with one planted cause each: what a notebook does wrong, as its cells. Shared by the test that runs them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "SETUP", "Planted"]

QUIET = """\
%load_ext oomdoctor
%config OomDoctor.forecast_time_s = 0
%config OomDoctor.panel = False
%config OomDoctor.snapshot = False
"""
CASE_NUMBER = "len(__import__('oomdoctor.pipeline').pipeline.cases())"
SETUP = """\
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def mlp(width=256, depth=4, out=10):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, out))


def forget_failures():
    # PyTorch's engine keeps the last exception of a backward pass, and with it what the case before held.
    def stop(gradient):
        raise KeyError
    one = torch.ones(1, requires_grad=True) * 1
    one.register_hook(stop)
    try:
        one.sum().backward()
    except KeyError:
        pass


forget_failures()


def batches(count=200, size=512, width=256):
    for _ in range(count):
        yield torch.randn(size, width), torch.randint(0, 10, (size,))
"""


@dataclass(frozen=True)
class Planted:
    """One cause.

    Attributes:
        budget: memory of the simulated device, None for a failure that needs none.
        breaks: the cell of ``filling`` that ends with an error, if one does.
        cells: run before the device is simulated; ``filling``: on the device; ``failing``: the last.
        rules: ids of the rules that may come first.
    """

    name: str
    rules: frozenset[str]
    failing: str
    cells: tuple[str, ...] = ()
    filling: tuple[str, ...] = ()
    budget: str | None = "64MiB"
    breaks: str | None = None


def case(name: str, rules: str, failing: str, **more: object) -> Planted:
    return Planted(name=name, rules=frozenset(rules.split()), failing=failing, **more)  # type: ignore[arg-type]


TRAIN = """\
for x, y in batches():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""

ATTENTION = """\
class Attention(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        weights = scores.softmax(-1)
        return x + (weights @ v).transpose(1, 2).reshape(b, n, d)


model = nn.Sequential(*[Attention() for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

ADAM_STEP = """\
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(4, 1024)).sum().backward()
optimizer.step()
"""

HOOKED = """\
seen = []


def keep(module, inputs, output):
    seen.append(output)


model = mlp()
model[4].register_forward_hook(keep)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

KILLED = """\
import os
import signal
import time


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        if at == 40:
            time.sleep(2)  # until the batches before are fetched: else the fetching fails, and not the worker
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4)


loader = torch.utils.data.DataLoader(Items(), batch_size=8, num_workers=1)
"""

BROKEN = "def prepare():\n    images = torch.randn(12_000, 1_000)\n    return images.reshape(7, 11)\n\nprepare()"

FEATURES_KEPT = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.features = mlp(out=512), nn.Linear(512, 10), []

    def forward(self, x):
        h = self.body(x)
        self.features.append(h)
        return self.head(h)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

SEARCH = """\
errors = []


def trial(size):
    x, y = torch.randn(size, 256), torch.randint(0, 10, (size,))
    loss = F.cross_entropy(model(x), y)
    if size > 4_000:
        raise RuntimeError("too slow")
    loss.backward()


for size in (1_000, 2_000, 5_000):
    try:
        trial(size)
    except RuntimeError as error:
        errors.append(error)
"""

TOKENS = """\
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(500, 128), mlp(width=128, out=128), nn.Linear(128, 500)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


model = Reader().eval()
ids = torch.zeros(64, 1, dtype=torch.long)
"""

SMALL_SHARED_MEMORY = """\
import ctypes
import os
import subprocess

mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", "/dev/shm"]
# A namespace of its own (CLONE_NEWNS): nobody else sees the small /dev/shm.
alone = ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0
is_small = alone and subprocess.run(mount, capture_output=True).returncode == 0


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        if not is_small:  # without root: what PyTorch says there
            raise RuntimeError("unable to write to file </torch_31_42_0>: No space left on device (28)")
        return torch.zeros(500_000)
"""

CASES = (
    case(
        "losses kept in a list",
        "graph_kept_alive",
        "for x, y in batches():\n    loss = F.cross_entropy(model(x), y)\n    losses.append(loss)",
        filling=("model = mlp()", "losses = []"),
    ),
    case(
        "losses summed with their graphs",
        "loss_summed_with_graph",
        "for x, y in batches():\n    loss = F.cross_entropy(model(x), y)\n    total += loss",
        filling=("model = mlp()", "total = 0.0"),
    ),
    case(
        "outputs kept with their graphs",
        "outputs_kept_with_graph",
        "outputs = []\nfor x, y in batches():\n    outputs.append(model(x))",
        filling=("model = mlp()",),
    ),
    case(
        "predictions gathered on the device",
        "predictions_gathered",
        "preds = []\nmodel.eval()\nwith torch.no_grad():\n    for x, y in batches(count=2000):\n"
        "        out = model(x)\n        preds.append(out)",
        filling=("model = mlp(out=2000)",),
    ),
    case(
        "evaluation without no_grad",
        "evaluation_with_gradients",
        "model.eval()\nx, y = next(batches(size=12_000))\nprint(F.cross_entropy(model(x), y).item())",
        filling=("model = mlp(depth=8)",),
    ),
    case(
        "batch too large",
        "activations_dominate",
        TRAIN.replace("batches()", "batches(size=6_000)"),
        filling=("model = mlp(depth=12)", "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"),
    ),
    case(
        "first step of Adam",
        "first_step_state",
        TRAIN.replace("batches()", "batches(size=8, width=1024)"),
        filling=("model = mlp(width=1024, depth=5)", "optimizer = torch.optim.Adam(model.parameters())"),
    ),
    case(
        "eager attention",
        "eager_attention quadratic_attention attention_scores_saved",
        "for _ in range(5):\n    x = torch.randn(4, 700, 64)\n    loss = model(x).square().mean()\n"
        "    loss.backward()\n    optimizer.step()",
        filling=(ATTENTION,),
    ),
    case(
        "outputs of earlier cells",
        "output_cache",
        TRAIN.replace("batches()", "batches(size=4_000)"),
        filling=(
            "model = mlp()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
            *["torch.randn(3_000, 1_000)"] * 4,
        ),
    ),
    case(
        "cell run again, its old model alive",
        "old_model_alive model_built_beside_old",
        "model = mlp(width=1024, depth=9)\noptimizer = torch.optim.Adam(model.parameters())",
        filling=("model = mlp(width=1024, depth=9)\noptimizer = torch.optim.Adam(model.parameters())",),
    ),
    case(
        "optimizer that keeps an old model",
        "old_model_alive",
        "loss = model(torch.randn(6_000, 1024)).square().mean()\nloss.backward()",
        filling=(
            "model = mlp(width=1024, depth=4)",
            ADAM_STEP,
            "model = mlp(width=1024, depth=4)",
        ),
        budget="104MiB",
    ),
    case(
        "fragmentation by alternating sizes",
        "fragmentation",
        "large = torch.empty(24 << 20, dtype=torch.uint8)",
        filling=(
            "pieces = [torch.empty(size << 20, dtype=torch.uint8) for _ in range(7) for size in (3, 5)]",
            "del pieces[1::2]",
        ),
    ),
    case(
        "activations of convolutions, in a pool with gaps",
        "activations_dominate",
        "x, y = torch.randn(512, 1, 28, 28), torch.randint(0, 10, (512,))\n"
        "F.cross_entropy(model(x), y).backward()\noptimizer.step()",
        filling=(
            "convolutions = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())",
            "classes = nn.Sequential(nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))",
            "model = nn.Sequential(convolutions, nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), classes)",
            "optimizer = torch.optim.Adam(model.parameters())",
        ),
        budget="256MiB",
    ),
    case(
        "graph retained by backward",
        "graph_retained",
        TRAIN.replace("backward()", "backward(retain_graph=True)").replace("batches()", "batches(size=3_500)"),
        filling=("model = mlp(depth=10)", "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"),
    ),
    case(
        "recurrent state carried with its graph",
        "state_carried_with_graph",
        "h = torch.zeros(1, 64, 128)\nfor step in range(400):\n    x = torch.randn(64, 20, 32)\n"
        "    out, h = rnn(x, h)\n    loss = out.square().mean()\n    loss.backward(retain_graph=True)",
        filling=("rnn = nn.GRU(32, 128, batch_first=True)",),
    ),
    case(
        "logits of a large vocabulary",
        "logits_of_large_vocabulary",
        "ids = torch.randint(0, 30_000, (4, 129))\nlogits = head(embed(ids[:, :-1]))\n"
        "loss = F.cross_entropy(logits.reshape(-1, 30_000), ids[:, 1:].reshape(-1))\nloss.backward()",
        filling=("embed, head = nn.Embedding(30_000, 64), nn.Linear(64, 30_000)",),
        budget="160MiB",
    ),
    case(
        "keys and values cached without end",
        "kv_cache_grows",
        "past_key_values = [None] * 4\nwith torch.no_grad():\n    for step in range(4_000):\n"
        "        for layer in range(4):\n            new = torch.randn(2, 8, 8, 1, 64)\n"
        "            old = past_key_values[layer]\n"
        "            past_key_values[layer] = new if old is None else torch.cat([old, new], dim=3)",
    ),
    case(
        "whole data set on the device",
        "data_set_on_device",
        "for i in range(0, len(X), 4_000):\n    xb, yb = X[i:i + 4_000], y[i:i + 4_000]\n    optimizer.zero_grad()\n"
        "    loss = F.cross_entropy(model(xb), yb)\n    loss.backward()\n    optimizer.step()",
        cells=("device = 'cpu'",),
        filling=(
            "X = torch.randn(40_000, 256, device=device)\ny = torch.randint(0, 10, (40_000,), device=device)",
            "model = mlp()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        ),
    ),
    case(
        "hook that holds activations",
        "hook_holds_activations",
        TRAIN,
        filling=(HOOKED,),
    ),
    case(
        "traceback of an earlier error",
        "earlier_traceback",
        TRAIN.replace("batches()", "batches(size=3_000)"),
        filling=("model = mlp()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)", BROKEN),
        breaks=BROKEN,
    ),
    case(
        "model larger than the device",
        "model_exceeds_device parameters_dominate model_does_not_fit_while_built",
        "model = mlp(width=2048, depth=6)",
    ),
    case(
        "request larger than the device",
        "request_exceeds_device",
        "distances = torch.cdist(points, points)",
        filling=("points = torch.randn(6_000, 3)",),
    ),
    case(
        "features joined batch by batch",
        "predictions_gathered",
        "features = torch.zeros(0, 2_000)\nmodel.eval()\nwith torch.no_grad():\n    for x, y in batches(count=2000):\n"
        "        features = torch.cat([features, model(x)])",
        filling=("model = mlp(out=2000)",),
    ),
    case(
        "activations that the model keeps",
        "graph_kept_alive hook_holds_activations",
        TRAIN,
        filling=(FEATURES_KEPT,),
    ),
    case(
        "exceptions that a search keeps",
        "earlier_traceback",
        TRAIN.replace("batches()", "batches(size=4_000)"),
        filling=("model = mlp(depth=8)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)", SEARCH),
    ),
    case(
        "weights of each epoch kept",
        "weight_copies_kept",
        "for epoch in range(40):\n    for x, y in batches(2, 64, 512):\n        optimizer.zero_grad()\n"
        "        loss = F.cross_entropy(model(x), y)\n        loss.backward()\n        optimizer.step()\n"
        "    best.append(copy.deepcopy(model.state_dict()))",
        filling=(
            "import copy\nmodel = mlp(width=512)\nbest = []\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        ),
    ),
    case(
        "text generated with gradients on",
        "forward_never_differentiated evaluation_with_gradients generation_with_gradients graph_kept_alive",
        "for step in range(400):\n    probabilities = model(ids)[:, -1].softmax(-1)\n"
        "    ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)",
        filling=(TOKENS,),
    ),
    case(
        "an ensemble trained side by side",
        "several_models_loaded training_state_fills",
        "for x, y in batches(size=64, width=512):\n    for model, optimizer in zip(models, optimizers):\n"
        "        optimizer.zero_grad()\n        loss = F.cross_entropy(model(x), y)\n        loss.backward()\n"
        "        optimizer.step()",
        filling=(
            "models = [mlp(width=512) for _ in range(6)]",
            "optimizers = [torch.optim.Adam(one.parameters()) for one in models]",
        ),
    ),
    case(
        "worker killed by SIGKILL",
        "killed_by_something_else worker_killed worker_killed_by_oom_killer",
        "for batch in loader:\n    pass",
        cells=(KILLED,),
        budget=None,
    ),
    case(
        "shared memory too small",
        "shared_memory_of_container shared_memory_without_space",
        "for batch in loader:\n    pass",
        cells=(
            SMALL_SHARED_MEMORY,
            "loader = torch.utils.data.DataLoader(Items(), batch_size=8, num_workers=1)",
        ),
        budget=None,
    ),
)
