"""What no allow-list names. Each of these writes down that it was called."""

from __future__ import annotations

from typing import Any

CALLED: list[str] = []


def function(*_: Any, **__: Any) -> Any:
    CALLED.append("function")
    return function


class Class:
    """An instance does everything that an opcode could look for."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        CALLED.append("Class")
        return object.__new__(cls)

    def __call__(self, *_: Any, **__: Any) -> Any:
        CALLED.append("Class()()")
        return self

    append = extend = add = __setitem__ = __setstate__ = method = __call__


INSTANCE = object.__new__(Class)
