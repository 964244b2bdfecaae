"""A program for test_torch_names.py: behaves like a release of torch that has renamed one private
name.

The program imports torch once. For each private name it forks; the child renames it wherever
upstream's Python code uses it, tries what a user's program would do, and prints the result as a
line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.optim
from torch.distributed import rpc as untyped_rpc
from torch.distributed.nn.api import remote_module

rpc: Any = untyped_rpc
#: torch's C++ code looks these up by name, so it does not find them under a name that only Python
#: uses.
OF_CPP = {"_run_function", "_handle_exception"}
#: The part of the package that needs a name -> the feature that is refused without the name.
FEATURES = {
    "torch_rpc_ext.launch": "WorkerGroup",
    "torch_rpc_ext.profiler": "profile",
    "torch_rpc_ext.scripting": "script",
    "torch_rpc_ext.sharding": "shard",
}


def upstream() -> Iterator[types.ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch.distributed.rpc", "torch.distributed.rendezvous")):
            yield module
    yield remote_module


def rename(full: str) -> None:
    """Rename ``full``: in its module, wherever it was imported to, and in the code that uses it."""
    before, _, last = full.rpartition(".")
    parent: Any = sys.modules.get(before)  # torch.distributed.rendezvous is a function too
    if parent is None:
        parent = torch
        for part in before.split(".")[1:]:
            parent = getattr(parent, part)
    if not isinstance(parent, (types.ModuleType, type)) and last not in vars(parent):
        parent = type(parent)
    if not last.startswith("_"):  # upstream uses it through a public module
        delattr(parent, last)
        return
    value, new = getattr(parent, last), f"renamed{last}"
    for place in (parent, *upstream()):
        if last in vars(place):
            setattr(place, new, value)
            delattr(place, last)
    for module in upstream():
        for function in functions_of(module):
            function.__code__ = renamed(function.__code__, last, new)


def functions_of(place: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    for value in list(vars(place).values()):
        value = getattr(value, "__func__", value)
        while isinstance(value, types.FunctionType):
            yield value
            value = getattr(value, "__wrapped__", None)
        if (
            isinstance(value, type)
            and value.__module__.startswith("torch.distributed")
            and not depth
        ):
            yield from functions_of(value, depth + 1)


def renamed(code: types.CodeType, old: str, new: str) -> types.CodeType:
    return code.replace(
        co_names=tuple(new if name == old else name for name in code.co_names),
        co_consts=tuple(
            renamed(const, old, new) if isinstance(const, types.CodeType) else const
            for const in code.co_consts
        ),
    )


def call_on(backend: str, **options: Any) -> str:
    """What a program sees when it makes one call."""
    try:
        if backend == "TENSORPIPE":
            make = rpc.TensorPipeRpcBackendOptions
        else:
            make = importlib.import_module("torch_rpc_ext").UcxRpcBackendOptions
        with tempfile.TemporaryDirectory() as folder:
            rpc.init_rpc(
                "a",
                backend=rpc.BackendType[backend],
                rank=0,
                world_size=1,
                rpc_backend_options=make(init_method=f"file://{folder}/store", **options),
            )
            result = rpc.rpc_sync("a", torch.add, args=(torch.ones(1), 1)).item()
            rpc.shutdown()
        return str(result)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def use(who: str) -> str:
    """What a program sees when it uses a feature."""
    try:
        if who == "the option allow_list":
            return call_on("UCX", allow_list=["torch.add"])
        feature = getattr(importlib.import_module(who), FEATURES[who])
        if who == "torch_rpc_ext.launch":
            with feature(1) as group:
                group.init_rpc("UCX")
        return "imported"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def attempt(who: str, name: str) -> dict[str, Any]:
    try:
        rename(name)
    except AttributeError:
        return {"name": name, "absent": True}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        importlib.import_module("torch_rpc_ext")
        said = [str(each.message) for each in warned if "torch_rpc_ext" in str(each.message)]
    found: dict[str, Any] = {"name": name, "warnings": said}
    if name.rpartition(".")[2] not in OF_CPP:
        found["TENSORPIPE"] = call_on("TENSORPIPE")
    found["UCX"] = call_on("UCX")
    if who and who != "BackendType.UCX":
        found["feature"] = use(who)
    return found


def main() -> None:
    for who, name in json.load(sys.stdin):
        child = os.fork()
        if child == 0:
            print(json.dumps(attempt(who, name)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


main()
