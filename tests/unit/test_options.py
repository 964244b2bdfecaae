"""UcxRpcBackendOptions: what it takes, refuses, and says."""

from __future__ import annotations

import copy
import enum
import inspect
import ipaddress
import math
import typing
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import rpc
from torch.distributed.rpc import constants

from torch_rpc_ext import UcxRpcBackendOptions
from torch_rpc_ext._base import option_checks
from torch_rpc_ext._native.loader import load
from torch_rpc_ext.options import OPTIONS, of_agent, public
from torch_rpc_ext.testing import FaultyUcxRpcBackendOptions


def test_defaults_are_upstreams() -> None:
    options = UcxRpcBackendOptions()
    theirs = rpc.TensorPipeRpcBackendOptions()
    for name in ("num_worker_threads", "rpc_timeout", "init_method", "device_maps", "devices"):
        assert getattr(options, name) == getattr(theirs, name)
    assert option_checks.DEFAULT_NUM_WORKER_THREADS == constants.DEFAULT_NUM_WORKER_THREADS
    assert option_checks.DEFAULT_RPC_TIMEOUT == constants.DEFAULT_RPC_TIMEOUT_SEC
    assert option_checks.UNSET_RPC_TIMEOUT == constants.UNSET_RPC_TIMEOUT
    assert option_checks.DEFAULT_INIT_METHOD == constants.DEFAULT_INIT_METHOD
    assert 0 < options.receive_cache_bytes <= 4 << 30


def test_each_option_is_a_documented_keyword() -> None:
    parameters = inspect.signature(UcxRpcBackendOptions).parameters
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert set(parameters) == set(OPTIONS)
    documented = UcxRpcBackendOptions.__doc__ or ""
    for name, option in OPTIONS.items():
        assert option.metadata["about"].doc
        assert (f"{name}: " in documented) == (name in public())


def test_the_classes_describe_themselves() -> None:
    hints = typing.get_type_hints(UcxRpcBackendOptions)
    assert set(OPTIONS) <= set(hints)
    faulty = inspect.signature(FaultyUcxRpcBackendOptions).parameters
    required = {name for name, p in faulty.items() if p.default is p.empty}
    assert required == {"messages_to_fail", "messages_to_delay", "num_fail_sends", "options"}


def test_a_member_of_a_text_enum_is_its_text() -> None:
    class Encryption(str, enum.Enum):  # noqa: UP042  str() of a StrEnum is its text
        ON = "on"

    options = UcxRpcBackendOptions(encryption=Encryption.ON)
    assert repr(options.encryption) == "'on'"
    assert copy.copy(options).encryption == "on"


def test_the_agent_takes_what_is_for_it_and_nothing_else() -> None:
    values = of_agent(UcxRpcBackendOptions())
    load().AgentOptions().set_values(values)
    with pytest.raises(KeyError, match="does not have all"):
        load().AgentOptions().set_values({**values, "further": 1})
    del values["keepalive"]
    with pytest.raises(KeyError, match="keepalive"):
        load().AgentOptions().set_values(values)


def test_the_agent_takes_the_largest_numbers() -> None:
    largest = UcxRpcBackendOptions(num_worker_threads=2**31 - 1, max_calls_in_flight=2**63 - 1)
    load().AgentOptions().set_values(of_agent(largest))
    load().AgentOptions().set_values(of_agent(faulty(num_fail_sends=2**31 - 1)))
    with pytest.raises(ValueError, match="num_fail_sends must be less than 2"):
        faulty(num_fail_sends=2**31)


def faulty(num_fail_sends: int) -> FaultyUcxRpcBackendOptions:
    return FaultyUcxRpcBackendOptions(
        messages_to_fail=[], messages_to_delay={}, num_fail_sends=num_fail_sends
    )


def test_not_a_relative_of_tensorpipes() -> None:
    # Options-only calls of init_rpc look with isinstance.
    assert not isinstance(rpc.TensorPipeRpcBackendOptions(), UcxRpcBackendOptions)
    assert not isinstance(UcxRpcBackendOptions(), rpc.TensorPipeRpcBackendOptions)
    assert isinstance(UcxRpcBackendOptions(), rpc.RpcBackendOptions)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"num_worker_threads": 0}, ValueError, "num_worker_threads must be positive, got 0"),
        (
            {"num_worker_threads": 1 << 31},
            ValueError,
            r"num_worker_threads must be less than 2\*\*31",
        ),
        (
            {"max_calls_in_flight": 1 << 63},
            ValueError,
            r"max_calls_in_flight must be less than 2\*\*63",
        ),
        ({"devices": [-1]}, ValueError, r"devices must be a list of CUDA devices, got \[-1\]: "),
        ({"devices": ["foo"]}, ValueError, r"devices must be .*, got \['foo'\]: "),
        (
            {"device_maps": {"worker1": {"foo": "cuda:0"}}},
            ValueError,
            "device_maps must map devices to devices, got 'worker1': {'foo': 'cuda:0'}",
        ),
        ({"num_worker_threads": 2.5}, TypeError, "num_worker_threads must be an int, got 2.5"),
        ({"num_worker_threads": True}, TypeError, "num_worker_threads"),
        ({"rpc_timeout": -1}, ValueError, "RPC Timeout must be non-negative"),
        ({"rpc_timeout": timedelta(seconds=1)}, TypeError, "rpc_timeout must be a number"),
        ({"rpc_timeout": math.nan}, ValueError, "nan"),
        ({"rpc_timeout": math.inf}, ValueError, r"rpc_timeout must be .* or 0 for none, got inf"),
        ({"init_method": ""}, ValueError, "init_method must not be empty"),
        ({"init_timeout": -1}, ValueError, "init_timeout"),
        ({"port_range": (5, 4)}, ValueError, r"port_range must be .* got \(5, 4\)"),
        ({"port_range": "a-b"}, ValueError, "port_range"),
        ({"port_range": (29500, 70000)}, ValueError, "70000"),
        ({"port_range": 29500}, ValueError, "port_range must be .* needs two ports .* got 29500"),
        ({"port_range": "29500"}, ValueError, "needs two ports .* got '29500'"),
        ({"port_range": (1, 1)}, ValueError, r"needs two ports .* got \(1, 1\)"),
        ({"port_range": (1, 2, 3)}, ValueError, r"port_range must be .* got \(1, 2, 3\)"),
        ({"port_range": 1.5}, TypeError, "port_range"),
        ({"use_cma": 1}, TypeError, "use_cma must be True or False, got 1"),
        ({"keepalive": -2}, ValueError, "keepalive"),
        ({"receive_cache_idle": 0.01}, ValueError, "receive_cache_idle"),
        ({"max_message_bytes": -1}, ValueError, "max_message_bytes must be 0 or more bytes"),
        ({"receive_cache_bytes": "4G"}, TypeError, "receive_cache_bytes"),
        ({"receive_budget": -1}, ValueError, "receive_budget must be 0 or more bytes, got -1"),
        ({"receive_budget": 1 << 63}, ValueError, "receive_budget must be less than 2"),
        ({"receive_budget": 0.5}, TypeError, "receive_budget must be an int .bytes., got 0.5"),
        ({"interface": 3}, TypeError, "interface"),
        ({"interface": "eth0,,eth1"}, ValueError, "empty entry"),
        ({"devices": ["cpu"]}, ValueError, "expect a list of CUDA devices"),
        ({"devices": 0}, TypeError, "list of CUDA devices"),
        ({"wire_dtype": torch.float64}, ValueError, r"torch.bfloat16.*got torch.float64"),
        ({"wire_dtype": "bfloat16"}, TypeError, "wire_dtype must be a torch.dtype.*'bfloat16'"),
        ({"wire_dtype": {"a": torch.int8}}, ValueError, r"wire_dtype\['a'\].*got torch.int8"),
        ({"wire_dtype": {0: torch.bfloat16}}, TypeError, "each key of wire_dtype"),
        ({"integrity": 1}, TypeError, "integrity must be True or False, got 1"),
        (
            {"device_maps": {"a": {"cuda:0": "cuda:1", "cuda:2": "cuda:1"}}},
            ValueError,
            "only supports 1-to-1 mapping",
        ),
        ({"device_maps": {0: {"cuda:0": "cuda:1"}}}, TypeError, "device_maps"),
    ],
)
def test_refuses(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        UcxRpcBackendOptions(**given)


def test_unknown_keyword_and_attribute() -> None:
    with pytest.raises(TypeError, match="no option 'num_worker_thread'; it has num_worker_threads"):
        UcxRpcBackendOptions(num_worker_thread=3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no option 'num_worker_thread'; it has"):
        UcxRpcBackendOptions().num_worker_thread = 3  # type: ignore[attr-defined]


def test_a_subclass_may_have_arguments_of_its_own() -> None:
    class Ours(UcxRpcBackendOptions):
        def __init__(self, cluster: str) -> None:
            super().__init__(interface=f"{cluster}0", rpc_timeout=5)

    assert Ours(cluster="eth").interface == ("eth0",)


def test_attributes_are_checked_too() -> None:
    options = UcxRpcBackendOptions()
    options.rpc_timeout = 5
    assert options.rpc_timeout == 5.0
    with pytest.raises(ValueError, match="num_worker_threads must be positive"):
        options.num_worker_threads = -1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, (0, 0)),
        (0, (0, 0)),
        ((29500, 29600), (29500, 29600)),
        ([29500, 29501], (29500, 29501)),
        ("29500-29600", (29500, 29600)),
    ],
)
def test_port_range(given: Any, kept: tuple[int, int]) -> None:
    assert UcxRpcBackendOptions(port_range=given).port_range == kept


def test_interface_forms() -> None:
    assert UcxRpcBackendOptions(interface="eth0").interface == ("eth0",)
    assert UcxRpcBackendOptions(interface="eth0, ::1").interface == ("eth0", "::1")
    assert UcxRpcBackendOptions(interface=["eth0", "eth1"]).interface == ("eth0", "eth1")
    address = ipaddress.ip_address("10.0.0.1")
    assert UcxRpcBackendOptions(interface=address).interface == ("10.0.0.1",)
    assert UcxRpcBackendOptions(interface=[address, "eth0"]).interface == ("10.0.0.1", "eth0")
    link_local = ipaddress.ip_address("fe80::1%eth0")
    assert UcxRpcBackendOptions(interface=link_local).interface == ("fe80::1%eth0",)


def test_device_maps() -> None:
    options = UcxRpcBackendOptions(device_maps={"a": {"cpu": "cuda:1"}})
    assert options.device_maps == {"a": {torch.device("cpu"): torch.device("cuda:1")}}
    options.set_device_map("b", {"cuda:0": "cuda:1"})
    options.set_device_map("b", {"cuda:1": "cuda:0"})
    assert len(options.device_maps["b"]) == 2
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        options.set_device_map("b", {"cuda:0": "cuda:2"})
    options.set_devices(["cuda:0", "cuda:1"])
    assert options.devices == [torch.device("cuda:0"), torch.device("cuda:1")]
    with pytest.raises(ValueError, match="`set_devices` expect a list of CUDA devices"):
        options.set_devices(["cpu"])


def test_init_timeout() -> None:
    assert UcxRpcBackendOptions(rpc_timeout=0.1).effective_init_timeout() == 3
    assert UcxRpcBackendOptions(rpc_timeout=0).effective_init_timeout() == 60
    assert UcxRpcBackendOptions(rpc_timeout=90).effective_init_timeout() == 90
    assert UcxRpcBackendOptions(init_timeout=3).effective_init_timeout() == 3
    year = 365 * 24 * 3600
    assert UcxRpcBackendOptions(rpc_timeout=1e10).effective_init_timeout() == year
    assert UcxRpcBackendOptions(init_timeout=1e10).effective_init_timeout() == year


def test_copy_and_repr() -> None:
    options = UcxRpcBackendOptions(interface="eth0", keepalive=5)
    twin = copy.copy(options)
    assert twin.interface == ("eth0",) and twin.keepalive == 5
    assert "keepalive=5.0" in repr(options)
