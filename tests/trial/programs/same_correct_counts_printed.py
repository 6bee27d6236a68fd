"""The running loss and the counts of hits are summed over parts, so that the lines of the progress report stay."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(31)
trainloader = DataLoader(TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 4, (64,))), batch_size=16, shuffle=True)
net = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

# %% before
def train(epoch):
    net.train()
    train_loss, correct, total = 0, 0, 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
        print(batch_idx, len(trainloader), "Loss: %.3f | Acc: %.3f%% (%d/%d)" % (train_loss / (batch_idx + 1), 100.0 * correct / total, correct, total))


train(0)

# %% after
def train(epoch):
    net.train()
    train_loss, correct, total = 0, 0, 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        optimizer.zero_grad()
        for i in range(0, len(inputs), 3):
            outputs = net(inputs[i : i + 3])
            loss = criterion(outputs, targets[i : i + 3]) * len(outputs) / len(inputs)
            loss.backward()
            train_loss += loss.item()
            _, predicted = outputs.max(1)
            correct += predicted.eq(targets[i : i + 3]).sum().item()
        optimizer.step()
        total += targets.size(0)
        print(batch_idx, len(trainloader), "Loss: %.3f | Acc: %.3f%% (%d/%d)" % (train_loss / (batch_idx + 1), 100.0 * correct / total, correct, total))


train(0)
