"""Nothing that is decided depends on what the clocks of the nodes say."""

import pytest

from helpers.cases import every_nth
from planaria.simulator.loop import Process
from planaria.simulator.simulation import run

# Its sum with a moment of a simulation is rounded to a ten-thousand-millionth of a second.
SHIFT_S = 2.0**20


@pytest.mark.parametrize("seed", every_nth(3, zip((3, 11, 60, 131, 7))))
def test_jobs_under_faults_go_the_same_way_by_shifted_clocks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node's clock, which its agent and workers read, is ahead of the head's by days."""
    before = run(seed)
    own_now_s = Process.now_s

    def shifted_now_s(process: Process) -> float:
        now_s: float = own_now_s.__get__(process)
        return now_s + SHIFT_S * (process.place + 1)

    monkeypatch.setattr(Process, "now_s", property(shifted_now_s))
    after = run(seed)

    assert not after.violations
    assert after.ending == before.ending
    assert [entry[1:] for entry in after.log] == [entry[1:] for entry in before.log]
    # Seconds that were measured are rounded otherwise, so a record may have a digit more.
    assert [entry[0] for entry in after.log] == pytest.approx(
        [entry[0] for entry in before.log], abs=1e-4
    )
