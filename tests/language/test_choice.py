"""Which language is shown: the setting, else the environment, else JupyterLab."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from oomdoctor.language import automatic

SETTING = "lab/user-settings/@jupyterlab/translation-extension/plugin.jupyterlab-settings"


def jupyter(folder: Path, text: str) -> dict[str, str]:
    path = folder / SETTING
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return {"JUPYTER_CONFIG_DIR": str(folder)}


@pytest.mark.parametrize(
    ("environ", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "en"}, "en"),
        ({"LANG": "C.UTF-8", "LANGUAGE": "de:zh_CN:en"}, "zh"),
        ({"LANG": "zh-Hans"}, "zh"),
        ({"LANG": "zhongwen"}, "en"),
        ({"LANG": "", "LC_ALL": ""}, "en"),
    ],
)
def test_the_environment_chooses(environ: dict[str, str], language: str, tmp_path: Path) -> None:
    assert automatic({"JUPYTER_CONFIG_DIR": str(tmp_path), **environ}) == language


@pytest.mark.parametrize("locale", ["zh_CN", "zh_TW"])
def test_jupyterlab_chooses_where_the_environment_says_nothing_of_chinese(locale: str, tmp_path: Path) -> None:
    lab = jupyter(tmp_path, f'// Translation\n{{\n    /* of menus */ "locale": "{locale}" // ours\n}}\n')
    assert automatic({**lab, "LANG": "en_US.UTF-8"}) == "zh"
    assert automatic({**lab, "LANGUAGE": "en"}) == "en"


def test_jupyterlab_s_settings_are_found_at_home(tmp_path: Path) -> None:
    jupyter(tmp_path / ".jupyter", json.dumps({"locale": "zh_CN"}))
    assert automatic({"HOME": str(tmp_path)}) == "zh"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"locale": null}', '{"locale": "default"}', '{"locale": 3}', "[" * 999]
)
def test_settings_that_cannot_be_read_choose_nothing(text: str, tmp_path: Path) -> None:
    assert automatic(jupyter(tmp_path, text)) == "en"


@pytest.mark.parametrize(("encoding", "language"), [("ascii", "en"), ("latin-1", "en"), ("gbk", "zh"), ("utf-8", "zh")])
def test_it_is_english_where_chinese_cannot_be_printed(
    encoding: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert automatic({"LANGUAGE": "zh"}) == language
