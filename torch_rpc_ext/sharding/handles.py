"""Objects on the stages' workers, as the caller knows them, and calls of their methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext.sharding import stage
from torch_rpc_ext.sharding.exact import exact
from torch_rpc_ext.sharding.failures import Failure, StageError
from torch_rpc_ext.sharding.placement import Place

__all__ = ["Handle", "Handles", "StageHandle", "results"]

rpc: Any = _untyped_rpc  # upstream's functions have no types


@dataclass(frozen=True)
class Handle:
    """An object that belongs to a stage: the stage itself, or its part of an optimizer.

    Attributes:
        index: of the stage, from 0.
        place: worker and device of the stage.
        rref: RRef of the object, which that worker owns.
    """

    index: int
    place: Place
    rref: Any

    def start(self, method: str, *args: Any, timeout: float) -> Any:
        """Return a future of what a method of the object returns, for result(). Tensors are not
        rounded on the way."""
        try:
            with exact():
                return rpc.rpc_async(
                    self.place.worker, stage.call, args=(self.rref, method, *args), timeout=timeout
                )
        except Exception as error:
            raise self.lost(error) from error

    def result(self, future: Any) -> Any:
        """Return the result of a method that start() has started.

        Raises:
            StageError: the stage raised, or its worker is lost.
        """
        try:
            result = future.wait()
        except Exception as error:
            raise self.lost(error) from error
        if isinstance(result, Failure):
            raise result.error()
        return result

    def lost(self, error: Exception) -> StageError:
        """Return the error to raise when a call to the stage's worker has failed."""
        return Failure.of(self.index, self.place.worker, "lost", error).error()


@dataclass(frozen=True)
class StageHandle(Handle):
    """A stage as the caller knows it.

    Attributes:
        names: of the submodules.
        keys: of the state.
        direct: devices of the stage whose tensors the next stage fetches by its device map, without
            the CPU.
    """

    names: list[str]
    keys: list[str]
    direct: Sequence[str]


HandleT = TypeVar("HandleT", bound=Handle)


class Handles(Generic[HandleT]):
    """An object of each stage, in the order of the stages."""

    def __init__(self, handles: Sequence[HandleT], timeout: float) -> None:
        self._handles, self._timeout = list(handles), timeout

    def __iter__(self) -> Iterator[HandleT]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, index: int) -> HandleT:
        return self._handles[index]

    def one(self, handle: HandleT, method: str, *args: Any) -> Any:
        """Return what a method of one object returns."""
        return handle.result(self.start(handle, method, *args))

    def each(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all objects at once; return what it returns on each stage.

        Raises:
            StageError: of the first stage that raised, or whose worker is lost; the others have
                been called as well.
        """
        return self.each_own(method, [args] * len(self._handles))

    def each_own(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As each(), with arguments of its own for each stage."""
        return results(
            (handle, self.start(handle, method, *args))
            for handle, args in zip(self._handles, arguments, strict=True)
        )

    def start(self, handle: HandleT, method: str, *args: Any) -> Any:
        """Return a future, for handle.result()."""
        return handle.start(method, *args, timeout=self._timeout)


def results(started: Iterable[tuple[Handle, Any]]) -> list[Any]:
    """Start all calls, then wait for all; return their results.

    Raises:
        StageError: of the first call that failed.
    """
    pairs = list(started)
    return [handle.result(future) for handle, future in pairs]
