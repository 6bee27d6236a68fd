"""A front end of a real kernel: it keeps what a page would show, displays by their id and widgets with their state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kernels import Kernel


class Frontend:
    """What a notebook page knows of one kernel.

    Attributes:
        messages: everything that the kernel has sent, in its order.
        displays: what is shown under each display id.
        widgets: the state of each widget by its comm.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._client = kernel._client
        self.messages: list[dict[str, Any]] = []
        self.displays: dict[str, dict[str, str]] = {}
        self.widgets: dict[str, dict[str, Any]] = {}

    # What the user does -----------------------------------------------------------------------------------------

    def run(self, code: str) -> str:
        """Run a cell to its end; return how it answers."""
        return str(self.wait(self.send(code))["status"])

    def send(self, code: str) -> str:
        """Begin to run a cell."""
        return str(self._client.execute(code, store_history=True, allow_stdin=False, stop_on_error=False))

    def wait(self, sent: str) -> dict[str, Any]:
        """Take what comes until a cell is done; return its reply."""
        self._until_idle(sent)
        while (reply := self._client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != sent:
            pass
        return dict(reply["content"])

    def click(self, name: str) -> None:
        """Press a button and wait for the end of what it does."""
        self._until_idle(self.begin_click(name))

    def begin_click(self, name: str) -> str:
        """Press a button."""
        return self._say(self.widget(name), {"method": "custom", "content": {"event": "click"}})

    def set(self, name: str, **state: Any) -> None:
        """Move a control."""
        comm = self.widget(name)
        self.widgets[comm].update(state)
        self._until_idle(self._say(comm, {"method": "update", "state": state, "buffer_paths": []}))

    def end(self, sent: str) -> None:
        """Take what comes until a click is answered."""
        self._until_idle(sent)

    # What the user sees -----------------------------------------------------------------------------------------

    def widget(self, name: str) -> str:
        """Return the comm of the control that is called so, the newest of several."""
        return [comm for comm, state in self.widgets.items() if state.get("description") == name][-1]

    def has(self, name: str) -> bool:
        return any(state.get("description") == name for state in self.widgets.values())

    def state(self, name: str) -> dict[str, Any]:
        return self.widgets[self.widget(name)]

    @property
    def texts(self) -> str:
        """What all texts of widgets say."""
        return "\n".join(str(state["value"]) for state in self.widgets.values() if isinstance(state.get("value"), str))

    def said(self, since: int = 0) -> str:
        """What was printed or displayed from the message of this number on."""
        found = []
        for message in self.messages[since:]:
            content = message["content"]
            found += [content.get("text", ""), content.get("data", {}).get("text/plain", "")]
            found += content.get("traceback", [])
        return "\n".join(text for text in found if isinstance(text, str))

    def take_until(self, seen: Callable[[], bool], timeout_s: float = 60) -> None:
        """Take what comes until something is seen."""
        end = time.monotonic() + timeout_s
        while not seen():
            assert time.monotonic() < end, self.said()[-2000:]
            self._take(end)

    # How it comes -----------------------------------------------------------------------------------------------

    def _say(self, comm: str, data: dict[str, Any]) -> str:
        message = self._client.session.msg("comm_msg", {"comm_id": comm, "data": {**data, "buffers": []}})
        self._client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def _until_idle(self, sent: str) -> None:
        end = time.monotonic() + 120
        while True:
            message = self._take(end)
            if message is None or message["parent_header"].get("msg_id") != sent:
                continue
            if message["content"].get("execution_state") == "idle":
                return

    def _take(self, end: float) -> dict[str, Any] | None:
        from queue import Empty

        try:
            message = self._client.get_iopub_msg(timeout=min(1.0, max(0.01, end - time.monotonic())))
        except Empty:
            assert time.monotonic() < end, "nothing came any more"
            return None
        self.messages.append(message)
        content, kind = message["content"], message["header"]["msg_type"]
        if kind in ("display_data", "update_display_data"):
            key = content.get("transient", {}).get("display_id", f"nameless {len(self.displays)}")
            assert kind == "display_data" or key in self.displays, "an update of nothing"
            self.displays[key] = content["data"]
        elif kind == "comm_open":
            self.widgets[content["comm_id"]] = dict(content["data"].get("state", {}))
        elif kind == "comm_msg" and content["data"].get("method") == "update" and content["comm_id"] in self.widgets:
            self.widgets[content["comm_id"]].update(content["data"]["state"])  # others are of another page
        return dict(message)
