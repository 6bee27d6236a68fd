"""The panel as a person uses it: read the diagnosis, look at a diff, retry, interrupt, undo."""

from __future__ import annotations

import json
import re

import nbformat
import pytest
from failing_cells import SCORE, SCORING, TRAIN, TRAINING
from nbconvert import HTMLExporter
from pages import Page
from playwright.sync_api import expect

# Slow and told live: a line and a bar for each part. The names are put together, so that no diff has the texts.
SLOW = """\
model.eval()
scores = []
for at, part in enumerate(tqdm(parts * 10)):
    scores.append(model(part)[:, :8].clone())
    print("part", at + 100)
    time.sleep(0.1)"""


@pytest.mark.parametrize("interface", ["lab", "notebook"])
def test_a_cell_is_healed_by_its_button(open_notebook, interface):
    page: Page = open_notebook(f"heal-{interface}", SCORING, SCORE, "print('next', 1 + 1)", interface=interface)
    page.run_all()
    page.expect_says(1, "OutOfMemoryError")
    retry = page.button(1, "Fix it")
    expect(retry).to_be_visible()
    expect(page.output(0)).to_have_text("")
    assert page.output(1).inner_text().startswith("Out of memory at ")
    expect(page.output(2)).not_to_contain_text("next 2")
    page.button(1, "Show change").click()
    expect(page.panel(1).locator("pre", has_text="@@").first).to_be_visible()
    page.shot(f"diagnosis-{interface}")
    retry.click()
    page.expect_says(1, "scored 5")
    expect(page.told(1).first).to_contain_text("Healed: In[2]")
    expect(page.told(1).first).to_contain_text("Changed")
    page.wait_until_idle()
    page.page.wait_for_timeout(1_000)  # it is kept soon
    kept = ["".join(one["text/plain"]) for one in page.saved_outputs(1)]
    assert kept[0].startswith("✓ Healed: In[2]")
    assert kept[3] == "scored 5\n", "what the cell put out is the notebook's"
    page.shot(f"healed-{interface}")
    page.wait_until_idle()
    page.run(2)
    page.expect_says(2, "next 2")


def test_a_healed_cell_is_headed_so_where_it_is_read_without_a_kernel(open_notebook, browser, tmp_path):
    """Also where a command healed it, whose own cell has the outputs; the traceback is of a run that counts no more."""
    page: Page = open_notebook("typed", SCORING, SCORE, "%oomdoctor retry")
    page.run_all()
    expect(page.button(1, "Fix it")).to_be_enabled()
    page.wait_until_idle()
    page.page.wait_for_timeout(1_000)  # what is run at once is taken for a cell that waited behind the failed one
    page.run(2)
    page.expect_says(2, "scored 5")
    expect(page.told(1).first).to_contain_text("Healed: In[2]")
    page.wait_until_idle()
    page.save()
    saved = json.loads(page._file.read_text())
    for trusted in (True, False):
        read = open_notebook(f"typed-{trusted}", whole=saved, trusted=trusted, runs=False)
        expect(read.told(1).first).to_contain_text("Healed: In[2]")
        for hidden in ("OutOfMemoryError", "the first run"):
            expect(read.output(1).get_by_text(hidden).first).not_to_be_visible()
        assert read.output(1).inner_text().startswith("✓ Healed: In[2]")
        read.shot(f"typed-{'trusted' if trusted else 'untrusted'}")
    made, _ = HTMLExporter().from_notebook_node(nbformat.reads(json.dumps(saved), as_version=4))
    path = tmp_path / "exported.html"
    path.write_text(made, encoding="utf-8")
    exported = browser.new_page()
    exported.goto(path.as_uri(), wait_until="domcontentloaded")
    expect(exported.locator("section", has_text="Healed: In[2]").first).to_be_visible()
    expect(exported.get_by_text("OutOfMemoryError").first).not_to_be_visible()
    exported.close()


def test_a_healed_cell_is_undone(open_notebook):
    look = 'print("as before", bool((model[0].weight == before).all()), "y" in globals())'
    setup = f"{TRAINING}\nbefore = model[0].weight.detach().clone()"
    page: Page = open_notebook("undo", setup, f"{TRAIN}\n{look}", look)
    page.run_all()
    page.button(1, "Fix it").click()
    page.expect_says(1, "as before False True")
    page.wait_until_idle()
    page.button(1, "Undo").click()
    page.expect_says(1, "Undone: ")
    page.wait_until_idle()
    page.shot("undone")
    page.run(2)
    page.expect_says(2, "as before True False")


def test_a_retry_shows_what_the_cell_puts_out_and_is_interrupted(open_notebook):
    after = 'print("after", 1 + 1, len(globals().get("scores", [])))'
    page: Page = open_notebook("interrupt", SCORING, SLOW, after, SCORE)
    page.run_all()
    page.button(1, "Fix it").click()
    panel = page.panel(1)
    expect(panel).to_contain_text(re.compile(r"\b[1-9]\d?/40"))
    expect(panel).to_contain_text(re.compile(r"part 10\d"))
    busy = page.page.locator(".jp-NotebookPanel .jp-Notebook-ExecutionIndicator")
    expect(busy).to_have_attribute("data-status", "busy")
    assert "part 139" not in panel.inner_text()
    page.shot("retrying")
    page.interrupt()
    expect(panel).to_contain_text("Interrupted. Everything is as before the cell ran.")
    expect(panel).not_to_contain_text("Traceback")
    expect(page.button(1, "Fix it")).to_be_enabled()
    page.wait_until_idle()
    page.shot("interrupted")
    page.run(2)
    page.expect_says(2, "after 2 0")
    page.wait_until_idle()
    page.run(3)
    expect(page.button(3, "Fix it")).to_be_visible(timeout=60_000)


def test_the_keyboard_alone_retries(open_notebook):
    page: Page = open_notebook("keyboard", SCORING, SCORE)
    page.run_all()
    expect(page.button(1, "Fix it")).to_be_visible(timeout=60_000)
    page.wait_until_idle()
    page.cell(1).locator(".jp-InputArea-editor").click()
    page.page.keyboard.press("Escape")
    focused = "() => document.activeElement.textContent.trim()"
    for _ in range(40):
        page.page.keyboard.press("Tab")
        if page.page.evaluate(focused) == "Fix it":
            break
    assert page.page.evaluate(focused) == "Fix it"
    page.shot("keyboard")
    page.page.keyboard.press("Enter")
    page.expect_says(1, "scored 5")
    page.wait_until_idle()


def test_a_press_is_answered_at_once_and_the_focus_goes_to_how_it_ended(open_notebook):
    page: Page = open_notebook("pressed", SCORING, SLOW)
    page.run_all()
    expect(page.panel(1)).to_contain_text("Other fixes (", timeout=60_000)
    page.wait_until_idle()
    page.button(1, "Fix it").click()
    status = page.panel(1).get_by_role("status")
    expect(status).to_contain_text("The cell runs again with the best fix")
    expect(page.button(1, "Fix it")).to_be_disabled()
    page.shot("working")
    expect(status).to_contain_text("Healed: In[2]", timeout=60_000)
    expect(page.button(1, "Fix it")).to_be_hidden()
    expect(page.button(1, "Undo")).to_be_enabled()
    page.page.wait_for_function("() => document.activeElement.textContent.includes('Healed: In[2]')")
    page.page.keyboard.press("Tab")
    page.button(1, "Undo").click()
    expect(status).to_contain_text("Undone")
    expect(page.button(1, "Fix it")).to_be_enabled()


@pytest.mark.parametrize("interface", ["lab", "notebook"])
def test_a_button_whose_kernel_is_gone_is_not_there(open_notebook, interface):
    page: Page = open_notebook(f"restarted-{interface}", SCORING, SCORE, interface=interface)
    page.run_all()
    expect(page.panel(1)).to_contain_text("Other fixes (", timeout=60_000)
    page.wait_until_idle()
    expect(page.output(1).get_by_text("%oomdoctor retry").first).to_be_hidden()
    page.restart()
    expect(page.button(1, "Fix it")).to_be_hidden()
    expect(page.output(1).get_by_text("%oomdoctor retry").first).to_be_visible()
    page.shot(f"restarted-{interface}")


def test_a_healed_cell_has_its_outputs_once(open_notebook):
    page: Page = open_notebook("once", SCORING, f"print('begun', 1 + 1)\n{SCORE}")
    page.run_all()
    expect(page.panel(1)).to_contain_text("Other fixes (", timeout=60_000)
    page.wait_until_idle()
    begun = page.output(1).get_by_text("begun 2").locator("visible=true")
    expect(begun).to_have_count(1)
    page.button(1, "Fix it").click()
    page.expect_says(1, "scored 5")
    expect(page.told(1).first).to_contain_text("Healed: In[2]")
    expect(begun).to_have_count(1)
    expect(page.output(1).get_by_text("Traceback (most recent call last)").first).to_be_hidden()
    page.wait_until_idle()
    page.shot("once", page.cell(1))
    page.button(1, "Undo").click()
    expect(page.told(1).first).to_contain_text("Out of memory")
    expect(page.output(1).get_by_text("Traceback (most recent call last)").first).to_be_visible()


def test_a_change_and_a_report_are_copied(open_notebook, browser):
    page: Page = open_notebook("copied", SCORING, SCORE)
    browser.grant_permissions(["clipboard-read", "clipboard-write"])
    page.run_all()
    expect(page.panel(1)).to_contain_text("Other fixes (", timeout=60_000)
    page.wait_until_idle()
    clipboard = "() => navigator.clipboard.readText()"
    page.button(1, "Show change").click()
    page.panel(1).locator("pre", has_text="@@").first.click()
    page.page.keyboard.press("Control+C")
    diff = page.page.evaluate(clipboard)
    assert diff.startswith("--- In[")
    assert diff.count("\n") > 5, "all of it"
    assert "A click" not in diff
    page.panel(1).locator("textarea").first.focus()
    page.page.keyboard.press("Control+A")
    page.page.keyboard.press("Control+C")
    cell = page.page.evaluate(clipboard)
    assert "@@" not in cell
    added = [line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert all(line in cell for line in added)
    page.panel(1).get_by_role("button", name="Other fixes").click()
    page.button(1, "Copy report").click()
    page.panel(1).get_by_label("Report", exact=True).focus()
    page.page.keyboard.press("Control+A")
    page.page.keyboard.press("Control+C")
    told = json.loads(page.page.evaluate(clipboard))
    assert told["environment"]["torch"]
    assert "model" not in json.dumps(told["case"]["incident"])


@pytest.mark.parametrize("width", [600, 1400])
def test_the_answer_to_a_long_output_is_not_in_a_box(open_notebook, width):
    """Notebook 7 puts outputs above 1,820 pixels into a box of some 310: a deep traceback is one."""
    calls = "\n".join(f"def call{at}():\n    # {at}\n    return call{at - 1}()" for at in range(1, 25))
    setup = f"{SCORING}\ndef call0():\n    return [model(part) for part in parts]\n{calls}"
    page: Page = open_notebook(f"long-{width}", setup, "scores = call24()", interface="notebook")
    page.page.set_viewport_size({"width": width, "height": 900})
    page.run_all()
    expect(page.told(1).first).to_be_visible(timeout=60_000)
    expect(page.panel(1)).to_contain_text(re.compile(r"Other fixes \(|Settings"), timeout=60_000)
    page.wait_until_idle()
    expect(page.cell(1)).to_have_class(re.compile("jp-mod-outputsScrolled"))  # it is long enough for a box
    page.cell(1).evaluate("cell => cell.scrollIntoView({block: 'start'})")
    for seen in (page.told(1).first, page.panel(1)):
        box = seen.bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= 900
    assert page.told(1).first.bounding_box()["y"] - page.output(1).bounding_box()["y"] < 30, "nothing stands above"
    assert page.output(1).evaluate("area => getComputedStyle(area).maxHeight") == "none"
    traceback = page.output(1).locator(".jp-OutputArea-child", has_text="OutOfMemoryError").last
    assert traceback.bounding_box()["height"] < 500, "what is long scrolls by itself"
    page.shot(f"long-{width}")


def test_run_all_goes_on_past_a_cell_that_heals_by_itself(open_notebook):
    page: Page = open_notebook("auto", SCORING, "%oomdoctor auto exact", SCORE, "print('next', len(scores) + 1)")
    page.run_all()
    page.expect_says(3, "next 5")
    page.expect_says(2, "scored 5")
    expect(page.told(2).last).to_contain_text("Healed: In[3]")
    expect(page.told(2).last).to_be_visible()
    expect(page.output(2)).not_to_contain_text("Traceback")
    expect(page.output(2)).not_to_contain_text("OutOfMemoryError:")
    page.shot("auto", page.cell(2))


def test_a_cell_that_awaits_is_healed_or_says_how_it_can_be(open_notebook):
    awaits = f"import asyncio\nawait asyncio.sleep(0)\n{SCORE}"
    page: Page = open_notebook("awaits", SCORING, awaits, "%oomdoctor retry")
    page.run_all()
    expect(page.told(1).first).to_be_visible(timeout=60_000)
    page.wait_until_idle()
    retry = page.button(1, "Fix it")
    if retry.count() and retry.is_enabled():
        retry.click()
    page.expect_says(1, re.compile("type `?%oomdoctor (retry|fix)"))
    page.shot("awaits")
    page.wait_until_idle()
    page.run(2)
    page.expect_says(2, "scored 5")


def test_hostile_names_stay_text(open_notebook):
    evil = "<img src=x onerror=alert(1)>"
    setup = f"""\
evil = {evil!r}
{SCORING.replace("parts =", "globals()[evil] =")}
table = {{evil: []}}
lines = ["def forward(self, x):", "    for layer in self:", "        x = layer(x)", "    return x"]
exec(compile(chr(10).join(lines), evil + ".py", "exec"))
model = type(evil, (nn.Sequential,), {{"forward": forward}})(*model)"""
    cell = f"model.eval()\nfor part in globals()[evil]:  # {evil}\n    table[evil].append(model(part))\nprint(1 + 1)"
    page: Page = open_notebook("hostile", setup, cell, "%memreport")
    page.run_all()
    page.expect_says(1, f"{evil}.py")
    expect(page.told(1).nth(1)).to_contain_text(f"table['{evil}'][0]")
    page.button(1, "Show change").click()
    expect(page.panel(1).locator("pre").first).to_contain_text(f"# {evil}")
    page.wait_until_idle()
    page.run(2)
    page.expect_says(2, f"table['{evil}']")
    page.shot("hostile")
    assert page.page.locator('img[src="x"], [onerror]').count() == 0
    assert page.dialogs == []
