"""UcxRpcBackendOptions: what a user may choose about the UCX back end."""

from __future__ import annotations

import copy
import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_rpc_ext._base import option_table as table
from torch_rpc_ext._base.requirements import require_rpc
from torch_rpc_ext._upstream import torch_names

require_rpc()  # first: it is what creates torch._C._distributed_rpc
torch_names.require(torch_names.UCX)
from torch._C._distributed_rpc import RpcBackendOptions  # noqa: E402
from torch.distributed.rpc import options as upstream  # noqa: E402

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

__all__ = ["UcxRpcBackendOptions"]

# Those with a keyword of another name are for tests.
_PUBLIC = [
    *(option.name for option in table.BY_NAME.values() if not option.keyword),
    "device_maps",
    "devices",
]


class UcxRpcBackendOptions(RpcBackendOptions):
    """Options for ``init_rpc(backend=BackendType.UCX, rpc_backend_options=...)``.

    Takes what torch's TensorPipeRpcBackendOptions takes, and our own. All are keyword-only,
    checked here, and may be set as attributes later, with the same checks.

    Args:
        num_worker_threads: threads that run the requests of other workers.
        rpc_timeout: time-out of a call that names none itself, s; 0 for none.
        init_method: URL of the store: ``env://``, ``tcp://host:port``, ``file:///path``.
        device_maps: callee's name -> {device here: device there}.
        devices: local CUDA devices that RPC uses; by default those of the device maps.
        init_timeout: how long init_rpc waits for the other workers, s; 0 for rpc_timeout, but at
            least 3 s.
        interface: name or IP address of the network interface for TCP, several comma-separated
            or as a list. By default the one that routes to MASTER_ADDR.
        port_range: a port, ``'lo-hi'`` or ``(lo, hi)``, both included; 0 for any.
        use_cma: copy bulk data directly between processes of one host.
        use_shared_memory: use shared memory between processes of one host.
        use_cuda_ipc: copy CUDA tensors directly between processes of one host.
        keepalive: after how long a silent worker elsewhere is suspected to be dead, s.
        secret: what the workers of a group must know to speak to each other, 16 bytes or more;
            by default rank 0 draws one and the store gives it out.
        secret_file: a file that holds it, readable for its owner only.
        encryption: which connections are encrypted: 'off', 'between_hosts' or 'on'.
        receive_cache_bytes: memory kept for receiving tensors, bytes; None for 4 GiB or an eighth
            of the machine's memory, whichever is less.
        receive_cache_idle: after how long unused some of it is given back, s.
        receive_budget: memory for the tensors of requests that no thread serves yet, bytes; more
            stay with their callers. 0 for no limit, None for an eighth of the machine's memory or
            of the cgroup's limit.
        max_message_bytes: largest message to accept, bytes; 0 for no limit but memory.
        max_calls_in_flight: calls that this worker may have under way to each other one; more
            wait. 0 for no limit.
        max_bytes_in_flight: the same for their bytes.
        wire_dtype: what float32 tensors travel as, to other workers and back: torch.bfloat16 or
            torch.float16; or worker -> dtype. None for float32.
        integrity: send checksums with all bytes of a call and of its answer, which are compared at
            their end.
        allow_list: names of the modules, functions, classes and operators that peers may call
            here; None for everything.

    Raises:
        TypeError: a value of a wrong type, named with its option.
        ValueError: a value out of range, named with its option.

    Source: torch/distributed/rpc/options.py, TensorPipeRpcBackendOptions.
    """

    # As they are after the checks in __setattr__.
    num_worker_threads: int
    device_maps: dict[str, DeviceMap]
    devices: list[torch.device]
    init_timeout: float
    interface: tuple[str, ...]
    port_range: tuple[int, int]
    use_cma: bool
    use_shared_memory: bool
    use_cuda_ipc: bool
    keepalive: float
    secret: bytes | None
    secret_file: str | None
    encryption: str
    receive_cache_bytes: int
    receive_cache_idle: float
    receive_budget: int
    max_message_bytes: int
    max_calls_in_flight: int
    max_bytes_in_flight: int
    wire_dtype: torch.dtype | dict[str, torch.dtype | None] | None
    integrity: bool
    allow_list: tuple[str, ...] | None
    messages_to_fail: list[str]
    messages_to_lose: list[str]
    messages_to_corrupt: list[str]
    messages_to_forge: list[str]
    messages_to_delay: dict[str, float]
    num_fail_sends: int

    def __init__(
        self,
        *,
        num_worker_threads: int = table.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = table.DEFAULT_RPC_TIMEOUT,
        init_method: str = table.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        init_timeout: float = 0.0,
        interface: str | IpAddress | Sequence[str | IpAddress] | None = None,
        port_range: int | str | tuple[int, int] | None = None,
        use_cma: bool = True,
        use_shared_memory: bool = True,
        use_cuda_ipc: bool = True,
        keepalive: float = 2.0,
        secret: str | bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        encryption: str = "off",
        receive_cache_bytes: int | None = None,
        receive_cache_idle: float = 30.0,
        receive_budget: int | None = None,
        max_message_bytes: int = 0,
        max_calls_in_flight: int = table.DEFAULT_MAX_CALLS_IN_FLIGHT,
        max_bytes_in_flight: int = 0,
        wire_dtype: torch.dtype | Mapping[str, torch.dtype | None] | None = None,
        integrity: bool = False,
        allow_list: Sequence[str] | None = None,
        _messages_to_fail: Sequence[str] = (),
        _messages_to_lose: Sequence[str] = (),
        _messages_to_corrupt: Sequence[str] = (),
        _messages_to_forge: Sequence[str] = (),
        _messages_to_delay: Mapping[str, float] | None = None,
        _num_fail_sends: int = 0,
    ) -> None:
        # pybind11 wants the base's __init__ called before anything else is done with the object.
        RpcBackendOptions.__init__(self)
        given: dict[str, Any] = {
            "num_worker_threads": num_worker_threads,
            "rpc_timeout": rpc_timeout,
            "init_method": init_method,
            "device_maps": {} if device_maps is None else device_maps,
            "devices": [] if devices is None else devices,
            "init_timeout": init_timeout,
            "interface": interface,
            "port_range": port_range,
            "use_cma": use_cma,
            "use_shared_memory": use_shared_memory,
            "use_cuda_ipc": use_cuda_ipc,
            "keepalive": keepalive,
            "secret": secret,
            "secret_file": secret_file,
            "encryption": encryption,
            "receive_cache_bytes": (
                table.default_receive_cache()
                if receive_cache_bytes is None
                else receive_cache_bytes
            ),
            "receive_cache_idle": receive_cache_idle,
            "receive_budget": (
                table.default_receive_budget() if receive_budget is None else receive_budget
            ),
            "max_message_bytes": max_message_bytes,
            "max_calls_in_flight": max_calls_in_flight,
            "max_bytes_in_flight": max_bytes_in_flight,
            "wire_dtype": wire_dtype,
            "integrity": integrity,
            "allow_list": allow_list,
            "messages_to_fail": list(_messages_to_fail),
            "messages_to_lose": list(_messages_to_lose),
            "messages_to_corrupt": list(_messages_to_corrupt),
            "messages_to_forge": list(_messages_to_forge),
            "messages_to_delay": {} if _messages_to_delay is None else _messages_to_delay,
            "num_fail_sends": _num_fail_sends,
        }
        for name, value in given.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in table.BY_NAME:
            value = table.BY_NAME[name].check(name, value)
        elif name == "device_maps":
            value = _device_maps(value)
        elif name == "devices":
            value = _devices(value)
        elif not name.startswith("_"):
            # A misspelt option would otherwise be lost without a word.
            known = ", ".join(_PUBLIC)
            raise AttributeError(f"UcxRpcBackendOptions has no option {name!r}; it has {known}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in _PUBLIC}
        if values["secret"] is not None:
            values["secret"] = "..."  # options end up in logs
        return f"UcxRpcBackendOptions({', '.join(f'{n}={v!r}' for n, v in values.items())})"

    def __copy__(self) -> UcxRpcBackendOptions:
        # pybind11 objects cannot be copied by copy.copy's default.
        twin = UcxRpcBackendOptions()
        for name in [*table.BY_NAME, "device_maps", "devices"]:
            setattr(twin, name, copy.copy(getattr(self, name)))
        return twin

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Map devices of this worker to devices of one callee; may be called several times.

        Args:
            to: callee's name.
            device_map: {device here: device there}; must be invertible.

        Raises:
            ValueError: the map, with what was set before, is not 1-to-1.
        """
        added = upstream._to_device_map(dict(device_map))
        current: DeviceMap = self.device_maps.get(to, {})
        for here, there in added.items():
            if here in current and current[here] != there:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying"
                    f" to map {here} to {there} and {current[here]}"
                )
        merged = {**current, **added}
        self.device_maps = {**self.device_maps, to: merged}

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Set the local CUDA devices that RPC uses.

        Args:
            devices: int, str or torch.device each.

        Raises:
            ValueError: one of them is no CUDA device.
        """
        self.devices = _devices(devices)

    def effective_init_timeout(self) -> float:
        """Return how long init_rpc waits for the other workers, s."""
        if self.init_timeout > 0:
            return float(self.init_timeout)
        return table.default_init_timeout(self.rpc_timeout)


def _device_maps(value: Any) -> dict[str, DeviceMap]:
    if not isinstance(value, Mapping):
        raise TypeError(f"device_maps must map worker names to device maps, got {value!r}")
    maps: dict[str, DeviceMap] = {}
    for callee, device_map in value.items():
        if not isinstance(callee, str) or not isinstance(device_map, Mapping):
            raise TypeError(
                f"device_maps must map worker names to device maps, got {callee!r}: {device_map!r}"
            )
        maps[callee] = upstream._to_device_map(dict(device_map))
    return maps


def _devices(value: Any) -> list[torch.device]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"devices must be a list of CUDA devices, got {value!r}")
    devices: list[torch.device] = upstream._to_device_list(list(value))
    return devices
