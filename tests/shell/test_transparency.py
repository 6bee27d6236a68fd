"""What is no memory failure goes through untouched: the same messages, byte for byte, with and without oomdoctor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from kernels import Kernel, Reply

CASES = {
    "plain": "1 / 0",
    "in a function": "def f(x):\n    return [1][x]\nf(3)",
    "chained": "try:\n    {}['a']\nexcept KeyError as exc:\n    raise ValueError('b') from exc",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "syntax": "def f(:\n    pass",
    "indentation": "if True:\npass",
    "async": "import asyncio\nawait asyncio.sleep(0)\nraise RuntimeError('late')",
    "%%time": "%%time\nraise KeyError('timed')",
    "%%capture": "%%capture out\nprint('x')\nraise KeyError('captured')",
    "%run": "open('script.py', 'w').write('import math\\nmath.sqrt(-1)\\n')\n%run script.py",
    "system exit": "raise SystemExit(3)",
    "interrupt": "raise KeyboardInterrupt",
    "own rendering": "class E(Exception):\n    def _render_traceback_(self):\n        return ['rendered']\nraise E",
    "unknown magic": "%nosuchmagic",
    "output widget": "import ipywidgets\nwith ipywidgets.Output():\n    1 / 0",
    "repr raises": "class R:\n    def __repr__(self):\n        raise ValueError('repr')\nR()",
    "no failure": "print('out'); import sys; print('err', file=sys.stderr); 42",
}

_PROCESS = re.compile(r"ipykernel_\d+")
_MASKS = (
    (re.compile(r"0x[0-9a-f]+"), "0x"),
    (_PROCESS, "ipykernel"),
    (re.compile(r"(CPU times: |Wall time: ).*"), r"\1"),
    (re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f]+_\d+_\d+"), "id"),
    (re.compile(r"/tmp/oomdoctor-kernel-\w+"), "/home"),
)


def _masked(reply: Reply) -> str:
    content = {key: value for key, value in reply.content.items() if key != "engine_info"}
    text = json.dumps([content, _joined(reply)], indent=1)
    for pattern, by in _MASKS:
        text = pattern.sub(by, text)
    return text


def _joined(reply: Reply) -> list[tuple[str, Any]]:
    """Return the messages, with the text of a stream in one: where a kernel cuts it is a matter of time.

    So is which of two streams is sent first.
    """
    joined: list[tuple[str, Any]] = []
    texts: dict[str, str] = {}
    for message in [*reply.messages, None]:
        kind, content = (message["header"]["msg_type"], message["content"]) if message else ("", {})
        if kind == "stream":
            texts[content["name"]] = texts.get(content["name"], "") + content["text"]
            continue
        joined += [("stream", {"name": name, "text": text}) for name, text in sorted(texts.items())]
        texts.clear()
        if message:
            joined.append((kind, content))
    return joined


@pytest.fixture(scope="module")
def replies() -> dict[str, tuple[str, str]]:
    """Every case run in a kernel without and in one with the extension, at the same execution counts."""
    plain, watched = Kernel(), Kernel()
    try:
        plain.run("pass", ok=True)
        watched.run("%load_ext oomdoctor", ok=True)
        for kernel in (plain, watched):
            kernel.run("import torch", ok=True)
        return {name: (_masked(plain.run(code)), _masked(watched.run(code))) for name, code in CASES.items()}
    finally:
        plain.stop()
        watched.stop()


@pytest.mark.parametrize("name", CASES)
def test_other_failures_are_byte_identical(replies: dict[str, tuple[str, str]], name: str) -> None:
    without, with_extension = replies[name]
    assert with_extension == without


def test_where_the_shell_itself_cannot_render_the_error_is_still_the_users(kernel: Kernel) -> None:
    """IPython then shows its own frames, and ours among them; what it says is the same."""
    hostile = "class E(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')\nraise E"
    without = kernel.run(hostile).content
    kernel.run("%load_ext oomdoctor", ok=True)
    with_extension = kernel.run(hostile).content
    assert [with_extension[key] for key in ("status", "ename", "evalue")] == [
        without[key] for key in ("status", "ename", "evalue")
    ]


def test_the_comparison_would_see_one_more_character(start_kernel: Callable[..., Kernel]) -> None:
    one, other = start_kernel().run("1 / 0"), start_kernel().run("1 /  0")
    assert _masked(one) != _masked(other)


def test_a_memory_failures_traceback_is_byte_identical_too(start_kernel: Callable[..., Kernel]) -> None:
    setup = "import torch; from oomdoctor.allocator.virtual import switch_on; device = switch_on('64MiB')"
    failing = "def step(n):\n    x = torch.ones(n)\n    return x\nstep(1 << 26)"
    replies = []
    for first in ("pass", "%load_ext oomdoctor"):
        kernel = start_kernel()
        kernel.run(first, ok=True)
        kernel.run(setup, ok=True)
        replies.append(kernel.run(failing, ok=False))
    # IPython 7 writes the path of the cell's file, which has the kernel's process number in it.
    without, with_extension = (
        _PROCESS.sub("ipykernel", json.dumps([reply.errors, reply.content["traceback"], reply.messages[0]["content"]]))
        for reply in replies
    )
    assert with_extension == without
