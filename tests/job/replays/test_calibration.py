"""What a run tells of the costs of its recoveries."""

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.core.cluster import NodesChanged, NodesLost
from planaria.job.replays import calibration
from planaria.job.replays.calibration import MeasuredCost, _look_ahead

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


def answered_loss(**changes: Any) -> Any:
    """An event with the times of a loss that was answered."""
    times = {"at_s": 5.0, "noticed_at_s": 5.01, "detect_s": 0.05, "recovery_s": 3.0}
    phases = {"decide_s": 0.1, "regroup_s": 0.1, "transfer_s": 0.0, "predicted_transfer_s": 0.0}
    of_node = {"inputs": SimpleNamespace(lost=LOST, changed=None), "source_tier": "live"}
    return SimpleNamespace(**{**times, **phases, **of_node, **changes})


def costs_of(monkeypatch: pytest.MonkeyPatch, *losses: Any) -> dict[str, MeasuredCost]:
    """The costs of a run that had these losses, each of which was answered alone."""
    for name in ("_look_ahead", "_save_stalls", "_save_speeds", "_profile_factors"):
        monkeypatch.setattr(calibration, name, lambda *_: [])
    monkeypatch.setattr(calibration, "_num_switches", lambda _: 0)
    run: Any = SimpleNamespace(
        decisions=tuple([loss] for loss in losses),
        iterations=(SimpleNamespace(seconds=1.0),),
        startup_s=1.0,
        events=(),
    )
    return {cost.name: cost for cost in calibration.calibrated_costs(run)}


def test_the_answer_to_a_crash_is_no_answer_to_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until the worker has been forked anew: each simulated loss took as long."""

    def answered(lost: NodesLost, detect_s: float) -> Any:
        inputs = SimpleNamespace(lost=lost, changed=None)
        return answered_loss(inputs=inputs, detect_s=detect_s)

    kill, crash = answered(NodesLost((3,), 0), 0.05), answered(NodesLost((), 0), 2.0)
    costs = costs_of(monkeypatch, kill, crash)

    assert costs["answer_s"].value == pytest.approx(0.04)
    assert costs["answer_s"].num_events == 1
    assert costs["decide_s"].num_events == 2


def test_the_reading_of_a_save_is_no_cost_of_other_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes 60 s here, which no prediction has. Each simulated loss took 20 s to regroup, and
    one that goes back to a save read it besides."""
    live = answered_loss(source_tier="live", transfer_s=0.75, predicted_transfer_s=0.75)
    from_disk = answered_loss(source_tier="disk", transfer_s=60.0)
    costs = costs_of(monkeypatch, live, live, from_disk)

    assert costs["regroup_s"].value == pytest.approx(0.1)
    assert costs["regroup_s"].num_events == 3
