"""A Lightning module fitted by its ``Trainer``: OneCycleLR per step, the batch size chosen by a condition."""

from __future__ import annotations

from typing import Final

from models.family import Family

__all__ = ["BASELINE"]

BASELINE: Final = Family(
    name="baseline",
    size=24,
    templates=(
        """\
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(7)

BATCH_SIZE = 256 if torch.cuda.is_available() else $size
""",
        """\
pictures = TensorDataset(torch.randn($samples, 3, 24, 24), torch.randint(0, 10, ($samples,)))
train_loader = DataLoader(pictures, batch_size=BATCH_SIZE, shuffle=True)
""",
        """\
def conv_block(in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


def create_model():
    model = nn.Sequential(*[conv_block(width, 12) for width in (3, 12, 12, 12)])
    model.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten()).append(nn.Linear(12, 10))
    return model
""",
        """\
losses = []


class LitNet(L.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()

        self.save_hyperparameters()
        self.model = create_model()

    def forward(self, x):
        out = self.model(x)
        return F.log_softmax(out, dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(),
            lr=self.hparams.lr,
            momentum=0.9,
            weight_decay=5e-4,
        )
        scheduler_dict = {
            "scheduler": OneCycleLR(
                optimizer,
                0.1,
                epochs=self.trainer.max_epochs,
                steps_per_epoch=len(train_loader),
            ),
            "interval": "step",
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler_dict}
""",
        """\
model = LitNet()
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
""",
        "trainer.fit(model, train_loader)\n",
    ),
)
