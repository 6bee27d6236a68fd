"""Ten public programs, rebuilt small and on synthetic data: what patches have to read well in.

Each stands for a habit of many notebooks: where the batch size is written, what owns the loop, what the step draws. No
line is copied. Model families that already are such a program serve for it.
"""

from __future__ import annotations

from typing import Final

from models.coupled import GAN
from models.images import CNN
from models.sequences import LSTM

from examples.classics import MNIST, UNET_AMP, VAE_ARGS
from examples.diffusion import DIFFUSION
from examples.huggingface import ACCELERATED, ADAPTERS
from examples.lightning_baseline import BASELINE

__all__ = ["EXAMPLES", "NEEDS"]

EXAMPLES: Final = {
    "mnist": MNIST,
    "vae": VAE_ARGS,
    "deep_residual_network": CNN,
    "generative_adversarial_network": GAN,
    "language_model": LSTM,
    "diffusion_from_scratch": DIFFUSION,
    "unet": UNET_AMP,
    "cifar10_baseline": BASELINE,
    "peft_lora_seq2seq": ADAPTERS,
    "run_glue_no_trainer": ACCELERATED,
}
"""By the name of the program that each is modelled on."""

NEEDS: Final = {"cifar10_baseline": "lightning", "run_glue_no_trainer": "accelerate"}
"""What has to be installed for an example beyond what the tests need."""
