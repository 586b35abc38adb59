"""A run as its recorder is told of it: what workers, coordinator and injector say."""

from helpers.jobs import shaped_plan
from planaria.core.inject import Injection, parse_injection
from planaria.core.kinds import ChangeKind, LossKind
from planaria.core.messages import IterationDone, MeasuredSpan, WorkerReady
from planaria.core.records import (
    Candidate,
    Changed,
    Committed,
    Decided,
    Recovering,
    Running,
    Starting,
)
from planaria.observe.metrics import EventRecord
from planaria.observe.recorder import Recorder

SPAN = MeasuredSpan("compute", "0.0F0", 0.0, 0.5)
PLAN = shaped_plan((2,), 4)


def report(rank: int, iteration: int, *, epoch: int = 3, eager_s: float = 0.0) -> IterationDone:
    """What a rank says; rank 1 is the slow one, and the one that needs most memory."""
    return IterationDone(
        rank=rank,
        epoch=epoch,
        iteration=iteration,
        loss=2.5,
        num_samples=3,
        sample_digest="digest",
        seconds=1.0 + rank,
        stall_s=0.25 * rank,
        peak_bytes=100 * (rank + 1),
        ends=False,
        action_s={"F": 0.25, "B": 0.5},
        eager_s=eager_s,
        spans=(SPAN,) if rank == 1 else (),
    )


def commit_message(
    iteration: int,
    now_s: float,
    *,
    epoch: int = 3,
    ranks: tuple[int, ...] = (0, 1),
    ends: bool = False,
    eager_s: float = 0.0,
) -> Committed:
    return Committed(
        iteration=iteration,
        epoch=epoch,
        loss=2.5,
        num_samples=3,
        sample_digest="digest",
        ends=ends,
        reports=tuple(report(rank, iteration, epoch=epoch, eager_s=eager_s) for rank in ranks),
        now_s=now_s,
    )


def running(
    now_s: float,
    *,
    epoch: int = 3,
    pid: int = 70,
    regroup_s: float = 0.0,
    transfer_s: float = 0.0,
    members: tuple[int, ...] = (5, 6),
) -> Running:
    """Every rank is ready; ranks 1 and 0 are on nodes 6 and 5."""
    workers = {
        rank: WorkerReady(node=rank + 5, rank=rank, pid=pid + rank, pid_start=8.0, host="h", port=1)
        for rank in (1, 0)
    }
    return Running(
        epoch=epoch,
        plan=PLAN,
        members=members,
        workers=workers,
        materialised={0: 3, 1: 4},
        received_bytes=50 if transfer_s else 0,
        regroup_s=regroup_s,
        transfer_s=transfer_s,
        now_s=now_s,
        predicted_s=0.5,
    )


def recorder() -> Recorder:
    """A run that started at second 10 and began to train at second 14."""
    started = Recorder(start_s=10.0, predicted_s=0.5, predicted_peak_bytes=999)
    assert started.on_running(running(14.0)) == ()
    return started


def loss_message(
    now_s: float, *nodes: int, kind: str = "lost", is_forking: bool = False
) -> Recovering:
    return Recovering(
        epoch=4,
        kind=LossKind(kind),
        nodes=nodes,
        iteration=7,
        reason="its connection closed",
        lost_s=now_s,
        is_forking=is_forking,
    )


def decision_message(now_s: float, *, redone_samples: int = 0, iteration: int = 7) -> Decided:
    candidate = Candidate(
        policy="reinstantiate",
        answer="borrow",
        iteration_s=0.75,
        downtime_s=1.0,
        moving_s=0.0,
        pause_s=0.0,
        then_s=0.0,
        samples_at_risk=0.5,
        score=4.0,
    )
    return Decided(
        epoch=4,
        iteration=iteration,
        policy="reinstantiate",
        answer="borrow",
        candidates=(candidate,),
        plan=PLAN,
        predicted_s=0.75,
        predicted_downtime_s=1.0,
        predicted_transfer_s=0.75,
        transfer_bytes=50,
        redone_samples=redone_samples,
        detected_s=now_s,
    )


def change_message(*joining: int) -> Changed:
    """Nodes joined while training went on."""
    return Changed(
        epoch=4,
        kinds=dict.fromkeys(joining, ChangeKind.JOIN),
        iteration=7,
        policy="reinstantiate",
        answer="grow",
        candidates=(),
        plan=PLAN,
        predicted_s=0.75,
        predicted_pause_s=0.1,
        transfer_bytes=50,
        received_bytes=50,
        asked_s=17.0,
        pause_s=0.1,
        now_s=18.0,
    )


def starting(now_s: float) -> Starting:
    return Starting(epoch=4, num_nodes=2, now_s=now_s)


def recover(run: Recorder, *, redone_samples: int = 0) -> tuple[EventRecord, ...]:
    """A loss noticed at 20: answered at 21, told at 23, linked at 23.5, ready at 26."""
    run.on_recovering(loss_message(20.0, 6))
    run.on_decided(decision_message(21.0, redone_samples=redone_samples), predicted_peak_bytes=555)
    run.on_starting(starting(23.0))
    return run.on_running(running(26.0, epoch=4, pid=80, regroup_s=0.5, transfer_s=2.5))


def parts(run: Recorder, now_s: float) -> dict[str, float]:
    ledger = run.ledger.enter(run.ledger.category, now_s)
    return {name: seconds for name, seconds in ledger.parts().items() if seconds}


def kill(text: str = "kill:6@7.reduce") -> Injection:
    return parse_injection(text)
