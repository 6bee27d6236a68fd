"""An LSTM in a while loop that takes its batches by next() goes over the batch in three parts."""

# %% setup
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.out = nn.Linear(12, 1)

    def forward(self, words):
        _, (hidden, _) = self.lstm(self.embed(words))
        return self.out(hidden[-1]).squeeze(1)


reviews, stars = torch.randint(0, 50, (64, 9)), torch.randint(0, 2, (64,)).float()
loader = DataLoader(TensorDataset(reviews, stars), batch_size=16, shuffle=True)
net = Sentiment()
opt = torch.optim.RMSprop(net.parameters(), lr=0.003)
criterion = nn.BCEWithLogitsLoss()
correct = 0

# %% before
it = iter(loader)
step = 0
while step < 4:
    x, y = next(it)
    opt.zero_grad()
    pred = net(x)
    loss = criterion(pred, y)
    loss.backward()
    opt.step()
    correct += ((pred > 0) == (y > 0.5)).sum().item()
    step += 1
print("accuracy", correct / 64)

# %% after
it = iter(loader)
step = 0
while step < 4:
    x, y = next(it)
    opt.zero_grad()
    preds, loss = [], torch.zeros(())
    for x_part, y_part in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        pred = net(x_part)
        part = criterion(pred, y_part) * len(x_part) / len(x)
        part.backward()
        preds.append(pred.detach())
        loss += part.detach()
    pred = torch.cat(preds)
    opt.step()
    correct += ((pred > 0) == (y > 0.5)).sum().item()
    step += 1
print("accuracy", correct / 64)
