from __future__ import annotations

import libcst as cst
import pytest

from oomdoctor.program.rewriting import given_to_class

CELL = '''\
class Net(Base):
    def __init__(self):
        self.size = self.measured()

    def measured(self):
        return 2

    def forward(self, x):
        text = """a
b"""
        return x * self.size, text

    def parent(self):
        return super().parent()
'''


def given(old: str, new: str, cell: str = CELL) -> str | None:
    before, after = cst.parse_module(cell), cst.parse_module(cell.replace(old, new))
    changed = after.body[0]
    assert isinstance(changed, cst.ClassDef)
    return given_to_class(before, after, changed, "Changed")


def test_live_objects_follow_a_changed_method() -> None:
    space: dict[str, object] = {"Base": object}
    exec(CELL, space)
    net = space["Net"]()  # type: ignore[operator]
    names = set(space)
    replay = given("x * self.size", "x + self.size")
    assert replay is not None
    exec(replay, space)
    assert net.forward(5) == (7, "a\nb")
    assert type(net).forward.__qualname__ == "Net.forward"
    assert set(space) == names


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.size = self", "self.length = self"),  # the objects are made already
        ("return 2", "return 3"),  # and this was called for it
        ("super().parent()", "super().parent() + 1"),
        ("(Base)", "(Other)"),
        ("return x * self.size", "return __hidden(x)"),
        ("    def forward", "    @cached\n    def forward"),
        ("    def forward", "    kept = 1\n\n    def forward"),
    ],
)
def test_what_live_objects_would_not_follow_is_left_alone(old: str, new: str) -> None:
    assert given(old, new) is None
