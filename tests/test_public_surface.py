"""What ``import oomdoctor`` offers, and what it must not cost."""

import subprocess
import sys

import pytest

import oomdoctor

HEAVY = ("torch", "ipywidgets", "IPython", "libcst", "rich", "pydantic")


def loaded_by(statement):
    """Return which of the heavy packages a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*({set(HEAVY)!r} & sys.modules.keys()))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(out.stdout.split())


def test_the_surface_is_pinned():
    assert sorted(oomdoctor.__all__) == [
        "__version__",
        "batch_parts",
        "chunked_head",
        "chunked_loss",
        "explain",
        "heal",
        "in_parts",
        "join_parts",
        "last_case",
        "load_ipython_extension",
        "plan",
        "recompute",
        "report",
        "simulate",
        "unload_ipython_extension",
    ]
    assert dir(oomdoctor) == sorted(oomdoctor.__all__)


@pytest.mark.parametrize("name", oomdoctor.__all__)
def test_every_name_of_the_surface_is_there(name):
    assert getattr(oomdoctor, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'does_not_exist'"):
        _ = oomdoctor.does_not_exist


def test_the_import_is_light():
    assert loaded_by("import oomdoctor") == set()


def test_the_errors_and_the_values_are_light_too():
    assert loaded_by("import oomdoctor.errors, oomdoctor.model.case, oomdoctor.model.session") == set()


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_import_would_be_seen(name):
    assert name in loaded_by(f"import oomdoctor, {name}")
