"""A diagnosis can be read: in both themes, on a narrow screen, saved, without its kernel, untrusted and offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from looks import contrasts, sticking_out
from notebooks import TRAIN, TRAINING
from pages import Page
from playwright.sync_api import expect

WCAG_AA = 4.5
PLANNED = f"%%memplan\n{TRAIN}"


@pytest.fixture(scope="module")
def diagnosed(open_for_all) -> Page:
    """A notebook with a plan, a diagnosis and its panel, which is open for all to look at."""
    page: Page = open_for_all("diagnosed", TRAINING, PLANNED, TRAIN)
    page.run_all()
    page.expect_says(2, "OutOfMemoryError", timeout_s=90)
    expect(page.button(2, "Retry best")).to_be_visible(timeout=60_000)
    page.wait_until_idle()
    page.save()
    return page


@pytest.fixture(scope="module")
def saved(diagnosed, server) -> dict[str, Any]:
    """That notebook as it was saved."""
    return json.loads((server.root / "diagnosed.ipynb").read_text())


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_every_text_stands_out_from_what_is_behind_it(diagnosed, theme):
    diagnosed.command("apputils:change-theme", theme=theme)
    diagnosed.page.wait_for_function(f"() => document.body.dataset.jpThemeName === '{theme}'")
    diagnosed.page.wait_for_timeout(500)  # colours fade
    page = diagnosed
    for part in (page.told(1).first, page.told(2).first, page.panel(2)):
        part.scroll_into_view_if_needed()
        found = contrasts(part)
        assert len(found) > 10
        faint = sorted({(ratio, text) for text, ratio in found if ratio < WCAG_AA})
        assert not faint, faint
