"""Clipping has moved into the loop over parts and cuts a growing sum again and again. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(128)
char_rnn = nn.LSTM(10, 16, batch_first=True)
proj = nn.Linear(16, 10)
params = [*char_rnn.parameters(), *proj.parameters()]
optimizer = torch.optim.SGD(params, lr=1.0)
onehot = torch.eye(10)[torch.randint(0, 10, (2, 16, 8))]

# %% before
for chunk in onehot:
    optimizer.zero_grad()
    out, _ = char_rnn(chunk[:, :-1])
    loss = nn.functional.cross_entropy(proj(out).flatten(0, 1), chunk[:, 1:].argmax(-1).flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(params, 0.05)
    optimizer.step()

# %% after
for chunk in onehot:
    optimizer.zero_grad()
    outs, total = [], 0.0
    for piece in chunk.split(4):
        out, _ = char_rnn(piece[:, :-1])
        loss = nn.functional.cross_entropy(proj(out).flatten(0, 1), piece[:, 1:].argmax(-1).flatten()) / 4
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.05)
        outs.append(out.detach())
        total += loss.detach()
    out, loss = torch.cat(outs), total
    optimizer.step()
