from __future__ import annotations

import functools
import os
import textwrap
from typing import Any

import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor.evidence import collect
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.session import Cell, Cells


def cells(*sources: str) -> Cells:
    return Cells(history=tuple(Cell(number=n, source=textwrap.dedent(s)) for n, s in enumerate(sources, 1)))


def read(
    *sources: str,
    line: int | None = None,
    running: tuple[tuple[int, int], ...] = (),
    is_kept: bool = False,
    **namespace: Any,
) -> CodeFacts:
    modules = [(name, value) for name, value in namespace.items() if isinstance(value, nn.Module)]
    optimizers = [(name, value) for name, value in namespace.items() if isinstance(value, torch.optim.Optimizer)]
    return facts(cells(*sources), namespace, modules, optimizers, line=line, running=running, is_kept=is_kept)


def only_loop(*sources: str, **namespace: Any) -> TrainingLoop:
    (loop,) = read(*sources, **namespace).loops
    return loop


PLAIN = """
    for x, y in loader:
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
"""


def live() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": optimizer,
        "annealer": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }


def test_plain_loop() -> None:
    loop = only_loop(PLAIN, **live())
    assert loop == TrainingLoop(
        cell=1,
        line=2,
        function=None,
        in_failing_run=True,
        loader="loader",
        batch=("x", "y"),
        models=("model",),
        optimizers=("optimizer",),
        loss="loss",
        loss_call="criterion(logits, y)",
        order=("zero_grad", "forward", "backward", "step"),
        end_line=7,
    )


@pytest.mark.parametrize(
    ("head", "loader", "batch"),
    [
        ("for i, (x, y) in enumerate(loader):", "loader", ("x", "y")),
        ("for i, (x, y) in enumerate(tqdm(loader, desc='a')):", "loader", ("x", "y")),
        ("for x, y in tqdm(loader):", "loader", ("x", "y")),
        ("for batch in loader:", "loader", ("batch",)),
        ("for step, batch in enumerate(loaders['train'], start=1):", "loaders['train']", ("batch",)),
        ("for batch in metric_logger.log_every(loader, 10):", "loader", ("batch",)),
    ],
)
def test_loop_targets(head: str, loader: str, batch: tuple[str, ...]) -> None:
    loop = only_loop(f"{head}\n    loss = model(x)\n    loss.backward()\n    opt.step()\n")
    assert (loop.loader, loop.batch) == (loader, batch)


@pytest.mark.parametrize(
    ("source", "batch"),
    [
        (
            "while True:\n    x, y = next(batches)\n    loss = model(x)\n    loss.backward()\n    opt.step()\n",
            ("x", "y"),
        ),
        ("for i in range(9):\n    x = X[i:i + 4]\n    model(x).sum().backward()\n    opt.step()\n", ("x",)),
        ("for i in range(9):\n    x, y = X[i], Y[i]\n    model(x).sum().backward()\n    opt.step()\n", ("x", "y")),
        ("for i in tqdm(range(9)):\n    x, y = get_batch('train')\n    model(x).sum().backward()\n", ("x", "y")),
    ],
)
def test_batches_bound_in_the_body(source: str, batch: tuple[str, ...]) -> None:
    assert only_loop(source).batch == batch


@pytest.mark.parametrize(
    ("body", "order"),
    [
        (
            ["loss = model(x)", "opt.zero_grad()", "loss.backward()", "opt.step()"],
            ("forward", "zero_grad", "backward", "step"),
        ),
        (
            ["loss = model(x)", "loss.backward()", "opt.step()", "opt.zero_grad()"],
            ("forward", "backward", "step", "zero_grad"),
        ),
        (
            [
                "loss = model(x)",
                "scaler.scale(loss).backward()",
                "scaler.unscale_(opt)",
                "nn.utils.clip_grad_norm_(model.parameters(), 1)",
                "scaler.step(opt)",
                "lr_scheduler.step()",
            ],
            ("forward", "backward", "clip", "step", "schedule"),
        ),
    ],
)
def test_order_of_events(body: list[str], order: tuple[str, ...]) -> None:
    loop = only_loop("for x in loader:\n" + "".join(f"    {line}\n" for line in body))
    assert (loop.order, loop.optimizers, loop.loss) == (order, ("opt",), "loss")


def test_scheduler_is_known_by_its_object() -> None:
    assert only_loop(PLAIN.rstrip() + "\n        annealer.step()\n", **live()).order[-1] == "schedule"


FUNCTION = """
    def train(net, batches, loss_fn):
        for x, y in batches:
            loss = loss_fn(net(x), y)
            loss.backward()
            optimizer.step()
"""


def test_loop_in_a_function_of_another_cell_with_what_its_parameters_stand_for() -> None:
    loop = only_loop(FUNCTION, "%time train(model, loader, loss_fn=criterion)", **live())
    assert (loop.cell, loop.function, loop.in_failing_run, loop.models) == (1, "train", True, ("net",))
    assert dict(loop.stands_for) == {"net": "model", "loss_fn": "criterion"}


def test_loop_reached_through_another_function() -> None:
    assert only_loop(FUNCTION, "def main():\n    train(model, loader, c)\n", "main()").in_failing_run


def test_loop_that_does_not_run_is_said_so() -> None:
    assert not only_loop(FUNCTION, "print(1)").in_failing_run


EPOCHS = """\
for epoch in range(3):
    for x, y in loader:
        model(x).sum().backward()
        optimizer.step()
    for x, y in held_out:
        model(x)
"""


@pytest.mark.parametrize(("line", "was_running"), [(None, True), (1, False), (2, True), (4, True), (5, False)])
def test_whether_the_loop_was_under_way(line: int | None, was_running: bool) -> None:
    (loop,) = read(EPOCHS, line=line, running=() if line is None else ((1, line),)).loops
    assert (loop.line, loop.end_line, loop.in_failing_run, loop.was_running) == (2, 4, True, was_running)


def test_under_a_cell_magic_the_line_that_ran_is_not_known() -> None:
    (loop,) = read(f"%%time\n{EPOCHS}", line=1, running=((1, 1),)).loops
    assert loop.was_running


def test_a_bare_call_of_step_steps_no_optimizer() -> None:
    source = "for x, y in loader:\n    model(x).sum().backward()\n    optimizer.step()\n    step()\n"
    (loop,) = read(source).loops
    assert loop.optimizers == ("optimizer",)


@pytest.mark.parametrize(
    ("running", "was_running"), [((), True), (((2, 1),), False), (((2, 1), (1, 4)), True), (((2, 1), (1, 9)), False)]
)
def test_whether_the_loop_of_a_function_was_under_way(running: tuple[tuple[int, int], ...], was_running: bool) -> None:
    (loop,) = read(FUNCTION, "train(model, loader, c)", line=1, running=running).loops
    assert loop.was_running is was_running


def test_draws_of_the_functions_that_the_step_calls_and_not_those_of_the_batch() -> None:
    loop = only_loop(
        "def noised(x):\n    return x + torch.randn_like(x)\n",
        "def loss_of(x):\n    return model(noised(x)).mean()\n",
        "for i in range(3):\n    x = torch.rand(B, 3)\n    loss = loss_of(x)\n    loss.backward()\n    opt.step()\n",
    )
    assert (loop.batch, loop.draws, loop.models) == (("x",), ("torch.randn_like(x)",), ("model",))


def test_a_bar_around_the_loader_is_looked_through() -> None:
    loop = only_loop(
        "pbar = tqdm(enumerate(loader), total=9)\n"
        "for i, (x, y) in pbar:\n    loss = model(x)\n    loss.backward()\n    opt.step()\n"
    )
    assert (loop.loader, loop.batch) == ("loader", ("x", "y"))


def test_a_function_of_the_cells_is_no_model_whatever_its_name() -> None:
    loop = only_loop(
        "def optimize_model():\n    loss = policy_net(1)\n    loss.backward()\n    opt.step()\n",
        "for t in range(3):\n    optimize_model()\n",
    )
    assert (loop.line, loop.models) == (1, ("policy_net",))


def test_what_a_class_is_given_stands_for_its_attributes() -> None:
    made = """
        class Trainer:
            def __init__(self, net, rate):
                self.net, self.rate = net, rate
                self.model = net.to("cpu")
            def fit(self):
                for x in loader:
                    self.model(x).sum().backward()
                    self.opt.step()
    """
    (loop,) = read(made, "Trainer(model, 0.1).fit()", **live()).loops
    assert ("self.model", "model") in loop.stands_for
    assert "self.model" not in dict(
        read(made, "Trainer(model, 1)\nTrainer(other, 1).fit()", **live()).loops[0].stands_for
    )


def test_last_definition_wins() -> None:
    loops = read(FUNCTION, FUNCTION.replace("batches", "other"), "train(a, b, c)").loops
    assert [(loop.cell, loop.loader) for loop in loops] == [(2, "other")]
    assert read(FUNCTION, "from library import train", "train(a, b, c)").loops == ()


def test_loop_in_a_method() -> None:
    loop = only_loop(
        "class Trainer:\n" + textwrap.indent(textwrap.dedent(FUNCTION), "    "), "Trainer().train(a, b, c)"
    )
    assert (loop.function, loop.in_failing_run) == ("Trainer.train", True)


def test_step_in_a_function_called_by_the_loop() -> None:
    loop = only_loop(
        "def train_step(x):\n    loss = model(x)\n    loss.backward()\n    opt.step()\n",
        "for epoch in range(2):\n    for x in loader:\n        train_step(x)\n",
    )
    assert (loop.cell, loop.line, loop.order) == (2, 2, ("forward", "backward", "step"))


def test_innermost_loop_is_the_one() -> None:
    assert only_loop("for epoch in range(3):\n" + textwrap.indent(textwrap.dedent(PLAIN), "    ")).batch == ("x", "y")


@pytest.mark.parametrize(
    "tail",
    [
        "    if (i + 1) % 4 == 0:\n        opt.step()\n        opt.zero_grad()\n",
        "    with accelerator.accumulate(model):\n        opt.step()\n",
    ],
)
def test_accumulation_is_seen(tail: str) -> None:
    head = "for i, x in enumerate(loader):\n    loss = model(x) / 4\n    loss.backward()\n"
    assert only_loop(head + tail).accumulates
    assert not only_loop(head + "    opt.step()\n    if i % 10 == 0:\n        print(i)\n").accumulates


def test_evaluation_is_no_training_loop() -> None:
    assert read("for x in loader:\n    print(model(x))\n").loops == ()


def test_draws_of_the_step() -> None:
    loop = only_loop(
        "for x in loader:\n    noise = torch.randn_like(x)\n    model(x + noise).backward()\n    o.step()\n"
    )
    assert loop.draws == ("torch.randn_like(x)",)


EVALUATE = """
    losses, inputs, total = [], [], 0
    {context}
        for x, y in loader:
            out = model(x)
            loss = criterion(out, y)
            {keep}
"""


def kept(found: CodeFacts) -> tuple[tuple[int, int, str], ...]:
    return tuple((one.cell, one.line, one.text) for one in found.sites.get("detach_history", ()))


@pytest.mark.parametrize(
    ("keep", "found"),
    [
        ("losses.append(loss)", True),
        ("losses.append((loss, x))", True),
        ("total += loss", True),
        ("total = total + loss", True),
        ("total += criterion(model(x), y)", True),
        ("losses.append(loss.item())", False),
        ("losses.append(float(loss))", False),
        ("losses.append(loss.detach().cpu())", False),
        ("total += loss.item()", False),
        ("total += (out.argmax(1) == y).sum()", False),
        ("inputs.append(x)", False),
    ],
)
def test_kept_graphs(keep: str, found: bool) -> None:
    got = kept(read(EVALUATE.format(context="if True:", keep=keep), **live()))
    assert got == (((1, 7, keep),) if found else ())
    assert kept(read(EVALUATE.format(context="with torch.no_grad():", keep=keep), **live())) == ()


def test_sums_that_backward_needs_are_left_alone() -> None:
    source = """
        for x, y in loader:
            loss = 0
            parts = []
            for t in range(4):
                step = criterion(model(x[t]), y)
                loss += step
                parts.append(step)
            (loss + torch.stack(parts).sum()).backward()
    """
    assert kept(read(source, **live())) == ()


def test_sum_in_a_training_loop_hardly_leaks_but_a_list_of_outputs_does() -> None:
    source = PLAIN.rstrip() + "\n        total += loss\n        kept.append(logits)\n"
    found = kept(read("total, kept = 0, []", source, **live()))
    assert [text for *_, text in found] == ["kept.append(logits)"]


KEEPING = """
    for x, y in loader:
        kept.append(model(x))
        total += criterion(model(x), y)
"""


@pytest.mark.parametrize(
    "use",
    [
        "",
        "len(kept)",
        "print(f'{total:.3f}', len(kept))",
        "mean = float(total) / len(kept)",
        "plt.plot([k.sum().item() for k in kept])",
        "np.mean([float(k) for k in kept])",
        "torch.stack(kept).mean().item()",
        "kept.clear()\ndel total",
        "def report():\n    return len(kept), total.item()",
        "def other():\n    kept, total = [], 0\n    return kept, total",
    ],
)
def test_what_is_only_measured_is_a_leak(use: str) -> None:
    for order in ((use, KEEPING), (KEEPING + textwrap.indent(use, "    "),)):
        found = kept(read("kept, total = [], 0", *order, **live()))
        assert [text for *_, text in found] == ["kept.append(model(x))", "total += criterion(model(x), y)"]


@pytest.mark.parametrize(
    "use",
    [
        "alias = {}",
        "box = {{'a': {}}}",
        "box['a'] = {}",
        "box.append({})",
        "loss = fancy({}) + 1",
        "sum({}).backward()",
        "loss = torch.stack({}).mean()",
        "torch.autograd.grad({}, ps)",
        "for part in {}: part.sum().backward()",
        "parts = [part.sum() for part in {}]",
        "first = {}[0]",
        "def loss():\n    return {}",
        "def loss():\n    yield {}[0]",
        "later = lambda: {}",
        "def loss({0}={0}):\n    return {0}",
    ],
)
def test_what_may_be_differentiated_is_no_leak(use: str) -> None:
    for name, text in (("kept", "kept.append(model(x))"), ("total", "total += criterion(model(x), y)")):
        written = use.format(name)
        for order in ((written, KEEPING), (textwrap.dedent(KEEPING) + written,)):
            found = kept(read("kept, total = [], 0", *order, **live()))
            assert text not in [found_text for *_, found_text in found]


def test_what_starts_out_of_sight_is_no_leak() -> None:
    assert kept(read("def f(kept, total):" + textwrap.indent(KEEPING, "    "), "f(a, b)", **live())) == ()


def test_the_local_list_of_a_function() -> None:
    body = "\n        kept, total = [], 0" + textwrap.indent(KEEPING, "    ")
    measured = "def f():" + body + "        return len(kept), total.item()\n"
    returned = "def f():" + body + "        return kept, total\n"
    assert len(kept(read(measured, "f()", **live()))) == 2
    assert kept(read(returned, "f()", **live())) == ()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("f = open('log.txt', 'a')", ("line 1: `open('log.txt', 'a')`",)),
        ("f = open('log.txt')", ()),
        ("path.open('a')", ("line 1: `path.open('a')`",)),
        ("import wandb\nwandb.log({'a': 1})", ("line 2: `wandb.log({'a': 1})`",)),
        ("import atexit\natexit.register(print)", ("line 2: `atexit.register(print)`",)),
        ("!rm -rf out\nx = 1", ("line 1: `!rm -rf out`",)),
        ("files = !ls", ("line 1: `files = !ls`",)),
        ("x = next(batches)", ("line 1: `next(batches)`",)),
        ("x = next(iter(loader))", ()),
        ("for b in batches:\n    pass", ("line 1: `for b in batches`",)),
        ("input('go? ')", ("line 1: `input('go? ')`",)),
        ("writer.add_scalar('a', 1)", ("line 1: `writer.add_scalar('a', 1)`",)),
        ("def later():\n    open('a', 'a')", ()),
    ],
)
def test_not_repeatable(source: str, found: tuple[str, ...]) -> None:
    assert read(source, batches=iter([1]), loader=[1]).not_repeatable == found


@pytest.mark.parametrize(
    "source",
    [
        "p.data.sub_(lr * p.grad)",
        "p.data -= lr * p.grad",
        "p.data = q",
        "x.data[0] = 1",
        "x.data[0].copy_(y)",
        "model.weight.data.copy_(y)",
        "a, p.data = (1, q)",
        "x.numpy()[0] = 1",
        "x.detach().numpy()[...] += 1",
        "x.detach().numpy().fill(0)",
        "x.detach().cpu().numpy()[0, :].sort()",
    ],
)
def test_writes_past_autograd_are_not_repeatable(source: str) -> None:
    assert read(source).not_repeatable == (f"line 1: `{source}`",)
    looped = f"def update():\n    for p in ps:\n        {source}"
    assert read(looped, "update()").not_repeatable == (f"cell 1, line 3: `{source}`",)
    assert read(looped).not_repeatable == ()
    assert read(source, is_kept=True).not_repeatable == (), "a copy of every tensor takes it back"


@pytest.mark.parametrize(
    "source",
    [
        "norm = p.data.norm()",
        "y = x.data",
        "y = x.detach().numpy().copy()",
        "y[x.data] = 1",
        "a = x.data[0].clone()",
        "x.data.__len__()",
        "p.sub_(1)",
        "data[0] = 1",
    ],
)
def test_reads_past_autograd_are_repeatable(source: str) -> None:
    assert read(source).not_repeatable == ()


@pytest.mark.parametrize(
    "source",
    [
        "torch.save(model.state_dict(), 'm.pt')",
        "with open('log.txt', 'w') as f:\n    f.write(str(x))\n    json.dump(x, f)",
        "frame.to_csv('a.csv')",
        "plt.savefig('a.png')",
    ],
)
def test_a_file_that_is_written_as_a_whole_is_written_again(source: str) -> None:
    found = read(source)
    assert (found.not_repeatable, len(found.written_anew)) == ((), 1)


@pytest.mark.parametrize(
    "source",
    ["frame.to_csv('a.csv', mode='a')", "open('a', 'a')", "open('a', 'r+')", "open('a', 'x')", "json.dump(x, f)"],
)
def test_what_is_added_to_a_file_would_be_added_twice(source: str) -> None:
    found = read(source)
    assert (len(found.not_repeatable), found.written_anew) == (1, ())


@pytest.mark.parametrize(
    ("source", "is_told"),
    [
        ("if logs:\n    wandb.log(1)", False),
        ("if logs and step > 3:\n    wandb.log(1)", False),
        ("logs = False\nif logs:\n    wandb.log(1)", False),
        ("if logs or step:\n    wandb.log(1)", True),
        ("logs = step > 3\nif logs:\n    wandb.log(1)", True),
        ("if logs:\n    pass\nelse:\n    wandb.log(1)", True),
        ("def log(logs):\n    if logs:\n        wandb.log(1)\nlog(True)", True),
    ],
)
def test_what_stands_under_a_switch_that_is_off_never_runs(source: str, is_told: bool) -> None:
    assert bool(read(f"import wandb\n{source}", logs=False, step=1).not_repeatable) is is_told


def test_a_method_of_the_users_own_is_read_and_not_known_by_its_name() -> None:
    stub = "class Writer:\n    def add_scalar(self, *args):\n        pass\nwriter = Writer()"
    assert read(stub, "writer.add_scalar('loss', 1, 1)").not_repeatable == ()
    assert len(read("writer = SummaryWriter()", "writer.add_scalar('loss', 1, 1)").not_repeatable) == 1


def test_not_repeatable_in_a_function_of_another_cell() -> None:
    assert read("def save():\n    open('a', 'a')", "save()").not_repeatable == ("cell 1, line 2: `open('a', 'a')`",)


@pytest.mark.parametrize(
    ("before", "source", "found"),
    [
        ("from subprocess import run", "run('a', shell=True)", "line 1: `run('a', shell=True)`"),
        ("from subprocess import run as R", "R('a', shell=True)", "line 1: `R('a', shell=True)`"),
        ("x = 1", "from os import system\nsystem('a')", "line 2: `system('a')`"),
        ("x = 1", "def f():\n    from os import read as r\n    r(fd, 2)\nf()", "line 3: `r(fd, 2)`"),
        ("import os as o", "o.read(fd, 2)", "line 1: `o.read(fd, 2)`"),
        ("import posix", "posix.read(fd, 2)", "line 1: `posix.read(fd, 2)`"),
        ("from shutil import move", "move('a', 'b')", "line 1: `move('a', 'b')`"),
        ("O = open", "O('f', 'a')", "line 1: `O('f', 'a')`"),
        ("from socket import socket", "socket()", "line 1: `socket()`"),
        ("from tqdm import tqdm\nfrom io import open", "open('f', 'a')", "line 1: `open('f', 'a')`"),
        ("import codecs as c", "c.open('f', 'a')", "line 1: `c.open('f', 'a')`"),
        ("import os\nR = os.read", "R(fd, 2)", "line 1: `R(fd, 2)`"),
        ("import os as o\nR = o.read\nQ = R", "Q(fd, 2)", "line 1: `Q(fd, 2)`"),
        ("import os\nclass K:\n    r = os.read", "K.r(fd, 2)", "line 1: `K.r(fd, 2)`"),
        ("import os\nD = {'r': os.read}", "D['r'](fd, 2)", "cell 1, line 2: `os.read`"),
        ("import os\nD = {}\nD['r'] = os.read", "D['r'](fd, 2)", "cell 1, line 3: `os.read`"),
        ("from os import read\nimport functools\nf = functools.partial(read, fd)", "f(2)", "cell 1, line 3: `read`"),
        ("import os\nf = lambda: os.read(fd, 2)", "f()", "cell 1, line 2: `os.read(fd, 2)`"),
        ("f = lambda: open('a', 'a')", "f()", "cell 1, line 1: `open('a', 'a')`"),
        ("import os\ndef rd(f=os.read):\n    return f(fd, 2)", "rd()", "cell 1, line 2: `os.read`"),
        ("def save():\n    open('a', 'a')\ns = save", "s()", "cell 1, line 2: `open('a', 'a')`"),
        ("def save():\n    open('a', 'a')", "train(then=save)", "cell 1, line 2: `open('a', 'a')`"),
        ("import atexit", "@atexit.register\ndef f():\n    pass", "line 1: `atexit.register`"),
        ("import subprocess as s", "pool.map(s.check_output, x)", "line 1: `s.check_output`"),
        ("import os", "open('f', 'a').write('a')", "line 1: `open('f', 'a')`"),
    ],
)
def test_a_second_name_hides_nothing(before: str, source: str, found: str) -> None:
    assert read(before, source).not_repeatable == (found,)


def test_names_that_only_the_namespace_has() -> None:
    found = read("R(fd, 2); o.system('a'); p(2)", R=os.read, o=os, p=functools.partial(os.read, 0)).not_repeatable
    assert found == ("line 1: `R(fd, 2)`", "line 1: `o.system('a')`", "line 1: `p(2)`")


def test_a_second_name_that_is_used_later() -> None:
    found = read("def save():\n    open('a', 'a')\ns = save", "train()\ns()", line=1, running=((2, 1),))
    assert (found.not_repeatable, found.not_reached) == ((), ("cell 1, line 2: `open('a', 'a')`",))


@pytest.mark.parametrize(
    ("before", "source"),
    [
        ("O = open", "O('f'); O('f', 'r'); open('f', mode='rb')"),
        ("f = lambda: open('f')", "f()"),
        ("import subprocess", "try:\n    x = subprocess.PIPE\nexcept subprocess.CalledProcessError:\n    pass"),
        ("import subprocess, socket", "p: subprocess.Popen = None\nisinstance(x, socket.socket)"),
        ("def f(input):\n    return F.linear(input, w)", "for input in loader:\n    f(input)"),
        ("class K:\n    def __init__(self, input):\n        self.input = input", "k.input(x)"),
        ("open, close = columns", "plot(open, close)"),
        ("import os\nR = os.read", "x = 1"),
        ("import os\nD = {'r': os.read}", "x = 1"),
        ("import requests\ndata = requests.get(u)\nf = open('a', 'a')", "train(data, f)"),
        ("def save():\n    open('a', 'a')\nsave = True", "train(save=save)"),
        ("a = b.x\nb = a.y\nb = a.z", "a.b.c(); b()"),
        ("socket = make()", "plot(socket.weight, table.rename)"),
    ],
)
def test_what_is_read_or_never_called_is_repeatable(before: str, source: str) -> None:
    assert read(before, source).not_repeatable == ()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.0)
        self.rnn = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.rnn.weight_hh_l0  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name == "trap":
            raise AssertionError
        return super().__getattr__(name)

    @property
    def training_property(self) -> bool:
        raise AssertionError

    def __repr__(self) -> str:
        raise AssertionError


def test_model_facts() -> None:
    net = Net()
    (model,) = read("", net=net).models
    assert (model.path, model.type_name, model.training) == ("net", "Net", True)
    assert model.parameter_bytes == sum(
        p.numel() * p.element_size() for p in {id(p): p for p in net.parameters()}.values()
    )
    assert model.blocks == ("layers",)
    assert model.batch_norm == ("norm",)
    assert model.dropout == ("layers.0.attention", "layers.1.attention", "rnn")
    assert model.sequence_first == ("rnn",)


def test_frozen_batch_norm_does_not_couple() -> None:
    net = Net()
    net.norm.eval()
    assert read("", net=net).models[0].batch_norm == ()


def test_instance_norm_couples_only_with_running_stats() -> None:
    found = read("", a=nn.InstanceNorm1d(2, track_running_stats=True), b=nn.InstanceNorm1d(2), c=nn.SyncBatchNorm(2))
    assert [bool(model.batch_norm) for model in found.models] == [True, False, True]


def test_loss_facts() -> None:
    found = read("", a=nn.CrossEntropyLoss(weight=torch.ones(2), ignore_index=7), b=nn.MSELoss(reduction="sum"))
    a, b = found.losses
    assert (a.reduction, a.ignore_index) == ("mean", 7)
    assert (b.reduction, b.ignore_index) == ("sum", None)
    assert found.models == ()


def test_grad_disabled_at_the_line() -> None:
    source = "with torch.no_grad():\n    f()\ng()\n"
    assert read(source, line=2).grad_disabled
    assert not read(source, line=3).grad_disabled
    assert read("@torch.inference_mode()\ndef f():\n    g()\nf()\n", line=3).grad_disabled


EARLIER = """
    @torch.no_grad()
    def predict(model, x):
        return model(x)

    class Net(nn.Module):
        @torch.inference_mode()
        def forward(self, x):
            return self.layer(x)

    def fit(model, x):
        with torch.no_grad():
            x = prepare(x)
        return model(x).sum().backward()
"""


@pytest.mark.parametrize(("at", "off"), [(4, True), (9, True), (13, True), (14, False)])
def test_grad_disabled_in_a_function_of_an_earlier_cell(at: int, off: bool) -> None:
    assert read(EARLIER, "run(model, x)\n", line=1, running=((2, 1), (1, at))).grad_disabled is off
    assert not read(EARLIER, "run(model, x)\n", line=1, running=((2, 1),)).grad_disabled
    assert not read(EARLIER, "run(model, x)\n", line=1, running=((2, 1), (2, at))).grad_disabled


def test_cells_that_are_not_python_are_passed_over() -> None:
    assert read("%%bash\nfor x in *; do echo $x; done", "def (:", PLAIN).loops[0].cell == 3


@pytest.mark.parametrize(("decorator", "off"), [(torch.no_grad, True), (torch.inference_mode, True), (None, False)])
def test_a_decorator_of_a_library_turns_gradients_off(decorator, off) -> None:
    def generate() -> None:
        raise MemoryError

    generate = decorator()(generate) if decorator is not None else generate
    with pytest.raises(MemoryError) as failed:
        generate()
    assert collect.is_within_no_grad(failed.value) is off
    with pytest.raises(MemoryError) as guided:
        torch.no_grad()(torch.enable_grad()(generate))()
    assert collect.is_within_no_grad(guided.value) is off
    assert collect.is_within_no_grad(None) is False
