"""Both ends of the connection between a head and a machine, where the other end is the test's."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

import msgspec

from helpers.heads import CREDENTIALS
from helpers.tasks import TIMEOUT_S
from planaria.core.machine_messages import (
    PROTOCOL,
    FromMachine,
    MachineArrived,
    MachineFacts,
    ToMachine,
)
from planaria.core.messages import Message
from planaria.transport.acceptor import Acceptor, Handshakes, Purpose, connect, listen
from planaria.transport.frames import FrameDecoder, frame, message_of
from planaria.transport.sockets import Address

Heard = TypeVar("Heard", FromMachine, ToMachine)
Kind = TypeVar("Kind", bound=Message)
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing the socket resets the connection.


class MachineLine(Generic[Heard]):
    """One end of a connection.

    Attributes:
        heard: everything that the other end has said.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.json.Decoder[Heard],
    ) -> None:
        self.heard: list[Heard] = []
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.json.Decoder[Heard] = decoder
        self._num_taken = 0
        self._frames = FrameDecoder()

    def tell(self, *messages: Message) -> None:
        """Sends messages."""
        self._writer.write(b"".join(frame(message) for message in messages))

    async def wait(self, kind: type[Kind]) -> Kind:
        """The next message of this kind; those before it are passed over.

        Raises:
            EOFError: the connection has ended before.
        """
        while True:
            while self._num_taken < len(self.heard):
                message = self.heard[self._num_taken]
                self._num_taken += 1
                if isinstance(message, kind):
                    return message
            await self._read()

    async def wait_end(self) -> None:
        """Waits until the other end has closed the connection."""
        try:
            while True:
                await self._read()
        except EOFError:
            return

    async def _read(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            try:
                data = await self._reader.read(1 << 20)
            except ConnectionError as error:
                raise EOFError from error
        if not data:
            raise EOFError
        self.heard += [message_of(body, self._decoder) for body in self._frames.feed(data)]

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()

    def reset(self) -> None:
        """Ends the connection as the kernel of a killed process does that had unread bytes."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._writer.transport.abort()


class FakeHead:
    """A head whose answers are the test's.

    Attributes:
        address: where it listens.
    """

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        listeners, self.address = listen(address)
        self._handshakes = Handshakes(CREDENTIALS)
        self._lines: asyncio.Queue[MachineLine[FromMachine]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._acceptor = Acceptor(listeners, {Purpose.MACHINE: self._accept})
        self._acceptor.start()

    def _accept(self, sock: socket.socket) -> None:
        self._tasks.add(asyncio.create_task(self._shake_hands(sock)))

    async def _shake_hands(self, sock: socket.socket) -> None:
        reader, writer, _ = await self._handshakes.accept(sock, Purpose.MACHINE)
        decoder: msgspec.json.Decoder[FromMachine] = msgspec.json.Decoder(FromMachine)
        self._lines.put_nowait(MachineLine(reader, writer, decoder))

    async def next_line(self) -> MachineLine[FromMachine]:
        """The next connection of a machine."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._lines.get()

    def close(self) -> None:
        """Listens no more."""
        self._acceptor.close()
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def fake_head() -> AsyncIterator[FakeHead]:
    """A head for the length of the context."""
    head = FakeHead()
    try:
        yield head
    finally:
        head.close()


async def arrive(
    address: Address,
    *,
    name: str = "m",
    host: str = "127.0.0.1",
    run: str = "",
    node: int = -1,
    machine_id: str = "",
    has_code: bool = False,
) -> MachineLine[ToMachine]:
    """The end of a machine that arrives at a head."""
    reader, writer = await connect(address, Purpose.MACHINE, CREDENTIALS, timeout_s=TIMEOUT_S)
    decoder: msgspec.json.Decoder[ToMachine] = msgspec.json.Decoder(ToMachine)
    line: MachineLine[ToMachine] = MachineLine(reader, writer, decoder)
    facts = MachineFacts(name=name, host=host)
    line.tell(
        MachineArrived(
            protocol=PROTOCOL,
            facts=facts,
            run=run,
            node=node,
            machine_id=machine_id,
            has_code=has_code,
        )
    )
    return line
