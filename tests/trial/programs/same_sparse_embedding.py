"""Word2vec with sparse gradients: those of the parts are added up and step as the whole batch's would."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(42)
center, context = nn.Embedding(40, 6, sparse=True), nn.Embedding(40, 6, sparse=True)
opt = torch.optim.SGD([*center.parameters(), *context.parameters()], lr=0.5)
words, near, noise = torch.randint(0, 40, (32,)), torch.randint(0, 40, (32,)), torch.randint(0, 40, (32, 5))


def skipgram(w, n, k):
    v = center(w)
    pos = F.logsigmoid((v * context(n)).sum(1))
    neg = F.logsigmoid(-(context(k) @ v.unsqueeze(2)).squeeze(2)).sum(1)
    return -(pos + neg).mean()

# %% before
running = 0.0
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = skipgram(words[i : i + 16], near[i : i + 16], noise[i : i + 16])
    loss.backward()
    opt.step()
    running += loss.item()

# %% after
running = 0.0
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = 0.0
    for j in range(i, i + 16, 8):
        half = skipgram(words[j : j + 8], near[j : j + 8], noise[j : j + 8]) / 2
        half.backward()
        loss += half.detach()
    opt.step()
    running += loss.item()
