"""Lists the messages that workers send each other, from the data in their sockets.

Only for groups on this host, with ``UCX_TLS=tcp`` and without encryption. Needs root, as Capture
does.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from tests.process.group import Group
from tests.support.backend import ROOT
from tests.support.capture import Capture

Sent = tuple[str, str, str]
"""(from, to, name of the message)"""

_VERSION = int(re.findall(r"kVersion = (\d+)", (ROOT / "csrc/wire/call_frame.h").read_text())[0])
# A call frame begins with its magic and version.
_CALL = re.compile(rb"TR" + re.escape(bytes([_VERSION])) + rb"[\x00\x01](..)\x00\x00", re.DOTALL)
_PROTOCOL = (ROOT / "csrc/transport/ucx/protocol.h").read_text()
PROTOCOL_VERSION = int(re.findall(r"kProtocolVersion = (\d+)", _PROTOCOL)[0])
# A FrameHeader: version, kind, count, token, and two numbers of transfers. UCX's own header of an
# active message begins with similar bytes (the id of our messages, flags, the length of our
# header); the first group excludes it.
_FRAME = re.compile(
    rb"(?!\x07\x00.\x00\x20\x00\x00\x00)"
    + re.escape(bytes([PROTOCOL_VERSION]))
    + rb"\x00([\x01-\x0a])\x00(..\x00\x00)(.{8})(.{8})(.{8})",
    re.DOTALL,
)


def call_types() -> dict[int, str]:
    """Number of a message type of torch -> its name."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/rpc/message.h"
    text = re.sub(r"\s+", " ", re.sub(r"//[^\n]*", "", header.read_text()))
    kinds = {"REQUEST_TYPE": 0x100, "RESPONSE_TYPE": 0x200}
    found = re.findall(r"(\w+) = (0x\w+) \| MessageTypeFlags::(\w+)", text)
    assert len(found) > 20, header
    return {int(number, 16) | kinds[kind]: name for name, number, kind in found}


def frame_kinds() -> list[str]:
    """The names of the transport's messages, in the order of their numbers from 1 on."""
    [body] = re.findall(r"enum class FrameKind[^{]*\{([^}]*)\}", _PROTOCOL)
    return re.findall(r"k\w+", body)


def calls(heard: Capture, group: Group) -> list[Sent]:
    """The messages of torch.distributed.rpc, in the order of time."""
    names = call_types()
    return [
        (source, target, names[number])
        for source, target, data in _packets(heard, group)
        for match in _CALL.finditer(data)
        if (number := struct.unpack("<H", match[1])[0]) in names
    ]


def frames(heard: Capture, group: Group) -> list[Sent]:
    """The messages of the transport, in the order of time."""
    kinds = frame_kinds()
    return [
        (source, target, kinds[match[1][0] - 1])
        for source, target, data in _packets(heard, group)
        for match in _FRAME.finditer(data)
        # Tells a real header from a message's data that looks alike: a token is 8 random bytes,
        # while numbers in data have mostly zero bytes.
        if sum(map(bool, match[3])) > 3
    ]


def _packets(heard: Capture, group: Group) -> Iterator[tuple[str, str, bytes]]:
    """(sender, receiver, data) of each packet that workers of the group sent each other."""
    owners = {
        connection.laddr.port: worker.name
        for worker in group
        for connection in psutil.Process(worker.child.pid).net_connections("tcp")
    }
    for (_, source, _, target), data in heard.packets():
        ends = [owners.get(source), owners.get(target)]
        if len(group.workers) == 2 and any(ends) and not all(ends):
            # The port on one side belongs to no socket any more: both workers had opened a
            # connection at the same time, and UCX has closed one. With two workers, the unknown
            # side is the other worker.
            [other] = {worker.name for worker in group} - set(ends)
            ends = [end or other for end in ends]
        if ends[0] and ends[1]:
            yield ends[0], ends[1], data
