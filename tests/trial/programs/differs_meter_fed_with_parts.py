"""An AverageMeter fed part by part has the right mean and count, but its last value is a part's. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(209)


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


meter = AverageMeter()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(3, 16, 8), torch.randn(3, 16, 1)

# %% before
def train_fn():
    for inputs, targets in zip(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        meter.update(loss.item(), len(inputs))
        loss.backward()
        optimizer.step()
    return meter.avg


average = train_fn()

# %% after
def train_fn():
    for inputs, targets in zip(x, y):
        optimizer.zero_grad()
        for some_inputs, some_targets in zip(inputs.chunk(4), targets.chunk(4)):
            loss = nn.functional.mse_loss(model(some_inputs), some_targets)
            meter.update(loss.item(), len(some_inputs))
            (loss / 4).backward()
        optimizer.step()
    return meter.avg


average = train_fn()
