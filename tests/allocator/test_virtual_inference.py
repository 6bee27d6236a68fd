"""Under ``inference_mode`` as much is counted as under ``no_grad``, inside of operations that are taken apart too."""

import gc

import pytest
import torch
from torch.nn import functional

from oomdoctor.allocator.virtual import simulate

CALLS = {
    "attention": lambda q: functional.scaled_dot_product_attention(q, q.sin(), q, attn_mask=torch.ones(64, 64)),
    "einsum": lambda q: torch.einsum("bhid,bhjd,bhjd->bhi", q, q, q),
    "matmul": lambda q: q.transpose(0, 2) @ torch.randn(32, 32),
    "cross_entropy": lambda q: functional.cross_entropy(q.flatten(0, 2), torch.zeros(q.shape[:3]).long().flatten()),
    "similarity": lambda q: functional.cosine_similarity(q, q.sin(), dim=-1),
}


def risen(call, context):
    q = torch.randn(4, 8, 64, 32)
    gc.collect()
    with simulate("1GiB") as device:
        before = device.read().allocated
        with context():
            call(q)
        return device.read().peak_allocated - before


@pytest.mark.parametrize("name", CALLS)
def test_the_peak_is_the_same(name):
    assert risen(CALLS[name], torch.inference_mode) == risen(CALLS[name], torch.no_grad) > 0


def test_what_does_not_fit_inside_is_refused_as_cuda_would():
    q = torch.randn(4, 8, 64, 32)
    with simulate("8MiB"), torch.inference_mode(), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.einsum("bhid,bhjd,bhjd->bhi", q, q, q)
