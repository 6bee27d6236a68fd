"""The site: a page of each rule, fix and notebook, links that lead to pages, and dead ones that are told."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import oomdoctor
from oomdoctor import fixes
from oomdoctor.rulebook import locate
from oomdoctor.rulebook.loading import files_in

ROOT = Path(__file__).parents[1]
SITE_PYTHON = ROOT / ".venv-site" / "bin" / "python"
RULES = sorted(path.stem for path in files_in([locate()], []))


def tool(name: str) -> ModuleType:
    """Import a tool."""
    if str(ROOT / "tools") not in sys.path:
        sys.path.append(str(ROOT / "tools"))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    pages: dict[str, Any] = tool("site_pages").generated()
    return pages


def test_each_rule_has_its_page(made: dict[str, Any]) -> None:
    assert {name for name in made if name.startswith("rules/")} == {f"rules/{rule}.md" for rule in RULES}
    for rule in RULES:
        page = made[f"rules/{rule}.md"]
        headings = re.findall(r"^## (.*)$", page, re.M)
        assert headings[:5] == ["What", "Why", "What to do", "Example", "When it may be wrong"]
        # The expression is there, and folded.
        assert re.search(r'^\?\?\? note "The expression that it matches"\n\n    ```\n', page, re.M)
        assert f"(rules/{rule}.md)" in made["rules.md"]


def test_each_fix_has_its_page(made: dict[str, Any]) -> None:
    assert {name for name in made if name.startswith("fixes/")} == {f"fixes/{fix}.md" for fix in fixes.ids()}
    for fix in fixes.ids():
        assert re.findall(r"^## (.*)$", made[f"fixes/{fix}.md"], re.M)[:4] == ["What", "Why", "What to do", "Example"]
        assert f"(fixes/{fix}.md)" in made["fixes.md"]
    assert sum("```diff" in made[f"fixes/{fix}.md"] for fix in fixes.ids()) >= 15


@pytest.mark.parametrize(
    ("page", "text", "leads"),
    [
        ("index.md", "[guide](docs/guide.md)", "[guide](guide.md)"),
        ("index.md", "![a picture](docs/images/answer.png)", "![a picture](images/answer.png)"),
        ("index.md", "[notes](CONTRIBUTING.md)", "[notes](contributing.md)"),
        ("how-to/scripts.md", "[limits](../limits.md#where)", "[limits](../limits.md#where)"),
        ("how-to/scripts.md", "[rule](../rules.md#graph_kept_alive)", "[rule](../rules/graph_kept_alive.md)"),
        ("guide.md", "[fix](fixes.md#micro_batch)", "[fix](fixes/micro_batch.md)"),
        ("guide.md", "[all](fixes.md#what-each-buys)", "[all](fixes.md#what-each-buys)"),
        ("gallery.md", "[first](../notebooks/01_first_oom.ipynb)", "[first](gallery/01_first_oom.md)"),
        ("limits.md", "[retry](../benchmarks/results/retry.txt)", "[retry](benchmarks/results/retry.txt)"),
        ("limits.md", "[sources](../oomdoctor/fixes)", "sources"),
        ("limits.md", "[out](https://pytorch.org)", "[out](https://pytorch.org)"),
        ("limits.md", "```\n[0](docs/guide.md)\n```", "```\n[0](docs/guide.md)\n```"),
        # It leads nowhere, and is left for the build to refuse.
        ("limits.md", "[gone](gone.md)", "[gone](gone.md)"),
    ],
)
def test_links_of_the_checkout_lead_to_pages(page: str, text: str, leads: str) -> None:
    assert tool("site_pages").linked(text, page) == leads


def test_a_dead_link_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = tool("check_links")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "index.html").write_text('<h2 id="place">x</h2><a href="../">up</a>')
    start = '<a href="there/">1</a><a href="there/#place">2</a><img src="a.png"><a href="https://host.org">3</a>'
    (tmp_path / "index.html").write_text(start)
    (tmp_path / "a.png").write_bytes(b"")
    assert check.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "4 links within the site followed, 0 lead nowhere; 1 lead to other hosts\n"
    (tmp_path / "index.html").write_text(start + '<a href="there/#gone">4</a><a href="gone/">5</a>')
    assert check.main([str(tmp_path)]) == 1
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == ["there/#gone", "gone/"]


def test_a_notebook_becomes_a_page_with_what_it_put_out(tmp_path: Path) -> None:
    notebook = {
        "cells": [
            {"cell_type": "markdown", "source": ["# Title"]},
            {
                "cell_type": "code",
                "source": ["fail()"],
                "outputs": [
                    {"output_type": "stream", "text": ["said\n"]},
                    {"output_type": "error", "ename": "ValueError", "traceback": ["Traceback", "ValueError: x"]},
                    {"output_type": "display_data", "data": {"text/html": ["<b>|</b>"], "text/plain": ["|"]}},
                    {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["<Figure>"]}},
                ],
            },
        ]
    }
    notebooks = tool("site_notebooks")
    made = notebooks.pages("one", notebook)
    page = made["gallery/one.md"]
    assert made["gallery/one/1-3.png"] == b"\0\0\0"
    assert page.startswith("# Title\n\n```python\nfail()\n```\n\n```text\nsaid\n```\n\n??? failure")
    assert "    ValueError: x\n" in page
    assert "one/1-3.png" in page
    (tmp_path / "one.ipynb").write_text(json.dumps(notebook))
    assert notebooks.filled('<div data-shown="1-2"></div>', tmp_path / "one.ipynb") == "<b>|</b>"


@pytest.mark.thorough
@pytest.mark.skipif(not SITE_PYTHON.exists(), reason="`make site` makes the environment that builds it")
def test_the_site_builds_strictly_without_torch_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    build = [SITE_PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tool("check_links").broken(tmp_path)[0] == []
    assert (tmp_path / "rules" / "graph_kept_alive" / "index.html").is_file()
    assert (tmp_path / "fixes" / "micro_batch" / "index.html").is_file()
    without = [SITE_PYTHON, "-c", "import importlib.util as u; print(u.find_spec('torch'))"]
    assert subprocess.run(without, capture_output=True, text=True, check=True).stdout == "None\n"


def test_what_the_site_needs_is_bounded_as_in_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements-site.txt").read_text().splitlines()
    shared = [line for line in lines if not line.startswith(("#", "mkdocs"))]
    assert shared
    assert set(shared) <= set(project["dependencies"])


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == oomdoctor.__version__ == project["version"]
    assert (citation["license"], citation["abstract"]) == (project["license"], project["description"])
    assert citation["keywords"] == project["keywords"]


def test_the_badges_say_what_the_project_says(capsys: pytest.CaptureFixture[str]) -> None:
    badges = tool("badges")
    assert (badges.main(["--check"]), capsys.readouterr().err) == (0, ""), "run: make docs"
    assert badges.said() == {"python": "3.11+", "torch": "2.4+", "license": "Apache-2.0"}
    shown = set(re.findall(r"\]\(docs/images/badge-(\w+)\.svg\)", (ROOT / "README.md").read_text()))
    assert shown == set(badges.said())


def test_the_workflow_runs_commands_that_there_are() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "make test-torch TORCH=${{ matrix.torch }}"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    oldest = re.search(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert jobs["torch"]["strategy"]["matrix"]["torch"] == [oldest[1], "newest"]  # type: ignore[index]


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_issue_templates_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["type"] in {"textarea", "dropdown"} and field["attributes"]["label"] for field in form["body"])
