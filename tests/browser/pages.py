"""A notebook opened in the browser, in JupyterLab or in Notebook: its cells, and what a person does with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Locator, expect
from servers import TOKEN, Server

SHOTS = Path(__file__).parents[2] / "demo-output" / "browser"

_CONTEXT = """
  const app = window.jupyterapp;
  const context = app && app.shell.currentWidget && app.shell.currentWidget.context;
  const session = context && context.isReady && context.sessionContext;
  const kernel = session && session.isReady && session.session && session.session.kernel;"""
# Neither the page nor the kernel is ready for a command when the first cells show.
_READY = (
    f"() => {{{_CONTEXT} return !!(kernel && kernel.connectionStatus === 'connected' && kernel.status === 'idle') }}"
)
_EMPTIED = f"code => {{{_CONTEXT} return kernel.requestExecute({{code, silent: true}}).done.then(() => null) }}"
_EMPTY = """\
import sys
if "ipywidgets" in sys.modules:
    sys.modules["ipywidgets"].Widget.close_all()
if "oomdoctor" in get_ipython().extension_manager.loaded:
    get_ipython().run_line_magic("unload_ext", "oomdoctor")
get_ipython().reset(new_session=True)"""


class Page:
    """An open notebook.

    Args:
        runs: whether it has a kernel, which is empty; else its kernel is one that is not installed here.
    """

    def __init__(
        self, context: BrowserContext, server: Server, name: str, *, interface: str = "lab", runs: bool = True
    ) -> None:
        if runs:
            server.connect(name)
        self._file = server.root / f"{name}.ipynb"
        self.page = context.new_page()
        self.dialogs: list[str] = []
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        place = f"lab/workspaces/w-{name}/tree" if interface == "lab" else "notebooks"
        reset = "&reset" if interface == "lab" else ""
        self.page.goto(f"{server.url}/{place}/{name}.ipynb?token={TOKEN}{reset}")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell")
        if runs:
            self.wait_until_idle()
            self.page.evaluate(_EMPTIED, _EMPTY)

    def command(self, name: str, **arguments: Any) -> None:
        """Run a command of the application, as its menus do."""
        self.page.evaluate("([name, given]) => { window.jupyterapp.commands.execute(name, given) }", [name, arguments])

    def run_all(self) -> None:
        """Run every cell; returns at once."""
        self.command("notebook:run-all-cells")

    def save(self) -> None:
        """Save the notebook; returns when that is done."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")

    def saved_outputs(self, number: int) -> list[dict[str, Any]]:
        """Save the notebook; return what it keeps of the output of a code cell, by MIME type."""
        command = f"() => {{{_CONTEXT} return context.save().then(() => null) }}"
        self.page.evaluate(command)
        outputs = json.loads(self._file.read_text())["cells"][number]["outputs"]
        return [one["data"] for one in outputs if one["output_type"] == "display_data"]

    def cell(self, number: int) -> Locator:
        """Return the code cell with this place, from 0."""
        return self.page.locator(".jp-NotebookPanel .jp-CodeCell").nth(number)

    def output(self, number: int) -> Locator:
        """Return the output of a code cell."""
        return self.cell(number).locator(".jp-OutputArea").first

    def told(self, number: int) -> Locator:
        """Return what we say below a cell: the diagnosis, then the notice of how it ended."""
        return self.output(number).locator("section")

    def panel(self, number: int) -> Locator:
        """Return the controls below a diagnosis."""
        return self.output(number).locator(".jupyter-widgets.widget-vbox").first

    def button(self, number: int, name: str) -> Locator:
        """Return the button with this name in the output of a cell, the upper one where there are two."""
        return self.cell(number).get_by_role("button", name=name, exact=True).first

    def run(self, number: int) -> None:
        """Run one cell by the keyboard."""
        self.cell(number).locator(".jp-InputArea-editor").click()
        self.page.keyboard.press("Control+Enter")

    def interrupt(self) -> None:
        """Press the toolbar's button that interrupts the kernel."""
        self.page.locator('.jp-NotebookPanel-toolbar [data-jp-item-name="interrupt"]').click()

    def restart(self) -> None:
        """Restart the kernel; returns when it is there again."""
        command = f"() => {{{_CONTEXT} return context.sessionContext.restartKernel().then(() => null) }}"
        self.page.evaluate(command)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until the kernel has nothing to do."""
        self.page.wait_for_function(_READY)

    def shot(self, name: str, of: Locator | None = None) -> Path:
        """Keep a picture."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / f"{name}.png"
        target: Any = of or self.page
        target.screenshot(path=path)
        return path

    def expect_says(self, number: int, text: Any, *, timeout_s: float = 60.0) -> None:
        """Expect the output of a cell to have ``text``, soon."""
        expect(self.output(number)).to_contain_text(text, timeout=timeout_s * 1000)
