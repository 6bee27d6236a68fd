"""``make images``: takes the pictures of a failed cell anew, in a real browser, and cuts them for README and the site.

The browser tests take them: JupyterLab and Notebook, wide and narrow, light and dark. Below the first lines of its
traceback each is cut off, as what follows are files of the machine at hand. ``answer.png`` is the cell alone, and
``panel.png`` what stands above its traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from PIL import Image

ROOT: Final = Path(__file__).resolve().parents[1]
IMAGES: Final = ROOT / "docs" / "images"
_TESTS: Final = (
    "tests/browser/test_answer_first.py",
    "tests/browser/test_readable.py::test_the_picture_of_the_panel_is_there",
)
_TRACEBACKS: Final = {(255, 221, 221), (80, 31, 27)}
"""Colours behind a traceback, light and dark. Source: --jp-rendermime-error-background of JupyterLab's two themes."""
_SHOWN_PIXELS: Final = 155
_CELL: Final = 293, 92, 1362
"""Left, top and right of the cell in the picture of JupyterLab that is 1400 pixels wide."""


def main() -> int:
    """Take and cut the pictures."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "CI": "1", "OOMDOCTOR_REGENERATE": "1"}, check=True)
    for path in sorted(IMAGES.glob("answer-*.png")):
        picture = Image.open(path).convert("RGB")
        bottom = traceback_top(picture) + _SHOWN_PIXELS
        _save(picture.crop((0, 0, picture.width, bottom)), path)
        if path.stem == "answer-lab-1400-light":
            left, top, right = _CELL
            _save(picture.crop((left, top, right, bottom)), IMAGES / "answer.png")
    return 0


def traceback_top(picture: Image.Image) -> int:
    """Return the row with which the traceback begins.

    Raises:
        ValueError: there is none.
    """
    for row in range(picture.height):
        wide = sum(picture.getpixel((column, row)) in _TRACEBACKS for column in range(0, picture.width, 5))
        if wide > picture.width / 5 / 3:
            return row
    raise ValueError("there is no traceback in the picture")


def _save(picture: Image.Image, path: Path) -> None:
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size / 2**10:.0f} KiB")


if __name__ == "__main__":
    sys.exit(main())
