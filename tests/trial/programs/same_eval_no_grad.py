"""The evaluation after an epoch runs without gradients; what it counts and prints is the same."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(22)
model = nn.Sequential(nn.Linear(7, 15), nn.ReLU(), nn.Dropout(0.3), nn.Linear(15, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
train_x, train_y = torch.randn(32, 7), torch.randint(0, 3, (32,))
test_x, test_y = torch.randn(40, 7), torch.randint(0, 3, (40,))

# %% before
def test(model, x, y):
    model.eval()
    loss, correct = 0, 0
    for xb, yb in zip(x.split(16), y.split(16)):
        pred = model(xb)
        loss += F.cross_entropy(pred, yb, reduction="sum")
        correct += (pred.argmax(1) == yb).sum().item()
    model.train()
    print(f"Accuracy: {100 * correct / len(x):>0.1f}%, Avg loss: {loss / len(x):>8f}")


for epoch in range(2):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(train_x), train_y)
    loss.backward()
    optimizer.step()
    test(model, test_x, test_y)

# %% after
@torch.no_grad()
def test(model, x, y):
    model.eval()
    loss, correct = 0, 0
    for xb, yb in zip(x.split(16), y.split(16)):
        pred = model(xb)
        loss += F.cross_entropy(pred, yb, reduction="sum")
        correct += (pred.argmax(1) == yb).sum().item()
    model.train()
    print(f"Accuracy: {100 * correct / len(x):>0.1f}%, Avg loss: {loss / len(x):>8f}")


for epoch in range(2):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(train_x), train_y)
    loss.backward()
    optimizer.step()
    test(model, test_x, test_y)
