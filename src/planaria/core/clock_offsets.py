"""Monotonic clocks of several machines, and how a moment of one is placed on another's.

A clock of one machine tells nothing about that of another one. So moments do not leave a machine,
or they do with the name of their clock. A node measures the offset of the head's clock from its own
with its heartbeats: the head's answer has a moment between the sending of the heartbeat and the
arrival of the answer. The middle of the two is wrong by half the round trip at most. The exchange
with the least round trip tells most; what it tells gets less certain, because no two clocks run at
the same speed.

Source: Cristian, "Probabilistic clock synchronization" (1989).
"""

from typing import Final

import msgspec

# Seconds per second by which two clocks may differ in speed. Crystals are within 1e-4, and a clock
# that is being corrected (NTP) may run off by 5e-4.
DRIFT_MAX: Final = 1e-3


class ClockReading(msgspec.Struct, frozen=True):
    """A moment by a monotonic clock. Readings of clocks with different names cannot be compared.

    Attributes:
        clock: name of the clock; "": the moment is unknown.
    """

    clock: str = ""
    now_s: float = 0.0


class ClockOffset(msgspec.Struct, frozen=True):
    """The offset of the head's clock from a node's.

    Attributes:
        offset_s: seconds to add to a moment of the node's clock.
        error_s: bound on the error of `offset_s` at the moment `measured_s`.
        measured_s: moment of the measurement, by the node's clock.
        drift: seconds per second by which the error grows before and after that.
    """

    offset_s: float
    error_s: float
    measured_s: float
    drift: float = DRIFT_MAX

    def error_at(self, moment_s: float) -> float:
        """Bound on the error of the offset at a moment of the node's clock, in seconds."""
        return self.error_s + self.drift * abs(moment_s - self.measured_s)


# The offset of a node that reads the same clock as the head.
NO_OFFSET: Final = ClockOffset(0.0, 0.0, 0.0, drift=0.0)


def measured_offset(sent_s: float, taken_s: float, received_s: float) -> ClockOffset:
    """The offset that one exchange tells.

    Args:
        sent_s: moment at which the node sent its heartbeat, by its clock.
        taken_s: moment at which the head had it, by the head's clock.
        received_s: moment at which the node had the answer, by its clock.
    """
    assert sent_s <= received_s
    middle_s = (sent_s + received_s) / 2
    error_s = (received_s - sent_s) * (0.5 + DRIFT_MAX)
    return ClockOffset(taken_s - middle_s, error_s, received_s)


def better_offset(before: ClockOffset | None, new: ClockOffset) -> ClockOffset:
    """The one of two measurements that tells more now, when the new one was made."""
    if before is None or new.error_s <= before.error_at(new.measured_s):
        return new
    return before
