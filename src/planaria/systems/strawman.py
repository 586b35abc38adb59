"""Strawman: a save to remote storage every three hours, and a restart from it after a loss.

Source: Gemini (SOSP '23), section 7.2; three hours as in BLOOM's training (section 2.2).
Differs: the paper counts the time to serialise a save with HighFreq only; here Strawman takes it,
too. The rest is in remote_saves.py.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from planaria.systems.modelled_job import ModelledJob
from planaria.systems.remote_saves import begin_with_remote_saves, serialise_s
from planaria.systems.system import Setting

STRAWMAN_INTERVAL_S: Final = 3 * 3600.0


@dataclass(frozen=True, slots=True)
class Strawman:
    """Saves to remote storage now and then; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "strawman"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        stall_s = serialise_s(setting)
        return begin_with_remote_saves(
            setting, absent, interval_s=STRAWMAN_INTERVAL_S, stall_s=stall_s
        )
