"""Timelines and treemaps are seen where scripts and styles are taken out: untrusted, exported, on light and on dark."""

from __future__ import annotations

import io
import json
from typing import Any

import nbformat
import pytest
from failing_cells import TRAIN, TRAINING
from looks import contrasts, sticking_out
from nbconvert import HTMLExporter
from pages import SHOTS, Page
from PIL import Image
from playwright.sync_api import Locator, expect
from test_readable import WCAG_AA, sent_by_mail

from oomdoctor.model.memory import Role
from oomdoctor.views.labels import KINDS

SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def saved(open_for_all, server) -> dict[str, Any]:
    """A notebook with a report and a plan, as it was saved; the report is a page of its own as well."""
    keep = "kept = model(inputs[:64])"
    report = f"%memreport\n%memreport --html {server.root}/report.html"
    page: Page = open_for_all("pictures", TRAINING, keep, report, f"%%memplan\n{TRAIN}")
    page.run_all()
    page.expect_says(3, "Memory over time", timeout_s=150)
    page.wait_until_idle()
    page.save()
    return json.loads((server.root / "pictures.ipynb").read_text())


def check_seen(part: Locator, count: int, role: Role, name: str) -> None:
    """Expect so many pictures that are described, answer the pointer and have the colour of ``role``, and keep one."""
    pictures = part.locator("img")
    expect(pictures).to_have_count(count)
    for at in range(count):
        picture = pictures.nth(at)
        picture.scroll_into_view_if_needed()
        expect(picture).to_be_visible()
        assert len(picture.get_attribute("alt")) > 40
        frame = picture.locator("..")
        expect(frame.get_by_title(KINDS[role.value].label).first).to_be_attached()
        with Image.open(io.BytesIO(picture.screenshot())) as shot:
            seen = {"#{:02x}{:02x}{:02x}".format(*colour[:3]) for _, colour in shot.getcolors(1 << 20)}
        assert KINDS[role.value].colour in seen
        frame.locator("..").screenshot(path=SHOTS / f"{name}-{at}.png")
    assert not sticking_out(part)


def check_read(part: Locator) -> None:
    """Expect each text to stand out; where a page has no ground of its own, this cannot be told."""
    faint = {(ratio, text) for text, ratio in contrasts(part) if ratio < WCAG_AA}
    assert not faint


@pytest.fixture(scope="module")
def reopened(saved, open_for_all) -> Page:
    """The notebook as somebody else opens it, who does not trust it."""
    page: Page = open_for_all("pictures-reopened", whole=sent_by_mail(saved, "of pictures"), runs=False)
    page.page.get_by_role("dialog").get_by_role("button", name="No Kernel").click()
    return page


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pictures_are_seen_in_an_untrusted_notebook(reopened, scheme):
    theme = f"JupyterLab {scheme.capitalize()}"
    reopened.command("apputils:change-theme", theme=theme)
    reopened.page.wait_for_function(f"() => document.body.dataset.jpThemeName === '{theme}'")
    reopened.page.wait_for_timeout(500)  # colours fade
    plan = reopened.told(3).first
    check_seen(plan, 1, Role.ACTIVATION, f"timeline-untrusted-{scheme}")
    check_read(plan)
    report = reopened.told(2).first.locator("section", has_text="Top holders").first
    check_seen(report, 1, Role.PARAMETER, f"treemap-untrusted-{scheme}")
    check_read(report)
    expect(reopened.told(2).first.locator("img")).to_have_count(2)  # and the ends of the cells
    assert not reopened.page.evaluate("() => window.ran")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pictures_are_seen_in_an_exported_page(saved, browser, tmp_path, scheme):
    made, _ = HTMLExporter(theme=scheme).from_notebook_node(nbformat.reads(json.dumps(saved), as_version=4))
    path = tmp_path / "exported.html"
    path.write_text(made, encoding="utf-8")
    page = browser.new_page()
    page.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
    page.goto(path.as_uri(), wait_until="domcontentloaded")
    plan = page.locator("section", has_text="without running it")
    check_seen(plan, 1, Role.ACTIVATION, f"timeline-exported-{scheme}")
    check_read(plan)
    report = page.locator("section section", has_text="Top holders").first
    check_seen(report, 1, Role.PARAMETER, f"treemap-exported-{scheme}")
    check_read(report)
    page.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_of_a_report_has_both(saved, server, browser, scheme):
    page = browser.new_page()
    page.emulate_media(color_scheme=scheme)
    page.goto((server.root / "report.html").as_uri())
    expect(page.locator("img")).to_have_count(2)
    expect(page.get_by_text("At the ends of cells:")).to_be_visible()
    check_seen(page.locator("section section", has_text="Top holders").first, 1, Role.PARAMETER, f"report-{scheme}")
    page.close()
