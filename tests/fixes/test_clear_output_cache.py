from __future__ import annotations

import gc

import live
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from oomdoctor.fixes import get, stale_references
from oomdoctor.model.fix import Dose, Effect
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cell, Cells, Session
from oomdoctor.model.unavailable import Refused

FIX = get("clear_output_cache")
patch, propose = FIX.patch, FIX.propose


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance()
    made.user_ns.update(refs=[], ref=__import__("weakref").ref, torch=torch)
    yield made
    made.reset(new_session=False)
    InteractiveShell.clear_instance()


def _session(shell, source: str = "model(x)") -> Session:
    return Session(
        namespace=shell.user_ns,
        cells=Cells(history=(Cell(number=shell.execution_count, source=source),)),
        accelerator=None,  # type: ignore[arg-type]
        shell=shell,
    )


def _show(shell, value: str, keep: str = "") -> None:
    source = f"made = torch.ones(64, requires_grad=True) * 2\nrefs.append(ref(made))\nlast = {value}\n"
    shell.run_cell(source + f"del made\n{keep}\n(last, globals().pop('last'))[0]", store_history=True)


def _alive(shell) -> list[bool]:
    gc.collect()
    return [one() is not None for one in shell.user_ns["refs"]]


@pytest.mark.parametrize(
    "value",
    ["made", "{'a': [made]}", "(1, (made,))", "type('Out', (), {})()", "torch.nn.Parameter(made.detach())"],
)
def test_removes_what_holds_tensors_in_a_real_shell(shell, value) -> None:
    holder = value.startswith("type")
    _show(shell, value if not holder else "made", keep="")
    shell.run_cell("1 + 1", store_history=True)
    number = shell.execution_count - 2
    assert number in shell.user_ns["Out"]
    with FIX.apply(_session(shell), Dose()):
        assert not any(_alive(shell))
    assert list(shell.user_ns["Out"].values()) == [2]
    assert f"_{number}" not in shell.user_ns
    assert (shell.user_ns["_"], shell.user_ns["__"]) == (2, "")
    shell.run_cell("3", store_history=True)
    assert (shell.user_ns["_"], shell.user_ns["__"], shell.user_ns["___"]) == (3, 2, "")


def test_the_last_result_goes_too_and_the_cache_goes_on(shell) -> None:
    _show(shell, "made")
    assert _alive(shell) == [True]
    with FIX.apply(_session(shell), Dose()):
        assert _alive(shell) == [False]
    shell.run_cell("4", store_history=True)
    assert shell.user_ns["_"] == 4


def test_a_name_of_the_users_keeps_its_object(shell) -> None:
    _show(shell, "made", keep="mine = last")
    with FIX.apply(_session(shell), Dose()):
        assert _alive(shell) == [True]
    assert torch.is_tensor(shell.user_ns["mine"])
    assert shell.user_ns["Out"] == {}


@pytest.mark.parametrize("source", ["y = _1 + 1", "y = _ * 2", "y = Out[1]", "%time y = Out[1]"])
def test_what_the_failing_cell_reads_stays(shell, source) -> None:
    _show(shell, "made")
    assert shell.execution_count == 2
    with FIX.apply(_session(shell, source), Dose()):
        assert _alive(shell) == [True]


def test_a_throwaway_underscore_of_the_failing_cell_is_no_reading(shell) -> None:
    _show(shell, "made")
    with FIX.apply(_session(shell, "for _ in range(3):\n    pass"), Dose()):
        assert _alive(shell) == [False]


def test_an_entry_missed_would_keep_it(shell, monkeypatch) -> None:
    _show(shell, "made")
    monkeypatch.setattr(stale_references, "_LAST", ())
    with FIX.apply(_session(shell), Dose()):
        assert _alive(shell) == [True]


def test_runs_no_code_of_the_users(shell) -> None:
    class Trap:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        def __hash__(self) -> int:
            raise AssertionError

    shell.user_ns["_oh"][7] = trap = Trap()
    with FIX.apply(_session(shell), Dose()):
        assert shell.user_ns["_oh"][7] is trap


def test_works_without_a_shell_and_when_the_body_raises() -> None:
    namespace = {"_oh": {1: torch.ones(2), 2: "text"}, "_1": None, "_": torch.ones(1)}
    mine = namespace["_"]
    with pytest.raises(KeyError), FIX.apply(live.session(namespace=namespace), Dose()):
        raise KeyError
    assert namespace["_oh"] == {2: "text"}
    assert namespace["_"] is mine  # no shell that would have bound it: the user did


def test_proposes_what_the_census_found() -> None:
    found = propose(live.INCIDENT, live.evidence(roles=((Role.OUTPUT_CACHE, 3 << 20),)))
    assert not isinstance(found, Refused)
    assert (found[0].saves, found[0].effect) == (3 << 20, Effect.EXACT)
    assert isinstance(propose(live.INCIDENT, live.evidence()), Refused)


def _facts(*numbers: int):
    return live.evidence(
        holdings=tuple(
            Holding(bytes=1, device="cuda:0", role=Role.OUTPUT_CACHE, path=f"Out[{number}][0] → graph")
            for number in numbers
        )
    )


def test_no_code_has_to_change_and_a_semicolon_is_recommended(shell) -> None:
    refused = patch(live.cells_of("torch.ones(3)", "train()"), _facts(1), Dose())
    assert isinstance(refused, Refused)
    assert "with a semicolon at its end, In[1] keeps no result" in refused.reason
    shell.run_cell("torch.ones(3)", store_history=True)
    shell.run_cell("torch.ones(3);", store_history=True)
    assert list(shell.user_ns["Out"]) == [1]
