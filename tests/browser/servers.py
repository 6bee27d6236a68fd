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

TOKEN = "tok"
_SETTINGS = {"@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
_START_S = 60.0


class Server:
    """JupyterLab and Notebook on a free port, with one kernel: this interpreter.

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

    def _write_kernel(self) -> None:
        folder = self._base / "data" / "kernels" / "python3"
        folder.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python", "language": "python"}))

    def _environment(self) -> dict[str, str]:
        folders = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
        places = {f"JUPYTER_{name}": str(self._base / folder) for name, folder in folders.items()}
        places |= {"IPYTHONDIR": str(self._base / "ipython"), "JUPYTERLAB_SETTINGS_DIR": str(self._base / "settings")}
        return {**os.environ, **places, "OMP_NUM_THREADS": "1", "HOME": str(self._base)}

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

    def write(self, name: str, cells: Sequence[str], **metadata: Any) -> Path:
        """Write a notebook with these code cells; return its path."""
        path = self.root / f"{name}.ipynb"
        path.write_text(json.dumps(notebook(cells, **metadata)))
        return path

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


def notebook(cells: Sequence[str], **metadata: Any) -> dict[str, Any]:
    """Return a notebook with these code cells."""
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    made = [
        {"id": f"c{at}", "cell_type": "code", "source": text, "metadata": {}, "outputs": [], "execution_count": None}
        for at, text in enumerate(cells)
    ]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel, **metadata}, "cells": made}
