"""What torch says of a machine while it is loaded for a forecast: it is no news to the user."""

from __future__ import annotations

import subprocess
import sys


def test_a_missing_triton_is_not_told_as_forecasts_are_loaded() -> None:
    code = (
        "import sys, torch, logging\n"
        "torch.version.cuda = '13.0'\n"
        "sys.modules['triton'] = None\n"
        "import oomdoctor.forecast.cost\n"
        "assert 'torch.utils.flop_counter' in sys.modules\n"
        "logging.getLogger('torch.utils.flop_counter').warning('of the user')\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "triton" not in told.stderr
    assert "of the user" in told.stderr
