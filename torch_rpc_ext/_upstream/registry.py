"""Changing torch's enum class of back ends, BackendType.

torch's ``register_backend`` replaces the enum class. Members that a program took earlier, and
``torch.distributed.rpc.BackendType`` itself, then belong to a class that init_rpc no longer
accepts. So this module adds a member to the existing class. The member comes last, because an
init_rpc with options but no back end takes the first member that fits, which is to be TENSORPIPE.
Source: torch/distributed/rpc/backend_registry.py.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


def enum_classes(rpc: Any) -> list[type[Enum]]:
    """Return the enum classes in use: two where a program called register_backend, else one."""
    classes = [rpc.BackendType]
    if rpc.backend_registry.BackendType is not rpc.BackendType:
        classes.append(rpc.backend_registry.BackendType)
    return classes


def add_member(enum_class: type[Enum], name: str, value: Any) -> None:
    """Add a member to an existing enum class (Python 3.11 to 3.14), unless the class has it.

    Python offers no public way. This sets the attributes that enum.EnumType sets for a member; the
    registry test compares them with those of the running Python.
    """
    members = enum_class._member_map_
    if name in members:
        return
    member = object.__new__(enum_class)
    member._name_ = name
    member._value_ = value
    member.__objclass__ = enum_class  # type: ignore[attr-defined]
    member._sort_order_ = len(members)  # type: ignore[attr-defined]
    enum_class._member_names_.append(name)
    members[name] = member
    enum_class._value2member_map_[value] = member
    # EnumType.__setattr__ refuses to set a name that is a member.
    type.__setattr__(enum_class, name, member)


def replace_value(member: Enum, value: Any) -> None:
    """Change the value of an existing member, also for programs that took the member earlier."""
    table = type(member)._value2member_map_
    table.pop(member.value, None)
    member._value_ = value
    table[value] = member
