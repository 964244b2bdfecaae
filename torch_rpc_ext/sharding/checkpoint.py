"""Checkpoints of torch.distributed.checkpoint (DCP), written by the stages; no process group.

DCP's planners and storage classes are public and need no process group; only dcp.save() needs one,
to exchange the plans and the results between ranks. Here these are exchanged over RPC. So one
ordinary checkpoint is made, each stage writes its own file of it, and no process ever holds the
whole model. dcp.load() can read the checkpoint anywhere, and a stage can read its part of any
checkpoint that has the names of the whole module.

Source: torch.distributed.checkpoint.state_dict_saver._save_state_dict, planner.py, storage.py.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as _untyped_dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["Coordinator", "Reader", "Writer", "flat"]

dcp: Any = _untyped_dcp  # upstream's functions have no types

# How DCP begins the name of a writer's file, with the writer's number.
_PREFIX = re.compile(r"__\d+_")


class Writer:
    """Plans and writes one file of a checkpoint.

    Args:
        path: of the checkpoint.
        flatten: whether dicts are stored as one entry for each of their values, as dcp.save() does;
            otherwise each value of the state is one entry.
    """

    def __init__(self, path: str, *, flatten: bool = True) -> None:
        # Whatever the planner flattens loses empty dicts, and keys that are no strings.
        self._planner = dcp.DefaultSavePlanner(
            flatten_state_dict=flatten, flatten_sharded_tensors=flatten
        )
        self._flatten = flatten
        self._storage = dcp.FileSystemWriter(path, overwrite=False)

    def plan(self, state: dict[str, Any]) -> Any:
        """Return what this writer would write, a SavePlan."""
        # As a coordinator, because only that plans state that is no tensor; each has its own.
        self._planner.set_up_planner(state, self._storage.storage_meta(), is_coordinator=True)
        self._storage.set_up_storage_writer(True)
        plan = self._planner.create_local_plan()
        if not self._flatten:
            plan = dataclasses.replace(plan, planner_data={name: (name,) for name in state})
        return self._storage.prepare_local_plan(plan)

    def write(self, plan: Any) -> Any:
        """Write what the plan says; return the list of WriteResults.

        Raises:
            ValueError: the plan has another name for the file than DCP gives it. A peer has sent
                the plan, and the name could lead to another folder.
        """
        prefix = getattr(plan.storage_data, "prefix", None)
        if type(prefix) is not str or not _PREFIX.fullmatch(prefix):
            raise ValueError(f"{prefix!r:.100} begins the name of no file of a checkpoint")
        written = self._storage.write_data(self._planner.finish_plan(plan), self._planner)
        written.wait()
        return written.value()


class Coordinator:
    """Does what is needed once for all writers: who writes which file, and the metadata.

    Until the metadata is written the checkpoint does not exist for readers.

    Args:
        path: the checkpoint's folder.
        overwrite: whether a checkpoint that is there is removed.

    Raises:
        FileExistsError: there is a checkpoint, and `overwrite` is False.
    """

    def __init__(self, path: str, overwrite: bool) -> None:
        self._path = Path(path)
        metadata = self._path / ".metadata"
        if overwrite:
            # Removed first: with the metadata, a half overwritten checkpoint would seem complete.
            metadata.unlink(missing_ok=True)
        elif metadata.exists():
            raise FileExistsError(
                f"There is a checkpoint in {path} already: save to another folder, or pass "
                "overwrite=True to replace it."
            )
        self._storage = dcp.FileSystemWriter(path, overwrite=False)
        self._storage.set_up_storage_writer(True)
        self._metadata: Any = None

    def plan(self, plans: list[Any]) -> list[Any]:
        """Return the plan of each writer, given what each would write."""
        plans, self._metadata = dcp.DefaultSavePlanner().create_global_plan(plans)
        final: list[Any] = self._storage.prepare_global_plan(plans)
        return final

    def missing_files(self, results: list[Any]) -> list[str]:
        """Return the files of one writer that cannot be seen from here."""
        files = {result.storage_data.relative_path for result in results}
        return sorted(file for file in files if not (self._path / file).exists())

    def finish(self, results: list[list[Any]]) -> None:
        """Write the metadata."""
        self._storage.finish(self._metadata, results)


class _ListedStorage(dcp.FileSystemReader):  # type: ignore[misc]
    """Reads the metadata with a worker's allow-list."""

    def __init__(self, path: str, allowed: Any) -> None:
        super().__init__(path)
        self._allowed = allowed

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        with (Path(self.path) / ".metadata").open("rb") as file:
            return self._allowed.unpickler(file).load()


class _DataPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """Reads entries that are no tensors as torch.load(weights_only=True) does."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # The base would unpickle whatever is in the file, so the base gets what has been read.
        data = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), data)
        data.seek(0)
        super().load_bytes(read_item, data)


class Reader:
    """Reads a checkpoint.

    Args:
        path: of the checkpoint.
        allowed: the allow-list of this worker (_security.allow_list.AllowList), if a peer has
            chosen the path: a file there is then read as a message of the peer, and runs no code.
            None: DCP unpickles what the files hold.

    Raises:
        Exception: as dcp.load() does, for a folder without a checkpoint.
        RefusedError: the metadata names what is not in the allow-list.
    """

    def __init__(self, path: str, allowed: Any = None) -> None:
        self._allowed = allowed
        self._storage = (
            dcp.FileSystemReader(path) if allowed is None else _ListedStorage(path, allowed)
        )
        self._metadata = self._storage.read_metadata()

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return list(self._metadata.state_dict_metadata)

    def read(self, state: dict[str, Any]) -> None:
        """Fill a state dict in place.

        As dcp.load(no_dist=True), which warns each time that there is no process group.

        Raises:
            Exception: as dcp.load() does, for names that are missing and sizes that differ; before
                anything has been changed.
            pickle.UnpicklingError: with an allow-list, for an entry that torch.load() refuses with
                weights_only=True.
        """
        planner = dcp.DefaultLoadPlanner() if self._allowed is None else _DataPlanner()
        planner.set_up_planner(state, self._metadata, is_coordinator=True)
        self._storage.set_up_storage_reader(self._metadata, True)
        plan = self._storage.prepare_local_plan(planner.create_local_plan())
        [plan] = self._storage.prepare_global_plan(planner.create_global_plan([plan]))
        self._storage.read_data(planner.finish_plan(plan), planner).wait()

    def unread(self, name: str, value: Any) -> list[str]:
        """Return the entries below a name that read() does not read for a value: for a dict those
        under keys that the dict does not have, for anything else all."""
        asked = [f"{name}.{path}" for path in flat(value)] if isinstance(value, Mapping) else []
        return [
            entry
            for entry in self.names()
            if entry.startswith(f"{name}.")
            and not any(entry == one or entry.startswith(f"{one}.") for one in asked)
        ]

    def read_named(self, wanted: Iterable[str]) -> dict[str, Any]:
        """Return entries, tensors on the CPU, by their names.

        Raises:
            Exception: as read().
        """
        state: dict[str, Any] = {}
        for name in wanted:
            stored = self._metadata.state_dict_metadata.get(name)
            is_tensor = isinstance(stored, TensorStorageMetadata)
            state[name] = (
                torch.empty(stored.size, dtype=stored.properties.dtype) if is_tensor else None
            )
        self.read(state)
        return state


def flat(state: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    """Return the values of nested dicts under the keys that lead to them, joined by dots."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{before}{key}."))
        else:
            found[f"{before}{key}"] = value
    return found
