"""Model families as notebooks that people write: what every fix is tried on.

Each family is a tuple of cells, the last of which trains. The programs differ in what fixes trip over: where the batch
size stands, in which order a step goes, whose names they use, what is normalised, drawn and carried over.
"""

from __future__ import annotations

from typing import Final

from models.coupled import CONTRASTIVE, GAN, VAE
from models.family import Family
from models.habits import EVALUATION, HISTORY, PREDICTION, RETAINED, STATEFUL, WIDE, ZEROED
from models.images import CNN, UNET, VIT
from models.rows import MLP
from models.sequences import ATTENTION, ENCODER_DECODER, GPT, LSTM, TRANSFORMERS

__all__ = ["FAMILIES", "Family"]

FAMILIES: Final = {
    family.name: family
    for family in (
        *(MLP, CNN, UNET, LSTM, GPT, VIT, GAN, VAE, ENCODER_DECODER, TRANSFORMERS, ATTENTION, CONTRASTIVE),
        *(EVALUATION, HISTORY, PREDICTION, RETAINED, STATEFUL, WIDE, ZEROED),
    )
}
