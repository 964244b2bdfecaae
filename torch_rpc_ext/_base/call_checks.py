"""Checks of what a call, or a call to several workers, is given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch_rpc_ext._base.option_checks import UNSET_RPC_TIMEOUT


def require_call_timeout(timeout: Any) -> None:
    """Raise for a call's time-out that is negative or NaN, as csrc/agent/ucx_agent.cpp does.

    Raises:
        ValueError: the value is neither 0 or more nor UNSET_RPC_TIMEOUT.
        TypeError: the value is no number.
    """
    wanted = "timeout must be a number of seconds, 0 for none, or -1 for the default of the options"
    try:
        is_one = timeout >= 0 or timeout == UNSET_RPC_TIMEOUT
    except TypeError:
        raise TypeError(f"{wanted}, got {timeout!r}") from None
    if not is_one:
        raise ValueError(f"{wanted}, got {timeout:g}")


def arguments(args: Any) -> tuple[Any, ...]:
    """Return the positional arguments of a call; None means none.

    Raises:
        TypeError: `args` is a value of its own, such as args=(tensor) without the comma: each row
            of the tensor would be an argument.
    """
    if args is None:
        return ()
    # Tensors and NumPy's arrays have __array__.
    if (
        not isinstance(args, Iterable)
        or isinstance(args, (str, bytes))
        or hasattr(type(args), "__array__")
    ):
        raise TypeError(
            f"args must be a tuple of the function's arguments, got a {type(args).__name__}: write "
            "args=(value,), with the comma, for one argument."
        )
    return tuple(args)


def require_workers(what: str, workers: Any, least: int = 1) -> None:
    """Raise where a call to several workers does not get a list of them.

    Args:
        what: the function that the user has called.
        workers: what the user has given.
        least: the fewest workers that the function takes.

    Raises:
        ValueError: `workers` is no list, or it is too short.
    """
    # A string would be a list of letters.
    is_list = isinstance(workers, Collection) and not isinstance(workers, str)
    if not is_list or len(workers) < least:
        wanted = "one worker or more" if least else "workers"
        raise ValueError(f"{what} needs a list of {wanted}, got {workers!r}")


def require_items(what: str, items: Any) -> None:
    """Raise where a function that calls once for each item does not get a list of items.

    A list is whatever has a length and takes an index: a tensor or a data set, too.

    Args:
        what: the function that the user has called.
        items: what the user has given.

    Raises:
        TypeError: `items` is no list.
        ValueError: `items` is empty.
    """
    kind = type(items)
    # A dictionary takes keys, not indices.
    is_list = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    if not is_list or isinstance(items, Mapping):
        raise TypeError(
            f"{what} needs a list of one item or more, got a {kind.__name__}: pass a list or a "
            "tuple of the items."
        )
    if not len(items):
        raise ValueError(f"{what} needs one item or more, got none")
