"""Strict fp32 for scores, even if training and sampling use TF32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def strict_fp32() -> Iterator[None]:
    """Compute fp32 products and convolutions without TF32, which changes the third digit of a score."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
