"""outputs.squeeze() takes the batch's dimension as well where a part has one row, and the loss raises. Visible in the first step of 17 rows."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(203)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(2 * 64, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, left, right):
        return self.fc(torch.cat([self.tower(left), self.tower(right)], 1))


pairs = TensorDataset(torch.randn(34, 1, 6, 6), torch.randn(34, 1, 6, 6), torch.randint(0, 2, (34,)).float())
loader = DataLoader(pairs, batch_size=17)
model = Siamese()
optimizer = torch.optim.Adadelta(model.parameters())
criterion = nn.BCELoss()

# %% before
for left, right, same in loader:
    optimizer.zero_grad()
    outputs = model(left, right).squeeze()
    loss = criterion(outputs, same)
    loss.backward()
    optimizer.step()

# %% after
for left, right, same in loader:
    optimizer.zero_grad()
    done, total = [], 0.0
    for lp, rp, sp in zip(left.split(4), right.split(4), same.split(4)):
        outputs = model(lp, rp).squeeze()
        loss = criterion(outputs, sp) * len(lp) / len(left)
        loss.backward()
        done.append(outputs.detach())
        total += loss.detach()
    outputs, loss = torch.cat(done), total
    optimizer.step()
