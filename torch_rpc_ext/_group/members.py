"""What each worker tells the others through the store, and the checks of that.

The text is JSON and never a pickle, because a pickle could run code, and others can write to the
store.
"""

from __future__ import annotations

import base64
import json
import os
import select
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.rpc import backend_registry as _untyped_registry

from torch_rpc_ext import errors
from torch_rpc_ext._base.version import __version__

# Upstream's functions have no types.
registry: Any = _untyped_registry

# Limits of the ids that torch's C++ makes of ranks, and csrc/compat/torch_compat.h of lives.
_MOST_RANKS = 1 << 15
_MOST_LIVES = 1 << 23

DeviceMap = dict[torch.device, torch.device]


class Member(NamedTuple):
    """One worker of a group.

    Attributes:
        name, rank: as given to init_rpc.
        address: the agent's address, opaque bytes.
        world_size: as given to init_rpc, None in a dynamic group.
        device_count: CUDA devices of its process.
        device_maps: callee -> {device here: device there}.
        devices: CUDA devices that its RPC uses, empty for those of the maps.
        wire: version of its wire format.
        host: differs between machines and between pid namespaces; see host_identity().
        pid: its process.
        incarnation: random, so that a restarted worker differs from the one before.
        secret: fingerprint of the secret that the user gave, '' where the store gives out one.
        life: greater than the lives of all workers that joined or came back before; 0 for the
            members of a new static group.
        package: version of torch_rpc_ext, for texts of errors.
    """

    name: str
    rank: int
    address: bytes
    world_size: int | None
    device_count: int
    device_maps: dict[str, DeviceMap]
    devices: list[torch.device]
    wire: int
    incarnation: str
    host: str
    pid: int
    secret: str = ""
    life: int = 0
    package: str = __version__

    def to_json(self) -> str:
        """Return the text that from_json reads."""
        fields = self._asdict()
        fields["address"] = base64.b64encode(self.address).decode()
        fields["devices"] = [str(device) for device in self.devices]
        fields["device_maps"] = {
            callee: {str(here): str(there) for here, there in device_map.items()}
            for callee, device_map in self.device_maps.items()
        }
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str | bytes) -> Member:
        """Read what to_json wrote.

        Raises:
            RpcError: the text was not written by to_json.
        """
        try:
            fields = json.loads(text)
            return Member(
                name=str(fields["name"]),
                rank=_below(_MOST_RANKS, fields["rank"]),
                address=base64.b64decode(fields["address"], validate=True),
                world_size=None if fields["world_size"] is None else int(fields["world_size"]),
                device_count=int(fields["device_count"]),
                device_maps={
                    str(callee): {
                        torch.device(here): torch.device(there) for here, there in pairs.items()
                    }
                    for callee, pairs in fields["device_maps"].items()
                },
                devices=[torch.device(device) for device in fields["devices"]],
                wire=int(fields["wire"]),
                incarnation=str(fields["incarnation"]),
                host=str(fields["host"]),
                pid=int(fields["pid"]),
                secret=str(fields["secret"]),
                life=_below(_MOST_LIVES, fields["life"]),
                package=str(fields["package"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise errors.RpcError(
                "The store holds an entry that torch_rpc_ext did not write: is another back end "
                f"or another version in this group? ({error!r})"
            ) from error

    def row(self) -> tuple[str, int, bytes, int]:
        """Return the member as the C++ agent takes it: name, rank, address, life."""
        return (self.name, self.rank, self.address, self.life)


def _below(limit: int, given: Any) -> int:
    number = int(given)
    if not 0 <= number < limit:
        raise ValueError(f"{number} is not from 0 to {limit - 1}")
    return number


@cache
def host_identity() -> str:
    """Return a text that is equal for processes that share a kernel and a pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def is_alive(pid: int) -> bool:
    """Return whether a process of this host runs; a zombie does not."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # not known, so it counts as alive
    try:
        # A pidfd becomes readable when the process ends, whether its parent has reaped it or not.
        ended = select.poll()
        ended.register(process, select.POLLIN)
        return not ended.poll(0)
    finally:
        os.close(process)


def validate(members: Sequence[Member], *, is_static: bool) -> None:
    """Check a group as a whole. Every worker does this and gets the same result.

    Raises:
        RpcError: a name or rank is not unique, or world sizes, secrets or wire versions differ.
        ValueError: the device maps do not fit together (upstream's checks and texts).
    """
    by_name: dict[str, Member] = {}
    by_rank: dict[int, Member] = {}
    first = members[0]
    for member in members:
        twin = by_name.setdefault(member.name, member)
        if twin is not member:
            raise errors.RpcError(
                f"RPC worker name {member.name} is not unique. Workers {twin.rank} and "
                f"{member.rank} cannot share the same name.",
                worker=member.name,
            )
        twin = by_rank.setdefault(member.rank, member)
        if twin is not member:
            raise errors.RpcError(
                f"Rank {member.rank} is not unique. Workers {twin.name} and {member.name} cannot "
                "share the same rank.",
                worker=member.name,
            )
        if member.wire != first.wire:
            raise errors.RpcError(
                f"Worker {member.name} (torch_rpc_ext {member.package}) speaks wire version "
                f"{member.wire}, worker {first.name} ({first.package}) version {first.wire}: "
                "install the same torch_rpc_ext everywhere.",
                worker=member.name,
            )
        if member.secret != first.secret:
            raise errors.RefusedError(
                f"Worker {member.name} has {_described(member)}, worker {first.name} "
                f"{_described(first)}: give all workers of a group the same one (option secret or "
                "secret_file), or none of them.",
                worker=member.name,
            )
        if member.world_size != first.world_size:
            raise errors.RpcError(
                f"Worker {member.name} was started with world_size={member.world_size}, worker "
                f"{first.name} with world_size={first.world_size}.",
                worker=member.name,
            )
    registry._validate_device_maps(
        [member.name for member in members],
        {member.name: member.device_count for member in members},
        {member.name: member.device_maps for member in members},
        {member.name: member.devices for member in members},
        is_static_group=is_static,
    )


def _described(member: Member) -> str:
    # A fingerprint may be shown: nobody can find the secret from it.
    return f"the secret with fingerprint {member.secret}" if member.secret else "no secret"


def prepare_devices(devices: Sequence[torch.device]) -> None:
    """Initialise CUDA if RPC uses devices here: another worker may send a CUDA tensor before this
    program first uses CUDA.

    Raises:
        RuntimeError: CUDA cannot be initialised.
    """
    if devices and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]


def device_tables(
    me: Member, members: Mapping[str, Member]
) -> tuple[dict[str, DeviceMap], list[torch.device]]:
    """Return (caller -> {device here: device there}, for answers; devices that RPC uses here)."""
    maps = {name: member.device_maps for name, member in members.items()}
    reverse: dict[str, DeviceMap] = registry._create_reverse_mapping(me.name, list(maps), maps)
    devices: list[torch.device] = registry._create_device_list(me.devices, me.device_maps, reverse)
    return reverse, devices
