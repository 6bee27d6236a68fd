"""A Trainer restarts its iterator when it runs out and calls back once a batch; its self.loss stays the whole batch's."""

# %% setup
from collections import defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(200)
digits = torch.randint(0, 10, (40, 6))
dataset = TensorDataset(digits[:, :-1], digits[:, 1:])


class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.mix, self.head = nn.Embedding(10, 12), nn.GRU(12, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, idx, targets):
        logits = self.head(self.mix(self.wte(idx))[0])
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

# %% setup
class Trainer:
    def __init__(self, model, data, max_iters):
        self.model, self.data, self.max_iters, self.iter_num = model, data, max_iters, 0
        self.callbacks = defaultdict(list)

    def on(self, event, callback):
        self.callbacks[event].append(callback)

    def run(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, betas=(0.9, 0.95))
        loader = DataLoader(self.data, batch_size=16, shuffle=True)
        batches = iter(loader)
        while self.iter_num < self.max_iters:
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
            logits, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            for callback in self.callbacks["batch_end"]:
                callback(self)
            self.iter_num += 1

# %% setup after
class Trainer:
    def __init__(self, model, data, max_iters):
        self.model, self.data, self.max_iters, self.iter_num = model, data, max_iters, 0
        self.callbacks = defaultdict(list)

    def on(self, event, callback):
        self.callbacks[event].append(callback)

    def run(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, betas=(0.9, 0.95))
        loader = DataLoader(self.data, batch_size=16, shuffle=True)
        batches = iter(loader)
        while self.iter_num < self.max_iters:
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
            self.model.zero_grad(set_to_none=True)
            self.loss = torch.zeros(())
            for x_part, y_part in zip(x.split(5), y.split(5), strict=True):
                logits, part = self.model(x_part, y_part)
                part = part * (len(x_part) / len(x))
                part.backward()
                self.loss += part.detach()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            for callback in self.callbacks["batch_end"]:
                callback(self)
            self.iter_num += 1

# %% before
trainer = Trainer(Adder(), dataset, max_iters=5)
trainer.on("batch_end", lambda t: print(f"iter {t.iter_num}: train loss {t.loss.item():.5f}"))
trainer.run()

# %% after
trainer = Trainer(Adder(), dataset, max_iters=5)
trainer.on("batch_end", lambda t: print(f"iter {t.iter_num}: train loss {t.loss.item():.5f}"))
trainer.run()
