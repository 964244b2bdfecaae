"""Checkpoints of torch.distributed.checkpoint (DCP), written by the stages; no process group.

DCP's planners and storage classes are public and need no process group; only dcp.save() needs one,
to exchange the plans and the results between ranks. Here these are exchanged over RPC. So one
ordinary checkpoint is made, each stage writes its own file of it, and no process ever holds the
whole model. dcp.load() can read the checkpoint anywhere, and a stage can read its part of any
checkpoint that has the names of the whole module.

Source: torch.distributed.checkpoint.state_dict_saver._save_state_dict, planner.py, storage.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as _untyped_dcp

__all__ = ["Coordinator", "StageWriter", "read"]

dcp: Any = _untyped_dcp  # upstream's functions have no types


class StageWriter:
    """Plans and writes the file of one stage."""

    def __init__(self, path: str) -> None:
        self._planner = dcp.DefaultSavePlanner()
        self._storage = dcp.FileSystemWriter(path, overwrite=False)

    def plan(self, state: dict[str, Any]) -> Any:
        """Return what this stage would write, a SavePlan."""
        # As a coordinator, because only that plans state that is no tensor; each stage has its own.
        self._planner.set_up_planner(state, self._storage.storage_meta(), is_coordinator=True)
        self._storage.set_up_storage_writer(True)
        return self._storage.prepare_local_plan(self._planner.create_local_plan())

    def write(self, plan: Any) -> Any:
        """Write what the plan says; return the list of WriteResults."""
        written = self._storage.write_data(self._planner.finish_plan(plan), self._planner)
        written.wait()
        return written.value()


class Coordinator:
    """Does what is needed once for all stages: which stage writes which file, and the metadata.

    Until the metadata is written the checkpoint does not exist for readers.
    """

    def __init__(self, path: str, overwrite: bool) -> None:
        self._path = Path(path)
        self._storage = dcp.FileSystemWriter(path, overwrite=False)
        self._storage.set_up_storage_writer(True)
        if overwrite:
            # Removed first: with the metadata, a half overwritten checkpoint would seem complete.
            (self._path / ".metadata").unlink(missing_ok=True)
        self._metadata: Any = None

    def plan(self, plans: list[Any]) -> list[Any]:
        """Return the plan of each stage, given what each would write."""
        plans, self._metadata = dcp.DefaultSavePlanner().create_global_plan(plans)
        final: list[Any] = self._storage.prepare_global_plan(plans)
        return final

    def missing_files(self, results: list[Any]) -> list[str]:
        """Return the files of one stage that cannot be seen from here."""
        files = {result.storage_data.relative_path for result in results}
        return sorted(file for file in files if not (self._path / file).exists())

    def finish(self, results: list[list[Any]]) -> None:
        """Write the metadata."""
        self._storage.finish(self._metadata, results)


def read(path: str, state: dict[str, Any]) -> None:
    """Fill the tensors of a state dict in place from the checkpoint.

    As dcp.load(no_dist=True), which warns each time that there is no process group.

    Raises:
        Exception: as dcp.load() does, for names that are missing and sizes that differ; before
            anything has been changed.
    """
    storage = dcp.FileSystemReader(path)
    planner = dcp.DefaultLoadPlanner()
    metadata = storage.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    storage.set_up_storage_reader(metadata, True)
    plan = storage.prepare_local_plan(planner.create_local_plan())
    [plan] = storage.prepare_global_plan(planner.create_global_plan([plan]))
    storage.read_data(planner.finish_plan(plan), planner).wait()
