"""Modules whose parts are on several workers, and pipelines over them. See docs/sharding.md.

It needs no agent of ours: public torch APIs only, so it works over TENSORPIPE as well.
"""

from __future__ import annotations

from torch_rpc_ext._upstream import torch_names

torch_names.require("torch_rpc_ext.sharding")  # before the names are imported
from torch_rpc_ext.sharding.failures import StageError  # noqa: E402
from torch_rpc_ext.sharding.job import StageStats  # noqa: E402
from torch_rpc_ext.sharding.module import ShardedModule, shard  # noqa: E402
from torch_rpc_ext.sharding.pipeline import Pipeline  # noqa: E402

__all__ = ["Pipeline", "ShardedModule", "StageError", "StageStats", "shard"]
