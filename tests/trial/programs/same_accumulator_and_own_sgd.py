"""A textbook loop: the sum of the losses goes backward, and a hand-written SGD divides by the rows of the batch."""

# %% setup
import torch

torch.manual_seed(204)
W = torch.normal(0, 0.1, size=(16, 4), requires_grad=True)
b = torch.zeros(4, requires_grad=True)
X_all, y_all = torch.rand(50, 16), torch.randint(0, 4, (50,))


def data_iter(batch_size, features, labels):
    order = torch.randperm(len(features))
    for i in range(0, len(features), batch_size):
        yield features[order[i : i + batch_size]], labels[order[i : i + batch_size]]


def softmax(X):
    e = torch.exp(X)
    return e / e.sum(1, keepdim=True)


def net(X):
    return softmax(X @ W + b)


def cross_entropy(y_hat, y):
    return -torch.log(y_hat[range(len(y_hat)), y])


def sgd(params, lr, batch_size):
    with torch.no_grad():
        for param in params:
            param -= lr * param.grad / batch_size
            param.grad.zero_()


class Accumulator:
    def __init__(self, n):
        self.data = [0.0] * n

    def add(self, *args):
        self.data = [a + float(x) for a, x in zip(self.data, args)]

# %% before
metric = Accumulator(3)
for X, y in data_iter(16, X_all, y_all):
    y_hat = net(X)
    l = cross_entropy(y_hat, y)
    l.sum().backward()
    sgd([W, b], 0.1, len(X))
    metric.add(l.sum(), (y_hat.argmax(1) == y).sum(), len(y))
print("loss %.5f, acc %.3f" % (metric.data[0] / metric.data[2], metric.data[1] / metric.data[2]))

# %% after
metric = Accumulator(3)
for X, y in data_iter(16, X_all, y_all):
    rows = []
    for X_part, y_part in zip(X.split(6), y.split(6)):
        y_hat = net(X_part)
        l = cross_entropy(y_hat, y_part)
        l.sum().backward()
        rows.append((y_hat.detach(), l.detach()))
    y_hat, l = (torch.cat(t) for t in zip(*rows))
    sgd([W, b], 0.1, len(X))
    metric.add(l.sum(), (y_hat.argmax(1) == y).sum(), len(y))
print("loss %.5f, acc %.3f" % (metric.data[0] / metric.data[2], metric.data[1] / metric.data[2]))
