"""The forecast inside a real kernel, whose threads and sockets the dry run inherits."""

from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).parents[2]

SETUP = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from forecast_lab import TRAIN, forecast, mlp, namespace, nothing, session
from oomdoctor.forecast import price
from oomdoctor.model.session import Attempt
globals().update(namespace(mlp, "adamw"))
def ask(source):
    shell = get_ipython()
    asked = session(shell.user_ns, source, shell=shell)
    (found,) = price(asked, [Attempt(source=source)], budget=None, prepare=nothing)
    return found
"""

NOISY = """
from IPython.display import HTML, clear_output, display
import ipywidgets
print("leaked")
display(HTML("leaked"))
bar = ipywidgets.IntProgress()
display(bar)
clear_output()
get_ipython().run_line_magic("pinfo", "print")
!echo leaked
%time y = model(torch.randn(64, 256))
await __import__("asyncio").sleep(0)
display(y)
bar.value = 3
y
"""


@pytest.fixture(scope="module")
def kernel():
    manager, client = start_new_kernel(kernel_name="python3")
    reply, said = _run(client, SETUP)
    assert reply["status"] == "ok", reply
    assert said == []
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def _run(client, code):
    said = []
    reply = client.execute_interactive(code, output_hook=said.append, timeout=120)
    kinds = [(message["msg_type"], str(message["content"])) for message in said]
    return reply["content"], [kind for kind in kinds if kind[0] not in ("status", "execute_input")]


def test_a_cell_full_of_output_says_nothing_and_the_kernel_goes_on(kernel):
    for _ in range(3):
        reply, said = _run(kernel, f"found = ask({NOISY!r})\nassert found.refused is None, found.refused")
        assert reply["status"] == "ok", reply
        assert said == []
    reply, said = _run(kernel, "print(ask(TRAIN).refused, 'bar' in globals(), ask('1 / 0').refused)")
    assert reply["status"] == "ok", reply
    (stream,) = said
    assert "None False the dry run of the cell stopped at line 1 with ZeroDivisionError" in stream[1]


def test_the_kernel_answers_after_a_forecast_that_was_interrupted(kernel):
    kernel.execute("ask('while True: pass')")
    kernel.get_iopub_msg(timeout=120)
    while (message := kernel.get_iopub_msg(timeout=120))["msg_type"] != "execute_input":
        pass
    import time

    time.sleep(1.0)
    kernel.parent.interrupt_kernel()
    reply = kernel.get_shell_msg(timeout=120)
    assert reply["content"]["ename"] == "KeyboardInterrupt", message
    time.sleep(0.5)  # until ipykernel has dropped what was queued behind the interrupted cell
    reply, said = _run(kernel, "print(6 * 7)")
    assert reply["status"] == "ok"
    assert "42" in said[-1][1]
