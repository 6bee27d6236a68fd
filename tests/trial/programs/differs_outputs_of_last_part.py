"""The accuracy after the loop reads the outputs, of which only the last part's are left. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(151)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
features, classes = torch.randn(2, 16, 6), torch.randint(0, 3, (2, 16))
hits = []

# %% before
def epoch():
    for x, y in zip(features, classes):
        optimizer.zero_grad()
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y)
        loss.backward()
        optimizer.step()
        hits.append((outputs.argmax(1) == y[: len(outputs)]).sum().item())


epoch()

# %% after
def epoch():
    for x, y in zip(features, classes):
        optimizer.zero_grad()
        for xp, yp in zip(x.chunk(4), y.chunk(4)):
            outputs = model(xp)
            loss = nn.functional.cross_entropy(outputs, yp) / 4
            loss.backward()
        optimizer.step()
        hits.append((outputs.argmax(1) == y[: len(outputs)]).sum().item())


epoch()
