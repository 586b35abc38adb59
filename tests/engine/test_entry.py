"""What a rank reads of a save when it enters an epoch."""

from pathlib import Path

import pytest

from planaria.checkpoint.disk.tiers import tier_of
from planaria.engine.entry import layers_on_disk
from planaria.errors import SpoiltError


def test_a_save_that_is_gone_is_missed_by_those_alone_who_need_it(tmp_path: Path) -> None:
    """All layers were live, and every rank complained of the save in each epoch, without end."""
    tier = tier_of(str(tmp_path))

    assert layers_on_disk(tier, "10-0", []) == {}
    assert layers_on_disk(tier, "", [3]) == {}
    with pytest.raises(SpoiltError):
        layers_on_disk(tier, "10-0", [3])
