"""The hidden state of one part starts the next, of other rows, in place of the same rows' later window. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(215)
lstm, to_next = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 5)
opt = torch.optim.SGD([*lstm.parameters(), *to_next.parameters()], lr=0.2)
sensors = torch.randn(16, 13, 5)

# %% before
def run(windows=3):
    hidden = None
    for k in range(windows):
        window = sensors[:, 4 * k : 4 * k + 5]
        out, hidden = lstm(window[:, :-1], hidden)
        hidden = tuple(h.detach() for h in hidden)
        loss = nn.functional.mse_loss(to_next(out), window[:, 1:])
        opt.zero_grad()
        loss.backward()
        opt.step()


run()

# %% after
def run(windows=3):
    hidden = None
    for k in range(windows):
        opt.zero_grad()
        for part in sensors[:, 4 * k : 4 * k + 5].split(4):
            out, hidden = lstm(part[:, :-1], hidden)
            hidden = tuple(h.detach() for h in hidden)
            loss = nn.functional.mse_loss(to_next(out), part[:, 1:]) / 4
            loss.backward()
        opt.step()


run()
