"""The lines that make a name hold more with each round."""

from __future__ import annotations

import pytest

from oomdoctor.program.code_names import growing


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("kept.append(f(x))", {"kept": 2}),
        ("y = 1\n    kept.extend(f(x))", {"kept": 3}),
        ("found[x] = f(x)", {"found": 2}),
        ("text += f(x)", {"text": 2}),
        ("frame = pd.concat([frame, f(x)])", {"frame": 2}),
        ("rows = np.append(rows, x)", {"rows": 2}),
        ("by[x].append(f(x))\n    by[x].append(2)", {"by": 2}),
        ("if x:\n        kept.add(x)", {"kept": 3}),
        ("by.setdefault(x, []).append(1)", {"by": 2}),
        ("total = f(x)", {}),
        ("total -= 1", {}),
        ("kept.clear()", {}),
    ],
)
def test_a_line_in_a_loop(body: str, names: dict[str, int]) -> None:
    assert growing(f"for x in range(9):\n    {body}") == names


def test_what_no_loop_repeats_does_not_grow() -> None:
    assert growing("kept.append(1)\nfound[2] = 3") == {}
    assert growing("while True:\n    %time kept.append(1)") == {"kept": 2}
    assert growing("not ( Python") == {}


def test_a_loop_of_a_function_counts() -> None:
    assert growing("def load():\n    kept = []\n    for x in f():\n        kept.append(x)\n    return kept") == {
        "kept": 4
    }
