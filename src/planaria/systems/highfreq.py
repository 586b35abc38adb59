"""HighFreq: saves to remote storage as often as its bandwidth allows, and as is useful.

A save begins when the one before is in remote storage. Training stands still while it is
serialised, for a seventh of the time at most.

Source: Gemini (SOSP '23), section 7.2 and figure 14. With the paper's 1.2 TB, 20 Gb/s and 81 s to
serialise a save, it saves every 480 s of training and loses 81 / (81 + 480) = 14.4% of its time;
the paper prints 14.5% (figure 15a).
Differs: as remote_saves.py says. With faster storage than the paper's, training would stand still
most of the time, so that share is kept as a bound.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from planaria.systems.modelled_job import ModelledJob, remote_s
from planaria.systems.remote_saves import (
    SERIALISE_BYTES_PER_S,
    begin_with_remote_saves,
    serialise_s,
)
from planaria.systems.system import Setting

HIGHFREQ_SERIALISE_S: Final = 1.2e12 / 128 / SERIALISE_BYTES_PER_S  # One copy, in every save.
_TRAINED_MIN: Final = 480.0 / 81.0  # Seconds trained for each one that it serialises.


@dataclass(frozen=True, slots=True)
class HighFreq:
    """Saves to remote storage one right after the other; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "highfreq"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        stall_s = serialise_s(setting)
        return begin_with_remote_saves(
            setting, absent, interval_s=interval_s(setting), stall_s=stall_s
        )


def interval_s(setting: Setting) -> float:
    """Seconds of training between two saves: those in which one is written, and at least those of
    an iteration (section 2.1: 1 / f >= max(t_ckpt, t_iter)) and 480 for 81 that it serialises."""
    least_s = _TRAINED_MIN * serialise_s(setting)
    return max(remote_s(setting), setting.failure_free_s, least_s)
