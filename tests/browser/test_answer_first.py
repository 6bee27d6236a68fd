"""The answer comes first: when a cell has failed, it and its button are seen before anything else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from failing_cells import TRAIN, TRAINING
from pages import Page
from playwright.sync_api import expect

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MOST_WORDS, MOST_PIXELS = 40, 150
SIZES = {1400: 900, 600: 900}


@pytest.fixture(scope="module", params=["lab", "notebook"])
def failed(request, open_for_all) -> tuple[str, Page]:
    """A cell that has failed, in either interface."""
    page: Page = open_for_all(f"answer-{request.param}", TRAINING, TRAIN, interface=request.param)
    page.page.set_viewport_size({"width": 1400, "height": 900})
    page.run_all()
    expect(page.panel(1)).to_contain_text("Other fixes (", timeout=120_000)
    page.wait_until_idle()
    return request.param, page


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("width", SIZES)
def test_the_headline_and_the_button_are_seen_without_scrolling(failed, width, theme):
    """``make images`` keeps the pictures."""
    interface, page = failed
    page.page.set_viewport_size({"width": width, "height": SIZES[width]})
    page.command("apputils:change-theme", theme=theme)
    page.page.wait_for_function(f"() => document.body.dataset.jpThemeName === '{theme}'")
    if interface == "lab" and width < 1000:
        page.command("application:set-mode", mode="single-document")
        if page.page.locator("#jp-left-stack").is_visible():
            page.command("application:toggle-left-area")
    page.cell(1).evaluate("cell => cell.scrollIntoView({block: 'start'})")
    page.page.wait_for_timeout(500)
    for seen in (page.told(1).first, page.button(1, "Fix it")):
        box = seen.bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= SIZES[width]
    made = page.shot(f"answer-{interface}-{width}-{theme.split()[-1].lower()}")
    if "OOMDOCTOR_REGENERATE" in os.environ:
        IMAGES.mkdir(exist_ok=True)
        shutil.copy(made, IMAGES)


def test_few_words_and_pixels_stand_above_the_button(failed):
    _, page = failed
    page.page.set_viewport_size({"width": 1400, "height": 900})
    page.page.wait_for_timeout(500)
    top = page.output(1).bounding_box()["y"]
    button = page.button(1, "Fix it").bounding_box()
    words = page.told(1).first.inner_text().split()
    print(f"{len(words)} words and {button['y'] - top:.0f} px above the button")
    assert len(words) <= MOST_WORDS
    assert button["y"] + button["height"] - top <= MOST_PIXELS


def test_the_traceback_is_whole_and_below(failed):
    _, page = failed
    traceback = page.output(1).locator(".jp-RenderedText", has_text="OutOfMemoryError").last
    assert traceback.bounding_box()["y"] > page.panel(1).bounding_box()["y"]
    expect(traceback).to_contain_text("loss = criterion(model(x), y)")


@pytest.mark.parametrize("width", SIZES)
def test_a_front_end_that_has_scrolled_to_the_next_cell_shows_the_answer_too(failed, width):
    """As after Shift+Enter, with a cell below: of a long traceback its end is seen."""
    interface, page = failed
    page.page.set_viewport_size({"width": width, "height": SIZES[width]})
    page.cell(1).evaluate("cell => cell.scrollIntoView({block: 'end'})")
    page.page.wait_for_timeout(500)
    told = page.output(1).get_by_text("the diagnosis is above this traceback")
    button = page.output(1).locator(".oomdoctor-again").get_by_role("button", name="Fix it")
    for seen in (told, button):
        box = seen.bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= SIZES[width]
    page.shot(f"answer-{interface}-{width}-below")
