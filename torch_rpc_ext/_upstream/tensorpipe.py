"""Takeover: BackendType.TENSORPIPE and the name TensorPipeAgent stand for our back end.

The value of the member BackendType.TENSORPIPE is changed in place, so that the change also holds
for programs that took the member earlier.
"""

from __future__ import annotations

from typing import Any

from torch_rpc_ext._upstream import registry

_applied = False
_agent_class: Any = None


def is_active() -> bool:
    """Return whether programs that ask for TENSORPIPE run on UCX in this process."""
    return _applied


def apply(rpc: Any, init_backend: Any) -> None:
    """Change the member TENSORPIPE, and the name TensorPipeAgent. Idempotent.

    Args:
        rpc: the module torch.distributed.rpc.
        init_backend: starts our agent; upstream's init_backend_handler.
    """
    global _applied
    if _applied or not hasattr(rpc, "TensorPipeAgent"):
        return
    _applied = True
    for enum_class in registry.enum_classes(rpc):
        member = enum_class["TENSORPIPE"]
        registry.replace_value(member, member.value._replace(init_backend_handler=init_backend))
    rpc.TensorPipeAgent = _either_agent(rpc.TensorPipeAgent)


def _either_agent(original: Any) -> Any:
    """Return a class TensorPipeAgent of which our agent counts as an instance.

    Programs ask isinstance(agent, rpc.TensorPipeAgent), for dynamic groups for example. The class
    derives from the original one, because the C++ of torch's FAULTY_TENSORPIPE needs that as a base
    class. torch._C keeps the original class, so rpc.shutdown() does not take our agent for
    TENSORPIPE's.
    """

    def __instancecheck__(_: Any, value: Any) -> bool:
        return isinstance(value, original) or (
            _agent_class is not None and isinstance(value, _agent_class)
        )

    kind: Any = type(original)
    metaclass: Any = type("TensorPipeAgentType", (kind,), {"__instancecheck__": __instancecheck__})
    return metaclass(
        original.__name__,
        (original,),
        {"__doc__": original.__doc__, "__module__": original.__module__},
    )


def adopt_agent_class(agent_class: Any) -> None:
    """Let our agent pass for a TensorPipeAgent under takeover, now or later."""
    global _agent_class
    _agent_class = agent_class
