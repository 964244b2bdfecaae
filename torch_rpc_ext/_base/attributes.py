"""What a name means in a class, found without running code of the class."""

from __future__ import annotations

import functools
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

__all__ = ["FIELDS", "attribute_of", "is_plain_value"]

#: Descriptors that are places for values in an instance, not code.
FIELDS = (MemberDescriptorType, GetSetDescriptorType)


def attribute_of(cls: type, name: str) -> Any:
    """Return a class's attribute without running code of the class; None if there is none."""
    for base in type.__dict__["__mro__"].__get__(cls):
        members = vars(base)
        if name in members:
            return members[name]
    return None


def is_plain_value(cls: type, name: Any) -> bool:
    """Return whether an attribute of this name in an instance of the class is a value, and stands
    in for no method or other code of the class.

    False for a __special__ name: libraries look such names up in instances, and believe what they
    find. NumPy reads the memory to which `__array_interface__` leads.
    """
    if type(name) is not str or (name.startswith("__") and name.endswith("__")):
        return False
    static = attribute_of(cls, name)
    return (
        static is None
        or isinstance(static, (*FIELDS, functools.cached_property))
        or name in (attribute_of(cls, "__dataclass_fields__") or ())
        or not (callable(static) or hasattr(type(static), "__get__"))
    )
