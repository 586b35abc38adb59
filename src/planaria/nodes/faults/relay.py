"""A relay between the agents and the coordinator, so that a node can be cut off from it.

It is used only if a cut is injected: then agents get the relay's address in place of the
coordinator's. While a node is cut off, what either end sends is held back, and so is its closing of
the connection.
"""

import asyncio
import contextlib
import socket
from typing import Final

from planaria.transport.sockets import Address

_READ_BYTES: Final = 1 << 16


class Relay:
    """A listener for every node, which forwards bytes to the coordinator and back."""

    def __init__(self) -> None:
        self._servers: set[asyncio.Task[None]] = set()
        self._num_cuts: dict[int, int] = {}
        self._is_connected: dict[int, asyncio.Event] = {}

    def start_listener(self, node: int, coordinator: Address) -> Address:
        """Starts a listener for a node; returns the address at which its agent is to connect."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._num_cuts[node] = 0
        self._is_connected[node] = asyncio.Event()
        self._is_connected[node].set()
        self._servers.add(asyncio.create_task(self._listen(node, listener, coordinator)))
        host, port = listener.getsockname()[:2]
        return str(host), int(port)

    def cut(self, node: int, seconds: float) -> None:
        """Cuts a node off from the coordinator for so many seconds; 0: for ever."""
        self._num_cuts[node] += 1
        self._is_connected[node].clear()
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._reconnect, node)

    def close(self) -> None:
        """Ends all listeners and connections."""
        for server in self._servers:
            server.cancel()

    def _reconnect(self, node: int) -> None:
        self._num_cuts[node] -= 1
        if not self._num_cuts[node]:
            self._is_connected[node].set()

    async def _listen(self, node: int, listener: socket.socket, coordinator: Address) -> None:
        async with asyncio.TaskGroup() as connections:

            async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    await self._is_connected[node].wait()
                except asyncio.CancelledError:
                    # Not raised again, because asyncio would log a cancelled handler as an error.
                    writer.close()
                    return
                far_reader, far_writer = await asyncio.open_connection(*coordinator)
                connections.create_task(self._forward(node, reader, far_writer))
                connections.create_task(self._forward(node, far_reader, writer))

            async with await asyncio.start_server(connect, sock=listener) as server:
                await server.serve_forever()

    async def _forward(
        self, node: int, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        """Forwards bytes until the source closes, then closes the target."""
        try:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(_READ_BYTES):
                    await self._is_connected[node].wait()
                    target.write(data)
                    await target.drain()
            await self._is_connected[node].wait()
        finally:
            target.close()
