"""A real Jupyter kernel of this interpreter, driven over its own protocol."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kernel_forks
from jupyter_client.blocking import BlockingKernelClient

# MKL would take fewer threads while the machine is busy, and round otherwise then: no two kernels would be alike.
os.environ.setdefault("MKL_DYNAMIC", "FALSE")
HANGS_S = 300
"""What takes longer hangs, on a slow and busy machine too."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Reply:
    """What a cell answered and put out."""

    status: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict)

    def data(self, mime: str) -> list[str]:
        """Everything that was displayed as ``mime``."""
        return [m["content"]["data"][mime] for m in self.messages if mime in m["content"].get("data", {})]

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    def _stream(self, name: str) -> str:
        return "".join(m["content"]["text"] for m in self.messages if m["content"].get("name") == name)

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [m["content"] for m in self.messages if m["header"]["msg_type"] == "error"]

    @property
    def kinds(self) -> list[str]:
        return [m["header"]["msg_type"] for m in self.messages]

    @property
    def text(self) -> str:
        """All that a person would read."""
        shown = [self.stdout, self.stderr, *self.data("text/plain")]
        shown += ["\n".join(error["traceback"]) for error in self.errors]
        return _ANSI.sub("", "\n".join(shown))


class Kernel:
    """One kernel process with folders of its own.

    Args:
        start: starts the process; ``kernel_forks.started`` one that makes all its imports itself.
    """

    def __init__(self, env: dict[str, str] | None = None, start: Any = kernel_forks.start) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="oomdoctor-kernel-")
        home = Path(self._home.name)
        connection = str(home / "connection.json")
        env = {**os.environ, "IPYTHONDIR": str(home), "JUPYTER_RUNTIME_DIR": str(home), **(env or {})}
        self._process = start(["-f", connection, "--log-level=ERROR"], env, str(home))
        self._client = BlockingKernelClient(connection_file=connection)
        self._await_ports(Path(connection))
        self._client.load_connection_file()
        self._client.start_channels()
        self._wait_until_ready(time.monotonic() + HANGS_S)

    def _await_ports(self, connection: Path) -> None:
        """Wait until the kernel has bound ports of its own choice and told them: what others choose is soon taken."""
        end = time.monotonic() + HANGS_S
        while time.monotonic() < end:
            with suppress(OSError, ValueError):
                json.loads(connection.read_text(encoding="utf-8"))
                return
            time.sleep(0.01)
        raise TimeoutError("the kernel does not start")

    def _wait_until_ready(self, end: float) -> None:
        """Wait for the first answer: a kernel that is busy with its imports lets its heartbeat wait as well."""
        while True:
            try:
                return self._client.wait_for_ready(timeout=60)
            except RuntimeError:
                if time.monotonic() > end:
                    self.stop()
                    raise

    def run(self, code: str, *, timeout: float = HANGS_S, ok: bool | None = None) -> Reply:
        """Run a cell; ``ok`` asserts how it answers."""
        # A kernel of ipykernel 6 that has just told an error may take the next cell for one that was waiting behind it.
        asked = self._client.execute(code, store_history=True, allow_stdin=False, stop_on_error=False)
        return self._wait(asked, timeout, ok)

    def value(self, expression: str) -> Any:
        """Return the value of an expression that JSON can carry. No cell is run for it."""
        asked = {"value": f"__import__('json').dumps({expression})"}
        reply = self._wait(self._client.execute("", user_expressions=asked, store_history=False), HANGS_S, True)
        answer = reply.content["user_expressions"]["value"]
        assert answer["status"] == "ok", answer
        return json.loads(ast.literal_eval(answer["data"]["text/plain"]))

    def _wait(self, sent: str, timeout: float, ok: bool | None) -> Reply:
        reply, end = Reply(""), time.monotonic() + timeout
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind = message["header"]["msg_type"]
            if kind == "status" and message["content"]["execution_state"] == "idle":
                break
            if kind not in ("status", "execute_input"):
                reply.messages.append(message)
        answer = self._client.get_shell_msg(timeout=max(0.1, end - time.monotonic()))
        while answer["parent_header"].get("msg_id") != sent:
            answer = self._client.get_shell_msg(timeout=max(0.1, end - time.monotonic()))
        reply.content = answer["content"]
        reply.status = answer["content"]["status"]
        if ok is not None:
            assert (reply.status == "ok") is ok, reply.text
        return reply

    def interrupt(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def stop(self) -> None:
        self._client.stop_channels()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._home.cleanup()
