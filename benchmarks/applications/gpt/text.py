"""The data of GPT: the source of Python's own standard library, byte by byte."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

SYMBOLS = 256
_HELD_OUT = 10  # of so many bytes the last one


@functools.cache
def load() -> tuple[Tensor, Tensor]:
    """Return the text to train with and the text held out, uint8 [bytes].

    The top-level modules in the order of their names; their text differs from one version of Python
    to the next.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    symbols = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    border = len(symbols) - len(symbols) // _HELD_OUT
    return symbols[:border], symbols[border:]


def batch(text: Tensor, size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pieces of a text and what follows each symbol of them, int64 [size, length]."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(text) - length - 1, (size, 1), generator=generator)
    pieces = text[begins + torch.arange(length + 1)].long()
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
