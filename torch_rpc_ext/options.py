"""UcxRpcBackendOptions: what a user may choose about the UCX back end.

Each option stands here once: name, type, default, check, unit and meaning. The docstring of the
class, docs/options.md and the C++ agent's options follow from that; an option that the agent knows
has one line more, in csrc/agent/agent_options.h.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch

from torch_rpc_ext._base import option_checks as checks
from torch_rpc_ext._base.requirements import require_rpc
from torch_rpc_ext._upstream import torch_names

require_rpc()  # first: it is what creates torch._C._distributed_rpc
torch_names.require(torch_names.UCX)
from torch._C._distributed_rpc import RpcBackendOptions  # noqa: E402
from torch.distributed.rpc import options as upstream  # noqa: E402

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]
WireDtype = torch.dtype | dict[str, torch.dtype | None] | None
# What may be given in place of the form that is kept.
DeviceMaps = Mapping[str, Mapping[DeviceType, DeviceType] | DeviceMap]
Interface = str | checks.IpAddress

__all__ = ["UcxRpcBackendOptions"]


Given = TypeVar("Given", contravariant=True)
Kept = TypeVar("Kept", covariant=True)


class Option(Generic[Given, Kept]):
    """The type of an option that may be given in several forms, and is kept in one.

    For type checkers and typing.get_type_hints() only: no object has this class.
    """

    if TYPE_CHECKING:

        def __get__(self, options: object, owner: Any = None) -> Kept: ...
        def __set__(self, options: object, value: Given) -> None: ...


class _SignatureOfInit:
    """The signature of a class with a __new__ of its own: that of __init__, of subclasses too."""

    def __get__(self, options: object, owner: type) -> inspect.Signature:
        of_init = inspect.signature(owner.__init__)  # type: ignore[misc]
        return of_init.replace(parameters=[*of_init.parameters.values()][1:])


@dataclasses.dataclass(frozen=True)
class About:
    """What is known of an option beside its name and its default.

    Attributes:
        check: takes the option's name and a value that a user has given; see option_checks.
        doc: what the option does, for docs/options.md.
        unit: '' for none.
        default: the default as the docs show it; '' where the docs show the field's own default.
        agent: whether the C++ agent gets the value as it is.
        tests: whether it is for tests only.
    """

    check: Callable[[str, Any], Any]
    doc: str
    unit: str = ""
    default: str = ""
    agent: bool = True
    tests: bool = False

    @staticmethod
    def of(option: dataclasses.Field[Any]) -> About:
        """Return what _option() was given."""
        about: About = option.metadata["about"]
        return about


def _option(
    value: Any, check: Callable[[str, Any], Any], doc: str, unit: str = "", **more: Any
) -> Any:
    """Return the field of an option with the default `value`; the others are those of About."""
    return dataclasses.field(default=value, metadata={"about": About(check, doc, unit, **more)})


def _device_maps(name: str, value: Any) -> dict[str, DeviceMap]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map worker names to device maps, got {value!r}")
    maps: dict[str, DeviceMap] = {}
    for callee, device_map in value.items():
        if not isinstance(callee, str) or not isinstance(device_map, Mapping):
            raise TypeError(
                f"{name} must map worker names to device maps, got {callee!r}: {device_map!r}"
            )
        try:
            maps[callee] = upstream._to_device_map(dict(device_map))
        except RuntimeError as error:  # as in _devices()
            raise ValueError(
                f"{name} must map devices to devices, got {callee!r}: {device_map!r}: "
                f"{str(error).splitlines()[0]}"
            ) from None
    return maps


def _devices(name: str, value: Any) -> list[torch.device]:
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of CUDA devices, got {value!r}")
    try:
        devices: list[torch.device] = upstream._to_device_list(list(value))
    except RuntimeError as error:  # torch's, which names neither the option nor the value
        raise ValueError(
            f"{name} must be a list of CUDA devices, got {value!r}: {str(error).splitlines()[0]}"
        ) from None
    return devices


# The generated __init__ sets each option by __setattr__, which checks the value.
@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class UcxRpcBackendOptions(RpcBackendOptions):
    """Options for ``init_rpc(backend=BackendType.UCX, rpc_backend_options=...)``.

    ::

        options = UcxRpcBackendOptions(num_worker_threads=8, interface="eth0", integrity=True)
        options.rpc_timeout = 30
        rpc.init_rpc("worker0", backend=rpc.BackendType.UCX, rpc_backend_options=options)

    The options of torch's TensorPipeRpcBackendOptions, and more. All are keyword-only. They may be
    set as attributes later, with the same checks.

    Args:
        {arguments}

    Raises:
        TypeError: a value has a wrong type; the text names value and option.
        ValueError: a value is out of range; the text names value and option.

    Source: torch/distributed/rpc/options.py, TensorPipeRpcBackendOptions.
    """

    num_worker_threads: int = _option(
        checks.DEFAULT_NUM_WORKER_THREADS,
        checks.positive_int,
        "Threads that run the requests of other workers.",
    )
    rpc_timeout: float = _option(
        checks.DEFAULT_RPC_TIMEOUT,
        checks.rpc_timeout,
        "Time-out of a call that names none itself; 0 for none.",
        "s",
    )
    init_method: str = _option(
        checks.DEFAULT_INIT_METHOD,
        checks.text,
        "URL of the store through which the workers find each other: env://, tcp://host:port "
        "or file:///path.",
        agent=False,
    )
    device_maps: Option[DeviceMaps | None, dict[str, DeviceMap]] = _option(
        None,
        _device_maps,
        "Callee's name -> {device here: device there}, as torch's TensorPipeRpcBackendOptions "
        "has it; see `set_device_map()`.",
        default="`{}`",
        agent=False,
    )
    devices: Option[Sequence[DeviceType] | None, list[torch.device]] = _option(
        None,
        _devices,
        "Local CUDA devices that RPC uses; by default those of the device maps. See "
        "`set_devices()`.",
        default="`[]`",
        agent=False,
    )
    init_timeout: float = _option(
        0.0,
        checks.duration,
        "How long init_rpc waits for the other workers; 0 for rpc_timeout, but at least "
        f"{checks.MINIMUM_INIT_TIMEOUT:.0f} s.",
        "s",
        agent=False,
    )
    interface: Option[Interface | Iterable[Interface] | None, tuple[str, ...]] = _option(
        None,
        checks.interface,
        "Network interfaces that TCP may use: a name, an IP address, or several "
        "comma-separated. By default the one that routes to MASTER_ADDR.",
        default="`()`",
        agent=False,
    )
    port_range: Option[int | str | Sequence[int] | None, tuple[int, int]] = _option(
        (0, 0),
        checks.port_range,
        "Ports to listen on, for firewalls: 'lo-hi' or (lo, hi), three for each worker of a "
        "host; with two, the least, large tensors are slower. 0 for any.",
    )
    use_cma: bool = _option(
        True,
        checks.boolean,
        "Move bulk data directly between processes of one host: through memory that they "
        "share, or by process_vm_readv.",
    )
    use_shared_memory: bool = _option(
        True, checks.boolean, "Use shared memory between processes of one host."
    )
    use_cuda_ipc: bool = _option(
        True,
        checks.boolean,
        "Copy CUDA tensors directly between processes of one host, both ways. See "
        "[cuda.md](cuda.md).",
    )
    busy_poll: bool = _option(
        True,
        checks.boolean,
        "While the machine has an idle core, a thread that waits for an answer or for the next "
        "request looks for it for up to 0.1 ms before it sleeps, as long as that pays. See "
        "[tuning](howto/tuning.md#latency).",
    )
    keepalive: float = _option(
        2.0,
        checks.at_least_100_ms,
        "After how long a silent worker on another host is suspected to be dead.",
        "s",
    )
    secret: Option[str | bytes | None, bytes | None] = _option(
        None,
        checks.secret,
        "What the workers of a group must know to speak to each other, 16 bytes or more, the "
        "same for all. By default rank 0 draws one and the store gives it out. See "
        "[security.md](security.md).",
        default="see right",
        agent=False,
    )
    secret_file: Option[str | os.PathLike[str] | None, str | None] = _option(
        None,
        checks.secret_file,
        "A file that holds the secret, readable for its owner only.",
        default="see right",
        agent=False,
    )
    encryption: str = _option(
        "off",
        checks.encryption,
        "Which connections are encrypted: `'off'`, `'between_hosts'` or `'on'`.",
        agent=False,
    )
    receive_cache_bytes: Option[int | None, int] = _option(
        None,
        checks.receive_cache,
        "Memory kept for large tensors on their way, at both ends; by default 4 GiB, or an "
        "eighth of the machine's memory where that is less.",
        "bytes",
        default="see right (bytes)",
    )
    receive_cache_idle: float = _option(
        30.0,
        checks.at_least_100_ms,
        "Memory of receive_cache_bytes that was unused for this long goes back to the system. When "
        "less than 1/16 of the machine's memory is available, all unused memory does.",
        "s",
    )
    receive_budget: Option[int | None, int] = _option(
        None,
        checks.receive_budget,
        "Memory for the tensors of requests that have been received and that no thread serves "
        "yet; more stay with their callers. By default an eighth of the machine's memory, or "
        "of the cgroup's limit; 0 for no limit of all callers together. In any case one caller "
        "has room for one request of any size, or for several that together take at most 64 MiB, "
        "or half of this budget if that is less. Calls that are received and wait for their "
        "functions to begin (`limit`, batches) may take as much again, or 64 MiB if that is more, "
        "and further ones are refused. See [faults.md](faults.md#load).",
        "bytes",
        default="see right (bytes)",
    )
    max_message_bytes: int = _option(
        0,
        checks.byte_count,
        "Largest message to accept; 0 for as much as the receiver's memory holds.",
        "bytes",
    )
    max_calls_in_flight: int = _option(
        checks.DEFAULT_MAX_CALLS_IN_FLIGHT,
        checks.count,
        "Calls that this worker may have under way to each other worker. One more waits for "
        "room, and fails with an OverloadedError at its time-out; 0 for no limit.",
    )
    max_bytes_in_flight: int = _option(
        0,
        checks.byte_count,
        "Bytes of the calls that this worker may have under way to each other worker; a larger "
        "call goes alone; 0 for no limit.",
        "bytes",
    )
    wire_dtype: Option[WireDtype | Mapping[str, torch.dtype | None], WireDtype] = _option(
        None,
        checks.wire_dtype,
        "What float32 tensors travel as, to other workers and back: `torch.bfloat16` or "
        "`torch.float16`, half the bytes and less precise, for all workers or by worker: "
        "`{'worker1': torch.bfloat16}`. By default float32. See "
        "[the guide](howto/wire_dtype.md).",
        default="see right",
        agent=False,
    )
    integrity: bool = _option(
        False,
        checks.boolean,
        "Send checksums with the bytes of each call of this worker, and of its answer. A call "
        "whose bytes have changed on the way fails with an IntegrityError. See "
        "[faults.md](faults.md#bytes-that-change-on-the-way).",
    )
    allow_list: Option[Iterable[str] | None, tuple[str, ...] | None] = _option(
        None,
        checks.allow_list,
        "What peers may call here: names of modules, functions, classes and operators "
        "(`aten::add`). By default everything. See [faults.md](faults.md#what-peers-may-call).",
        default="see right",
        agent=False,
    )
    # Fault injection.
    messages_to_fail: list[str] = _option(
        (),
        checks.message_names,
        "Message types of which the first sends fail.",
        default="`[]`",
        tests=True,
    )
    messages_to_lose: list[str] = _option(
        (),
        checks.message_names,
        "Message types of which the first sends lose the connection, at this end only.",
        default="`[]`",
        tests=True,
    )
    messages_to_corrupt: list[str] = _option(
        (),
        checks.message_names,
        "Message types of which the first sends have one bit changed.",
        default="`[]`",
        tests=True,
    )
    messages_to_forge: list[str] = _option(
        (),
        checks.message_names,
        "Message types of which the first sends claim that their large tensors lie in memory "
        "of the receiver.",
        default="`[]`",
        tests=True,
    )
    messages_to_delay: dict[str, float] = _option(
        None, checks.message_delays, "Message type -> delay.", "s", default="`{}` s", tests=True
    )
    num_fail_sends: int = _option(
        0, checks.small_count, "How many sends of each such message fail.", tests=True
    )

    __signature__ = _SignatureOfInit()  # without this, help() would show __new__'s parameters

    def __new__(cls, *_: Any, **given: Any) -> Self:
        unknown = given.keys() - OPTIONS.keys()
        # A subclass may have an __init__ of its own, with arguments of its own.
        if unknown and cls.__init__ is UcxRpcBackendOptions.__init__:
            raise TypeError(_no_option(min(unknown)))
        # pybind11 needs its base's __init__ before any other use of the object; the generated
        # __init__ does not call it.
        made = super().__new__(cls)
        RpcBackendOptions.__init__(made)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        option = OPTIONS.get(name)
        if option is not None:
            value = About.of(option).check(name, value)
        elif not name.startswith("_"):
            # Without this error a misspelt option would have no effect and say nothing.
            raise AttributeError(_no_option(name))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in public()}
        if values["secret"] is not None:
            values["secret"] = "..."  # programs log their options
        return f"UcxRpcBackendOptions({', '.join(f'{n}={v!r}' for n, v in values.items())})"

    def __copy__(self) -> UcxRpcBackendOptions:
        # pybind11 objects cannot be copied by copy.copy's default.
        twin = UcxRpcBackendOptions()
        for name in OPTIONS:
            setattr(twin, name, copy.copy(getattr(self, name)))
        return twin

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Map devices of this worker to devices of a callee, in addition to earlier maps.

        Args:
            to: the callee's name.
            device_map: {device here: device there}; must be invertible.

        Raises:
            ValueError: the map and the earlier maps of this callee together are not 1-to-1.
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
            devices: each an int, a str or a torch.device.

        Raises:
            ValueError: a device is no CUDA device.
        """
        self.devices = devices

    def effective_init_timeout(self) -> float:
        """Return how long init_rpc waits for the other workers, s."""
        return checks.effective_init_timeout(self.init_timeout, self.rpc_timeout)


# Torch's C++ reads these two from the base, whose properties a dataclass hides by its defaults.
del UcxRpcBackendOptions.rpc_timeout, UcxRpcBackendOptions.init_method

OPTIONS = {option.name: option for option in dataclasses.fields(UcxRpcBackendOptions)}


def public() -> list[str]:
    """Return the names of all options but those for tests."""
    return [name for name, option in OPTIONS.items() if not About.of(option).tests]


def _no_option(name: str) -> str:
    return f"UcxRpcBackendOptions has no option {name!r}; it has {', '.join(public())}"


def of_agent(options: UcxRpcBackendOptions) -> dict[str, Any]:
    """Return name -> value of the options that the C++ agent gets as they are."""
    return {
        name: getattr(options, name) for name, option in OPTIONS.items() if About.of(option).agent
    }


def _docstring() -> str:
    arguments = []
    for name in public():
        about = About.of(OPTIONS[name])
        unit = f" ({about.unit})" if about.unit else ""
        arguments.append(f"{name}: {about.doc}{unit}")
    text = UcxRpcBackendOptions.__doc__ or ""  # None under `python -OO`
    return text.replace("{arguments}", "\n        ".join(arguments))


UcxRpcBackendOptions.__doc__ = _docstring()
