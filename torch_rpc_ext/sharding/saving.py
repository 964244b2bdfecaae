"""save_checkpoint() and load_checkpoint(): sharded models, optimizers and the caller's own state in
one checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from torch_rpc_ext.sharding import checkpoint
from torch_rpc_ext.sharding.handles import Handle, Handles, results

__all__ = ["SavedByStages", "load_checkpoint", "save_checkpoint", "write"]


class SavedByStages:
    """Something whose state the stages write and read themselves."""

    def checkpoint_handles(self) -> Handles[Any]:
        """Return the handles of the stage.Saved on each stage."""
        raise NotImplementedError

    def checkpoint_arguments(self) -> tuple[Any, ...]:
        """Return what plan_checkpoint() on the stages takes besides path and key."""
        return ()

    def checkpoint_read(self, read: Sequence[Any]) -> None:
        """Take what read_checkpoint() has returned on each stage."""


def save_checkpoint(
    state: Mapping[str, Any], path: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Write a checkpoint of torch.distributed.checkpoint, as dcp.save() does; each stage writes the
    state that it has, and no process group is needed.

    ::

        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 100}
        sharding.save_checkpoint(state, folder)

    A ShardedModule is stored under the names of the local module, and a ShardedOptimizer under
    those that torch.distributed.checkpoint.state_dict.get_optimizer_state_dict() gives the local
    optimizer with flatten_optimizer_state_dict=True; each after its key and a dot. So dcp.load()
    reads both into the local model. Anything else is stored by the caller as one entry: the
    state_dict() of an object that has one, or the value.

    Args:
        state: what to save.
        path: a folder that all workers and the caller share.
        overwrite: whether to replace a checkpoint that is there. The old one is gone then, even if
            writing fails.

    Raises:
        FileExistsError: there is a checkpoint already.
        StageError: a stage could not write.
        TypeError: a key is no string, or a value of the caller's own cannot be pickled; nothing has
            been written.
        ValueError: there is nothing to save; or a stage has written where the caller does not see
            it.
    """
    if not state:
        raise ValueError("there is nothing to save: state is empty")
    for key in state:
        if not isinstance(key, str):
            raise TypeError(f"the keys of state must be strings, got {key!r}")
    own = {
        key: value.state_dict() if hasattr(value, "state_dict") else value
        for key, value in state.items()
        if not isinstance(value, SavedByStages)
    }
    parts = {key: value for key, value in state.items() if isinstance(value, SavedByStages)}
    write(parts, own, path, overwrite)


def load_checkpoint(state: MutableMapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Take the state from a checkpoint; each stage reads its own part.

    ::

        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
        sharding.load_checkpoint(state, folder)
        step = state["step"]

    Args:
        state: what to load, with the keys of save_checkpoint(): objects take their state, other
            values are replaced in this dict. The model may have another partition than the one that
            was saved, and the checkpoint may hold more.
        path: of save_checkpoint().

    Raises:
        StageError: there is no checkpoint, or a name is missing in it, or a size differs. Other
            stages may have been loaded.
        RuntimeError: a key of the caller's own state is missing.
    """
    text = os.fspath(path)
    parts = {key: value for key, value in state.items() if isinstance(value, SavedByStages)}
    started = [
        (one, handle, one.checkpoint_handles().start(handle, "read_checkpoint", text, key))
        for key, one in parts.items()
        for handle in one.checkpoint_handles()
    ]
    read = results((handle, future) for _, handle, future in started)
    for one in parts.values():
        pairs = zip(started, read, strict=True)
        one.checkpoint_read([found for (other, _, _), found in pairs if other is one])
    own = checkpoint.Reader(text).read_named(key for key in state if key not in parts)
    for key, found in own.items():
        if hasattr(state[key], "load_state_dict"):
            state[key].load_state_dict(found)
        else:
            state[key] = found


def write(
    parts: Mapping[str, SavedByStages],
    own: Mapping[str, Any],
    path: str | os.PathLike[str],
    overwrite: bool,
) -> None:
    """As save_checkpoint().

    Args:
        parts: what the stages write, by key; the key may be empty.
        own: what the caller writes, by name.
        path: the folder.
        overwrite: whether a checkpoint may be replaced.
    """
    text = os.fspath(path)
    for name, value in own.items():
        try:
            torch.save(value, os.devnull)
        except Exception as error:  # noqa: BLE001  whatever pickle or the value's class raises
            raise TypeError(f"state[{name!r}] cannot be saved: {error}") from error
    coordinator = checkpoint.Coordinator(text, overwrite)
    writers: list[tuple[str, SavedByStages, Handle]] = [
        (key, one, handle) for key, one in parts.items() for handle in one.checkpoint_handles()
    ]
    plans = results(
        (handle, one.checkpoint_handles().start(handle, "plan_checkpoint", text, key, *arguments))
        for key, one, handle in writers
        for arguments in [one.checkpoint_arguments()]
    )
    here = checkpoint.Writer(text, flatten=False) if own else None
    if here is not None:
        plans.append(here.plan(dict(own)))
    plans = coordinator.plan(plans)
    written = results(
        (handle, one.checkpoint_handles().start(handle, "write_checkpoint", plan))
        for (_, one, handle), plan in zip(writers, plans, strict=False)  # the last is the caller's
    )
    for (_, _, handle), done in zip(writers, written, strict=True):
        missing = coordinator.missing_files(done)
        if missing:
            raise ValueError(
                f"stage {handle.index} on {handle.place.worker} has written "
                f"{', '.join(missing)} into a {text} that is not the one here: "
                "the folder must be on storage that all workers share"
            )
    if here is not None:
        written.append(here.write(plans[-1]))
    coordinator.finish(written)
