"""Which names of a cell stand for items of something else."""

from __future__ import annotations

import pytest

from oomdoctor.program.names import loop_targets


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("%%time\nfor layer in layers:\n    x = layer(x)", {"layer"}),
        ("for at, (layer, *more) in pairs: pass\nfor it.of in them: pass", {"at", "layer", "more"}),
        ("with lock:\n    for at in range(3):\n        layer = layers[at]\n        y = f(layer)", {"at", "layer"}),
        ("while True:\n    batch = next(batches)\n    loss = model(batch)", {"batch"}),
        ("def f(models):\n    for model in models: pass\nfor x in xs:\n    def g(): y = x[0]", {"x"}),
        ("first = layers[0]", set()),
        ("for x in", set()),
    ],
)
def test_names_that_loops_bind_to_items(source: str, names: set[str]) -> None:
    assert loop_targets(source) == names
