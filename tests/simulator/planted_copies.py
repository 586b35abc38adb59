"""Bugs to plant: rules about copies, saves and machines that are granted, each switched off."""

import math

import pytest

from planaria.coordinator import crashes, recovery
from planaria.coordinator import step as coordinator
from planaria.simulator.modelled import saver
from planaria.simulator.modelled.copying import CopyMemory


def spoilt_copies_are_read(patch: pytest.MonkeyPatch) -> None:
    """Nobody compares what is read with what was written."""
    patch.setattr(CopyMemory, "read", lambda self, layer, label: self.contents[layer, label])


def damaged_saves_are_used_again(patch: pytest.MonkeyPatch) -> None:
    """They are set aside, but the coordinator still counts on them."""
    patch.setattr(crashes, "without_spoilt", lambda state, _: state)


def sound_saves_are_given_up(patch: pytest.MonkeyPatch) -> None:
    """That one node cannot read a save counts for all."""
    patch.setattr(crashes, "with_sound", lambda _rules, state, _source: state)


def who_was_granted_is_not_taken(patch: pytest.MonkeyPatch) -> None:
    """All wait for a machine, and do not see that it has come."""
    patch.setattr(recovery, "replacements_at_loss", lambda *_: ())


def a_store_is_waited_for_without_end(patch: pytest.MonkeyPatch) -> None:
    """The job ends with its last save, or never."""
    patch.setattr(coordinator, "await_last_save", lambda _rules, state, _now_s: (state, ()))


def saves_are_not_skipped(patch: pytest.MonkeyPatch) -> None:
    """Training waits for the save before, however long that takes."""
    patch.setattr(saver, "_WAIT_S", math.inf)
