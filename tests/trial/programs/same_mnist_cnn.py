"""A CNN's epoch in a function takes each batch in parts of uneven size, each weighted by its share of the rows."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc = nn.Linear(8 * 5 * 5, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


images, digits = torch.randn(70, 1, 14, 14), torch.randint(0, 10, (70,))
train_loader = DataLoader(TensorDataset(images, digits), batch_size=16, shuffle=True)
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

# %% before
def train_one_epoch(model, loader, optimizer):
    model.train()
    running = 0.0
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        running += loss.item() * len(data)
        if batch_idx % 2 == 0:
            print(f"batch {batch_idx}: loss {loss.item():.6f}")
    return running / len(loader.dataset)


train_loss = train_one_epoch(model, train_loader, optimizer)

# %% after
def train_one_epoch(model, loader, optimizer):
    model.train()
    running = 0.0
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        batch_loss = 0.0
        for data_part, target_part in zip(data.split(6), target.split(6), strict=True):
            output = model(data_part)
            loss = F.nll_loss(output, target_part) * (len(data_part) / len(data))
            loss.backward()
            batch_loss += loss.detach()
        loss = batch_loss
        optimizer.step()
        running += loss.item() * len(data)
        if batch_idx % 2 == 0:
            print(f"batch {batch_idx}: loss {loss.item():.6f}")
    return running / len(loader.dataset)


train_loss = train_one_epoch(model, train_loader, optimizer)
