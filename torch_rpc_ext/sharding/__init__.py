"""Modules whose parts are on several workers, and pipelines over them. See docs/sharding.md.

It needs no agent of ours: public torch APIs only, so it works over TENSORPIPE as well.
"""

from __future__ import annotations

from torch_rpc_ext.sharding.failures import StageError
from torch_rpc_ext.sharding.job import StageStats
from torch_rpc_ext.sharding.module import ShardedModule, shard
from torch_rpc_ext.sharding.pipeline import Pipeline

__all__ = ["Pipeline", "ShardedModule", "StageError", "StageStats", "shard"]
