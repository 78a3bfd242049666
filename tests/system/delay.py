"""Delays all packets that emulated machines receive. Works without tc netem, which many kernels lack.

The iptables rule `-j NFQUEUE` sends the numbers of a namespace's packets to this program. The contents stay
in the kernel. After the delay, the program lets the packets pass in order, all that are due with one message.
The program needs Linux and root. `tests.system.machines` sets the rules and starts the program. The arguments
are the seconds and the names of the namespaces. The program prints "ready" when it receives from every queue.

The messages have the format of linux/netfilter/nfnetlink_queue.h. Each namespace has a netlink socket.
"""

import ctypes
import os
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator

_NETLINK_NETFILTER, _SOL_NETLINK, _NETLINK_NO_ENOBUFS, _SO_RCVBUFFORCE = 12, 270, 5, 33
_CLONE_NEWNET = 0x40000000
_SUBSYSTEM = 3 << 8  # NFNL_SUBSYS_QUEUE, of every message's type
_PACKET, _CONFIG, _VERDICT_BATCH = _SUBSYSTEM | 0, _SUBSYSTEM | 2, _SUBSYSTEM | 3
_REQUEST, _ACCEPT, _QUEUE = 1, 1, 0
_BUFFER_BYTES, _MOST_WAITING = 2**24, 2**18


class Queue:
    """The packets that a namespace has received and that wait for their delivery. Holds a netlink socket.

    namespace: Name of the network namespace. This process enters it. seconds: Delay of each packet.
    """

    def __init__(self, namespace: str, seconds: float):
        self._seconds, self._waiting = seconds, deque()  # of (when it is due, its number)
        with open(f"/run/netns/{namespace}") as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self.socket.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        self.socket.bind((0, 0))
        self._send(_CONFIG, {1: struct.pack(">BxH", 1, 0)})  # bind to the queue
        self._send(_CONFIG, {2: struct.pack(">IB", 0, 1)})  # copy nothing but facts about a packet
        self._send(_CONFIG, {3: struct.pack(">I", _MOST_WAITING)})
        large = struct.pack(">I", 4)  # NFQA_CFG_F_GSO: segments that travel as one stay one
        self._send(_CONFIG, {5: large, 4: large})
        self.socket.setblocking(False)

    def receive(self) -> None:
        """Reads the numbers of all new packets from the socket, and stores when each is due."""
        try:
            while True:
                due = time.monotonic() + self._seconds
                self._waiting.extend((due, number) for number in _numbers(self.socket.recv(2**16)))
        except BlockingIOError:
            pass

    def release(self) -> float | None:
        """Lets all packets pass that are due. Returns the time at which the next one is due, or None.

        The time is one of `time.monotonic`. It is None if no packet waits.
        """
        last = None
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            last = self._waiting.popleft()[1]
        if last is not None:
            self._send(_VERDICT_BATCH, {2: struct.pack(">II", _ACCEPT, last)})  # it and all before it
        return self._waiting[0][0] if self._waiting else None

    def _send(self, kind: int, attributes: dict[int, bytes]) -> None:
        body = struct.pack(">BBH", socket.AF_UNSPEC, 0, _QUEUE)
        for name, value in attributes.items():
            body += struct.pack("=HH", 4 + len(value), name) + value + bytes(-len(value) % 4)
        self.socket.send(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST, 0, 0) + body)


def _numbers(messages: bytes) -> Iterator[int]:
    """Yields the number of the packet in each message: the first field of the first attribute."""
    while len(messages) >= 24:
        length, kind = struct.unpack_from("=IH", messages)
        if kind == _PACKET:
            yield struct.unpack_from(">I", messages, 24)[0]
        messages = messages[-(-length // 4) * 4 :]


def main() -> None:
    seconds, namespaces, parent = float(sys.argv[1]), sys.argv[2:], os.getppid()
    queues = [Queue(name, seconds) for name in namespaces]
    selector = selectors.SelectSelector()  # epoll knows whole milliseconds only
    for queue in queues:
        selector.register(queue.socket, selectors.EVENT_READ, queue)
    print("ready", flush=True)
    while os.getppid() == parent:  # packets that nobody holds back any more pass at once
        due = [when for queue in queues if (when := queue.release()) is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else 1.0
        for key, _ in selector.select(timeout):
            key.data.receive()
