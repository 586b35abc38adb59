"""Bugs to plant: rules about copies, saves and machines that are granted, each switched off."""

import pytest

from planaria.coordinator import crashes, recovery
from planaria.simulator.copying import CopyMemory


def spoilt_copies_are_read(patch: pytest.MonkeyPatch) -> None:
    """Nobody compares what is read with what was written."""
    patch.setattr(CopyMemory, "read", lambda self, layer, label: self.contents[layer, label])


def damaged_saves_are_used_again(patch: pytest.MonkeyPatch) -> None:
    """They are set aside, but the coordinator still counts on them."""
    patch.setattr(crashes, "without_spoilt", lambda state, _: state)


def who_was_granted_is_not_taken(patch: pytest.MonkeyPatch) -> None:
    """All wait for a machine, and do not see that it has come."""
    patch.setattr(recovery, "taken_at_loss", lambda *_: ())
