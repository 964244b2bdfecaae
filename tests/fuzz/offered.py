"""What the allow-list of the fuzzed worker names. Results and arguments are an attacker's best."""

from __future__ import annotations

from typing import Any

from tests.fuzz import bait


def take(*arguments: Any) -> Any:
    return arguments[0] if arguments else None


def pick_function(*_: Any) -> Any:
    return bait.function


def pick_class(*_: Any) -> Any:
    return bait.Class


def pick_type(*_: Any) -> Any:
    return type


def pick_instance(*_: Any) -> Any:
    return bait.INSTANCE


class Holder:
    """A plain object."""

    kind = "plain"

    def __init__(self, *values: Any) -> None:
        self.values = values

    def first(self) -> Any:
        return self.values[0]

    @classmethod
    def of(cls, *values: Any) -> Holder:
        return cls(*values)

    @property
    def text(self) -> str:
        return ""

    @text.setter
    def text(self, _: str) -> None:
        bait.CALLED.append("Holder.text")

    def append(self, _: Any) -> None:
        bait.CALLED.append("Holder.append")

    def __setitem__(self, _: Any, __: Any) -> None:
        bait.CALLED.append("Holder[]")

    def extend(self, _: Any) -> None:
        bait.CALLED.append("Holder.extend")

    def add(self, _: Any) -> None:
        bait.CALLED.append("Holder.add")


class Failure(Exception):
    """An exception."""


class Items(list):  # type: ignore[type-arg]
    """A list of a class of its own."""

    def extend(self, _: Any) -> None:
        bait.CALLED.append("Items.extend")
