"""Modules whose parts are on several workers, and pipelines over them. See docs/sharding.md::

    model = sharding.shard(nn.Sequential(*layers), ["worker1", "worker2"])  # a ShardedModule
    y = model(x)

    pipeline = sharding.Pipeline(model, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = sharding.ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)
    try:
        pipeline.forward_backward(x, target)
        model.clip_grad_norm_(1.0)
        optimizer.step()
    except sharding.StageError as error:
        print(f"stage {error.stage} on {error.worker}: {error.__cause__}")
    for stats in pipeline.stats:  # each a StageStats
        print(stats.worker, stats.compute_s, stats.peak_micro_batches)
    sharding.save_checkpoint({"model": model, "optimizer": optimizer}, folder)

This uses public torch APIs only, so it works over TENSORPIPE as well.
"""

from __future__ import annotations

from torch_rpc_ext._upstream import torch_names

torch_names.require("torch_rpc_ext.sharding")  # before the names are imported
from torch_rpc_ext.sharding.creation import shard  # noqa: E402
from torch_rpc_ext.sharding.failures import StageError  # noqa: E402
from torch_rpc_ext.sharding.grad_scaler import ShardedGradScaler  # noqa: E402
from torch_rpc_ext.sharding.job import StageStats  # noqa: E402
from torch_rpc_ext.sharding.module import ShardedModule  # noqa: E402
from torch_rpc_ext.sharding.optimizer import ShardedOptimizer  # noqa: E402
from torch_rpc_ext.sharding.pipeline import Pipeline  # noqa: E402
from torch_rpc_ext.sharding.saving import load_checkpoint, save_checkpoint  # noqa: E402

__all__ = [
    "Pipeline",
    "ShardedGradScaler",
    "ShardedModule",
    "ShardedOptimizer",
    "StageError",
    "StageStats",
    "load_checkpoint",
    "save_checkpoint",
    "shard",
]
