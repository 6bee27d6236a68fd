"""README and the pages that people write: links lead somewhere, figures stand in the results that they link to."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

from oomdoctor.shell.config import OomDoctor

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
PAGES |= {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for name in ("guide", "gallery", "limits", "tutorial", "faq", "comparison", "api", "how-to/*")
    for path in (ROOT / "docs").glob(f"{name}.md")
}
README, GUIDE, LIMITS = (PAGES[name] for name in ("README.md", "docs/guide.md", "docs/limits.md"))
LINKS = {
    (page, link)
    for page, text in PAGES.items()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    if link[:4] not in ("http", "#")
}
ROWS = [line for line in README.splitlines() if "benchmarks/results/" in line]
MOST_WORDS = 900
FIGURE = re.compile(r"\d+\.\d+(?:%|x)")


@pytest.mark.parametrize(("page", "link"), sorted(LINKS))
def test_links_lead_to_files(page: str, link: str) -> None:
    assert ((ROOT / page).parent / link).exists()


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len(README.split()) <= MOST_WORDS


@pytest.mark.parametrize("row", ROWS)
def test_figures_stand_in_the_results_that_they_link_to(row: str) -> None:
    results = "".join((ROOT / path).read_text() for path in re.findall(r"\((benchmarks/results/[^)]+)\)", row))
    assert [figure for figure in FIGURE.findall(row) if figure not in results] == []


def test_figures_of_the_comparison_stand_in_the_results_that_it_links_to() -> None:
    page = PAGES["docs/comparison.md"]
    results = "".join((ROOT / path).read_text() for path in re.findall(r"\(../(benchmarks/results/[^)]+)\)", page))
    assert len(FIGURE.findall(page)) >= 10
    assert [figure for figure in FIGURE.findall(page) if figure not in results] == []


def test_the_table_of_what_others_do_has_figures_of_benchmarks() -> None:
    table = [row for row in ROWS if row.startswith("| ")]
    linked = {Path(path).stem: row for row in table for path in re.findall(r"\((benchmarks/[^)]+)\)", row)}
    assert linked.keys() == {"retry", "forecast", "census", "public"}
    assert all(FIGURE.findall(row) for name, row in linked.items() if name != "public")
    results = (ROOT / "benchmarks" / "results" / "public.txt").read_text()
    healed, of = re.findall(r"^(\d+) of (\d+) healed", results, re.M)[0]
    first = re.findall(r"^likeliest cause first in (\d+) of", results, re.M)[0]
    assert f"[{of} public training programs]" in linked["public"]
    assert f"| {healed} healed by themselves" in linked["public"]
    assert f"stood first in {first} |" in linked["public"]


def test_what_is_said_of_the_state_after_retries_is_what_was_measured() -> None:
    ended: Counter[str] = Counter()
    for line in (ROOT / "benchmarks" / "results" / "state.txt").read_text().splitlines():
        if found := re.fullmatch(r" *(\d+) (?:RLIMIT_DATA|simulated): (.+)", line):
            ended[found[2]] += int(found[1])
    healed = ended.pop("healed, equal") + ended.pop("healed, unverified, equal", 0)
    assert ended.keys() == {"offered", "refused"}
    said = " ".join(README.split())
    assert f"Of [{healed + ended.total()} failures" in said
    assert f"{healed} were healed to what a fresh kernel leaves, bit for bit, and {ended.total()} refused" in said


def test_what_is_said_of_retries_is_what_was_measured() -> None:
    rows = retries()
    ours, peers = ([row for row in rows if row["name"].startswith("oomdoctor") is own] for own in (True, False))
    healed = [row for row in ours if row["done"] == "yes"]
    assert {program for row in healed for program in [row["program"]]} == set(PROGRAMS) - {
        "CNN, BatchNorm, momentum, 56MiB"
    }
    assert {(row["wanted"], row["in"], row["RNG"]) for row in healed} == {("6", "6", "same")}
    assert {row["batch"].split(" > ")[0] == row["batch"].split(" > ")[1] for row in healed} == {True}
    done = [row for row in peers if row["done"] == "yes"]
    steps = [int(row["in"]) for row in done]
    shares = [float(row["share"].removesuffix("%")) for row in done]
    ratios = [[float(row["ratio"].removesuffix("x")) for row in group] for group in (done, healed)]
    assert f"{min(steps)} to {max(steps)} steps" in README
    assert f"{min(shares)}% to {max(shares)}%" in README
    assert f"at most {max(float(row['share'].removesuffix('%')) for row in healed)}% away" in README
    assert all(f"{min(group)}x to {max(group)}x" in README for group in ratios)


PROGRAMS = re.findall(r"^(\w.*MiB)$", (ROOT / "benchmarks" / "results" / "retry.txt").read_text(), re.M)
_ROW = re.compile(
    r"(?P<name>\w[\w, ]*?)  +(?P<done>yes|no) .*? (?P<wanted>\d+) / \d+ / (?P<in>\d+)  +(?P<batch>\d+ > [\d-]+)"
    r"  +(?:\S+)  +(?P<share>\S+)  +(?P<RNG>\S+)  +[\d.]+ s  +(?P<ratio>\S+)$"
)


def retries() -> list[dict[str, str]]:
    """Return the rows of the benchmark of retries, each with its program."""
    rows, program = [], ""
    for line in (ROOT / "benchmarks" / "results" / "retry.txt").read_text().splitlines():
        program = line if line in PROGRAMS else program
        if found := _ROW.match(line):
            rows.append(found.groupdict() | {"program": program})
    assert len(rows) == 8 * len(PROGRAMS)
    return rows


@pytest.mark.parametrize("package", ["JupyterLab", "Notebook", "IPython", "ipykernel", "ipywidgets", "torch"])
def test_the_versions_that_it_names_are_those_of_this_environment(package: str) -> None:
    (said,) = {match[1] for match in re.finditer(rf"(?:\b|\| ){package}(?: \|)? (\d+\.\d+)", compatibility())}
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    if package == "torch" and f"torch=={version(package).partition('+')[0]}" not in pinned:
        pytest.skip("this environment has another torch than the one that is pinned")
    assert version(package.lower()).startswith(f"{said}.")


def test_the_versions_of_colab_are_those_of_its_constraints() -> None:
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints-colab.txt").read_text(), re.M))
    assert f"IPython {pinned['ipython']}, ipykernel {pinned['ipykernel']}, ipywidgets {pinned['ipywidgets']}" in LIMITS


def compatibility() -> str:
    """Return the table of what was tested, without what is said of Colab."""
    section = LIMITS.split("## Where it was tested")[1].split("\n## ")[0]
    return re.sub(r"; in `make test-colab`.*", "", section)


def test_the_gallery_lists_every_notebook_and_the_settings_that_are_named_exist() -> None:
    assert sorted(re.findall(r"\(../notebooks/([^)]+)\)", PAGES["docs/gallery.md"])) == sorted(
        path.name for path in (ROOT / "notebooks").glob("*.ipynb")
    )
    named = set(re.findall(r"OomDoctor\.(\w+)", GUIDE + LIMITS))
    assert named <= set(OomDoctor.class_own_traits(config=True))
    assert named >= {"auto", "snapshot_share"}


def test_the_extra_for_the_gallery_has_what_its_notebooks_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert all(name in extras for name in re.findall(r"'\.\[(\w+)\]'", "".join(PAGES.values())))
    assert "oomdoctor[demo]" in extras["gallery"]
    named = [
        *project["dependencies"],
        *(one for extra in ("demo", "ranks", "gallery") for one in extras[extra]),
        "oomdoctor",
    ]
    had = {re.match(r"[\w-]+", requirement)[0] for requirement in named} | sys.stdlib_module_names  # type: ignore[index]
    cells = [cell for path in ROOT.glob("notebooks/*.ipynb") for cell in json.loads(path.read_text())["cells"]]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.M))
    assert {"torch", "matplotlib", "transformers"} <= imported
    assert imported - had == {"jittor"}, "which compiles itself, and is for its notebook alone: see make test-jittor"
