"""``python -m oomdoctor`` is the shell command."""

from __future__ import annotations

import sys

from oomdoctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
