from typing import Any

import numpy as np

from oomdoctor.objects.leaves import Leaves


class Kept:
    """An object that shows what it holds only in what it would be pickled as, made anew each time."""

    def __init__(self, number: float) -> None:
        self.number = [number]

    def __getattribute__(self, name: str) -> Any:
        return {} if name == "__dict__" else super().__getattribute__(name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Kept, (list(self.number), (list(self.number), {"number": list(self.number)}))


def test_what_is_made_for_the_walk_is_not_taken_for_what_was_met_before() -> None:
    held = {f"at {at}": Kept(at / 2) for at in range(50)} | {
        f"array {at}": np.array([[at], {at: [at]}], dtype=object) for at in range(50)
    }
    namespace = {"held": held}
    leaves = dict(Leaves(namespace).below(held, "held"))
    assert not [path for path, leaf in leaves.items() if leaf.frame == "another name"]


class Files:
    """Has nothing but entries of its own, as what an opened ``.npz`` gives them by has: no ``__class__`` either."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)


def test_an_object_without_attributes_that_all_others_have_is_walked_over() -> None:
    assert dict(Leaves({}).below({"files": Files(), "count": 3}, "held")).keys() >= {"held['count']"}
