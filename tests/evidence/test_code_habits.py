"""Facts of the code: several spellings of each that people write, and near misses that must not count."""

from __future__ import annotations

import argparse
import functools
import textwrap
from typing import Any

import pytest
import torch
from observed import facts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oomdoctor.model.code import CodeFacts
from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.site import Site


def read(*sources: str, line: int | None = None, loaded: tuple[str, ...] = (), **namespace: Any) -> CodeFacts:
    history = tuple(Cell(number=n, source=textwrap.dedent(s).strip("\n")) for n, s in enumerate(sources, 1))
    kinds = (nn.Module, torch.optim.Optimizer, DataLoader)
    found = [[(name, value) for name, value in namespace.items() if isinstance(value, kind)] for kind in kinds]
    return facts(Cells(history=history), namespace, *found, line=line, loaded=loaded)


def said(fact: str | Site | None) -> str | None:
    """What a fact quotes, without the place."""
    return None if fact is None else str(fact).partition(": ")[2]


def loop(*lines: str, head: str = "for x, y in loader:") -> str:
    return "\n".join([head, *(f"    {line}" for line in lines)])


@pytest.mark.parametrize(
    ("statement", "counts"),
    [
        ("loss.backward(retain_graph=True)", True),
        ("loss.backward(None, True)", True),
        ("scaler.scale(loss).backward(retain_graph=True)", True),
        ("accelerator.backward(loss, retain_graph=True)", True),
        ("loss.backward(create_graph=True)", True),
        ("torch.autograd.backward(loss, retain_graph=True)", True),
        ("loss.backward()", False),
        ("loss.backward(retain_graph=False)", False),
        ("loss.backward(gradient)", False),
        ("torch.autograd.grad(loss, x, retain_graph=True)", False),
    ],
)
def test_graph_kept_by_backward(statement: str, counts: bool) -> None:
    found = read(loop("loss = model(x).sum()", statement)).first("drop_retain_graph")
    assert str(found) == (f"In[1] line 3: {statement}" if counts else "None")


def test_what_a_function_of_another_cell_does_counts_only_if_the_failing_cell_runs_it() -> None:
    step = "def step(x):\n    model(x).sum().backward(retain_graph=True)\n    opt.zero_grad(set_to_none=False)"
    found = read(step, loop("step(x)")).first("drop_retain_graph")
    assert str(found) == "In[1] line 2: model(x).sum().backward(retain_graph=True)"
    assert read(step, loop("step(x)")).first("set_to_none") is not None
    assert read(step, loop("model(x)")).first("drop_retain_graph") is None
    assert read(step, loop("model(x)")).first("set_to_none") is None


def test_methods_count_because_a_framework_may_call_them() -> None:
    module = """
        class Lit(pl.LightningModule):
            def training_step(self, batch, _):
                self.manual_backward(loss)
                loss.backward(retain_graph=True)
    """
    assert read(module, "trainer.fit(Lit(), loader)").first("drop_retain_graph") is not None


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        ("optimizer.zero_grad(set_to_none=False)", True),
        ("model.zero_grad(False)", True),
        ("optimizer.zero_grad()", False),
        ("optimizer.zero_grad(set_to_none=True)", False),
        ("optimizer.zero_grad(set_to_none=flag)", False),
    ],
)
def test_gradients_that_are_zeroed_and_not_freed(call: str, counts: bool) -> None:
    assert (read(loop(call)).first("set_to_none") is not None) == counts


@pytest.mark.parametrize(
    "source",
    [
        loop("preds.append(model(x))"),
        loop("out = model(x)", "preds.append(out.detach())"),
        loop("with torch.no_grad():", "    out = model(x)", "preds.append(out)"),
        loop("preds.append((model(x), y))"),
        loop("out = model(x)", "preds = torch.cat([preds, out])"),
        loop("out = model(x)", "preds = torch.cat((preds, out), dim=0)"),
        loop("probs = torch.sigmoid(model(x))", "preds += [probs]"),
        loop("for out in model(x):", "    preds.append(out)"),
        loop("preds.extend(F.softmax(net(x), -1))"),
        loop("results[i] = model(x).logits", head="for i, x in enumerate(loader):"),
        "preds = [model(x) for x in loader]",
        "def predict():\n    out = []\n    for x in loader:\n        out.append(model(x))\n    return out\npredict()",
        "@torch.no_grad()\ndef run(m):\n    return [m(x) for x in loader]\nrun(model)",
        "def encode(x):\n    return model(x)\n" + loop("features.append(encode(x))"),
        loop("tokens.append(model.generate(x))"),
        loop("hidden.append(encoder(x).last_hidden_state)"),
    ],
)
def test_predictions_collected_on_the_device(source: str) -> None:
    found = read(source, model=nn.Linear(1, 1)).first("offload_predictions")
    assert found is not None


@pytest.mark.parametrize(
    "source",
    [
        loop("preds.append(model(x).cpu())"),
        loop("preds.append(model(x).detach().cpu().numpy())"),
        loop("preds.append(model(x).to('cpu'))"),
        loop("out = model(x).argmax(1)", "preds.append(out)"),
        loop("loss = criterion(model(x), y)", "losses.append(loss.item())"),
        loop("loss = criterion(model(x), y)", "losses.append(loss)"),
        loop("loss = F.cross_entropy(model(x), y)", "losses.append(loss.detach())"),
        loop("correct += (model(x).argmax(1) == y).sum()"),
        loop("scores.append(accuracy(model(x), y))"),
        loop("names.append(x)"),
        loop("outs = []", "outs.append(model(x))"),
        loop(
            "outs = []",
            "for t in range(9):",
            "    h = model(x[t])",
            "    outs.append(h)",
            "criterion(torch.stack(outs), y).backward()",
        ),
        "preds = [model(x).cpu() for x in loader]",
        "preds = [build(x) for x in loader]",
        "preds.append(model(x))",
        "def encode(x):\n    return model(x).cpu()\n" + loop("features.append(encode(x))"),
        loop("writer.add(model(x).shape)"),
    ],
)
def test_what_is_no_collection_of_predictions(source: str) -> None:
    assert read(source, model=nn.Linear(1, 1), criterion=nn.CrossEntropyLoss()).first("offload_predictions") is None


def test_the_statement_that_collects_is_quoted_with_its_place() -> None:
    found = read("import torch", loop("out = model(x)", "preds.append(out)"), model=nn.Linear(1, 1))
    assert str(found.first("offload_predictions")) == "In[2] line 3: preds.append(out)"


TRAINS = ("loss = criterion(out, y)", "loss.backward()")


@pytest.mark.parametrize(
    "feed",
    [
        "out, h = rnn(x, h)",
        "out, (h, c) = lstm(x, (h, c))",
        "out, hidden = model(x, hidden)",
        "out, state = model(x, hidden=None, state=state)",
        "h = cell(x, h)",
    ],
)
def test_state_carried_from_step_to_step(feed: str) -> None:
    assert said(read(loop(feed, *TRAINS)).first("detach_state")) == feed


@pytest.mark.parametrize(
    "lines",
    [
        ("h = h.detach()", "out, h = rnn(x, h)"),
        ("out, h = rnn(x, h.detach())",),
        ("out, h = rnn(x, h)", "h.detach_()"),
        ("out, h = rnn(x, h)", "h = h.data"),
        ("hidden = repackage_hidden(hidden)", "out, hidden = model(x, hidden)"),
        ("h = torch.zeros(1, 8)", "out, h = rnn(x, h)"),
        ("h = None", "for t in range(9):", "    out, h = rnn(x[t], h)"),
        ("states = [s.detach() for s in states]", "out, states = model(x, states)"),
        ("h, c = h.detach(), c.detach()", "out, (h, c) = lstm(x, (h, c))"),
        ("hidden = model.init_hidden(4)", "out, hidden = model(x, hidden)"),
        ("out, _ = rnn(x, h)",),
        ("x = augment(x, strength)", "out = model(x)"),
        ("out = model(x, h)",),
    ],
)
def test_state_that_is_cut_or_made_anew(lines: tuple[str, ...]) -> None:
    assert read(loop(*lines, *TRAINS)).first("detach_state") is None


def test_state_of_a_loop_that_does_not_train_is_not_looked_at() -> None:
    assert read("for t in range(9):\n    out, h = rnn(x[t], h)").first("detach_state") is None
    assert read(loop("with torch.no_grad():", "    out, h = rnn(x, h)", *TRAINS)).first("detach_state") is None


MEMORY = """
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = None
        def forward(self, x):
            out, self.h = self.rnn(x, self.h)
            return out
"""


def test_state_kept_by_a_module() -> None:
    made, runs = "model = Memory()", loop("out = model(x)", *TRAINS)
    assert said(read(MEMORY, made, runs).first("detach_state")) == "out, self.h = self.rnn(x, self.h)"
    assert read(MEMORY, made, loop("model.h = None", "out = model(x)", *TRAINS)).first("detach_state") is None
    cut = MEMORY.replace("            return out", "            self.h = self.h.detach()\n            return out")
    assert read(cut, made, runs).first("detach_state") is None
    assert read(MEMORY, "model = Other()", runs).first("detach_state") is None


MAKES_HOOK = "def get(n):\n    def hook(m, i, o):\n        acts[n] = o\n    return hook"
HOOK_METHOD = "class Probe:\n    def see(self, m, i, o):\n        self.kept.append(o)"


@pytest.mark.parametrize(
    ("hook", "register", "counts"),
    [
        ("def hook(m, i, o):\n    kept.append(o)", "net.fc.register_forward_hook(hook)", True),
        ("def hook(m, i, o):\n    kept.append(o.detach())", "net.register_forward_hook(hook)", True),
        ("def hook(m, i, o):\n    acts[m] = o", "net.register_forward_hook(hook)", True),
        ("def hook(m, i, o):\n    out = o[0]\n    m.seen = out", "net.register_forward_hook(hook)", True),
        ("def hook(m, gi, go):\n    grads.append(go[0])", "net.register_full_backward_hook(hook)", True),
        ("", "net.register_forward_hook(lambda m, i, o: kept.append(o))", True),
        (MAKES_HOOK, "net.register_forward_hook(get('a'))", True),
        ("def save(n, m, i, o):\n    acts[n] = o", "net.register_forward_hook(partial(save, 'a'))", True),
        (HOOK_METHOD, "net.register_forward_hook(probe.see)", True),
        ("def hook(m, i, o):\n    kept.append(o.cpu())", "net.register_forward_hook(hook)", False),
        ("def hook(m, i, o):\n    stats.append(o.mean().item())", "net.register_forward_hook(hook)", False),
        ("def hook(m, i, o):\n    print(o.shape)", "net.register_forward_hook(hook)", False),
        ("def hook(m, i, o):\n    acts[m] = o.detach()", "net.register_forward_hook(hook)", False),
        ("def hook(m, i, o):\n    shapes.append(o.shape)", "net.register_forward_hook(hook)", False),
        ("def hook(m, i, o):\n    kept.append(o)", "callbacks.register(hook)", False),
    ],
)
def test_hooks_that_keep_what_passes(hook: str, register: str, counts: bool) -> None:
    assert said(read(hook, register, "net(x)").hooks) == (register if counts else None)


@pytest.mark.parametrize(
    "body",
    [
        "att = q @ k.transpose(-2, -1)\natt = F.softmax(att / 8, dim=-1)\ny = att @ v",
        "a = (q @ k.mT) * scale\na = a.masked_fill(mask == 0, -1e9)\na = a.softmax(-1)\na = drop(a)\ny = a @ v",
        "s = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d)\np = torch.softmax(s, -1)\ny = torch.matmul(p, v)",
        "e = torch.einsum('bid,bjd->bij', q, k)\na = nn.Softmax(dim=-1)(e)\ny = torch.einsum('bij,bjd->bid', a, v)",
        "energy = torch.bmm(q, k)\nattention = self.softmax(energy)\nout = torch.bmm(v, attention.permute(0, 2, 1))",
        "return F.softmax(q @ k.T + bias, -1) @ v",
    ],
)
def test_attention_that_writes_out_its_scores(body: str) -> None:
    layer = "class A(nn.Module):\n    def forward(self, q, k, v):\n" + textwrap.indent(body, "        ")
    found = read(layer, "model = nn.Sequential(A())", "model(x)").first("sdpa_attention")
    assert found is not None
    assert "oftmax(" in found.text


@pytest.mark.parametrize(
    "body",
    [
        "return F.scaled_dot_product_attention(q, k, v)",
        "att = q @ k.mT\nif flash:\n    return F.scaled_dot_product_attention(q, k, v)\nreturn F.softmax(att, -1) @ v",
        "logits = x @ w.T\nreturn F.softmax(logits, -1)",
        "h = F.relu(x @ w)\nreturn F.softmax(self.head(h), -1)",
        "g = F.softmax(self.gate(x), -1)\nreturn g @ experts",
        "return F.log_softmax(q @ k.T, -1) @ v",
    ],
)
def test_what_is_no_written_out_attention(body: str) -> None:
    layer = "class A(nn.Module):\n    def forward(self, q, k, v):\n" + textwrap.indent(body, "        ")
    assert read(layer, "model = nn.Sequential(A())", "model(x)").first("sdpa_attention") is None


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("model = AutoModel.from_pretrained('gpt2', attn_implementation='eager')", True),
        ("model.set_attn_implementation('eager')", True),
        ("config._attn_implementation = 'eager'\nmodel = AutoModel.from_config(config)", True),
        ("model = AutoModel.from_pretrained('gpt2', attn_implementation='sdpa')", False),
        ("model = AutoModel.from_pretrained('gpt2')", False),
    ],
)
def test_attention_that_was_asked_for(source: str, counts: bool) -> None:
    assert (read(source, "model(x)").first("sdpa_attention") is not None) == counts


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("state = torch.load('m.pt')", True),
        ("model.load_state_dict(torch.load(path))", True),
        ("state = torch.load('m.pt', map_location='cuda:0')", True),
        ("state = torch.load('m.pt', map_location=device)", True),
        ("state = torch.load('m.pt', map_location=host)", False),
        ("state = torch.load('m.pt', map_location='cpu')", False),
        ("state = torch.load('m.pt', 'cpu')", False),
        ("state = torch.load('m.pt', map_location=torch.device('cpu'))", False),
        ("state = torch.load('m.pt', map_location=lambda storage, loc: storage)", False),
        ("state = json.load(f)", False),
    ],
)
def test_checkpoints_loaded_onto_a_device(source: str, counts: bool) -> None:
    found = read(source, device=torch.device("cuda"), host=torch.device("cpu")).first("load_mmap")
    assert (found is not None) == counts


@pytest.mark.parametrize(
    "sources",
    [
        ("X = X.to(device)\ny = y.to(device)", "for i in range(9):\n    model(X[i:i + 4])"),
        ("X, y = X.cuda(), y.cuda()", "for b in perm.split(8):\n    model(X[b])"),
        ("train_data = torch.tensor(a, device='cuda')", "model(train_data)"),
        ("X = X.to(device=device, non_blocking=True).float()", "def batch(i):\n    return X[i]\nmodel(batch(3))"),
        ("ds = TensorDataset(X.to(device), y.to(device))", "loader = DataLoader(ds, 4)"),
        ("X = torch.from_numpy(a).to('cuda:0')", "ds = TensorDataset(X, y)"),
        ("data = data.to(device)", "out = model(data.x)"),
        ("images = torch.rand(9, 3, device=device)", "for i in range(9):\n    model(images[idx])"),
    ],
)
def test_a_whole_data_set_put_on_the_device(sources: tuple[str, ...]) -> None:
    assert read(*sources).first("batch_to_device") is not None


@pytest.mark.parametrize(
    "sources",
    [
        (loop("x = x.to(device)", "model(x)"),),
        ("model = model.to(device)", loop("model(x)")),
        ("x = x.to(device)\nout = model(x)",),
        ("X = X.to('cpu')", "for i in range(9):\n    model(X[i])"),
        ("X = X.to(torch.float16)", "for i in range(9):\n    model(X[i])"),
        ("mask = torch.ones(9, device=device)\nmodel(x, mask)",),
        ("first = X[0]", "for i in range(9):\n    model(X[i])"),
        ("for split in splits:\n    data = data.to(device)",),
    ],
)
def test_what_is_no_data_set_on_the_device(sources: tuple[str, ...]) -> None:
    assert read(*sources).first("batch_to_device") is None


DATA = TensorDataset(torch.zeros(4, 2))


def collate(batch: list[Any]) -> Any:
    return batch


def test_loaders_are_read_from_their_objects() -> None:
    found = read("model(x)", a=DataLoader(DATA, num_workers=2, prefetch_factor=5), b=DataLoader(DATA, pin_memory=True))
    assert (found.num_workers, found.prefetch, found.pin_memory) == (2, 5, True)
    plain = read("model(x)", a=DataLoader(DATA))
    assert (plain.num_workers, plain.prefetch, plain.pin_memory) == (0, None, False)
    none = read("model(x)")
    assert (none.num_workers, none.prefetch) == (None, None)


def test_loaders_without_a_name_are_read_from_their_calls() -> None:
    found = read(
        "def main():\n    for x in data.DataLoader(ds, 8, num_workers=4, pin_memory=True):\n        fit(x)\nmain()"
    )
    assert (found.num_workers, found.prefetch, found.pin_memory) == (4, 2, True)
    assert read(loop("x = x.pin_memory()")).pin_memory
    assert read("loader = DataLoader(ds, num_workers=n)").num_workers is None


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("def pad(b):\n    return pad_sequence(b)\nloader = DataLoader(ds, collate_fn=pad)", True),
        ("loader = DataLoader(ds, collate_fn=lambda b: pad_sequence(b, batch_first=True))", True),
        ("loader = DataLoader(ds, collate_fn=DataCollatorWithPadding(tokenizer))", True),
        (loop("enc = tokenizer(x, padding=True, return_tensors='pt')"), True),
        (loop("enc = tokenizer(x, padding='longest')"), True),
        (loop("enc = tokenizer(x, padding='max_length', max_length=512)"), False),
        ("def stack(b):\n    return torch.stack(b)\nloader = DataLoader(ds, collate_fn=stack)", False),
        ("loader = DataLoader(ds, collate_fn=lambda b: b)", False),
        ("conv = nn.Conv2d(3, 8, 3, padding=True)", False),
        ("loader = DataLoader(ds)", False),
    ],
)
def test_batches_padded_to_their_longest_sample(source: str, counts: bool) -> None:
    assert read(source).sequence_varies == counts


def test_the_collate_function_of_a_loader_object_is_found_by_its_name() -> None:
    cell = "def collate(batch):\n    return pad_sequence(batch)"
    loader = DataLoader(DATA, collate_fn=collate)
    assert read(cell, loader=loader).sequence_varies
    assert not read("pass", loader=loader).sequence_varies
    assert not read(cell, loader=DataLoader(DATA)).sequence_varies
    assert not read(cell, loader=DataLoader(DATA, collate_fn=functools.partial(collate))).sequence_varies


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        (loop("with torch.autocast('cuda'):", "    model(x)"), True),
        (loop("with torch.cuda.amp.autocast():", "    model(x)"), True),
        (loop("with autocast(dtype=torch.bfloat16):", "    model(x)"), True),
        (
            "class N(nn.Module):\n    @torch.autocast('cuda')\n    def forward(self, x):\n        return x\nN()(x)",
            True,
        ),
        ("args = TrainingArguments('out', fp16=True)", True),
        ("trainer = pl.Trainer(precision='bf16-mixed')", True),
        ("trainer = pl.Trainer(precision=16)", True),
        ("accelerator = Accelerator(mixed_precision='bf16')", True),
        (loop("with torch.autocast('cuda', enabled=False):", "    model(x)"), False),
        ("trainer = pl.Trainer(precision=32)", False),
        ("trainer = pl.Trainer(precision='bf16-true')", False),
        ("args = TrainingArguments('out')", False),
        (loop("model(x)"), False),
    ],
)
def test_mixed_precision(source: str, counts: bool) -> None:
    assert read(source).autocast == counts


def test_mixed_precision_of_a_function_that_does_not_run_is_not_in_force() -> None:
    cell = "def amp_step(x):\n    with torch.autocast('cuda'):\n        model(x)"
    assert not read(cell, "model(x)").autocast
    assert read(cell, "amp_step(x)").autocast


def test_mixed_precision_behind_a_switch_that_is_off_is_not_in_force() -> None:
    cell = loop("with torch.autocast('cuda', enabled=amp):", "    model(x)")
    assert not read(cell, amp=False).autocast
    assert read(cell, amp=True).autocast
    by_arguments = loop("with torch.cuda.amp.autocast(enabled=args.amp):", "    model(x)")
    assert not read(by_arguments, args=argparse.Namespace(amp=False)).autocast
    assert read(by_arguments, args=argparse.Namespace(amp=True)).autocast
    step = "def step(x, use):\n    with torch.autocast('cuda', enabled=use):\n        model(x)"
    assert not read(step, "step(x, args.amp)", args=argparse.Namespace(amp=False)).autocast
    assert read(step, "step(x, True)").autocast


def test_apex_is_told_by_its_import() -> None:
    cell = "model, optimizer = amp.initialize(model, optimizer, opt_level='O1')"
    found = read("from apex import amp", cell)
    assert said(found.apex) == "amp.initialize(model, optimizer, opt_level='O1')"
    assert found.autocast
    assert read("from apex import amp", "model(x)").apex is None


def test_width_of_the_weights_is_read_from_the_parameters() -> None:
    assert read("model(x)", model=nn.Linear(2, 2).half()).half_weights
    assert read("model(x)", model=nn.Linear(2, 2).bfloat16()).half_weights
    assert not read("model.half()", model=nn.Linear(2, 2)).half_weights
    mixed = nn.Sequential(nn.Linear(64, 64).half(), nn.LayerNorm(64))
    assert read("model(x)", model=mixed).half_weights


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("model = Net().cuda()\nmodel.half()", True),
        ("pipe = DiffusionPipeline.from_pretrained('x', torch_dtype=torch.float16)", True),
        ("model = AutoModel.from_pretrained('x', dtype=torch.bfloat16)", True),
        ("torch.set_default_dtype(torch.bfloat16)", True),
        ("x = x.half()", False),
        ("model = AutoModel.from_pretrained('x')", False),
        ("model = AutoModel.from_pretrained('x', torch_dtype=torch.float32)", False),
    ],
)
def test_width_of_weights_that_no_name_leads_to(source: str, counts: bool) -> None:
    assert read(source).half_weights == counts


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("model = DDP(model, device_ids=[0])", "DistributedDataParallel"),
        ("m = nn.parallel.DistributedDataParallel(m)", "DistributedDataParallel"),
        ("model = FSDP(model)", "FullyShardedDataParallel"),
        ("for block in model.blocks:\n    fully_shard(block)", "FullyShardedDataParallel"),
        ("engine, *_ = deepspeed.initialize(model=model)", "deepspeed"),
        ("trainer = Trainer(strategy='fsdp')", "FullyShardedDataParallel"),
        ("trainer = Trainer(strategy='ddp_find_unused_parameters_true')", "DistributedDataParallel"),
        ("args = TrainingArguments('o', deepspeed='ds.json')", "deepspeed"),
        ("model = nn.DataParallel(model)", None),
        ("trainer = Trainer(strategy='auto')", None),
        ("args = TrainingArguments('o', deepspeed=None)", None),
    ],
)
def test_what_spreads_the_training(source: str, name: str | None) -> None:
    assert read(source).distributed == name


def test_data_parallel_and_unused_parameters() -> None:
    assert said(read("model = nn.DataParallel(model)").data_parallel) == "nn.DataParallel(model)"
    assert read("model = DDP(model)").data_parallel is None
    assert read("model = DDP(model, find_unused_parameters=True)").find_unused_parameters
    assert read("t = Trainer(strategy='ddp_find_unused_parameters_true')").find_unused_parameters
    assert not read("model = DDP(model, find_unused_parameters=False)").find_unused_parameters


@pytest.mark.parametrize(
    ("source", "compiled", "captured"),
    [
        ("model = torch.compile(model)", True, False),
        ("@torch.compile\ndef step(x):\n    return x\nstep(x)", True, False),
        ("@torch.compile(dynamic=True)\ndef step(x):\n    return x\nstep(x)", True, False),
        ("@torch.compile\ndef step(x):\n    return x", False, False),
        ("model.compile()", True, False),
        ("model = torch.compile(model, mode='reduce-overhead')", True, True),
        ("g = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    model(x)", False, True),
        ("model = torch.cuda.make_graphed_callables(model, (x,))", False, True),
        ("p = re.compile('a')", False, False),
        ("graph = nx.graph(g)", False, False),
    ],
)
def test_compiled_and_captured(source: str, compiled: bool, captured: bool) -> None:
    found = read(source)
    assert (found.compiles is not None, found.cuda_graphs is not None) == (compiled, captured)


def test_other_frameworks_are_those_imported_or_loaded() -> None:
    assert read("import tensorflow as tf\nfrom jax import numpy as jnp").framework == "tensorflow, jax"
    assert read("model(x)", loaded=("cupy", "os")).framework == "cupy"
    assert read("import torch, jaxtyping").framework is None


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("out = model.generate(ids, max_new_tokens=9)", "model.generate(ids, max_new_tokens=9)"),
        ("def chat(t):\n    return llm.model.generate(**t)\nchat(x)", "llm.model.generate(**t)"),
        ("out = model(ids)", None),
        ("def chat(t):\n    return model.generate(t)\nmodel(x)", None),
    ],
)
def test_generation(source: str, call: str | None) -> None:
    assert said(read(source).generates) == call


def test_the_array_of_the_failing_line() -> None:
    cell = "a = np.zeros(3)\nb = [numpy.stack(images).astype('float32')\n     for images in parts]\nc = model(a)"
    assert read(cell, line=1).numpy_call == "np.zeros(3)"
    assert read(cell, line=2).numpy_call == "numpy.stack(images).astype('float32')"
    assert read(cell, line=4).numpy_call is None
    assert read("frame = pd.get_dummies(frame)", line=1).pandas_call == "pd.get_dummies(frame)"
    assert read(cell).numpy_call is None


def test_runs_of_the_same_cell_are_counted() -> None:
    assert read("model = Net()", "x = 1", "model = Net()\n", "model = Net()").reruns == 2
    assert read("model = Net()", "x = 1").reruns == 0
    assert read("", "").reruns == 0


def test_a_plain_notebook_has_none_of_these_habits() -> None:
    sources = (
        "import torch\nmodel = torch.nn.Linear(2, 2).to(device)\nopt = torch.optim.AdamW(model.parameters())",
        loop(
            "x, y = x.to(device), y.to(device)",
            "opt.zero_grad()",
            "loss = F.cross_entropy(model(x), y)",
            "loss.backward()",
            "opt.step()",
            "losses.append(loss.item())",
        ),
    )
    plain, ours = CodeFacts(), read(*sources, model=nn.Linear(2, 2))
    found = {name for name in CodeFacts.__slots__ if getattr(plain, name) != getattr(ours, name)}
    of_any_program = {"failing_cell", "loops", "models", "runs_model", "classes", "sites", "sharing_strategy"}
    assert found <= of_any_program
