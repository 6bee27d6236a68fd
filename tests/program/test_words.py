"""The vocabulary of torch's names, held against what torch itself does."""

from __future__ import annotations

import ast
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch.nn import functional

from oomdoctor.program import torch_functions
from oomdoctor.program.torch_functions import Result

SHAPES = ((2, 2), (1,), (4,), (2, 3, 2))
HOMES = {"Tensor": torch.Tensor, "torch": torch, "functional": functional}
NUMBERLESS = {"backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}


def names(home: str) -> Iterator[str]:
    for name in dir(HOMES[home]):
        value = getattr(HOMES[home], name)
        if not name.startswith("_") and callable(value) and not inspect.isclass(value):
            yield name


def leaf(shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def arguments(x: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield what calls of torch are given beside their tensor."""
    plain = x.detach()
    yield from ((), (0,), (0.5,), (x,), (0, 1), (1, 0), (-1,), (2,), ((-1,),), ((0,),), (2, -1), ("cpu",), (x, x))
    yield from (
        (torch.float32,),
        (torch.tensor([0]),),
        (0, torch.tensor([0])),
        (plain > 0,),
        (plain > 0, 0.0),
        (0, 0, 1),
    )
    yield from (
        (plain.argsort(-1),),
        (plain.long(),),
        (plain.shape,),
        (plain.shape, 1.0),
        (0, x),
        (0, (1, -1)),
        (x, 0.5),
    )


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


@functools.cache
def answers(home: str, name: str) -> tuple[bool, bool, bool, bool]:
    """Return whether a call worked, gave a tensor with a graph, wrote into its tensor, and drew random numbers."""
    called: Callable[..., Any] = getattr(HOMES[home], name)
    worked = graph = wrote = drew = False
    for shape in SHAPES:
        for given in arguments(leaf(shape)):
            x = leaf(shape) * 1
            version, random = x._version, torch.get_rng_state()
            try:
                result = called(x, *given)
            except Exception:  # noqa: BLE001 - most arguments fit few names
                continue
            worked = True
            graph |= any(one.requires_grad for one in tensors(result))
            wrote |= x._version != version
            drew |= not torch.equal(torch.get_rng_state(), random)
    return worked, graph, wrote, drew


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


SETTING = ("set_", "manual_seed", "seed", "save", "compile", "fork", "wait", "import_", "use_deter", "init", "unravel")
"""Beginnings of names of torch that change settings or start something: they are not called."""


ENDS_TORCH_2_4: Final = "native_channel_shuffle"
"""Divides by the number of groups without a look at it, and ends the process where that is zero."""


def asked(home: str) -> list[str]:
    left_out = (*SETTING, ENDS_TORCH_2_4) if torch.__version__ < (2, 5) else SETTING
    return [name for name in names(home) if home == "Tensor" or not name.startswith(left_out)]


def test_every_method_of_a_tensor_whose_result_has_no_graph_is_known() -> None:
    told = {name: answers("Tensor", name) for name in asked("Tensor")}
    cut = {name for name, (worked, graph, _, _) in told.items() if worked and not graph}
    assert cut - {"module_load", "new"} <= torch_functions.NO_GRAPH


def test_every_function_of_torch_whose_result_of_a_tensor_has_no_graph_is_known() -> None:
    known = torch_functions.NO_GRAPH | {name for name in torch_functions.DRAWS if not name.endswith("_")}
    told = {name: answers("torch", name) for name in asked("torch") if hasattr(torch.Tensor, name)}
    cut = {name for name, (worked, graph, _, _) in told.items() if worked and not graph}
    assert cut - {"where"} <= known  # it wants a condition first, which has no graph itself


@pytest.mark.parametrize("home", HOMES)
def test_no_name_that_is_said_to_cut_gives_a_graph(home: str) -> None:
    there = [name for name in torch_functions.NO_GRAPH if hasattr(HOMES[home], name)]
    assert [name for name in there if answers(home, name)[1]] == []


def test_names_that_are_said_to_keep_the_graph_keep_it() -> None:
    keeping = torch_functions.names_of(Result.MOVED, Result.CAST, Result.SHAPED, Result.REDUCED)
    missing = {"cuda", "xpu", "ipu", "mtia", "pin_memory", "type"}  # need a device, or are asked for a name
    assert [name for name in sorted(keeping - missing) if not answers("Tensor", name)[1]] == []
    for name in torch_functions.JOINS:
        assert getattr(torch, name)([leaf((2, 2)), leaf((2, 2))]).requires_grad


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="names of newer releases of torch are listed too")
@pytest.mark.parametrize("result", Result)
def test_every_word_is_a_name_of_torch(result: Result) -> None:
    for name in torch_functions.names_of(result):
        assert any(hasattr(home, name) for home in HOMES.values()), name
    for name in torch_functions.DRAWS:
        assert any(hasattr(home, name) for home in HOMES.values()), name


def test_methods_that_write_in_place() -> None:
    for name in asked("Tensor"):
        worked, _, wrote, _ = answers("Tensor", name)
        if wrote and name != "module_load":
            assert torch_functions.is_in_place(name), name
        elif worked and torch_functions.is_in_place(name):
            assert name in SAME_VERSION, name


SAME_VERSION = {"detach_", "transpose_", "t_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_as_"}
"""Methods that change what a tensor is seen as, and not its values."""


@pytest.mark.parametrize("home", HOMES)
def test_what_draws_random_numbers(home: str) -> None:
    drawing = {name for name in asked(home) if answers(home, name)[3]}
    assert drawing <= torch_functions.DRAWS


def test_functions_of_python_whose_result_has_no_graph() -> None:
    x = leaf((1,)) * 1
    for name in torch_functions.PLAIN_FUNCTIONS - {"print", "range", "isinstance", "len", "round"}:
        assert not isinstance(__builtins__[name](x), torch.Tensor)  # type: ignore[index]
    with pytest.raises(TypeError):
        round(x)
    assert abs(x).requires_grad


def test_attributes_that_have_no_graph() -> None:
    x = leaf((2, 2)) * 1
    apart = {"grad", "grad_dtype", "imag", "volatile"}  # of leaves or complex tensors alone, or gone
    there = [name for name in dir(x) if not name.startswith(("_", "is_")) and name not in apart]
    values = {name: getattr(x, name) for name in there if not callable(getattr(torch.Tensor, name))}
    plain = {name for name, one in values.items() if not isinstance(one, torch.Tensor) or not one.requires_grad}
    assert plain <= torch_functions.PLAIN_ATTRIBUTES
    assert not (values.keys() - plain) & torch_functions.PLAIN_ATTRIBUTES


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        ("out.argmin(1)", True),
        ("out.argsort()", True),
        ("out.long()", True),
        ("torch.argmax(out, 1)", True),
        ("float(out)", True),
        ("out.float()", False),
        ("'{}'.format(out)", True),
        ("out.sum()", False),
        ("out[0](1)", False),
    ],
)
def test_calls_that_cut_the_graph(text: str, cuts: bool) -> None:
    assert torch_functions.cuts_graph(ast.parse(text, mode="eval").body) == cuts  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(torch_functions.INDEXED))
def test_pairs_of_values_and_positions(name: str) -> None:
    call = f"x.{name}({'1' if name in {'kthvalue', 'topk'} else '0'})"
    values, positions = eval(call, {"x": leaf((4,)) * 1})
    assert values.requires_grad
    assert not positions.requires_grad
    assert torch_functions.has_index(ast.parse(call, mode="eval").body)
