"""Slow disks on demand: what is injected is felt where it says, and costs training nothing."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from helpers.acting_display import At
from helpers.chaos import (
    FAMILY,
    ITERATIONS,
    baseline_digests,
    chaos_job,
    check_survived,
    recoveries,
    run_under_faults,
)
from helpers.command import wait_for
from planaria.nodes.forkserver import ForkServer

STORE_S = 0.2


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param(
            (f"store={STORE_S}:@1", "kill:1@4", "leader:@6"), marks=pytest.mark.long, id="store"
        ),
        pytest.param(("disk=2:@4", "kill:1@4"), id="disk"),
        pytest.param(
            ("refuse=2:@1", "kill:1@4", "refuse=2:@7"), marks=pytest.mark.long, id="refuse"
        ),
        pytest.param(("refuse=2:@4", "kill:0,2@5"), id="refuse and go back"),
    ],
)
def test_a_slow_disk_changes_no_bit(
    specs: tuple[str, ...], tmp_path: Path, server: ForkServer
) -> None:
    """The store stays slow for processes that come later; records wait for the journal's disk. A
    coordinator that says the newest order again had ranks leave their last save out, if one before
    it was still being written. A store that refuses costs saves alone, and at the end some time.

    Where all have to go back, the first save is complete before the store refuses."""
    config = chaos_job(FAMILY, tmp_path / "run", server, nodes=4)
    config = replace(config, checkpoint=replace(config.checkpoint, persist_every=2))
    saves = Path(config.checkpoint.directory)
    goes_back = "kill:0,2@5" in specs
    wait = partial(wait_for, lambda: any(saves.glob("2-*/manifest.json")), what="a save")
    display = At({1: wait} if goes_back else {})

    result = run_under_faults(config, server, *specs, display=display)

    check_survived(result, specs, baseline_digests(server, ITERATIONS))
    (loss,) = (event for event in recoveries(result) if event.kind == "kill")
    if specs[0].startswith("store"):
        # Each rank writes some layers, one after the other; then the save is made complete.
        assert result.report.checkpoints["disk"]["checkpoint_s"] > 3 * STORE_S
    elif specs[0].startswith("disk"):
        assert loss.downtime_s > 1.0, "the record of members waited for the disk"
    else:
        assert any(event.kind == "refuse" and event.fired for event in result.report.events)
