"""The method of a Trainer class in an earlier cell splits the batch; its own counters and records stay per batch."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(7)
data = [(torch.randn(18, 12), torch.randint(0, 3, (18,))) for _ in range(4)]

# %% setup
class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.step = 0
        self.log = {"loss": [], "acc": []}

    def training_step(self, x, y):
        self.optimizer.zero_grad()
        out = self.model(x)
        loss = self.criterion(out, y)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.log["loss"].append(loss.item())
        self.log["acc"].append((out.argmax(1) == y).float().mean().item())

    def fit(self, batches, epochs=1):
        for _ in range(epochs):
            for x, y in batches:
                self.training_step(x, y)
            print(f"step {self.step}: {self.log['loss'][-1]:.5f}")

# %% setup after
class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.step = 0
        self.log = {"loss": [], "acc": []}

    def training_step(self, x, y):
        self.optimizer.zero_grad()
        total, hits = 0.0, 0
        for xp, yp in zip(x.split(4), y.split(4), strict=True):
            out = self.model(xp)
            loss = self.criterion(out, yp) * len(xp) / len(x)
            loss.backward()
            total += loss.item()
            hits += (out.argmax(1) == yp).sum().item()
        self.optimizer.step()
        self.step += 1
        self.log["loss"].append(total)
        self.log["acc"].append(hits / len(x))

    def fit(self, batches, epochs=1):
        for _ in range(epochs):
            for x, y in batches:
                self.training_step(x, y)
            print(f"step {self.step}: {self.log['loss'][-1]:.5f}")

# %% before
trainer = Trainer(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3)), lr=0.05)
trainer.fit(data)

# %% after
trainer = Trainer(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3)), lr=0.05)
trainer.fit(data)
