"""A head examines its machines and the paths between them: what it asks of them, and when."""

from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.heads import runs
from helpers.joined_machines import Cluster, cluster
from planaria.core.checkups import HEAD, ClusterCheckup
from planaria.core.job import JobConfig, ModelConfig
from planaria.core.machine_messages import ExaminationRequested, ToMachine
from planaria.nodes.head.remote import cluster_examination, machine_handle
from planaria.nodes.head.remote.cluster_examination import examine_machines, tournament
from planaria.transport import link_measurement

JOB = JobConfig(model=ModelConfig(kind="paced", profile="gpt3-xl"))


@given(st.integers(min_value=0, max_value=30))
def test_each_two_machines_meet_once_and_none_is_in_two_pairs_at_once(num_machines: int) -> None:
    rounds = list(tournament(num_machines))

    met = Counter(frozenset(pair) for pairs in rounds for pair in pairs)
    assert met == Counter(map(frozenset, combinations(range(num_machines), 2)))
    for pairs in rounds:
        busy = [machine for pair in pairs for machine in pair]
        assert len(busy) == len(set(busy))


async def join(made: Cluster, *hosts: str) -> None:
    """Machines at these addresses come."""
    for host in hosts:
        made.join(host=host)
        await made.wait_ready(len(made.ends))


async def examined(made: Cluster, *, can_load: bool) -> ClusterCheckup:
    return await examine_machines(made.machines.connected, can_load=lambda: can_load)


@runs
async def test_each_machine_is_examined_and_each_path_is_measured_both_ways(
    tmp_path: Path,
) -> None:
    """Between the machines, from the head, and to it; their clock is that of the head here."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, "127.0.0.2", "127.0.0.3", "127.0.0.4")
        checkup = await examined(made, can_load=True)

    names = [machine.name for machine in checkup.machines]
    ways = {(path.source, path.target) for path in checkup.paths}
    assert len(names) == 3
    assert ways == {(a, b) for a in (*names, HEAD) for b in (*names, HEAD) if a != b}
    assert [path.problem for path in checkup.paths] == [""] * 12
    measured = [path for path in checkup.paths if path.target != HEAD]
    assert all(path.bandwidth_bytes_per_s > 0.0 for path in measured)
    assert all(path.latency_s > 0.0 for path in checkup.paths)
    assert (checkup.note, checkup.num_paths_left) == ("", 0)
    for machine in checkup.machines:
        assert {"Python", "clock", "open files"} <= {check.subject for check in machine.checks}
        assert abs(machine.clock_offset_s) <= machine.clock_error_s + 1e-3


@runs
async def test_a_job_that_trains_is_not_disturbed(tmp_path: Path) -> None:
    """Latency alone is measured then."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, "127.0.0.2", "127.0.0.3")
        checkup = await examined(made, can_load=False)

    assert len(checkup.paths) == 6
    assert not any(path.bandwidth_bytes_per_s for path in checkup.paths)
    assert "--bandwidth" in checkup.note


@runs
async def test_two_agents_of_one_machine_have_no_path_between_them(tmp_path: Path) -> None:
    async with cluster(tmp_path, JOB) as made:
        await join(made, "127.0.0.2", "127.0.0.2")
        checkup = await examined(made, can_load=False)

    assert all(HEAD in (path.source, path.target) for path in checkup.paths)


@runs
async def test_paths_that_are_broken_are_told_with_their_reason(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, JOB) as made:
        await join(made, "127.0.0.2", "127.0.0.3")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link_measurement, "listening_socket", refuse)
            checkup = await examined(made, can_load=False)

    broken = [path for path in checkup.paths if path.target != HEAD]
    assert len(broken) == 4
    assert all("opens no port" in path.problem for path in broken)


@runs
async def test_what_there_is_no_time_for_is_counted(tmp_path: Path) -> None:
    """However many machines there are, the user gets an answer after a minute."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, "127.0.0.2", "127.0.0.3", "127.0.0.4")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster_examination, "_TIME_S_MAX", 0.0)
            checkup = await examined(made, can_load=True)

    assert [path.target for path in checkup.paths] == [HEAD] * 3
    assert checkup.num_paths_left == 9


@runs
async def test_a_machine_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    async with cluster(tmp_path, JOB) as made:
        await join(made, "127.0.0.2", "127.0.0.3")
        silent, _ = made.machines.connected
        with pytest.MonkeyPatch.context() as patch:
            # The other machine has to answer in time.
            patch.setattr(machine_handle, "ANSWER_TIMEOUT_S", 2.0)
            patch.setattr("planaria.nodes.machine.checks_of_this_machine", lambda _: ())
            patch.setattr(silent, "tell", lambda _: None)
            checkup = await examined(made, can_load=False)

    errors_s = [machine.clock_error_s for machine in checkup.machines]
    assert errors_s[0] == -1.0
    assert errors_s[1] >= 0.0
    assert f"{silent.name} did not answer" in {path.problem for path in checkup.paths}


@runs
async def test_a_machine_that_does_not_answer_at_the_end_is_not_waited_for(tmp_path: Path) -> None:
    """For up to half a minute more than the minute that the user is told."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, "127.0.0.2", "127.0.0.3")
        silent, _ = made.machines.connected
        really_tell = silent.tell

        def tell(message: ToMachine) -> None:
            if isinstance(message, ExaminationRequested):
                really_tell(message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine_handle, "ANSWER_TIMEOUT_S", 1e6)
            patch.setattr(cluster_examination, "_TIME_S_MAX", 0.3)
            patch.setattr(silent, "tell", tell)
            checkup = await examined(made, can_load=False)

    assert checkup.num_paths_left == 4
    assert not any(path.problem for path in checkup.paths)


def refuse(_: str) -> None:
    raise OSError("no descriptors are left")
