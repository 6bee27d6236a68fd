"""What is read of Jittor as it runs: nothing is computed by it; and what is put back of its variables."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def told(program: str) -> list[str]:
    """Run a program in a process of its own, as Jittor changes how signals are handled; return what it prints."""
    head = """
    import jittor as jt
    from jittor import nn
    from oomdoctor.evidence.collect import largest
    from oomdoctor.objects import jittor as lazy
    from oomdoctor.objects.rng import RandomState
    from oomdoctor.retry import Transaction
    """
    text = textwrap.dedent(head) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")]


def test_the_graph_is_read_and_not_computed() -> None:
    found = told("""
    x = jt.ones((512, 1024))
    y = x
    for _ in range(8):
        y = y + 1
    before = jt.liveness_info()
    memory = lazy.memory(lambda: largest([("x", x), ("y", y)], frozenset(), lazy.size_of))
    print(">", before == jt.liveness_info(), memory.held, memory.operators >= 8, memory.alive >= 10)
    print(">", [(one.path, one.bytes >> 20) for one in memory.holders], memory.limit, memory.swaps, memory.on_device)
    y.sync()
    memory = lazy.memory(tuple)
    print(">", memory.pool_used >= 2 << 20, memory.total == memory.host_total > 0)
    jt.flags.cpu_mem_limit = 1 << 30
    print(">", lazy.memory(tuple).limit == 1 << 30)
    """)
    assert found == [
        "True 2 True True",
        "[('x', 2), ('y', 2)] None False False",
        "True True",
        "True",
    ]


def test_the_log_of_a_program_that_captures_it_is_left_to_it() -> None:
    found = told("""
    x = jt.ones((4, 4))
    with jt.log_capture_scope() as logs:
        memory = lazy.memory(tuple)
    print(">", memory.held, memory.pool_used, any("display_memory_info" in log["msg"] for log in logs))
    """)
    assert found == ["1 None False"]


def test_models_and_optimizers_are_known_by_their_classes() -> None:
    found = told("""
    model = nn.Linear(512, 1024)
    optimizer = nn.Adam(model.parameters(), 1e-3)
    print(">", lazy.role_of(type(model)), lazy.role_of(type(optimizer)), lazy.is_var(type(model.weight)))
    names = [("model", model), ("optimizer", optimizer)]
    print(">", [(one.path, one.bytes >> 20) for one in largest(names, frozenset(), lazy.size_of)])
    """)
    assert found == ["model optimizer True", "[('optimizer', 4), ('model', 2)]"]


def test_a_transaction_brings_back_weights_state_and_random_numbers() -> None:
    found = told("""
    import numpy as np
    jt.set_global_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm(8), nn.Linear(8, 2))
    optimizer = nn.Adam(model.parameters(), 1e-2)
    space = {"jt": jt, "model": model, "optimizer": optimizer, "x": jt.rand((16, 8))}
    jt.sync_all()

    def state():
        kept = [one.numpy().copy() for one in [*model.state_dict().values(), space["x"]]]
        kept += [one.numpy().copy() for group in optimizer.param_groups for one in (*group["values"], *group["m"])]
        return [*kept, np.array(optimizer.n_step)]

    cell = "for _ in range(3):\\n    optimizer.step((model(jt.rand((16, 8))) ** 2).mean())\\nx = x * 2\\nmade = 1\\n"
    before = state()
    transaction = Transaction(space, cell, lambda: 1 << 30)
    drawn = RandomState.take()
    with transaction.armed():
        exec(cell, space)
    jt.sync_all()
    after = state()
    print(">", transaction.losses(), drawn.has_moved(), "made" in space)
    print(">", any(np.array_equal(one, other) for one, other in zip(before[:2], after[:2])))
    for _ in range(2):
        transaction.restore()
        print(">", all(map(np.array_equal, before, state())), drawn.has_moved(), "made" in space)
        exec(cell, space)
        print(">", all(map(np.array_equal, after, state())))
    print(">", sum(not one.is_stop_grad() for one in model.parameters()))
    """)
    assert found[:2] == ["() True True", "False"]
    assert found[2:6] == ["True False False", "True"] * 2
    assert found[6] == "6"


def test_what_is_written_in_place_is_told_to_be_lost() -> None:
    found = told("""
    x = jt.ones((4, 4))
    x.sync()
    space, cell = globals(), "x[0] = 5.0"
    transaction = Transaction(space, cell, lambda: 1 << 30)
    exec(cell, space)
    print(">", transaction.losses())
    """)
    assert found == ['("`x` is a variable of Jittor\'s, and the cell may have written into its value",)']
