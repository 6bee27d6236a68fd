"""A notebook opened in the browser, in JupyterLab or in Notebook: its cells, and what a person does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Locator, expect
from servers import TOKEN, Server

SHOTS = Path(__file__).parents[2] / "demo-output" / "browser"

# Neither the page nor the kernel is ready for a command when the first cells show.
_READY = """() => {
  const app = window.jupyterapp;
  const context = app && app.shell.currentWidget && app.shell.currentWidget.context;
  const session = context && context.isReady && context.sessionContext;
  const kernel = session && session.isReady && session.session && session.session.kernel;
  return !!(kernel && kernel.connectionStatus === 'connected' && kernel.status === 'idle');
}"""


class Page:
    """An open notebook."""

    def __init__(self, context: BrowserContext, server: Server, name: str, *, interface: str = "lab") -> None:
        self.page = context.new_page()
        place = f"lab/workspaces/w-{name}/tree" if interface == "lab" else "notebooks"
        reset = "&reset" if interface == "lab" else ""
        self.page.goto(f"{server.url}/{place}/{name}.ipynb?token={TOKEN}{reset}")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell")
        self.page.wait_for_function(_READY)

    def command(self, name: str) -> None:
        """Run a command of the application, as its menus do."""
        self.page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)

    def run_all(self) -> None:
        """Run every cell; returns at once."""
        self.command("notebook:run-all-cells")

    def cell(self, number: int) -> Locator:
        """Return the code cell with this place, from 0."""
        return self.page.locator(".jp-NotebookPanel .jp-CodeCell").nth(number)

    def output(self, number: int) -> Locator:
        """Return the output of a code cell."""
        return self.cell(number).locator(".jp-OutputArea").first

    def press(self, number: int, button: str) -> None:
        """Press the button with this name in the output of a cell."""
        self.cell(number).get_by_role("button", name=button, exact=True).click()

    def run(self, number: int) -> None:
        """Run one cell by the keyboard."""
        self.cell(number).locator(".jp-InputArea-editor").click()
        self.page.keyboard.press("Control+Enter")

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

    def expect_says(self, number: int, text: Any, *, timeout_s: float = 30.0) -> None:
        """Expect the output of a cell to have ``text``, soon."""
        expect(self.output(number)).to_contain_text(text, timeout=timeout_s * 1000)
