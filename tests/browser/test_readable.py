"""A diagnosis can be read: in both themes, on a narrow screen, saved, without its kernel, untrusted and offline."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from failing_cells import TRAIN, TRAINING
from looks import contrasts, scrolled, sticking_out
from nbconvert import HTMLExporter
from pages import SHOTS, Page
from PIL import Image, ImageOps
from playwright.sync_api import expect

WCAG_AA = 4.5
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "panel.png"
PLANNED = f"%%memplan\n{TRAIN}"


@pytest.fixture(scope="module")
def diagnosed(open_for_all) -> Page:
    """A notebook with a plan, a diagnosis and its panel, which is open for all to look at."""
    setup = f"{TRAINING}\n%config OomDoctor.forecast_time_s = 60"
    page: Page = open_for_all("diagnosed", setup, PLANNED, TRAIN)
    page.run_all()
    page.expect_says(2, "OutOfMemoryError", timeout_s=150)
    expect(page.panel(2)).to_contain_text("Other fixes (", timeout=120_000)  # the forecasts are made
    page.wait_until_idle()
    page.save()
    return page


@pytest.fixture(scope="module")
def saved(diagnosed, server) -> dict[str, Any]:
    """That notebook as it was saved."""
    return json.loads((server.root / "diagnosed.ipynb").read_text())


def unfolded(page: Page) -> Page:
    """Open all that is folded away below the failed cell."""
    for summary in page.output(2).locator("details:not([open]) > summary").all():
        if summary.is_visible():
            summary.click()
    others = page.output(2).get_by_role("button", name="Other fixes")
    if not others.inner_text().startswith("Hide"):
        others.click()
    return page


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_every_text_stands_out_from_what_is_behind_it(diagnosed, theme):
    diagnosed.command("apputils:change-theme", theme=theme)
    diagnosed.page.wait_for_function(f"() => document.body.dataset.jpThemeName === '{theme}'")
    diagnosed.page.wait_for_timeout(500)  # colours fade
    page = unfolded(diagnosed)
    for part, least in (
        (page.told(1).first, 10),
        (page.told(2).first, 3),
        (page.told(2).nth(1), 10),
        (page.panel(2), 10),
    ):
        part.scroll_into_view_if_needed()
        found = contrasts(part)
        assert len(found) > least
        faint = sorted({(ratio, text) for text, ratio in found if ratio < WCAG_AA})
        assert not faint, faint


@pytest.mark.parametrize("part", [".jp-OutputArea section", ".oomdoctor-panel"])
def test_axe_finds_no_fault(diagnosed, part):
    """The checks of axe-core for people who see little, use no mouse, or have the page read to them."""
    page = unfolded(diagnosed)
    found = Axe().run(page.page, context=part).response["violations"]
    assert not [(one["id"], node["html"][:200]) for one in found for node in one["nodes"]]


def test_nothing_sticks_out_of_a_narrow_window(diagnosed):
    page = unfolded(diagnosed)
    page.page.set_viewport_size({"width": 400, "height": 900})
    page.command("application:set-mode", mode="single-document")
    page.command("application:toggle-left-area")
    page.page.wait_for_timeout(500)
    for part in (page.told(1).first, page.told(2).first, page.told(2).nth(1), page.panel(2)):
        part.scroll_into_view_if_needed()
        assert not sticking_out(part)
    assert not scrolled(page.told(2).nth(1))
    page.shot("narrow")
    page.page.set_viewport_size({"width": 1200, "height": 1000})
    page.command("application:set-mode", mode="multiple-document")


def test_the_picture_of_the_panel_is_there(diagnosed):
    """Taken here: ``OOMDOCTOR_REGENERATE=1`` puts it among the documents."""
    made = SHOTS / PICTURE.name
    diagnosed.page.set_viewport_size({"width": 1000, "height": 4000})
    diagnosed.page.wait_for_timeout(500)  # all of it finds its place
    around = 1000 - diagnosed.told(2).first.locator("..").bounding_box()["width"]
    diagnosed.page.set_viewport_size({"width": 1000 + round(around), "height": 4000})
    diagnosed.told(2).first.evaluate("story => story.scrollIntoView({block: 'center'})")  # the toolbar hides none of it
    diagnosed.page.wait_for_timeout(500)
    story, controls = diagnosed.told(2).first.bounding_box(), diagnosed.panel(2).bounding_box()
    below = controls["y"] + controls["height"]
    clip = {**story, "height": below - story["y"]}
    with Image.open(io.BytesIO(diagnosed.page.screenshot(clip=clip))) as picture:
        framed = ImageOps.expand(picture.convert("RGB"), border=12, fill="white")
        framed.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(made, optimize=True)
    diagnosed.page.set_viewport_size({"width": 1200, "height": 1000})
    if "OOMDOCTOR_REGENERATE" in os.environ:
        PICTURE.parent.mkdir(exist_ok=True)
        shutil.copy(made, PICTURE)
    for path in (made, PICTURE):
        with Image.open(path) as picture:
            assert 800 <= picture.width <= 860, "as wide as the diagnosis is at most, and nothing beside it"
        assert path.stat().st_size <= 200 * 1024


def test_a_plan_says_what_the_cell_needs_and_does_not_run_it(diagnosed):
    expect(diagnosed.told(1)).to_have_count(1)
    expect(diagnosed.told(1)).to_contain_text("Cards")
    expect(diagnosed.told(1)).to_contain_text("✗ too large")
    expect(diagnosed.output(1)).not_to_contain_text("steps 2")
    diagnosed.page.set_viewport_size({"width": 1200, "height": 3000})
    diagnosed.shot("plan", diagnosed.told(1))
    diagnosed.page.set_viewport_size({"width": 1200, "height": 1000})


@pytest.mark.parametrize("trusted", [True, False])
def test_a_saved_diagnosis_can_be_read_without_a_kernel(saved, open_notebook, trusted):
    page: Page = open_notebook(
        f"reopened-{trusted}", whole=sent_by_mail(saved, f"trusted: {trusted}"), trusted=trusted, runs=False
    )
    page.page.get_by_role("dialog").get_by_role("button", name="No Kernel").click()
    story, details = page.told(2).first, page.told(2).nth(1)
    for text in (story.get_by_text("asked for"), story.get_by_text("%oomdoctor retry"), details.get_by_text("Why")):
        expect(text.first).to_be_visible()
        text.first.scroll_into_view_if_needed()
    expect(page.output(2)).not_to_contain_text("model not found")
    page.shot(f"reopened-{'trusted' if trusted else 'untrusted'}")
    details.get_by_text("All fixes").click()
    details.get_by_text("Considered and refused").click()
    expect(details.locator("details li").last).to_be_visible()
    bar = story.locator("[title]").first.evaluate("one => getComputedStyle(one).backgroundColor")
    assert bar not in ("rgba(0, 0, 0, 0)", "transparent")
    expect(page.output(0).get_by_text(f"trusted: {trusted}")).to_be_visible()
    page.page.wait_for_timeout(300)
    assert page.page.evaluate("() => window.ran === true") is trusted


def sent_by_mail(saved: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a notebook as it comes from a computer whose kernel is not here, with an output that runs."""
    # What is signed is the content, wherever it lies: each has one of its own.
    kernel = {"name": "elsewhere", "display_name": "Elsewhere", "language": "elsewhere"}
    running = {"text/html": f"<p>{text}</p><img src=x onerror='window.ran = true'>"}
    first, *others = saved["cells"]
    first = {**first, "outputs": [{"output_type": "display_data", "data": running, "metadata": {}}]}
    return {**saved, "cells": [first, *others], "metadata": {"kernelspec": kernel}}


def test_an_exported_page_can_be_read_offline(saved, browser, tmp_path):
    made, _ = HTMLExporter().from_notebook_node(nbformat.reads(json.dumps(saved), as_version=4))
    path = tmp_path / "exported.html"
    path.write_text(made, encoding="utf-8")
    page = browser.new_page()
    page.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
    page.goto(path.as_uri(), wait_until="domcontentloaded")
    story = page.locator("section", has_text="Out of memory").first
    expect(story.get_by_text("%oomdoctor retry")).to_be_visible()
    expect(page.locator("summary", has_text="All fixes")).to_be_visible()
    faint = {(ratio, text) for text, ratio in contrasts(story) if ratio < WCAG_AA}
    story.screenshot(path=SHOTS / "offline.png")
    page.close()
    assert not faint
