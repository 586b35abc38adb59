"""What a node without a head says of what it has saved, and when it ends."""

import asyncio

from planaria.core.messages import PartSaved, Raised, WorkerFailed
from planaria.nodes.part_reports import PartReports

PLACE = "s3://bucket/job"


def failure(rank: int) -> WorkerFailed:
    raised = Raised(error="MemoryError", message="no memory")
    return WorkerFailed(node=0, rank=rank, traceback="", raised=raised)


def wait_done(reports: PartReports, *, silent_s_max: float = 60.0) -> None:
    asyncio.run(reports.wait_done(silent_s_max=silent_s_max))


def test_the_layers_of_all_workers_are_counted() -> None:
    reports = PartReports((2, 3))
    reports.add(PartSaved(rank=2, iteration=17, num_layers=1))
    reports.add(PartSaved(rank=2, iteration=17, num_layers=2, is_done=True))
    reports.add(PartSaved(rank=3, iteration=17, num_layers=3, is_done=True))
    wait_done(reports)

    assert reports.has_saved
    assert "5 layers of iteration 17" in reports.text(PLACE)
    assert PLACE in reports.text(PLACE)
    assert "--resume" in reports.text(PLACE)


def test_what_one_worker_could_not_save_is_told_and_the_rest_counts() -> None:
    reports = PartReports((2, 3))
    reports.add(PartSaved(rank=2, iteration=17, num_layers=2, is_done=True))
    reports.add(failure(3))
    wait_done(reports)

    assert reports.has_saved
    assert "no memory" in reports.text(PLACE)
    assert "2 layers of iteration 17" in reports.text(PLACE)


def test_a_worker_that_ended_or_stays_silent_has_saved_nothing() -> None:
    """The node ends all the same."""
    reports = PartReports((2, 3))
    reports.add_exit(2)
    wait_done(reports, silent_s_max=0.01)

    assert not reports.has_saved
    assert "its process ended" in reports.text(PLACE)
    assert "did not answer in time" in reports.text(PLACE)


def test_a_node_that_may_not_write_says_why() -> None:
    reports = PartReports((2,))
    reports.add(PartSaved(rank=2, is_done=True, reason="epoch 3 has begun without node 2"))
    wait_done(reports)

    assert not reports.has_saved
    assert "epoch 3 has begun without node 2" in reports.text(PLACE)


def test_a_worker_that_was_done_before_it_ended_has_saved() -> None:
    reports = PartReports((2,))
    reports.add(PartSaved(rank=2, iteration=17, num_layers=2, is_done=True))
    reports.add_exit(2)

    assert reports.has_saved
