"""A3C, the communication by torch.distributed.rpc, on UCX or TENSORPIPE."""

import torch.distributed.rpc as rpc

from benchmarks.applications.a3c import model


def run(rank: int, job: model.A3cJob, backend: str) -> model.Figures | None:
    """Be process ``rank`` of a run; the first has the learner and returns the figures."""
    rpc.init_rpc(f"worker{rank}", rpc.BackendType[backend], rank, job.processes)
    if rank == 0:
        learner, actors = model.Learner(job), range(1, job.processes)
        plays = [rpc.rpc_async(i, play, (rpc.RRef(learner), job, i), timeout=0) for i in actors]
        figures = learner.figures([play.wait() for play in plays])
    rpc.shutdown()
    return figures if rank == 0 else None


def play(learner: rpc.RRef, job: model.A3cJob, number: int) -> model.Figures:
    """Run on each actor: play with the network that the first process has."""
    return model.play(learner.rpc_sync().fetch, learner.rpc_sync().update, job, number)
