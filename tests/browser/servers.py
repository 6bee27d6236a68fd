"""A Jupyter server of its own, with JupyterLab and Notebook, whose settings and folders are nobody else's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat.sign import NotebookNotary

TOKEN = "tok"
_SETTINGS = {"@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
_START_S = 60.0


class Server:
    """JupyterLab and Notebook on a free port, with one kind of kernel: this interpreter.

    Attributes:
        url: where it answers.
        root: the folder that it shows.
    """

    def __init__(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="oomdoctor-lab-"))
        self.root = self._base / "root"
        self.root.mkdir()
        self._write_kernel()
        for plugin, values in _SETTINGS.items():
            path = self._base / "settings" / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(values))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (self._base / "log").open("w")
        options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
        options += [f"--ServerApp.root_dir={self.root}", f"--IdentityProvider.token={TOKEN}", "--LabApp.news_url="]
        options += [f"--{app}.expose_app_in_browser=True" for app in ("LabApp", "JupyterNotebookApp")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env=self._environment(),
            stdout=self._log,
            stderr=self._log,
        )
        self._wait()
        self._kernel: str | None = None

    def _write_kernel(self) -> None:
        folder = self._base / "data" / "kernels" / "python3"
        folder.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        # As a server sets it for the kernel of a notebook: this one is begun before there is one.
        env = {"JPY_SESSION_NAME": "notebook.ipynb"}
        spec = {"argv": argv, "display_name": "Python", "language": "python", "env": env}
        (folder / "kernel.json").write_text(json.dumps(spec))

    def _environment(self) -> dict[str, str]:
        folders = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
        places = {f"JUPYTER_{name}": str(self._base / folder) for name, folder in folders.items()}
        places |= {"IPYTHONDIR": str(self._base / "ipython"), "JUPYTERLAB_SETTINGS_DIR": str(self._base / "settings")}
        # Of two kernels of one name the one of the virtual environment comes first otherwise.
        return {**os.environ, **places, "HOME": str(self._base), "JUPYTER_PREFER_ENV_PATH": "0"}

    def _wait(self) -> None:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/api?token={TOKEN}", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.log()}")

    def log(self) -> str:
        """Return what the server wrote."""
        return (self._base / "log").read_text() if self._base.exists() else ""

    def write(self, name: str, content: Sequence[str] | dict[str, Any]) -> Path:
        """Write a notebook, or one with these code cells; return its path."""
        path = self.root / f"{name}.ipynb"
        path.write_text(json.dumps(content if isinstance(content, dict) else notebook(content)))
        return path

    def trust(self, path: Path) -> None:
        """Sign a notebook as one that was run here."""
        notary = NotebookNotary(data_dir=str(self._base / "data"))
        notary.sign(nbformat.read(path, as_version=4))
        notary.store.close()

    def connect(self, name: str) -> None:
        """Give the notebook ``name`` the one kernel that all notebooks share, one that has nothing to do.

        A kernel of its own for each would import torch each time, which takes longer than most tests do.
        """
        if self._kernel is None:
            self._kernel = self._ask("kernels", name="python3")["id"]
        elif self._ask(f"kernels/{self._kernel}")["execution_state"] == "busy":  # what a failed test left running
            self._ask(f"kernels/{self._kernel}/restart")
        self._ask("sessions", path=f"{name}.ipynb", name=name, type="notebook", kernel={"id": self._kernel})

    def _ask(self, resource: str, **sent: Any) -> Any:
        body = json.dumps(sent).encode() if sent or resource.endswith("/restart") else None
        headers = {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api/{resource}", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def stop(self) -> None:
        """End the server and its kernels, and take its folder away."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self._base, ignore_errors=True)


def notebook(cells: Sequence[str]) -> dict[str, Any]:
    """Return a notebook with these code cells."""
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    made = [
        {"id": f"c{at}", "cell_type": "code", "source": text, "metadata": {}, "outputs": [], "execution_count": None}
        for at, text in enumerate(cells)
    ]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": made}
