"""Which code is found to run a model with gradients that nobody takes, and which is left alone."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor.model.session import Cell, Cells

LIVE: dict[str, Any] = {"model": nn.Linear(2, 2), "criterion": nn.MSELoss()}

TRAIN = """
    for x, y in train_loader:
        out = model(x)
        loss = criterion(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
EVALUATE = """
    total = 0
    for x, y in test_loader:
        out = model(x)
        loss = criterion(out, y)
        total += loss.item() * len(x)
    print(total / len(test_set))
"""
FUNCTION = """
    def evaluate(net, loader):
        net.eval()
        preds, total = [], 0.0
        for x, y in loader:
            out = net(x)
            total += criterion(out, y).item()
            preds.append(out.argmax(1))
        return total / len(loader), torch.cat(preds)
"""
PHASES = """
    for phase in phases:
        with torch.set_grad_enabled(phase == 'train'):
            out = model(x)
            loss = criterion(out, y)
            if phase == 'train':
                loss.backward()
"""
TRAINER = """
    class Trainer:
        def __init__(self, model):
            self.model = model
            self.best = 0

        def loss(self, batch):
            x, y = batch
            return criterion(self.model(x), y)

        def train_epoch(self):
            for batch in train_loader:
                optimizer.zero_grad()
                self.loss(batch).backward()
                optimizer.step()

        def validate(self):
            total = 0
            for batch in test_loader:
                total += self.loss(batch).item()
            return total
"""


def found(*sources: str, **namespace: Any) -> list[tuple[int, int, str]]:
    cells = Cells(history=tuple(Cell(number=n, source=textwrap.dedent(s)) for n, s in enumerate(sources, 1)))
    live = LIVE | namespace
    modules = [(name, value) for name, value in live.items() if isinstance(value, nn.Module)]
    sites = facts(cells, live, modules, []).sites.get("no_grad_eval", ())
    return [(one.cell, one.line, one.text) for one in sites]


@pytest.mark.parametrize("before", ["", TRAIN])
def test_a_loop_at_the_top_level(before: str) -> None:
    assert found(before, EVALUATE) == [(2, 3, "for x, y in test_loader:")]


def test_a_single_prediction() -> None:
    assert found(TRAIN, "pred = model(x_test)\nprint(pred.mean())") == [(2, 1, "pred = model(x_test)")]


def test_an_evaluation_within_an_epoch_is_found_beside_the_training() -> None:
    epochs = "for epoch in range(3):" + textwrap.indent(textwrap.dedent(TRAIN), "    ")
    epochs += textwrap.indent(textwrap.dedent(EVALUATE), "    ")
    assert found(epochs) == [(1, 10, "for x, y in test_loader:")]


def test_the_loop_of_a_function_that_is_called_from_an_epoch() -> None:
    epochs = "for epoch in range(3):" + textwrap.indent(textwrap.dedent(TRAIN), "    ")
    epochs += "    loss_now, preds = evaluate(model, test_loader)\n    print(loss_now)\n"
    assert found(FUNCTION, epochs) == [(1, 5, "for x, y in loader:")]


def test_of_a_function_that_others_may_train_by_it_is_the_call() -> None:
    epochs = "for epoch in range(3):" + textwrap.indent(textwrap.dedent(TRAIN), "    ")
    epochs += "    loss_now, preds = evaluate(model, test_loader)\n    print(loss_now)\n"
    gives_graph = FUNCTION.replace(".item()", "")
    assert found(gives_graph, epochs) == [(2, 8, "loss_now, preds = evaluate(model, test_loader)")]


def test_the_methods_of_a_trainer() -> None:
    assert found(TRAINER, "trainer = Trainer(model)\ntrainer.train_epoch()\nprint(trainer.validate())") == [
        (1, 19, "for batch in test_loader:")
    ]


def test_a_function_whose_results_are_differentiated_elsewhere_gives_way_to_its_calls() -> None:
    step = "def step(batch):\n    x, y = batch\n    return criterion(model(x), y)\n"
    train = "for batch in train_loader:\n    loss = step(batch)\n    loss.backward()\n    optimizer.step()\n"
    check = "total = 0\nfor batch in test_loader:\n    total += step(batch).item()\n"
    assert found(step, train, check) == [(3, 2, "for batch in test_loader:")]


@pytest.mark.parametrize(
    "source",
    [
        TRAIN,
        "for x, y in loader:\n    x.requires_grad = True\n    loss = criterion(model(x), y)\n    loss.backward()\n",
        "for x, y in loader:\n    g = torch.autograd.grad(model(x).sum(), x)\n",
        "out = model(x)\nloss = criterion(out, y)\nloss.backward()",
        "outs = []\nfor x in xs:\n    outs.append(model(x))\ntorch.cat(outs).sum().backward()",
        "total = 0\nfor x, y in loader:\n    total += criterion(model(x), y)\ntotal.backward()",
        "total = 0\nfor x, y in loader:\n    total = total + criterion(model(x), y)\n(total / 3).backward()",
        "seen = {}\nfor x, y in loader:\n    seen['out'] = model(x)\nseen['out'].mean().backward()",
        "h = None\nfor x in xs:\n    h = model(x)\n    if len(x) > 3:\n        (h ** 2).mean().backward()",
        "z = model(x)\ndef closure():\n    l = z.sum()\n    l.backward()\n    return l\noptimizer.step(closure)",
        "z = model(x)\n(g,) = torch.autograd.grad(z.sum(), list(model.parameters())[0])",
        "with torch.no_grad():\n    out = model(x)",
        "with torch.inference_mode():\n    for x, y in loader:\n        out = model(x)",
        PHASES,
        "out = model(x)\nprint(out.grad_fn)",
        "for x in xs:\n    h = model(x)\n    h.register_hook(print)",
        "print(len(xs))",
    ],
)
def test_what_needs_gradients_or_has_none_is_left_alone(source: str) -> None:
    assert found(TRAIN, source) == []


def test_a_prediction_on_adversarial_examples_is_found_and_the_making_of_them_is_not() -> None:
    source = "for x, y in loader:\n    adv = fgsm_attack(model, x, y)\n    out = model(adv)"
    assert found(TRAIN, source) == [(2, 3, "out = model(adv)")]


ENCODE = """
    def encode(xs):
        return torch.cat([model(x) for x in xs])
"""


@pytest.mark.parametrize(
    "sources",
    [
        (ENCODE, "loss = criterion(encode(x.chunk(4)), y)\nloss.backward()"),
        (ENCODE, "def loss_of(x, y):\n    return criterion(encode(x), y)", "l = loss_of(x, y)\nl.backward()"),
        (ENCODE, "f = encode(xs)", "f.sum().backward()", "f = encode(xs)"),
        ("def perturbed(x):\n    x.requires_grad_()\n    return x", "out = model(perturbed(x))"),
        (
            "class Energy(nn.Module):\n    def forward(self, x):\n        return torch.autograd.grad(e(x), x)[0]\n",
            "for x in xs:\n    force = model(x)",
        ),
        (
            "class Net(nn.Module):\n    def forward(self, x):\n        self.h = self.cell(x, self.h)\n",
            TRAIN,
            EVALUATE,
        ),
        ("class T:\n    def look(self, x):\n        self.out = self.model(x)\n", TRAIN, "t = T()\nt.look(x)"),
        ("kept = []\ndef look(x):\n    kept.append(model(x))\n", TRAIN, "look(x)"),
    ],
)
def test_gradients_taken_elsewhere_are_seen(sources: tuple[str, ...]) -> None:
    assert found(*sources) == []


STYLE = """
    class StyleLoss(nn.Module):
        def forward(self, x):
            self.loss = F.mse_loss(gram(x), self.target)
            return x
"""
HOOKED = """
    seen = {}
    model.register_forward_hook(lambda module, args, out: seen.update(out=out))
"""


@pytest.mark.parametrize(
    "sources",
    [
        (STYLE, "for _ in range(3):\n    out = model(image)\n    sum(l.loss for l in losses).backward()"),
        (HOOKED, "for x, y in loader:\n    out = model(x)\n    seen['out'].mean().backward()"),
        ("for x, y in loader:\n    model(x)\n    (features.mean() + prior).backward()",),
        ("for x, y in loader:\n    inner = criterion(model(x), y)\n    learner.adapt(inner)\n    outer().backward()",),
        ("for x, y in loader:\n    inner = criterion(model(x), y)\n    diffopt.step(inner)\n    outer().backward()",),
    ],
)
def test_gradients_that_flow_past_the_names_are_seen(sources: tuple[str, ...]) -> None:
    assert found(*sources) == []


FITS = """    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "body",
    [
        "out = model(x)\nloss = criterion(out.float(), y)",
        "out = model(x)\nloss = criterion(out.type(torch.float32), y)",
        "loss = torch.zeros(())\nloss.add_(criterion(model(x), y))",
        "out = torch.zeros(4, 2)\nout[:2].copy_(model(x))\nloss = criterion(out, y)",
        "memory.store(model(x))\nloss = criterion(memory.values, y)",
        "value = model(x)\nmemory.store(value)\nloss = criterion(memory.get(), y)",
        "out = model(x)\ndef compare():\n    return criterion(out, y)\nloss = compare()",
        "out = model(x)\ncompare = lambda: criterion(out, y)\nloss = compare()",
    ],
)
def test_gradients_that_flow_through_calls_are_seen(body: str) -> None:
    assert found(f"for x, y in train_loader:\n{textwrap.indent(body, '    ')}\n{FITS}") == []


def test_gradients_that_flow_through_globals_are_seen() -> None:
    look = "def look(x):\n    global out\n    out = model(x)\n"
    assert found(look, f"for x, y in train_loader:\n    look(x)\n    loss = criterion(out, y)\n{FITS}") == []


@pytest.mark.parametrize("keep", ["states[0] = out", "kept.state = out", "states.append(out)"])
def test_gradients_of_what_is_kept_in_the_next_line_are_seen(keep: str) -> None:
    function = f"def read(x):\n    out = model(x)\n    {keep}\n"
    assert found(function, "read(x)\nloss = criterion(states[0], y)\nloss.backward()") == []
    assert found("states = {}", f"out = model(x)\n{keep}", "criterion(states[0], y).backward()\n") == []


def test_what_only_shows_a_result_does_not_take_its_gradient() -> None:
    shows = "    pbar.set_postfix(loss=criterion(model(x), y))\n    print(float(criterion(model(x), y)))\n"
    places = found(f"pbar = tqdm(train_loader)\nfor x, y in pbar:\n    loss = criterion(model(x), y)\n{FITS}{shows}")
    assert [line for _, line, _ in places] == [7, 8]


def test_a_function_that_is_handed_on_keeps_its_gradients() -> None:
    sources = (
        "def loss_of(x, y):\n    return criterion(model(x), y)\n",
        "runner = Runner(loss=loss_of)\nrunner.backward()",
    )
    assert found(*sources, "score = loss_of(x, y).item()") == [(3, 1, "score = loss_of(x, y).item()")]


def test_without_any_gradient_in_the_notebook_results_may_go_anywhere() -> None:
    assert found(ENCODE, "f = encode(xs)\nkept = [f]") == [(2, 1, "f = encode(xs)")]


def test_modules_with_a_kernel_of_their_own_for_inference() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    cells = Cells(history=(Cell(number=1, source="model(x)"),))
    (known,) = facts(cells, {"model": layer}, [("model", layer)], []).models
    assert known.fused_without_grad == ("", "self_attn")
    assert torch.is_tensor(layer(torch.zeros(1, 2, 8)))


EPOCHS = """\
for epoch in range(3):
    for x, y in train_loader:
        out = model(x)
        loss = criterion(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "check",
    [
        "out = model(x_val)\nval_loss = criterion(out, y_val)\nprint(val_loss.item())",
        "out = model(x_val)\nval_loss = criterion(out, y_val)\nif val_loss < best:\n    best = val_loss",
        "out = model(x_val)\nif criterion(out, y_val) < best:\n    break",
        "for x, y in val_loader:\n    out = model(x)\n    loss = criterion(out, y)\n    total += loss.item()",
    ],
)
def test_a_name_that_training_binds_anew_before_it_is_read_carries_nothing_there(check: str) -> None:
    assert [line for _, line, _ in found(EPOCHS + textwrap.indent(check, "    "))][:1] == [8]


@pytest.mark.parametrize(
    "steps",
    [
        "out = model(x)\nloss = criterion(out, y) + 0.1 * old\nold = model(x_val).mean()",
        "if sometimes:\n    prior = model(x)\nloss = criterion(prior, y)\nprior = model(x_val)",
        "try:\n    prior = read(x)\nexcept ValueError:\n    pass\nloss = criterion(prior, y)\nprior = model(x_val)",
        "for x in few:\n    prior = x\nloss = criterion(prior, y)\nprior = model(x_val)",
        "loss = criterion(prior, y)\nprior = model(x_val)",
        "with suppress(ValueError):\n    prior = read(x)\nloss = criterion(prior, y)\nprior = model(x_val)",
    ],
)
def test_a_name_that_the_next_step_may_still_read_keeps_its_gradients(steps: str) -> None:
    source = f"for x, y in train_loader:\n{textwrap.indent(steps, '    ')}\n{FITS}"
    assert not [text for _, _, text in found(source) if "x_val" in text]


@pytest.mark.parametrize(
    "source",
    [
        "for x in xs:\n    out = model(x)\n    if out.mean() > 1:\n        break\n    out = None\nout.sum().backward()",
        "while True:\n    out = model(x)\n    if done:\n        break\n    out = 0\nout.sum().backward()",
        "try:\n    out = model(x)\nexcept ValueError:\n    out = None\nelse:\n    out.sum().backward()",
        "try:\n    out = model(x)\nfinally:\n    out.sum().backward()",
        "try:\n    out = model(x)\n    check(x)\n    out = None\nexcept ValueError:\n    out.sum().backward()",
        "out = model(x)\nkept = out\nout = None\nkept.sum().backward()",
        "out = model(x)\nout, last = None, out\nlast.sum().backward()",
        "out = model(x)\nfor step in steps:\n    criterion(prior, y).backward()\n    prior = prior + out",
        "out = model(x)\nwhile go:\n    criterion(prior, y).backward()\n    if on:\n        break\n    prior += out",
        "out = model(x)\ndef loss_of():\n    return out.sum()\nloss_of().backward()",
    ],
)
def test_gradients_are_seen_on_every_way_through(source: str) -> None:
    assert not [line for _, line, text in found(source) if "model(x)" in text or "for x" in text]


def test_what_is_evaluated_takes_memory_only_while_it_runs() -> None:
    cell = (
        "for epoch in range(3):\n    for x in loader:\n        model(x).sum().backward()\n    print(model(x).mean())\n"
    )
    cells = Cells(history=(Cell(number=1, source=cell),))
    for line, holds in ((3, False), (4, True)):
        (found,) = facts(cells, LIVE, line=line, running=((1, line),)).sites["no_grad_eval"]
        assert (found.line, found.holds) == (4, holds)
