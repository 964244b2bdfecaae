"""Remote functions and asyncio: `async def` functions, futures to await, batches.

::

    @aio.remote
    async def lookup(key: str) -> Tensor: ...

    @aio.batched(max_size=32, max_wait=0.002)
    def predict(inputs: list[Tensor]) -> list[Tensor]: ...

    await lookup.call("worker1", "a")
    predict.sync("worker1", x)

It uses public APIs of torch.distributed.rpc only, so it works over any back end.
"""

from torch_rpc_ext._calls.event_loops import as_asyncio
from torch_rpc_ext.aio._async_function import AsyncFunction, remote
from torch_rpc_ext.aio._batch import BatchedFunction, batched

__all__ = ["AsyncFunction", "BatchedFunction", "as_asyncio", "batched", "remote"]
