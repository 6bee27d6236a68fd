"""In the style of accelerate's examples: its `Accelerator` makes the group, and remembers that it has."""

import os
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(accelerator, batch_size=16):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 1000, (8192, 16), generator=g)
    y = torch.randint(0, 2, (8192,), generator=g)
    return DataLoader(TensorDataset(x, y), shuffle=True, batch_size=batch_size, drop_last=True)


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(1000, 64)
        self.fc = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 2))

    def forward(self, input_ids, labels):
        logits = self.fc(self.emb(input_ids)).mean(1)
        return torch.nn.functional.cross_entropy(logits, labels), logits


def training_function(config):
    accelerator = Accelerator(cpu=True)
    lr, num_epochs, seed, batch_size = config["lr"], config["num_epochs"], config["seed"], config["batch_size"]
    set_seed(seed)
    train_dataloader = get_dataloaders(accelerator, batch_size)
    model = Classifier()
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    cache = torch.zeros((16 << 18) if accelerator.process_index == 1 else 0)
    for epoch in range(num_epochs):
        model.train()
        for step, (x, y) in enumerate(train_dataloader):
            loss, logits = model(x, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    torch.save([p.detach() for p in model.parameters()], f"{os.environ['OUT']}.{accelerator.process_index}.pt")
    accelerator.end_training()


def main():
    config = {"lr": 2e-4, "num_epochs": 2, "seed": 42, "batch_size": 1024}
    training_function(config)


if __name__ == "__main__":
    main()
