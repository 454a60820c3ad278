"""Slow and lossy line for IP packets, in a network namespace of its own, where the kernel has no netem."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import math
import multiprocessing
import os
import random
import struct
import subprocess
from multiprocessing.connection import Connection

#: The two ends of a line: whoever connects to FAR reaches HERE, by way of the line.
HERE, FAR = "10.0.0.1", "10.0.0.2"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def enter_own_network() -> None:
    """Move the calling thread, and whatever it starts, into a new network namespace; needs root.

    Raises:
        OSError: The kernel refuses it.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace can be made here")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


class Relay:
    """Process that passes packets on in both directions, after a delay, at a rate, and without some of them."""

    def __init__(self, *, delay: float = 0.0, rate: float = math.inf, loss: float = 0.0) -> None:
        """Start it.

        Args:
            delay: Seconds that every packet is held back in each direction.
            rate: Bytes a second of each connection in each direction.
            loss: Share of the packets that are dropped, drawn independently.
        """
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, delay, rate, loss), daemon=True)
        self._process.start()
        here.recv()  # the line is up

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(told: Connection, delay: float, rate: float, loss: float) -> None:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"line", _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "address", "add", HERE, "peer", FAR, "dev", "line"], check=True)
    subprocess.run(["ip", "link", "set", "line", "up"], check=True)
    told.send(None)
    asyncio.run(_relay(device, delay, rate, loss))


async def _relay(device: int, delay: float, rate: float, loss: float) -> None:
    loop, drawn = asyncio.get_running_loop(), random.Random(0)
    free: dict[bytes, float] = {}  # when a connection's line has sent what came before

    def pass_on() -> None:
        packet = os.read(device, 1 << 16)
        if packet[0] >> 4 != 4 or drawn.random() < loss:
            return
        # Swapped addresses bring the packet back to this machine, from the other end; checksums stay right.
        packet = packet[:12] + packet[16:20] + packet[12:16] + packet[20:]
        ends = packet[12:24]
        free[ends] = max(free.get(ends, 0.0), loop.time()) + len(packet) / rate
        loop.call_at(free[ends] + delay, os.write, device, packet)

    loop.add_reader(device, pass_on)
    await asyncio.Event().wait()
