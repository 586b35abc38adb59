"""What a run tells of the time until answers are ready ahead of need."""

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.core.cluster import NodesChanged, NodesLost
from planaria.job.replays import calibration
from planaria.job.replays.calibration import _look_ahead

LOST = NodesLost((3,), 0)


def event(at_s: float, *, foreseen: bool, lost: NodesLost | None = LOST, epoch: int = 0) -> Any:
    """An event that is noticed at a time; its epoch began at second 100, or at second 200."""
    inputs = SimpleNamespace(
        plan_epoch=epoch,
        is_foreseen=foreseen,
        lost=lost,
        changed=None if lost else NodesChanged((), ()),
    )
    return SimpleNamespace(noticed_at_s=at_s, over_at_s=-1.0, epoch=1, inputs=inputs)


@pytest.mark.parametrize(
    ("answered", "look_ahead_s"),
    [
        ([event(105.0, foreseen=True)], [5.0]),
        ([event(140.0, foreseen=True)], []),
        ([event(105.0, foreseen=False)], []),
        ([event(140.0, foreseen=False)], [40.0]),
        ([event(140.0, foreseen=False), event(160.0, foreseen=True)], [40.0, 60.0]),
        ([event(102.5, foreseen=True, lost=None), event(140.0, foreseen=True)], [2.5]),
    ],
    ids=["sooner", "bound above", "bound below", "later", "between", "better plan"],
)
def test_a_look_ahead_is_measured_by_a_better_plan_or_bounded_by_losses(
    answered: list[Any], look_ahead_s: list[float]
) -> None:
    """The default, 10 s, holds where it agrees with the bounds."""
    run: Any = SimpleNamespace(
        planned=SimpleNamespace(
            config=SimpleNamespace(resilience=SimpleNamespace(failures_ahead=2))
        ),
        iterations=(SimpleNamespace(epoch=0),),
        startup_s=100.0,
        events=answered,
    )

    assert _look_ahead(run, answered) == pytest.approx(look_ahead_s)


def test_the_answer_to_a_crash_is_no_answer_to_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until the worker has been forked anew: each simulated loss took as long."""

    def answered(lost: NodesLost, detect_s: float) -> Any:
        inputs = SimpleNamespace(lost=lost, changed=None)
        seconds = {"at_s": 5.0, "noticed_at_s": 5.01, "detect_s": detect_s, "recovery_s": 3.0}
        others = {"decide_s": 0.1, "regroup_s": 0.1, "transfer_s": 0.0}
        return SimpleNamespace(**seconds, **others, predicted_transfer_s=0.0, inputs=inputs)

    kill, crash = answered(NodesLost((3,), 0), 0.05), answered(NodesLost((), 0), 2.0)
    for name in ("_look_ahead", "_save_stalls", "_save_speeds", "_profile_factors"):
        monkeypatch.setattr(calibration, name, lambda *_: [])
    monkeypatch.setattr(calibration, "_num_switches", lambda _: 0)
    run: Any = SimpleNamespace(
        decisions=([kill], [crash]),
        iterations=(SimpleNamespace(seconds=1.0),),
        startup_s=1.0,
        events=(),
    )
    costs = {cost.name: cost for cost in calibration.calibrated_costs(run)}

    assert costs["answer_s"].value == pytest.approx(0.04)
    assert costs["answer_s"].num_events == 1
    assert costs["decide_s"].num_events == 2
