"""HighFreq: saves to remote storage as often as its bandwidth allows.

A save begins when the one before is in remote storage. Training stands still while it is
serialised.

Source: Gemini (SOSP '23), section 7.2 and figure 14. With the paper's 1.2 TB, 20 Gb/s and 81 s to
serialise a save, it saves every 480 s of training and loses 81 / (81 + 480) = 14.4% of its time;
the paper prints 14.5% (figure 15a).
Differs: as remote_saves.py says.
"""

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


@dataclass(frozen=True, slots=True)
class HighFreq:
    """Saves to remote storage one right after the other; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "highfreq"

    def begin(self, setting: Setting) -> ModelledJob:
        """A job that begins; see `System`."""
        stall_s = serialise_s(setting)
        return begin_with_remote_saves(setting, interval_s=interval_s(setting), stall_s=stall_s)


def interval_s(setting: Setting) -> float:
    """Seconds of training between two saves: those in which one is written, and at least those of
    an iteration (section 2.1: 1 / f >= max(t_ckpt, t_iter))."""
    return max(remote_s(setting), setting.failure_free_s)
