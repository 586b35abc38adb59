"""A device on which tests see what waits for what."""

from collections.abc import Iterator
from contextlib import contextmanager

from planaria.engine.devices import LateDevice, Mark


class StreamedDevice(LateDevice):
    """A device that notes on which stream each mark was made, and which streams wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = ""
        self.waits: list[tuple[str, str]] = []  # The stream that waits, and that of the mark.

    @contextmanager
    def beside(self, purpose: str) -> Iterator[None]:
        self.stream, before = purpose, self.stream
        try:
            yield
        finally:
            self.stream = before

    def mark(self) -> Mark:
        return StreamMark(self, self.stream)


class StreamMark:
    """A mark on a stream of the device."""

    def __init__(self, device: StreamedDevice, stream: str) -> None:
        self._device = device
        self._stream = stream

    def wait(self) -> None:
        raise AssertionError("it would wait for a peer that may be lost")

    def order(self) -> None:
        self._device.waits.append((self._device.stream, self._stream))
