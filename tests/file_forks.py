"""Files of tests that have a process of their own: each is a fork of one that has imported torch, and no tests.

Snapshots, censuses and forecasts look at all that is alive, which takes several times as long where every test of the
project is imported, and some count bytes, descriptors and children. ``Files`` is a plugin that hands such tests over,
and their reports back. Run as a script, this is the process that forks: pytest, ready to collect.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import kernel_forks
import pytest
from _pytest.reports import pytest_report_to_serializable
from _pytest.runner import runtestprotocol

MARKER: Final = "own_process"
_IMPORTED: Final = ("libcst", "torch._dynamo", "torch._subclasses.fake_tensor", "torch.utils.checkpoint")
_HERE: Final = Path(__file__).parent


class Files:
    """Runs marked tests in the process of their file, where there are tests of other files beside them."""

    def __init__(self) -> None:
        self._forks: _Forks | None = None
        self._file: _File | None = None
        self._several = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._several = len({item.path for item in items}) > 1
        for item in items if self._several else ():
            if item.get_closest_marker(MARKER):
                item.add_marker(pytest.mark.timeout(0), append=False)  # it has the time that it has in that process

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not self._several:
            return None
        if not item.get_closest_marker(MARKER):
            if nextitem is None or not nextitem.get_closest_marker(MARKER):
                return None
            # What is set up for it here ends with it: the next one runs elsewhere.
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            runtestprotocol(item, nextitem=None)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            return True
        if self._forks is None:
            self._forks = _Forks()
        if self._file is None or self._file.path != item.path:
            self._end()
            self._file = self._forks.fork(item.path)
        following = nextitem if nextitem is not None and nextitem.path == item.path else None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            for data in self._file.reports(item.nodeid, following and following.nodeid):
                report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
                item.ihook.pytest_runtest_logreport(report=report)
        except EOFError:
            why = f"the process of this file has ended:\n{self._forks.said()}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
            item.ihook.pytest_runtest_logreport(report=report)
            following = None
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if following is None:
            self._end()
        return True

    def pytest_unconfigure(self) -> None:
        self._end()
        if self._forks is not None:
            self._forks.close()

    def _end(self) -> None:
        if self._file is not None:
            self._file.end()
            self._file = None


class _Forks:
    """The process that forks one for each file."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed with the rest
        self._link, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            env = {**os.environ, kernel_forks.OWNER: str(os.getpid())}
            given: dict[str, Any] = {"pass_fds": [theirs.fileno()], "stdout": self._said, "stderr": self._said}
            subprocess.run(command, env=env, check=True, cwd=_HERE.parent, **given)

    def fork(self, path: Path) -> _File:
        ours, theirs = socket.socketpair()
        with theirs, suppress(BrokenPipeError):
            socket.send_fds(self._link, [str(path).encode()], [theirs.fileno()])
        return _File(path, ours)

    def said(self) -> str:
        """Return the end of what it and its forks have put out."""
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-4000:]

    def close(self) -> None:
        self._link.close()
        self._said.close()


class _File:
    """The process of a file's tests."""

    def __init__(self, path: Path, link: socket.socket) -> None:
        self.path = path
        self._link, self._stream = link, link.makefile("rwb")

    def reports(self, nodeid: str, following: str | None) -> Iterator[dict[str, Any]]:
        """Yield the reports of one test.

        Raises:
            EOFError: the process has ended.
        """
        with suppress(OSError):
            pickle.dump((nodeid, following), self._stream)
            self._stream.flush()
        while (report := pickle.load(self._stream)) is not None:
            yield report

    def end(self) -> None:
        """Wait until it has put away what is its own."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
            self._stream.read()
            self._stream.close()
        self._link.close()


class _Serving:
    """Forks before anything is collected; a fork collects its file, and runs the tests that it is asked for."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._stream: Any = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        for name in _IMPORTED:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # the collections of forks pass over what was imported, and leave its pages shared
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
        while True:
            path, descriptors, *_ = socket.recv_fds(self._link, 4096, 1)
            if not path:
                os._exit(0)
            if os.fork():
                os.close(descriptors[0])
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._link.close()
            self._stream = socket.socket(fileno=descriptors[0]).makefile("rwb")
            session.config.args = [path.decode()]
            return

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        with suppress(EOFError):
            while True:
                nodeid, following = pickle.load(self._stream)
                item = items[nodeid]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=items.get(following))
                self._tell(None)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tell(pytest_report_to_serializable(report))

    def _tell(self, report: dict[str, Any] | None) -> None:
        pickle.dump(report, self._stream)
        self._stream.flush()


if __name__ == "__main__":
    if os.fork():  # there are tests that count the children of their process
        os._exit(0)
    serving = _Serving(socket.socket(fileno=int(sys.argv[1])))
    os._exit(pytest.main([str(_HERE), "-p", "no:cacheprovider"], plugins=[serving]))
