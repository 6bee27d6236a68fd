"""In which module a graph saved what it holds: held against what the modules that ran were when it was saved."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from capabilities import tells_saved
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomdoctor.evidence import census
from oomdoctor.model.memory import Census, DeviceMemory, Role
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.frames import frames_of
from oomdoctor.objects.named import user_names

pytestmark = tells_saved

_UNKNOWN = Unavailable("not asked in this test")
HOST = DeviceMemory(
    name="cpu", tensor_device="cpu", total=_UNKNOWN, free=_UNKNOWN, allocated=_UNKNOWN, reserved=_UNKNOWN
)
BATCH = 16
_OF_GRAPHS = (Role.ACTIVATION, Role.GRAPH_KEPT_ALIVE)


def taken(namespace: dict[str, Any], exc: BaseException | None = None) -> Census:
    program = census.Program(
        passed_over=frozenset({id(namespace)}),
        names=list(user_names(namespace)),
        frames=list(frames_of(exc, {}, namespace)),
        batch_names=frozenset({"batch"}),
    )
    (found,) = census.take(program, [(HOST, lambda tensor: tensor.is_cpu)])
    return found


def told(found: Census, depth: int | None = None) -> Counter[str]:
    """Return the bytes by module; those of modules deeper than ``depth`` count to the one around them."""
    sizes: Counter[str] = Counter()
    for holding in found.holdings:
        for module, size in holding.saved_in:
            sizes[module if depth is None else "".join(steps(module)[: depth + 1])] += size
    return sizes


def steps(module: str) -> list[str]:
    return re.findall(r"^[^.\[]+|\.\w+|\[[^\]]*\]", module)


class Truth:
    """Every storage that was saved for backward, with all the modules that were running when it was."""

    def __init__(self) -> None:
        self.saved: dict[int, tuple[int, list[str | None]]] = {}
        self._kept: list[torch.Tensor] = []

    @contextmanager
    def of(self, model: nn.Module, *given: torch.Tensor) -> Iterator[None]:
        running: list[str] = []
        hooks = []
        for name, module in model.named_modules():
            path = "model" + "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in name.split(".") if step)
            hooks.append(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)))
            hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
        not_asked = {one.untyped_storage()._cdata for one in (*given, *model.parameters(), *model.buffers())}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in not_asked:
                self._kept.append(tensor)
                entry = self.saved.setdefault(storage._cdata, (storage.nbytes(), []))
                entry[1].append(running[-1] if running else None)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        for hook in hooks:
            hook.remove()

    @property
    def total(self) -> int:
        return sum(size for size, _ in self.saved.values())

    def blocks(self, depth: int, only: Callable[[list[str]], list[str]]) -> Counter[str]:
        """Return the bytes by module: of those ``only`` says of the modules that saved a storage."""
        sizes: Counter[str] = Counter()
        for size, paths in self.saved.values():
            cut = ["".join(steps(path)[: depth + 1]) if path else "" for path in paths]
            for block in dict.fromkeys(only(list(dict.fromkeys(cut)))):
                sizes[block] += size if block else 0
        return +sizes


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(32, 64), nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.softmax(self.second(nn.functional.relu(self.first(x))), dim=-1) * 2)


class Residual(nn.Module):
    def __init__(self, into: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(into, out, 1, stride) if into != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.bn2(self.conv2(nn.functional.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


class Decoder(nn.Module):
    """One block of a decoder, with attention written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate, self.down = (nn.Linear(*size) for size in ((width, 128), (width, 128), (128, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.ln1(x)
        attention = torch.softmax(self.q(h) @ self.k(h).transpose(1, 2) / 6, dim=-1)
        x = x + self.drop(self.o(self.drop(attention) @ self.v(h)))
        h = self.ln2(x)
        return x + self.drop(self.down(nn.functional.silu(self.gate(h)) * self.up(h)))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self.layer) is nn.LSTM:
            return self.head(nn.functional.dropout(self.layer(x)[0], 0.1))
        h = torch.zeros(len(x), 64)
        for at in range(x.shape[1]):
            h = self.layer(x[:, at], h)
        return self.head(h)


def encoder(**more: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **more)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def named(**parts: nn.Module) -> nn.Module:
    """Return a model of parts that run one after the other."""
    return nn.Sequential(OrderedDict(parts))


VECTORS, IMAGES, SEQUENCES = (BATCH, 32), (4, 3, 32, 32), (4, 24, 32)
FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (
        lambda: named(
            encoder=nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 128), nn.GELU()),
            decoder=nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Dropout(), nn.Linear(64, 8)),
        ),
        VECTORS,
        1,
    ),
    "functional": (Functional, VECTORS, 0),
    "cnn": (
        lambda: named(
            stem=nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            layers=nn.Sequential(Residual(8, 8), Residual(8, 16, 2), Residual(16, 16)),
            pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            head=nn.Linear(16, 10),
        ),
        IMAGES,
        1,
    ),
    "residual blocks": (lambda: nn.Sequential(*(Residual(3, 3) for _ in range(6)), nn.Conv2d(3, 1, 1)), IMAGES, 1),
    "encoder": (lambda: named(embed=nn.Linear(32, 32), encoder=encoder(), head=nn.Linear(32, 50)), SEQUENCES, 3),
    "encoder, norm first": (
        lambda: named(embed=nn.Linear(32, 32), encoder=encoder(norm_first=True), head=nn.Linear(32, 50)),
        SEQUENCES,
        3,
    ),
    "decoder": (
        lambda: named(h=nn.Sequential(*(Decoder(32) for _ in range(3))), ln=nn.LayerNorm(32), head=nn.Linear(32, 50)),
        SEQUENCES,
        2,
    ),
    "lstm": (
        lambda: named(embed=nn.Linear(32, 32), body=Recurrent(nn.LSTM(32, 64, 2, batch_first=True))),
        SEQUENCES,
        2,
    ),
    "cell in a loop": (lambda: Recurrent(nn.GRUCell(32, 64)), SEQUENCES, 1),
    "nested": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())),
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.GELU()),
            nn.Linear(64, 4),
        ),
        VECTORS,
        1,
    ),
}


@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_have_the_shares_that_the_modules_saved_which_ran(family: str, cast: bool) -> None:
    make, shape, depth = FAMILIES[family]
    torch.manual_seed(0)
    model, batch, truth = make(), torch.randn(shape), Truth()
    with truth.of(model, batch), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = model(batch).float().pow(2).mean()
    found = taken({"model": model, "batch": batch, "loss": loss})
    shares = told(found, depth)
    alone = truth.blocks(depth, lambda paths: paths if len(paths) == 1 else [])
    at_all = truth.blocks(depth, lambda paths: paths)
    first = truth.blocks(depth, lambda paths: paths[:1])
    near = 0.04 * truth.total
    for block in at_all:
        # A storage that two blocks saved is of either; what ends a block may count to what is around it and the next.
        around = sum(size for module, size in shares.items() if module != block and block.startswith(module))
        assert alone[block] - near <= shares[block] + around, (block, shares, alone)
        assert shares[block] <= at_all[block] + near, (block, shares, at_all)
    assert all(any(block.startswith(module) for block in at_all) for module in shares)
    assert sum(shares[block] for block in at_all) >= 0.5 * sum(first.values())
    assert sum(shares.values()) <= sum(found.bytes_of(role) for role in _OF_GRAPHS)
    assert sum(shares.values()) >= 0.9 * sum(first.values())


def test_paths_are_those_of_the_program() -> None:
    model = named(encoder=nn.ModuleDict({"of 1": nn.Linear(8, 8)}), head=nn.Linear(8, 1))
    h = model.encoder["of 1"](torch.randn(4, 8, requires_grad=True)).relu()
    found = taken({"model": model, "loss": model.head(h).sum()})
    assert told(found) == {"model.encoder._modules['of 1']": 4 * 8 * 4, "model.head": 4 * 8 * 4}


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: nn.functional.cross_entropy(out, torch.zeros(64, dtype=torch.long)),
        lambda out: torch.sigmoid(out).mean(),
        lambda out: torch.sigmoid(out.relu() * 2).pow(2).mean() + 0.1 * out.pow(2).mean(),
    ],
)
def test_a_loss_is_of_no_module_of_the_model(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, x = named(body=nn.Linear(8, 4), head=nn.Linear(4, 500)), torch.randn(64, 8)
    found = taken({"model": model, "batch": x, "loss": loss(model(x))})
    assert found.bytes_of(Role.GRAPH_KEPT_ALIVE) >= 64 * 500 * 4
    assert told(found) == {"model.head": 64 * 4 * 4}


def test_a_list_of_layers_runs_none_of_what_lies_between_them() -> None:
    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = nn.functional.silu(layer(x)) + 1
            return self.layers[0](x)

    model, x, row = Looping(), torch.randn(BATCH, 8), BATCH * 8 * 4
    saved = told(taken({"model": model, "batch": x, "loss": model(x).sum()}))
    assert saved == {"model": 3 * row, **{f"model.layers[{at}]": row for at in range(3)}}


def test_a_loss_of_one_step_is_of_no_module_though_the_next_step_follows() -> None:
    model, x = named(body=nn.Linear(8, 4), head=nn.Linear(4, 500)), torch.randn(64, 8)
    loss = sum(nn.functional.log_softmax(model(x), dim=-1).pow(2).sum() for _ in range(2))
    assert told(taken({"model": model, "batch": x, "loss": loss})) == {"model.head": 2 * 64 * 4 * 4}


def test_what_two_calls_of_a_model_have_between_them_is_of_none_of_its_parts() -> None:
    model, x = named(body=nn.Linear(8, 4), head=nn.Linear(4, 8)), torch.randn(64, 8)
    out = model(nn.functional.softmax(model(x)[:, None] - torch.zeros(1, 20, 1), dim=-1).mean(1)).sum()
    saved = told(taken({"model": model, "batch": x, "out": out}))
    assert saved["model"] >= 64 * 20 * 8 * 4
    assert saved["model.body"] + saved["model.head"] == 64 * (4 + 4 + 8) * 4


def test_what_grows_between_two_parts_is_of_the_model_around_them() -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.backbone(x)
            return self.head((x[:, None] - x[None]).pow(2).sum(-1))

    model, x = Distances(), torch.randn(64, 8)
    saved = told(taken({"model": model, "batch": x, "out": model(x).sum()}))
    assert saved["model"] == 64 * 64 * 8 * 4 + 64 * 8 * 4, "with the end of the backbone, which is before the head"


def test_layers_that_are_frozen_are_told_by_the_weights_that_they_saved() -> None:
    model, truth = named(prompt=nn.Linear(32, 32), h=nn.Sequential(Decoder(32), Decoder(32))), Truth()
    for parameter in model.h.parameters():
        parameter.requires_grad = False
    x = torch.randn(SEQUENCES)
    with truth.of(model, x):
        loss = model(x).sum()
    saved, first = told(taken({"model": model, "batch": x, "loss": loss}), 2), truth.blocks(2, lambda paths: paths[:1])
    for block in ("model.h[0]", "model.h[1]"):
        assert saved[block] == pytest.approx(first[block], rel=0.05)
    assert not saved["model.prompt"]


@pytest.mark.parametrize("has_head", [False, True])
def test_layers_that_are_frozen_and_cast_are_not_taken_for_the_one_below_them(has_head: bool) -> None:
    frozen = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(64, 64), nn.GELU())))
    head = nn.Linear(64, 1) if has_head else nn.Identity()
    model, x = named(prompt=nn.Linear(32, 64), frozen=frozen, head=head), torch.randn(VECTORS)
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).sum()
    found, row = taken({"model": model, "batch": x, "loss": loss}), BATCH * 64 * 2
    assert found.bytes_of(Role.GRAPH_KEPT_ALIVE) > 8 * row
    # The input and the weight that one layer takes, and what was cast for it.
    assert told(found)["model.prompt"] <= BATCH * 32 * 2 + 32 * 64 * 2 + 2 * row
    assert not told(found)["model.frozen"]
    assert (told(found)["model"] >= 8 * row) == has_head


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_checkpointed_hold_their_inputs_or_are_not_told(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(32, 64), nn.Linear(64, 8)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=False)
            return self.head(x)

    model, x = Checkpointed(), torch.randn(VECTORS)
    out = model(x)
    saved, row = told(taken({"model": model, "batch": x, "out": out}), 2), BATCH * 64 * 4
    assert saved["model.head"] == row
    assert not saved["model.embed"]
    assert [saved[f"model.blocks[{at}]"] for at in range(4)] == ([0] * 4 if reentrant else [row] * 4)


def test_what_comes_from_a_function_without_parameters_is_of_no_module() -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            return given[0] * 2

    model, x = named(body=nn.Linear(8, 8), head=nn.Linear(8, 1)), torch.randn(BATCH, 8)
    out = model.head(torch.sin(torch.tanh(Hidden.apply(model.body(x)))))
    assert told(taken({"model": model, "batch": x, "out": out})) == {"model.head": BATCH * 8 * 4}


def test_parameters_that_are_shared_are_of_the_module_around_all_that_share_them() -> None:
    model, x = named(body=nn.Linear(8, 8), mid=nn.Linear(8, 8), head=nn.Linear(8, 8)), torch.randn(BATCH, 8)
    model.head.weight = model.body.weight
    loss = model(x).sum()
    row = BATCH * 8 * 4
    assert told(taken({"model": model, "batch": x, "loss": loss})) == {"model": row, "model.mid": row}


def test_parameters_that_lie_in_one_buffer_tell_the_module_around_them() -> None:
    model, x = named(body=nn.Linear(8, 8), head=nn.Linear(8, 8)), torch.randn(BATCH, 8)
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    begin = 0
    for parameter in model.parameters():
        parameter.data = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    assert told(taken({"model": model, "batch": x, "loss": model(x).sum()})) == {"model": BATCH * 8 * 4}


@pytest.mark.parametrize("kinds", ["parameter, tensor", "tensor, parameter", "tensor"])
def test_layers_that_no_module_has_are_not_taken_for_one_before_them(kinds: str) -> None:
    model, x = nn.Linear(8, 8), torch.randn(BATCH, 8)
    made = {"parameter": nn.Parameter(torch.randn(8, 8)), "tensor": torch.randn(8, 8, requires_grad=True)}
    weights = [made[kind] for kind in kinds.split(", ")]
    h = model(x)
    for weight in weights:
        h = torch.tanh(h @ weight)
    out = nn.functional.linear(h, model.weight)
    found = taken({"model": model, "weights": weights, "batch": x, "out": out})
    assert told(found) == {"model": BATCH * 8 * 4}  # what the last one takes


def test_each_storage_counts_once_and_to_the_row_of_its_owner() -> None:
    model, x = named(body=nn.Linear(8, 8), head=nn.Linear(8, 1)), torch.randn(BATCH, 8)
    kept = torch.relu(model.body(x))
    loss, again = model.head(kept).sum(), model.head(kept + 0).sum()
    found = taken({"model": model, "batch": x, "kept": kept, "loss": loss, "again": again})
    row = BATCH * 8 * 4
    assert {one.path: one.saved_in for one in found.holdings if one.saved_in} == {
        "kept": (("model.head", row),),
        "again → graph": (("model.head", row),),
    }


def test_a_model_that_only_a_frame_has_is_not_named() -> None:
    def train() -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        loss = model(torch.randn(BATCH, 8)).sum()
        raise RuntimeError(str(loss is None))

    try:
        train()
    except RuntimeError as exc:
        found = taken({}, exc)
    assert found.bytes_of(Role.ACTIVATION)
    assert not told(found)


class Failing(nn.Module):
    """Two layers and what comes between them, of which the second fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        raise RuntimeError(str(hidden is None))


def failed(run: Callable[[], object]) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        run()
    return caught.value


def test_what_a_forward_that_failed_has_made_last_is_of_its_module() -> None:
    model, x = Failing(), torch.randn(BATCH, 8)
    found = taken({"model": model, "batch": x}, failed(lambda: model(x)))
    assert told(found) == {"model": BATCH * 32 * 4}


def test_what_is_computed_between_two_models_is_of_neither() -> None:
    model, head, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 1), torch.randn(BATCH, 8)
    hidden = model(x)
    for _ in range(20):
        hidden = torch.tanh(hidden)
    out = head(hidden)
    saved = told(taken({"model": model, "head": head, "batch": x, "out": out}))
    assert sum(size for module, size in saved.items() if module.startswith("model")) == BATCH * 8 * 4


def test_a_part_without_parameters_is_told_as_the_model_around_it() -> None:
    class Post(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                x = torch.tanh(x)
            return x

    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), Post(), nn.Linear(8, 1))
    x = torch.randn(BATCH, 8)
    saved = told(taken({"model": model, "batch": x, "out": model(x)}))
    assert saved["model"] == 19 * BATCH * 8 * 4
    assert sum(size for module, size in saved.items() if module.startswith("model[0]")) == BATCH * 8 * 4


def test_a_loss_that_failed_in_a_module_of_its_own_is_of_no_module_of_the_model() -> None:
    class Loss(nn.Module):
        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            squashed = torch.tanh(logits)
            raise RuntimeError(str(squashed is None))

    model, criterion, x = nn.Sequential(nn.Linear(8, 32)), Loss(), torch.randn(BATCH, 8)
    logits = model(x)
    found = taken({"model": model, "batch": x, "criterion": criterion}, failed(lambda: criterion(logits)))
    assert found.bytes_of(Role.ACTIVATION) == 2 * BATCH * 32 * 4
    assert told(found) == {"model[0]": BATCH * 32 * 4}, "the logits, and nothing of the loss"


def test_two_models_have_each_their_own() -> None:
    models = {"maker": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), "judge": nn.Linear(8, 1)}
    x, row = torch.randn(BATCH, 4), BATCH * 8 * 4
    out = models["judge"](models["maker"](x)).sum()
    assert told(taken({**models, "batch": x, "out": out})) == {"maker[2]": row, "judge": row}


def test_very_many_modules_are_told_by_those_around_them_and_no_byte_is_lost() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(80))), torch.randn(2, 4)
    found = taken({"model": model, "batch": x, "loss": model(x).sum()})
    (of_graph,) = (one.saved_in for one in found.holdings if one.saved_in)
    assert len(of_graph) == 80
    assert dict(of_graph)["model[7]"] == 2 * 2 * 4 * 4
    assert sum(size for _, size in of_graph) == (2 * 80 - 1) * 2 * 4 * 4


def test_a_graph_in_which_nothing_has_a_parameter_for_thousands_of_nodes_is_followed_to_the_end() -> None:
    model = named(body=nn.Linear(4, 4), head=nn.Linear(4, 1))
    x = torch.randn(2, 4)
    h = model.body(x)
    for _ in range(9000):
        h = torch.tanh(h)
    found = taken({"model": model, "batch": x, "out": model.head(h)})
    assert told(found) == {"model": 8999 * 2 * 4 * 4, "model.head": 2 * 4 * 4}


def test_a_graph_that_a_backward_freed_has_nothing_saved() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    loss = model(torch.randn(BATCH, 8)).sum()
    loss.backward()
    assert not told(taken({"model": model, "loss": loss}))


def test_what_a_part_is_called_beside_does_not_hide_the_model() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(BATCH, 8)
    part = model[2]
    saved = told(taken({"part": part, "model": model, "batch": x, "out": model(x).sum()}))
    assert saved == {"model[2]": BATCH * 8 * 4}
