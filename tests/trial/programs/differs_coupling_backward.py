"""A custom function's forward is row by row, but its backward takes the batch's mean off the gradient. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(108)


class CentredGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(dim=0, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(7, 14), nn.Linear(14, 3)

    def forward(self, x):
        return self.head(CentredGradient.apply(torch.relu(self.body(x))))


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
inputs, targets = torch.randn(32, 7), torch.randint(0, 3, (32,))

# %% before
for x, y in zip(inputs.split(16), targets.split(16)):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")

# %% after
for x, y in zip(inputs.split(16), targets.split(16)):
    optimizer.zero_grad()
    loss = 0.0
    for xp, yp in zip(x.chunk(4), y.chunk(4)):
        part = F.cross_entropy(net(xp), yp) / 4
        part.backward()
        loss += part.detach()
    optimizer.step()
    print(f"{loss.item():.6f}")
