"""Named causes, live: the first finding is the right one, and tells the user's own variable and line.

As in ``test_planted_causes.py``, all cases share one kernel. Those on the device run on a simulated one; on the host
the kernel has a limit on its data, which is real.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from kernels import Kernel
from planted import ADAM_STEP, CASE_NUMBER, QUIET, SETUP, TRAIN

LAST = "__import__('oomdoctor').last_case()"
LINES = f"[line.source_line for line in ({LAST}.incident.cell, {LAST}.incident.inner) if line]"
FINDINGS = f"[[one.rule, [one.title, *one.because]] for one in {LAST}.findings]"
LIBRARY_FILE = re.compile(r"\b(?:adam|adamw|container|linear|module|functional|graph|merge|_tensor)\.py\b")

LIMIT = """\
import pathlib
import resource

_status = pathlib.Path("/proc/self/status").read_text()
_used = int(next(line for line in _status.splitlines() if line.startswith("VmData")).split()[1]) << 10
_unlimited = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (_used + (300 << 20), _unlimited[1]))
"""
UNLIMITED = "resource.setrlimit(resource.RLIMIT_DATA, _unlimited)"


@dataclass(frozen=True)
class Named:
    """A cause that has a name and a line in the program.

    Attributes:
        rule: that comes first; ``says``: what its sentences contain, the variable first of all.
        line: the user's own, in these sentences or above them: of a leak what keeps, else what failed.
        cells: run before the device is simulated, or the limit is set; ``filling``: then; ``failing``: the last.
        budget: of the simulated device, None for the limit on the kernel.
    """

    name: str
    rule: str
    says: tuple[str, ...]
    line: str
    failing: str
    cells: tuple[str, ...] = ()
    filling: tuple[str, ...] = ()
    budget: str | None = "64MiB"


SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"

DISTIL = """\
for x, y in batches(size=64, width=768):
    with torch.no_grad():
        wanted = teacher(x)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), wanted)
    loss.backward()
    optimizer.step()
"""

AVERAGED = """\
for x, y in batches(size=600, width=768):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, weight in zip(ema.parameters(), model.parameters()):
            average.lerp_(weight, 0.01)
"""

SHADOW = """\
class Averages:
    def __init__(self, model, decay=0.99):
        self.decay = decay
        self.shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def update(self, model):
        for name, value in model.state_dict().items():
            self.shadow[name].mul_(self.decay).add_(value, alpha=1 - self.decay)


averages = Averages(model)
"""

ATTEND = """\
class Mixer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, tokens):
        q, k, v = self.query(tokens), self.key(tokens), self.value(tokens)
        weights = torch.softmax(torch.matmul(q, k.transpose(1, 2)) / 8, dim=-1)
        return torch.matmul(weights, v)


mixer = nn.Sequential(Mixer(), Mixer())
"""

KEPT = """\
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 128)
        self.k_cache, self.v_cache = [], []

    def forward(self, token):
        key, value = self.project(token).chunk(2, dim=-1)
        self.k_cache.append(key)
        self.v_cache.append(value)
        return token


decoder = Decoder()
"""

JOINED = """\
keys, values = torch.zeros(4, 8, 0, 64), torch.zeros(4, 8, 0, 64)
with torch.no_grad():
    for token in range(8_000):
        new = torch.randn(4, 8, 16, 64)
        keys = torch.cat([keys, new], dim=2)
        values = torch.cat([values, new], dim=2)
"""

CLOSURES = """\
callbacks = []


def watch(images):
    features = model(images)

    def report():
        return features.norm().item()

    callbacks.append(report)


for x, y in batches(size=1_000):
    watch(x)
"""

FAILED = """\
saved = None


def score(images):
    features = model(images)
    raise ValueError("no labels")


try:
    score(torch.randn(4_000, 256))
except ValueError as error:
    saved = error
"""

EPOCH = """\
def train_epoch(net, stepper, size):
    total = 0.0
    for images, labels in batches(size=size):
        stepper.zero_grad()
        scores = net(images)
        objective = F.cross_entropy(scores, labels)
        objective.backward()
        stepper.step()
        total += objective.item()
    return total
"""

EVALUATE = """\
def evaluate(net):
    net.eval()
    hits = 0
    for images, labels in batches(size=12_000):
        scores = net(images)
        hits += (scores.argmax(1) == labels).sum().item()
    return hits
"""

EMBED = """\
embedded = {}
for step, (x, y) in enumerate(batches()):
    embedded[step] = model(x)
"""

REGRESS = """\
features, target = torch.randn(6_000, 256), torch.randn(6_000)
predicted = model(features)
loss = ((predicted - target) ** 2).mean()
"""

MERGED = """\
import numpy as np
import pandas as pd

orders = pd.DataFrame({"customer": np.zeros(20_000, dtype=np.int64), "price": np.random.rand(20_000)})
visits = pd.DataFrame({"customer": np.zeros(20_000, dtype=np.int64), "length": np.random.rand(20_000)})
"""

IN_MAIN = """\
def main():
    net = mlp(width=1024, depth=5)
    stepper = torch.optim.Adam(net.parameters())
    for images, labels in batches(size=8, width=1024):
        stepper.zero_grad()
        objective = F.cross_entropy(net(images), labels)
        objective.backward()
        stepper.step()


main()
"""

DISTIL_IN_MAIN = """\
def main():
    guide = mlp(width=768, depth=10).eval()
    pupil = mlp(width=768, depth=6)
    stepper = torch.optim.SGD(pupil.parameters(), lr=0.1)
    for images, labels in batches(size=64, width=768):
        with torch.no_grad():
            wanted = guide(images)
        stepper.zero_grad()
        objective = F.mse_loss(pupil(images), wanted)
        objective.backward()
        stepper.step()


main()
"""

KEPT_IN_MAIN = """\
def main():
    net = mlp()
    history = []
    for images, labels in batches():
        objective = F.cross_entropy(net(images), labels)
        history.append(objective)


main()
"""

FITTED = """\
import pytorch_lightning as pl


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp(width=1024, depth=5)

    def training_step(self, batch, at):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


lit = Lit()
rows = torch.utils.data.TensorDataset(torch.randn(64, 1024), torch.randint(0, 10, (64,)))
loader = torch.utils.data.DataLoader(rows, batch_size=8)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
"""

CASES = (
    Named(
        "a teacher beside the model",
        "second_model_untrained",
        ("The second model `teacher`",),
        "loss.backward()",
        DISTIL,
        filling=("model = mlp(width=768, depth=6)", SGD, "teacher = mlp(width=768, depth=10).eval()"),
        budget="46MiB",
    ),
    Named(
        "a model of an earlier experiment",
        "second_model_untrained",
        ("The second model `baseline`",),
        "loss.backward()",
        TRAIN.replace("batches()", "batches(size=64, width=768)"),
        filling=(
            "baseline = mlp(width=768, depth=12)",
            "model = mlp(width=768, depth=8)",
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        ),
        budget="80MiB",
    ),
    Named(
        "an EMA copy",
        "second_model_untrained",
        ("The EMA copy `ema`",),
        "loss.backward()",
        AVERAGED,
        filling=(
            "model = mlp(width=768, depth=8)",
            ADAM_STEP.replace("1024", "768"),
            "import copy\nema = copy.deepcopy(model).requires_grad_(False)",
        ),
        budget="102MiB",
    ),
    Named(
        "averages kept in a dict",
        "second_model_untrained",
        ("The EMA copy `averages.shadow`",),
        "loss.backward()",
        AVERAGED.partition("    with")[0] + "    averages.update(model)\n",
        filling=(
            "model = mlp(width=768, depth=8)",
            ADAM_STEP.replace("1024", "768"),
            SHADOW,
        ),
        budget="102MiB",
    ),
    Named(
        "outputs kept in a dict",
        "outputs_kept_with_graph",
        ("hang on embedded",),
        "line 3: embedded[step] = model(x)",
        EMBED,
        filling=("model = mlp()",),
    ),
    Named(
        "Adam's first step",
        "first_step_state",
        ("`stepper` is Adam",),
        "stepper.step()",
        "train_epoch(net, stepper, 8)",
        filling=(
            EPOCH.replace("size=size", "size=size, width=1024"),
            "net = mlp(width=1024, depth=5)\nstepper = torch.optim.Adam(net.parameters())",
        ),
    ),
    Named(
        "Adam's first step in a function",
        "first_step_state",
        ("`stepper` is Adam",),
        "stepper.step()",
        IN_MAIN,
    ),
    Named(
        "Adam's first step in a trainer",
        "first_step_state",
        ("trainer.fit(lit, loader)",),
        "trainer.fit(lit, loader)",
        "trainer.fit(lit, loader)",
        filling=(FITTED, "trainer = pl.Trainer(max_epochs=1, accelerator='cpu', **quiet)"),
    ),
    Named(
        "a teacher in a function",
        "second_model_untrained",
        ("The second model `guide`",),
        "objective.backward()",
        DISTIL_IN_MAIN,
        budget="46MiB",
    ),
    Named(
        "losses kept in a function",
        "graph_kept_alive",
        ("`history[0:",),
        "line 6: history.append(objective) keeps a tensor with its graph",
        KEPT_IN_MAIN,
    ),
    Named(
        "a column against a row",
        "shapes_broadcast",
        ("predicted", "target"),
        "loss = ((predicted - target) ** 2).mean()",
        REGRESS,
        filling=("model = mlp(out=1)",),
    ),
    Named(
        "attention written out",
        "eager_attention",
        ("q, k",),
        "line 8: torch.softmax(torch.matmul(q, k.transpose(1, 2)) / 8, dim=-1)",
        "tokens = torch.randn(4, 900, 64)\nmixer(tokens).sum().backward()",
        filling=(ATTEND,),
    ),
    Named(
        "an evaluation in a function",
        "evaluation_with_gradients",
        ("net(images)",),
        "scores = net(images)",
        "accuracy = evaluate(model)",
        filling=("model = mlp(depth=8)", EVALUATE),
    ),
    Named(
        "a big batch in a function",
        "activations_dominate",
        ("`net` keeps",),
        "scores = net(images)",
        "train_epoch(net, stepper, 6_000)",
        filling=(EPOCH, "net = mlp(depth=12)\nstepper = torch.optim.SGD(net.parameters(), lr=0.1)"),
    ),
    Named(
        "a big batch",
        "activations_dominate",
        ("`model` keeps",),
        "loss = F.cross_entropy(model(x), y)",
        TRAIN.replace("batches()", "batches(size=6_000)"),
        filling=("model = mlp(depth=12)", SGD),
    ),
    Named(
        "the optimizer of an old model",
        "old_model_alive",
        ("`optimizer` still leads",),
        "loss = model(torch.randn(6_000, 1024)).square().mean()",
        "loss = model(torch.randn(6_000, 1024)).square().mean()\nloss.backward()",
        filling=("model = mlp(width=1024, depth=4)", ADAM_STEP, "model = mlp(width=1024, depth=4)"),
        budget="104MiB",
    ),
    Named(
        "keys and values joined",
        "user_tensors_fill",
        ("keys",),
        "line 5: keys = torch.cat([keys, new], dim=2) makes it hold more",
        JOINED,
    ),
    Named(
        "a KV cache",
        "kv_cache_grows",
        ("decoder.k_cache",),
        "decoder(torch.zeros(4, 256, 64))",
        "with torch.no_grad():\n    for step in range(10_000):\n        decoder(torch.zeros(4, 256, 64))",
        filling=(KEPT,),
    ),
    Named(
        "the weights of each epoch",
        "weight_copies_kept",
        ("`snapshots` keeps",),
        "line 6: snapshots.append({name: value.clone() for name, value in model.state_dict().items()}) keeps one more",
        TRAIN.replace("batches()", "batches(size=64, width=512)")
        + "    snapshots.append({name: value.clone() for name, value in model.state_dict().items()})",
        filling=("model = mlp(width=512)\n" + SGD, "snapshots = []"),
    ),
    Named(
        "a cell run again",
        "model_built_beside_old",
        ("net, stepper of before",),
        "net = mlp(width=1024, depth=9)",
        "net = mlp(width=1024, depth=9)\nstepper = torch.optim.SGD(net.parameters(), lr=0.1)",
        filling=("net = mlp(width=1024, depth=9)\nstepper = torch.optim.SGD(net.parameters(), lr=0.1)",),
    ),
    Named(
        "closures that hold results",
        "closure_holds_tensors",
        ("callbacks[", "features"),
        "features = model(images)",
        CLOSURES,
        filling=("model = mlp()",),
    ),
    Named(
        "an exception that holds its frame",
        "earlier_traceback",
        ("`saved`", "`features` of score at In["),
        "loss = F.cross_entropy(model(x), y)",
        TRAIN.replace("batches()", "batches(size=4_000)"),
        filling=("model = mlp(depth=8)\n" + SGD, FAILED),
    ),
    Named(
        "a list of arrays",
        "many_arrays_under_one_name",
        ("`frames` leads",),
        "line 3: frames.append(np.ones((512, 1024))) makes it hold more",
        "frames = []\nfor step in range(1_000):\n    frames.append(np.ones((512, 1024)))",
        cells=("import numpy as np",),
        budget=None,
    ),
    Named(
        "a dict of arrays",
        "many_arrays_under_one_name",
        ("`tiles` leads",),
        "line 3: tiles[row, column] = np.full((512, 512), 1.0) makes it hold more",
        "for row in range(100):\n    for column in range(100):\n        tiles[row, column] = np.full((512, 512), 1.0)",
        cells=("import numpy as np\ntiles = {}",),
        budget=None,
    ),
    Named(
        "a table that grows",
        "name_grows",
        ("makes `table` hold more",),
        "line 4: table = pd.concat([table, part]) makes",
        "table = pd.DataFrame()\nfor day in range(1_000):\n    part = pd.DataFrame(np.random.rand(100_000, 8))\n"
        "    table = pd.concat([table, part])",
        cells=("import numpy as np\nimport pandas as pd",),
        budget=None,
    ),
    Named(
        "tensors in a list in host memory",
        "name_grows",
        ("makes `seen[0:",),
        "line 3: seen.append(torch.randn(1_000, 1_000)) makes",
        "seen = []\nfor step in range(10_000):\n    seen.append(torch.randn(1_000, 1_000))",
        budget=None,
    ),
    Named(
        "a many-to-many merge",
        "merge_multiplies_rows",
        ("orders", "visits"),
        "both = orders.merge(visits, on='customer')",
        "both = orders.merge(visits, on='customer')",
        cells=(MERGED,),
        budget=None,
    ),
)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run(QUIET, ok=True)
    yield kernel
    kernel.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_first_finding_names_the_variable_and_the_line(case: Named, notebook: Kernel) -> None:
    notebook.run("%oomdoctor simulate off", ok=True)
    notebook.run("%reset -f", ok=True)
    for cell in (SETUP, *case.cells):
        notebook.run(cell, ok=True)
    notebook.run(f"%oomdoctor simulate {case.budget}" if case.budget else LIMIT, ok=True)
    before = notebook.value(CASE_NUMBER)
    for cell in case.filling:
        notebook.run(cell, ok=True)
    notebook.run(case.failing, ok=False)
    if case.budget is None:
        notebook.run(UNLIMITED, ok=True)
    assert notebook.value(CASE_NUMBER) == before + 1
    (rule, told), *others = notebook.value(FINDINGS)
    assert rule == case.rule, (rule, told, others)
    text = "\n".join(told)
    assert not [words for words in case.says if words not in text], text
    assert case.line in "\n".join((text, *notebook.value(LINES))), text
    assert not LIBRARY_FILE.search(text), text
