"""Which functions are compiled anew so that their loops ask."""

from __future__ import annotations

from types import FunctionType

from oomdoctor.allocator import mode
from oomdoctor.sandbox.attempt import hook_functions

THEIRS = "def evens(n):\n    return [i for i in range(n) if i % 2 == 0]\n"


def test_functions_of_ours_keep_their_code_also_with_the_globals_of_the_user(tmp_path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    path = tmp_path / "own.py"
    path.write_text(THEIRS)
    exec(compile(THEIRS, str(path), "exec"), namespace)
    theirs, codes = namespace["evens"], [mode.stays_whole.__code__]
    assert isinstance(theirs, FunctionType)
    ours = FunctionType(mode.stays_whole.__code__, namespace, "stays_whole")
    plain = theirs.__code__
    assert hook_functions([ours, mode.stays_whole, theirs]) == {str(path)}
    assert [ours.__code__, mode.stays_whole.__code__] == codes * 2
    assert theirs.__code__ is not plain
