"""Records what goes over this host's loopback interface, for tests of what a listener can learn.

Needs root.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from types import TracebackType

_ETH_P_ALL = 3
_TCP = 6
_ETHERNET = 14
_BUFFER = 64 << 20
_SO_RCVBUFFORCE = 33  # Linux; Python has no name for it

Flow = tuple[bytes, int, bytes, int]
"""(source address, port, destination address, port)"""


class Capture:
    """Records all TCP data between two moments.

    Raises:
        PermissionError: this process may not capture packets.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        self._socket.bind(("lo", 0))
        # In the order of arrival. The key is (flow, place in the flow), so that a packet that is
        # seen twice counts once.
        self._pieces: dict[tuple[Flow, int], bytes] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Capture:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._socket.close()

    def streams(self) -> dict[Flow, bytes]:
        """The bytes of each flow, in the flow's order."""
        pieces: dict[Flow, list[bytes]] = {}
        for (flow, _), data in sorted(self._pieces.items(), key=lambda piece: piece[0]):
            pieces.setdefault(flow, []).append(data)
        return {flow: b"".join(parts) for flow, parts in pieces.items()}

    def packets(self) -> list[tuple[Flow, bytes]]:
        """The data of each packet, in the order of time."""
        return [(flow, data) for (flow, _), data in self._pieces.items()]

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._socket], [], [], 0.2)
            if ready:
                self._take(self._socket.recv(1 << 17))
            elif self._done.is_set():
                return

    def _take(self, frame: bytes) -> None:
        packet = frame[_ETHERNET:]
        if not packet or packet[0] >> 4 != 4 or packet[9] != _TCP:
            return
        segment = packet[4 * (packet[0] & 15) : int.from_bytes(packet[2:4], "big") or None]
        source_port, port, sequence = struct.unpack_from("!HHI", segment)
        data = segment[4 * (segment[12] >> 4) :]
        if data:
            flow = (packet[12:16], source_port, packet[16:20], port)
            self._pieces.setdefault((flow, sequence), data)
