# ruff: noqa: N999  the underscore is the convention for extension modules
"""Types of the C++ extension (csrc/bindings)."""

from typing import Any

import torch
from torch._C._distributed_rpc import PyRRef, RpcAgent, WorkerInfo

WIRE_VERSION: int

class AgentOptions:
    num_worker_threads: int
    rpc_timeout: float
    interfaces: list[str]
    port_range: tuple[int, int]
    prefer_ipv6: bool
    use_cma: bool
    use_shared_memory: bool
    keepalive: float
    encryption: int
    receive_cache_bytes: int
    max_message_bytes: int
    inline_bytes: int
    max_calls_in_flight: int
    max_bytes_in_flight: int
    fault_messages_to_fail: list[str]
    fault_messages_to_delay: dict[str, float]
    fault_num_fail_sends: int
    def allow_only(self, names: set[str], modules: set[str]) -> None: ...

class UcxAgent(RpcAgent):
    def __init__(
        self, options: AgentOptions, name: str, worker_id: int, is_static: bool
    ) -> None: ...
    @property
    def address(self) -> bytes: ...
    @property
    def group_id(self) -> bytes: ...
    @property
    def is_static_group(self) -> bool: ...
    def set_group(
        self, group: bytes, members: list[tuple[str, int, bytes]], secret: bytes
    ) -> None: ...
    def add_member(self, name: str, id: int, address: bytes) -> None: ...
    def remove_member(self, name: str) -> None: ...
    def set_device_maps(
        self,
        device_maps: dict[str, dict[torch.device, torch.device]],
        reverse_device_maps: dict[str, dict[torch.device, torch.device]],
        devices: list[torch.device],
    ) -> None: ...
    def get_worker_infos(self) -> list[WorkerInfo]: ...
    def get_metrics(self) -> dict[str, str]: ...
    def describe(self) -> dict[str, str]: ...
    def describe_peers(self) -> list[dict[str, str]]: ...
    def leak(self) -> None: ...

def watch_creation(rref: PyRRef[Any]) -> None: ...
def ucx_version() -> str: ...
def ucx_library_path() -> str: ...
def ucx_transports() -> list[tuple[str, str, str]]: ...
