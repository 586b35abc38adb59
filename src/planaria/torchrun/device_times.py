"""When the collectives of an accelerator begin and are over, by the host's clock.

The host only gives them to the device, and goes on. So a pair of events on the stream that waits
for a collective enclose it, and a thread waits for the second one. The device's clock is mapped to
the host's by the moments at which that thread wakes: it never wakes early, so the smallest
difference of late is the best. A better one puts what comes earlier; no span begins before the end
of one that was told, though.

Source: Gemini (SOSP '23), section 5.4, whose profile of idle spans comes from the device, too.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, NamedTuple

from planaria.engine.devices import Device, Mark, Moment

_NUM_SAMPLES: Final = 100  # Differences that are compared.
_REBASE_S: Final = 60.0  # Events measure short times more precisely.


class _Enclosed(NamedTuple):
    start: Moment
    end: Moment
    end_mark: Mark


class DeviceTimes:
    """Tells begin and end of what a device computes for this process, in order.

    Args:
        on_span: takes both, by the monotonic clock; called on a thread of this object.
    """

    def __init__(self, device: Device, on_span: Callable[[float, float], None]) -> None:
        self._device = device
        self._on_span = on_span
        self._base = device.moment()
        self._base_s = 0.0  # On the device's clock, which begins with the first base.
        self._offsets_s: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._told_s = 0.0  # The end of the last span, by the host's clock.
        self._queue: SimpleQueue[_Enclosed | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="device times", daemon=True)
        self._thread.start()

    def start(self) -> Moment:
        """Begins a span on the stream of the calling thread."""
        moment = self._device.moment()
        assert moment is not None
        return moment

    def end(self, start: Moment) -> None:
        """Ends a span there."""
        self._queue.put(_Enclosed(start, self.start(), self._device.mark()))

    def close(self) -> None:
        """Ends the thread, once all spans that have ended are told."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (span := self._queue.get()) is not None:
            span.end_mark.wait()
            woke_s = time.monotonic()
            first_s, last_s = (
                self._base_s + moment.seconds_since(self._base) for moment in span[:2]
            )
            self._offsets_s.append(woke_s - last_s)
            offset_s = min(self._offsets_s)
            if last_s - self._base_s > _REBASE_S:
                self._base, self._base_s = span.end, last_s
            begin_s = max(self._told_s, first_s + offset_s)
            self._told_s = max(begin_s, last_s + offset_s)
            self._on_span(begin_s, self._told_s)
