"""The data of federated learning: the handwritten digits that scikit-learn ships.

1797 pictures of 8 x 8 pixels, of 43 writers (Alpaydin and Kaynak, 1998).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

PIXELS, KINDS = 64, 10
_HELD_OUT = 5  # of so many pictures one
_SHARDS = 2  # of a client


@functools.cache
def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pictures float32 [count, PIXELS] and digits int64 [count]: to train with, held out."""
    datasets: Any = importlib.import_module("sklearn.datasets")
    found = datasets.load_digits()
    pictures = torch.from_numpy(found.data).float() / 8 - 1
    digits = torch.from_numpy(found.target).long()
    held_out = torch.arange(len(digits)) % _HELD_OUT == 0
    return pictures[~held_out], digits[~held_out], pictures[held_out], digits[held_out]


def of_client(client: int, clients: int) -> tuple[Tensor, Tensor]:
    """Return what a client has: two shards of the pictures that are sorted by their digit, so
    that it knows two to four digits (McMahan et al., 2017).

    Args:
        client: 1 the first.
        clients: how many.
    """
    pictures, digits, _, _ = load()
    shards = digits.argsort(stable=True).tensor_split(_SHARDS * clients)
    dealt = torch.randperm(len(shards), generator=torch.Generator().manual_seed(0))
    first = (client - 1) * _SHARDS
    own = torch.cat([shards[int(one)] for one in dealt[first : first + _SHARDS]])
    return pictures[own], digits[own]
