"""Relay that delays every byte and bounds their rate, for slow networks where the kernel has no netem."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
from multiprocessing.connection import Connection


class Relay:
    """Process that passes bytes on to an address, in both ways, after a delay and at a rate."""

    def __init__(self, target: tuple[str, int], *, delay: float = 0.0, rate: float = math.inf) -> None:
        """Start it.

        Args:
            target: Host and port of the server.
            delay: Seconds that every byte is held back in each direction.
            rate: Bytes a second of each connection in each direction.
        """
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, target, delay, rate), daemon=True)
        self._process.start()
        self.address = ("127.0.0.1", int(here.recv()))

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(told: Connection, target: tuple[str, int], delay: float, rate: float) -> None:
    asyncio.run(_relay(told, target, delay, rate))


async def _relay(told: Connection, target: tuple[str, int], delay: float, rate: float) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*target)
        except OSError:  # the server has ended
            writer.close()
            return
        await asyncio.gather(_pass_on(reader, far_writer, delay, rate), _pass_on(far_reader, writer, delay, rate))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    told.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float, rate: float) -> None:
    loop = asyncio.get_running_loop()
    free = loop.time()  # when the line has sent what came before
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            free = max(free, loop.time()) + len(data) / rate
            loop.call_at(free + delay, writer.write, data)
    loop.call_at(max(free, loop.time()) + delay, writer.close)
