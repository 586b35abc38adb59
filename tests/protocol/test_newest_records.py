"""What a launcher remembers of its coordinators' records."""

import msgspec

from planaria.core.records import Committed, Members, Outcome, Recorded
from planaria.protocol.newest_records import NewestRecords

MEMBERS = Members(epoch=3, term=1, nodes=(0, 1, 2), gone=(7,))


def commit(iteration: int, *, since: int = -1) -> Committed:
    return Committed(
        iteration=iteration,
        epoch=3,
        loss=0.0,
        num_samples=0,
        sample_digest="",
        ends=False,
        reports=(),
        now_s=0.0,
        since=since,
    )


def test_an_iteration_counts_once_until_the_job_goes_back() -> None:
    """A coordinator reports again what the one before it had reported."""
    records = NewestRecords(MEMBERS)

    assert [records.add_commit(commit(iteration)) for iteration in (0, 1, 1, 0, 2)] == [
        *(True, True, False, False, True)
    ]
    assert records.add_commit(commit(1, since=3))
    assert not records.add_commit(commit(2))


def test_a_coordinator_that_only_saves_begins_with_the_live_members() -> None:
    """Its epoch is one that no node knows, and so is that of a second such coordinator."""
    records = NewestRecords(Members(epoch=0, term=-1, nodes=(0,)))
    records.add_records(Recorded(members=MEMBERS))
    records.add_records(Recorded(outcome=Outcome(epoch=3, iteration=5)))
    records.add_commit(msgspec.structs.replace(commit(4), ends=True, is_trained=True))

    first = records.rescue("the disk is full", term=2, live_nodes=(0, 2, 9))
    second = records.rescue("the disk is full", term=3, live_nodes=(2,))

    assert (first.term, first.members.epoch, first.members.nodes) == (2, 4, (0, 2))
    assert first.members.gone == (1, 7)
    assert first.outcome == Outcome(epoch=3, iteration=5)
    assert first.progress is not None
    assert first.progress.num_committed == 5
    assert (first.progress.ends, first.progress.is_trained) == (True, True)
    assert (second.members.epoch, second.members.nodes) == (5, (2,))
    assert second.members.gone == (0, 1, 7)
    assert records.nodes == (2,)
