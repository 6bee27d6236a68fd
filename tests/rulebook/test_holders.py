"""What the holders of a device show of models: which nothing trains, what copies their weights, what grows."""

from __future__ import annotations

from typing import Any

import pytest
from rulebook.test_context import facts, holding

from oomdoctor.model.code import CodeFacts, ModelFacts
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.sizes import MIB
from oomdoctor.rulebook.context import Fact


def weights(path: str, *sizes: int) -> list[Holding]:
    names = [f"{path}[{at}].weight" for at in range(len(sizes))]
    return [
        holding(Role.PARAMETER, size * MIB, path=name, expression=name) for name, size in zip(names, sizes, strict=True)
    ]


def kept(path: str, size: int, count: int = 2) -> Holding:
    return holding(Role.USER_TENSOR, size * MIB, path=path, expression=path, count=count)


def census(*held: Holding, stepped: str = "model", **code: Any) -> dict[str, Fact]:
    paths = dict.fromkeys(one.path.partition("[")[0] for one in held if one.role is Role.PARAMETER)
    models = tuple(
        ModelFacts(path=path, type_name="Net", training=True, parameter_bytes=MIB, stepped=path == stepped)
        for path in paths
    )
    return facts(holdings=held, code=CodeFacts(models=models, **code))["census"]


def seconds(told: dict[str, Fact]) -> dict[str, Fact]:
    names = ("second", "second_model", "second_copy", "second_average")
    return {name: told[name] for name in names if told.get(name) is not None}


MODEL = weights("model", 4, 2)


def test_a_model_that_nothing_steps_is_the_second_beside_one_that_is_trained() -> None:
    told = census(*MODEL, *weights("teacher", 8, 2), *weights("probe", 1))
    assert seconds(told) == {"second": 10 * MIB, "second_model": "teacher"}
    assert told["model_names"] == "`teacher`, `model`, `probe`"
    assert seconds(census(*MODEL, *weights("teacher", 8, 2), stepped="none")) == {}


def test_a_model_with_gradients_is_trained_whoever_steps_it() -> None:
    gradient = holding(Role.GRADIENT, MIB, path="model[0].weight.grad", expression="model[0].weight.grad")
    assert seconds(census(*MODEL, *weights("other", 4), gradient, stepped="none"))["second_model"] == "other"


@pytest.mark.parametrize("name", ["ema", "ema_model", "model_ema", "averaged", "net_swa", "avg_net"])
def test_a_copy_of_the_same_size_that_is_called_an_average_is_one(name: str) -> None:
    assert seconds(census(*MODEL, *weights(name, 4, 2))) == {"second": 6 * MIB, "second_average": name}


@pytest.mark.parametrize("name", ["best", "schema", "emanuel"])
def test_a_copy_that_is_called_otherwise_is_a_copy(name: str) -> None:
    assert seconds(census(*MODEL, *weights(name, 4, 2))) == {"second": 6 * MIB, "second_copy": name}


def test_a_model_of_another_size_is_no_average_whatever_it_is_called() -> None:
    assert seconds(census(*MODEL, *weights("ema", 4, 3))) == {"second": 7 * MIB, "second_model": "ema"}


def test_a_dict_as_large_as_the_weights_is_a_copy_of_them() -> None:
    told = census(*MODEL, kept("tracker.shadow.values()", 6))
    assert seconds(told) == {"second": 6 * MIB, "second_average": "tracker.shadow"}
    told = census(*MODEL, kept("best.values()", 6))
    assert (told["kept_copies"], told["kept_copies_path"], told["kept_copies_count"]) == (6 * MIB, "best", 1)
    assert census(*MODEL, kept("best.values()", 6, count=3)).get("kept_copies") is None
    assert census(*MODEL, kept("best.values()", 5)).get("kept_copies") is None


def test_weights_with_their_buffers_are_copied_too_and_told_one_by_one() -> None:
    buffer = holding(Role.BUFFER, MIB, path="model[1].mean", expression="model[1].mean")
    parts = [kept("best['0.weight']", 4, 1), kept("best['1.weight']", 2, 1), kept("best['1.mean']", 1, 1)]
    assert census(*MODEL, buffer, *parts)["kept_copies"] == 7 * MIB


def test_copies_of_many_rounds_are_told_by_the_name_and_the_line_that_makes_it_longer() -> None:
    grows = (("saved", "In[2] line 3: saved.append(copy)"),)
    told = census(*MODEL, kept("saved[0].values()", 6), kept("saved[1].values()", 6), grows=grows)
    assert (told["kept_copies_path"], told["kept_copies_count"]) == ("saved", 2)
    assert told["kept_copies_grown_by"] == "In[2] line 3: saved.append(copy)"
    assert told["user_tensor_grown_by"] == "In[2] line 3: saved.append(copy)"


def test_activations_are_of_the_model_that_keeps_most_of_them() -> None:
    saved = (("model[0]", 5 * MIB), ("model[1]", 2 * MIB), ("head", MIB))
    told = census(*MODEL, *weights("head", 1), holding(Role.ACTIVATION, 9 * MIB, saved_in=saved))
    assert (told["activation_model"], told["activation_of_model"]) == ("model", 7 * MIB)


def test_lighter_architectures_are_told_of_the_model_that_has_most_of_each_kind() -> None:
    plain = {"type_name": "Net", "training": True, "parameter_bytes": MIB}
    wide = ModelFacts(path="wide", convolution_bytes=90, separable_bytes=11, **plain)  # type: ignore[arg-type]
    deep = ModelFacts(path="deep", repeats=6, repeated_bytes=600, **plain)  # type: ignore[arg-type]
    code = facts(code=CodeFacts(models=(wide, deep)))["code"]
    assert (code["convolution_bytes"], code["separable_bytes"]) == (90, 11)
    names = ("repeated_path", "repeats", "repeated_bytes", "halved_bytes", "shared_bytes")
    assert [code[name] for name in names] == ["deep", 6, 600, 300, 100]
    assert facts()["code"].get("repeats") is None
