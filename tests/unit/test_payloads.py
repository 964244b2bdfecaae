"""Short forms of payloads: what has one, what is pickled, and what comes back."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_rpc_ext._upstream import payloads

internal: Any = payloads.internal
PICKLE = b"\x80"


def function(*values: object) -> object:
    return values


def other(*values: object) -> object:
    return values


class Holder:
    def method(self) -> None:
        """Has a name with a dot."""


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    payloads.install()
    yield
    payloads.uninstall()


def udf(called: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return internal.PythonUDF(called, args, kwargs)


ONE = torch.arange(3.0)


@pytest.mark.parametrize(
    "value",
    [None, ONE, udf(function), udf(function, ONE), udf(function, ONE, ONE[1:])],
)
def test_the_commonest_values_have_a_short_form(value: Any) -> None:
    payload, tensors = internal.serialize(value)
    assert not payload.startswith(PICKLE)
    back = internal.deserialize(payload, tensors)
    assert type(back) is type(value)
    if isinstance(value, internal.PythonUDF):
        assert (back.func, back.kwargs) == (function, {})
        assert type(back.args) is tuple and all(map(torch.equal, back.args, value.args))
        assert len(back.args) == len(value.args)
        # Whose names error texts show.
        assert f"{__name__}\0function\0".encode() in payload
    else:
        assert back is value


@pytest.mark.parametrize(
    "value",
    [
        0,
        "None",
        b"\x01None",
        [ONE],
        torch.nn.Parameter(ONE),
        ONE.to_sparse(),
        ONE.reshape(1, 3).to_sparse_csr(),
        udf(function, 1),
        udf(function, ONE, scale=1),
        udf(function, nn.Parameter(ONE)),
        udf(function, ONE.to_sparse()),
        udf(Holder.method, ONE),
        udf(torch.add, ONE),
        udf(Holder, ONE),
        internal.PythonUDF(function, [ONE], {}),
    ],
)
def test_all_others_are_pickled(value: Any) -> None:
    payload, tensors = internal.serialize(value)
    assert payload.startswith(PICKLE)
    back = internal.deserialize(payload, tensors)
    assert type(back) is type(value)
    if isinstance(value, torch.Tensor):
        assert torch.equal(back.to_dense(), value.to_dense())
    elif isinstance(value, internal.PythonUDF):
        assert back.func is value.func and len(back.args) == len(value.args)
    else:
        assert back == value


def test_an_argument_that_stands_there_twice_arrives_as_one() -> None:
    first, second, third = internal.deserialize(
        *internal.serialize(udf(function, ONE, ONE[1:], ONE))
    ).args
    assert first is third and torch.equal(first, ONE) and torch.equal(second, ONE[1:])


def test_a_tensor_in_a_container_costs_few_bytes() -> None:
    few, _ = internal.serialize([ONE] * 10)
    many, tensors = internal.serialize([ONE.clone() for _ in range(110)])
    assert len(many) - len(few) < 100 * 12
    assert all(map(torch.equal, internal.deserialize(many, tensors), [ONE] * 110))


def test_a_function_that_its_name_does_not_lead_to_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = udf(function, ONE)
    monkeypatch.setitem(globals(), "function", other)
    with pytest.raises(pickle.PicklingError, match="function"):
        internal.serialize(request)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        internal.serialize(udf(lambda x: x, ONE))


def test_names_are_looked_up_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    payload, tensors = internal.serialize(udf(function, ONE))
    monkeypatch.setitem(globals(), "function", other)
    assert internal.deserialize(payload, tensors).func is other
    monkeypatch.delitem(globals(), "function")
    missing = internal.deserialize(payload, tensors)
    assert isinstance(missing, AttributeError) and "UDFs are defined on both" in str(missing)


def test_a_module_is_imported_when_its_function_is_called(tmp_path: Path) -> None:
    (tmp_path / "not_yet.py").write_text("def work(x): return x\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from torch_rpc_ext._upstream import payloads\n"
        "print(payloads.deserialize(b'\\x01Call\\0not_yet\\0work\\0', []).func.__module__)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.stdout.strip() == "not_yet", ended.stderr
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        internal.deserialize(b"\x01Call\0no_such_module\0work\0", [])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x01",
        b"\x01Tensor",
        b"\x01Call\0",
        b"\x01Call\0os",
        b"\x01Call\0os\0system",
        b"\x01Call\0\0\0",
        b"\x01Call\0os\0system\0more\0",
        b"\x01Call\0os\n.\0system\0",
        b"\x01Call\0\xff\xfe\0\xff\0",
        b"\x01Nonesuch",
        b"\x80",
    ],
    ids=repr,
)
def test_bad_payloads_raise_and_leave_nothing_behind(payload: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  whatever pickle says
        internal.deserialize(payload, [])
    assert not vars(internal._thread_local_tensor_tables)
    assert internal.deserialize(*internal.serialize(ONE)) is ONE


def test_an_error_while_pickling_leaves_nothing_behind() -> None:
    with pytest.raises(TypeError, match="BytesIO|pickle"):
        internal.serialize(internal.PythonUDF(len, ([ONE, (value for value in ())],), {}))
    assert not vars(internal._thread_local_tensor_tables)


def test_a_programs_own_pickler_and_reducer_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByValue(pickle.Pickler):
        """Such as cloudpickle's."""

    with monkeypatch.context() as patch:
        patch.setattr(internal, "_pickler", ByValue)
        assert internal.serialize(udf(function, ONE))[0].startswith(PICKLE)
    reducers = internal._internal_rpc_pickler._class_reducer_dict
    with monkeypatch.context() as patch:
        patch.setitem(reducers, torch.Tensor, lambda tensor: (list, (tensor.tolist(),)))
        payload, tensors = internal.serialize(udf(function, ONE))
        assert not tensors and internal.deserialize(payload, tensors).args == (ONE.tolist(),)
    assert not internal.serialize(udf(function, ONE))[0].startswith(PICKLE)


def test_without_them_upstreams_own_come_back() -> None:
    payloads.uninstall()
    payloads.uninstall()
    pickler = internal._internal_rpc_pickler
    payload, tensors = internal.serialize(udf(function, ONE))
    assert payload.startswith(PICKLE) and b"_tensor_receiver" in payload
    assert internal.deserialize(payload, tensors).args[0] is ONE
    assert pickler._dispatch_table[torch.Tensor] == pickler._tensor_reducer
    assert torch.nn.Parameter not in pickler._class_reducer_dict


def test_attributes_of_a_parameter_are_values() -> None:
    foreign = {"shape": (2,), "typestr": "<f4", "data": (4096, False), "version": 3}
    given = {"mark": 1, "backward": print, "__array_interface__": foreign, 5: 6}
    parameter: Any = payloads.with_tensors(
        [torch.ones(2)], lambda: payloads._restore_parameter(0, given)
    )
    assert type(parameter) is nn.Parameter and vars(parameter) == {"mark": 1}
