"""DLRM, the communication by torch.distributed.rpc, on UCX or TENSORPIPE."""

import torch.distributed.rpc as rpc

from benchmarks.applications.dlrm import model


def run(rank: int, job: model.DlrmJob, backend: str) -> model.Figures | None:
    """Be process ``rank`` of a run; the first has the tables and returns the figures."""
    rpc.init_rpc(f"worker{rank}", rpc.BackendType[backend], rank, job.processes)
    if rank == 0:
        tables, trainers = model.Tables(job), range(1, job.processes)
        work = [rpc.rpc_async(i, train, (rpc.RRef(tables), job, i), timeout=0) for i in trainers]
        figures = tables.figures([trainer.wait() for trainer in work])
    rpc.shutdown()
    return figures if rank == 0 else None


def train(tables: rpc.RRef, job: model.DlrmJob, number: int) -> model.Figures:
    """Run on each trainer: train with the tables that the first process has."""
    return model.train(tables.rpc_sync().look_up, tables.rpc_sync().update, job, number)
