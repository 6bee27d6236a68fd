"""The hand-written SGD is called after the parts with the last part's rows, and so steps too far. Visible in the first step."""

# %% setup
import torch

torch.manual_seed(205)
w = torch.zeros(6, 1, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
features = torch.randn(48, 6)
labels = features @ torch.tensor([[2.0], [-3.4], [1.0], [0.0], [0.5], [4.0]]) + 4.2


def squared_loss(y_hat, y):
    return (y_hat - y.reshape(y_hat.shape)) ** 2 / 2


def sgd(params, lr, batch_size):
    with torch.no_grad():
        for param in params:
            param.sub_(lr * param.grad / batch_size)
            param.grad.zero_()

# %% before
for i in range(0, 48, 16):
    X, y = features[i : i + 16], labels[i : i + 16]
    l = squared_loss(X @ w + b, y)
    l.sum().backward()
    sgd([w, b], 0.03, len(X))
    with torch.no_grad():
        print(f"{squared_loss(features @ w + b, labels).mean().item():.5f}")

# %% after
for i in range(0, 48, 16):
    parts = []
    for j in range(i, i + 16, 4):
        X, y = features[j : j + 4], labels[j : j + 4]
        l = squared_loss(X @ w + b, y)
        l.sum().backward()
        parts.append(l.detach())
    sgd([w, b], 0.03, len(X))
    X, y, l = features[i : i + 16], labels[i : i + 16], torch.cat(parts)
    with torch.no_grad():
        print(f"{squared_loss(features @ w + b, labels).mean().item():.5f}")
