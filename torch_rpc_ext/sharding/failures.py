"""The failure of a stage: as a value that any back end carries unchanged, and as an exception.

Of a remote exception only the text is sure to arrive on every back end. So a stage returns a
Failure in place of raising, other stages pass the Failure on, and the caller raises a StageError.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass
from typing import Any, Literal

from torch_rpc_ext import errors

__all__ = ["Failure", "Kind", "StageError", "first_cause"]

#: raised: the stage's code raised. lost: its worker cannot be reached, or gave no answer in time.
#: late, stopped: when the batch was given up the stage was at work (late) or waited for others.
Kind = Literal["raised", "lost", "late", "stopped"]
# From the most likely cause of the other failures to the least likely.
_BY_WEIGHT: tuple[Kind, ...] = ("raised", "lost", "late", "stopped")


class StageError(errors.RpcError):
    """A stage of a sharded module failed. Its cause is the error of the stage.

    Args:
        message: which stage, on which worker, and what happened.
        stage: its index, from 0; None where the text alone has arrived.
        worker: the name of its worker.
    """

    stage: int | None

    def __init__(
        self, message: str = "", *, stage: int | None = None, worker: str | None = None
    ) -> None:
        super().__init__(message, worker=worker)
        self.stage = stage


@dataclass(frozen=True)
class Failure:
    """A stage that failed.

    Attributes:
        stage: its index, from 0.
        worker: the name of its worker.
        kind: see Kind.
        what: the error in words.
        trace: where it was raised, as Python writes it.
        cause: the error itself, None where it cannot be pickled.
    """

    stage: int
    worker: str
    kind: Kind
    what: str
    trace: str = ""
    cause: BaseException | None = None

    @staticmethod
    def of(stage: int, worker: str, kind: Kind, error: BaseException) -> Failure:
        """Return the Failure for an error. Raises nothing, whatever a user's error does."""
        what, trace = type(error).__name__, ""
        with contextlib.suppress(BaseException):
            described = traceback.TracebackException.from_exception(error)
            trace = "".join(described.format())
            text = str(described).strip()  # str(error) might raise
            what = f"{what}: {text}" if text else what
        return Failure(stage, worker, kind, what, trace, _if_picklable(error))

    def error(self) -> StageError:
        """Return the error that the caller raises, with the cause, and the trace as a note."""
        verb = "raised" if self.kind == "raised" else "gave no result:"
        error = StageError(
            f"stage {self.stage} on {self.worker} {verb} {self.what}",
            stage=self.stage,
            worker=self.worker,
        )
        if self.trace and self.kind == "raised":
            error.add_note(f"on {self.worker}:\n{self.trace}")
        error.__cause__ = self.cause
        return error


def first_cause(failures: list[Failure]) -> Failure:
    """Return the failure that has probably caused the others: a user's error rather than a lost
    worker, and both rather than a stage that was late or waited. `failures` is not empty."""
    return min(failures, key=lambda failure: _BY_WEIGHT.index(failure.kind))


def _if_picklable(error: BaseException) -> BaseException | None:
    try:
        copied: Any = pickle.loads(pickle.dumps(error))
    except BaseException:  # noqa: BLE001  pickling a class of a user may raise anything
        return None
    return copied if isinstance(copied, BaseException) else None
