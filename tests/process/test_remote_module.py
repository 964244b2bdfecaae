"""RemoteModule: upstream's, on our agent."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed import rpc

from tests.process import service
from tests.process.group import workers

TEMPLATE = "_remote_module___torch___tests_process_service_DoubleInterface"


def instantiate_in_two_threads() -> list[bool]:
    """Serve two requests for the module that upstream generates; the second comes while the first
    is compiling. Return for both whether the module was whole when they ended."""
    from torch.distributed.nn.api import remote_module
    from torch.distributed.nn.jit import instantiator

    compiling, go_on = threading.Event(), threading.Event()
    execute = instantiator._StringLoader.exec_module

    def execute_late(self: Any, module: Any) -> None:
        compiling.set()
        assert go_on.wait(60)
        execute(self, module)

    def request() -> bool:
        untyped: Any = remote_module
        untyped._instantiate_template(service.DoubleInterface, False)
        return hasattr(sys.modules[TEMPLATE], "_remote_forward")

    assert TEMPLATE not in sys.modules
    untyped: Any = instantiator
    untyped._StringLoader.exec_module = execute_late
    try:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(request)
            assert compiling.wait(60)
            second = pool.submit(request)
            # The second must wait for the first; a second that does not is done by then.
            threading.Event().wait(0.3)
            go_on.set()
            return [first.result(60), second.result(60)]
    finally:
        untyped._StringLoader.exec_module = execute


@workers(2)
def test_a_template_is_whole_before_a_second_request_gets_it() -> None:
    """Upstream's RemoteModule asks for the template of an interface twice at once, and calls it
    when the second request has ended."""
    assert rpc.rpc_sync("worker1", instantiate_in_two_threads) == [True, True]


@workers(2)
def test_with_an_interface() -> None:
    from torch.distributed.nn.api import remote_module

    module: Any = remote_module._RemoteModule(
        "worker1/cpu", service.Double, _module_interface_cls=service.DoubleInterface
    )
    assert module.forward(torch.ones(2)).tolist() == [2.0, 2.0]
    assert module.forward_async(torch.ones(2)).wait().tolist() == [2.0, 2.0]
