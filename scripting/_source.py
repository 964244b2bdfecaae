"""The remote function's methods as TorchScript sees them, as source.

TorchScript has neither functions as arguments nor *args, so each remote function gets methods of
its own, with the function's arguments. TorchScript compiles a method when a script first uses it.
"""

from __future__ import annotations

import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any

from torch import futures
from torch.distributed import rpc

from ._types import Signature

# {parameters} are the function's, with types and defaults; {arguments} are their names. {rest} and
# {rest_arguments} leave out the first. generate() defines the names that begin with rpc_.
_METHODS = {
    "sync": """
def sync(rpc_to: str, {parameters}rpc_timeout: float = -1.0) -> rpc_result:
    return rpc_api.rpc_sync(rpc_to, rpc_function, ({arguments}), {{}}, rpc_timeout)
""",
    "async_": """
def async_(rpc_to: str, {parameters}rpc_timeout: float = -1.0) -> Future[rpc_result]:
    return rpc_api.rpc_async(rpc_to, rpc_function, ({arguments}), {{}}, rpc_timeout)
""",
    "remote": """
def remote(rpc_to: str, {parameters}rpc_timeout: float = -1.0) -> RRef[rpc_result]:
    return rpc_api.remote(rpc_to, rpc_function, ({arguments}), {{}}, rpc_timeout)
""",
    "gather": """
def gather(rpc_workers: List[str], {parameters}rpc_timeout: float = -1.0) -> List[rpc_result]:
    if len(rpc_workers) == 0:
        raise ValueError("gather needs a list of one worker or more, got none")
    rpc_futures: List[Future[rpc_result]] = []
    for rpc_worker in rpc_workers:
        rpc_futures.append(
            rpc_api.rpc_async(rpc_worker, rpc_function, ({arguments}), {{}}, rpc_timeout)
        )
    rpc_results: List[rpc_result] = []
    for rpc_future in rpc_futures:
        rpc_results.append(rpc_future.wait())
    return rpc_results
""",
    "broadcast": """
def broadcast(rpc_workers: List[str], {parameters}rpc_timeout: float = -1.0) -> None:
    if len(rpc_workers) == 0:
        raise ValueError("broadcast needs a list of one worker or more, got none")
    rpc_futures: List[Future[rpc_result]] = []
    for rpc_worker in rpc_workers:
        rpc_futures.append(
            rpc_api.rpc_async(rpc_worker, rpc_function, ({arguments}), {{}}, rpc_timeout)
        )
    for rpc_future in rpc_futures:
        rpc_future.wait()
""",
    "map_reduce": """
def map_reduce(
    rpc_workers: List[str], rpc_items: List[rpc_item], {rest}rpc_timeout: float = -1.0
) -> rpc_result:
    if len(rpc_workers) == 0:
        raise ValueError("map_reduce needs a list of one worker or more, got none")
    if len(rpc_items) == 0:
        raise ValueError("map_reduce needs one item or more, got none")
    rpc_futures: List[Future[rpc_result]] = []
    for rpc_i in range(len(rpc_items)):
        if rpc_i >= len(rpc_workers):
            rpc_futures[rpc_i - len(rpc_workers)].wait()
        rpc_futures.append(
            rpc_api.rpc_async(
                rpc_workers[rpc_i % len(rpc_workers)],
                rpc_function,
                (rpc_items[rpc_i], {rest_arguments}),
                {{}},
                rpc_timeout,
            )
        )
    rpc_reduced = rpc_futures[0].wait()
    for rpc_i in range(1, len(rpc_futures)):
        rpc_reduced = rpc_reduce(rpc_reduced, rpc_futures[rpc_i].wait())
    return rpc_reduced
""",
}

_numbers = itertools.count()


def generate(
    method: str,
    function: Any,
    signature: Signature,
    reduce: Callable[..., Any] | None,
) -> Any:
    """Make a method as a Python function that torch.jit.script() can compile.

    Args:
        method: a key of _METHODS; map_reduce needs `reduce` and a parameter.
        function: the torch.jit.ScriptFunction that is called remotely.
        signature: the function's arguments and result.
        reduce: makes one result of two, for map_reduce.

    Returns:
        A function whose source inspect.getsource() finds.
    """
    names = list(signature.parameters)
    typed = [_parameter(signature, name, place) for place, name in enumerate(names)]
    source = _METHODS[method].format(
        parameters=_listed(typed),
        arguments=_listed(names),
        rest=_listed(typed[1:]),
        rest_arguments=_listed(names[1:]),
    )
    variables: dict[str, Any] = {
        "__name__": __name__,
        "rpc_api": rpc,
        "rpc_function": function,
        "rpc_reduce": reduce,
        # TorchScript takes a name whose value is None for undefined, so None becomes its type.
        "rpc_result": type(None) if signature.returns is None else signature.returns,
        "Future": futures.Future,
        "RRef": rpc.RRef,
        "List": list,
    }
    for place, (name, annotation) in enumerate(signature.parameters.items()):
        variables[f"rpc_type_{place}"] = annotation
        variables[f"rpc_default_{place}"] = signature.defaults.get(name)
    variables["rpc_item"] = next(iter(signature.parameters.values()), None)
    file = f"<{function.name}.{method} of torch_rpc_ext.scripting, {next(_numbers)}>"
    # inspect.getsource(), and so torch.jit.script(), looks here for source that is in no file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), variables)
    generated: types.FunctionType = variables[method]
    return generated


def _parameter(signature: Signature, name: str, place: int) -> str:
    default = f" = rpc_default_{place}" if name in signature.defaults else ""
    return f"{name}: rpc_type_{place}{default}"


def _listed(texts: list[str]) -> str:
    """Join the texts, with a comma after each."""
    return "".join(f"{text}, " for text in texts)
