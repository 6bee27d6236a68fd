"""Sizes as people write them."""

from __future__ import annotations

import pytest

from oomdoctor.errors import SizeError
from oomdoctor.model.sizes import parse_size


@pytest.mark.parametrize("text", ["", "0", "-1", "1e5", "NaN", "inf", "12 apples", "9" * 400, "9" * 5000 + "GiB", True])
def test_what_is_no_size_is_told_in_one_short_line(text: str) -> None:
    with pytest.raises(SizeError) as told:
        parse_size(text)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 200
