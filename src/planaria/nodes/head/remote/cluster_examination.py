"""Examines the machines of a job, and the paths between them, for `planaria doctor HOST:PORT`.

Each machine is asked what it is like, and by the same exchange how far its clock is from the
head's. Then each two machines measure the paths between them, both ways. The pairs are taken in
rounds in which each machine is in one pair at most, as in a tournament. The head measures its paths
to the machines; that from a machine to the head is the connection over which it was asked.

All of it takes at most a minute. A path whose bandwidth is measured is busy for half a second, with
at most 128 MiB; one whose latency alone is measured gets 21 bytes and as many lengths.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from planaria.core.checkups import HEAD, ClusterCheckup, MachineCheckup, PathCheck
from planaria.core.machine_messages import (
    LINK_BUDGET_S,
    ExaminationRequested,
    LinkMeasured,
    LinkMeasureRequested,
    MachineExamined,
)
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.examination import versions_of_this_machine
from planaria.nodes.head.remote.link_classes import LinkClass, link_class
from planaria.nodes.head.remote.machine_handle import MachineHandle, in_time, measured_path
from planaria.transport.link_measurement import measured_link

_TIME_S_MAX: Final = 60.0
_TRAINING_NOTE: Final = (
    "bandwidth was not measured, so that the job is not disturbed; --bandwidth measures it all the "
    "same"
)


async def examine_machines(
    machines: Sequence[MachineHandle], *, can_load: Callable[[], bool]
) -> ClusterCheckup:
    """What the machines and the paths between them are like.

    Args:
        machines: machines that are connected.
        can_load: returns whether the bandwidth of a path may be measured now.
    """
    end_s = asyncio.get_running_loop().time() + _TIME_S_MAX
    examinations = [_examination(machine) for machine in machines]
    examined = await asyncio.gather(*examinations)
    measuring = _Paths(can_load, end_s=end_s)
    for machine, (_, latency_s) in zip(machines, examined, strict=True):
        if latency_s >= 0.0:
            path = PathCheck(source=machine.name, target=HEAD, latency_s=latency_s)
            measuring.paths.append(path)
        await measuring.measure_from_head(machine)
    for pairs in tournament(len(machines)):
        await asyncio.gather(
            *(measuring.measure_pair(machines[index], machines[other]) for index, other in pairs)
        )
    return ClusterCheckup(
        head_versions=versions_of_this_machine(),
        machines=tuple(checkup for checkup, _ in examined),
        paths=tuple(measuring.paths),
        num_paths_left=measuring.num_left,
        note="" if measuring.has_loaded_all else _TRAINING_NOTE,
    )


async def _examination(machine: MachineHandle) -> tuple[MachineCheckup, float]:
    """What a machine is like, and the latency of its connection; -1.0: it has not answered."""
    sent_s = time.time()
    answer = await in_time(machine.ask(ExaminationRequested(), MachineExamined))
    received_s = time.time()
    checkup = MachineCheckup(
        name=machine.name,
        host=machine.facts.host,
        domain=machine.facts.domain,
        node=machine.node,
        processor=machine.facts.processor,
        versions=machine.facts.versions,
    )
    if answer is None:
        return checkup, -1.0
    on_way_s = max(0.0, received_s - sent_s - (answer.sent_s - answer.received_s))
    offset_s = ((answer.received_s - sent_s) + (answer.sent_s - received_s)) / 2
    checkup = msgspec.structs.replace(
        checkup, checks=answer.checks, clock_offset_s=offset_s, clock_error_s=on_way_s / 2
    )
    return checkup, on_way_s / 2


class _Paths:
    """The paths that have been measured.

    Args:
        can_load: see `examine_machines`.
        end_s: time of the loop at which measurements end.

    Attributes:
        paths: results so far.
        num_left: number of paths for which there was no time.
        has_loaded_all: whether each path was to be measured with its bandwidth.
    """

    def __init__(self, can_load: Callable[[], bool], *, end_s: float) -> None:
        self.paths: list[PathCheck] = []
        self.num_left = 0
        self.has_loaded_all = True
        self._can_load = can_load
        self._end_s = end_s

    async def measure_pair(self, machine: MachineHandle, other: MachineHandle) -> None:
        """Measures both directions, unless two agents of one machine are meant."""
        if link_class(machine.facts, other.facts) is not LinkClass.MACHINE:
            for source, target in ((machine, other), (other, machine)):
                await self._measure(source.name, target, source.measure)

    async def measure_from_head(self, target: MachineHandle) -> None:
        """Measures the path from the head to a machine."""
        await self._measure(HEAD, target, _link_from_here)

    async def _measure(
        self,
        source: str,
        target: MachineHandle,
        measure: Callable[[LinkMeasureRequested], Awaitable[LinkMeasured | None]],
    ) -> None:
        if self._is_late():
            self.num_left += 1
            return
        budget_s = LINK_BUDGET_S if self._can_load() else 0.0
        self.has_loaded_all = self.has_loaded_all and budget_s > 0.0
        measured = await measured_path(
            source, measure, target, budget_s=budget_s, end_s=self._end_s
        )
        link = measured.link
        if link is None and self._is_late():  # It was broken off, which says nothing of the path.
            self.num_left += 1
            return
        self.paths.append(
            PathCheck(
                source=source,
                target=target.name,
                latency_s=link.latency_s if link else 0.0,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s if link else 0.0,
                problem=measured.reason,
            )
        )

    def _is_late(self) -> bool:
        return asyncio.get_running_loop().time() >= self._end_s


async def _link_from_here(question: LinkMeasureRequested) -> LinkMeasured:
    return await answer_of_thread(partial(measured_link, question), name="link")


def tournament(num_players: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of pairs, so that each two players meet once and none plays twice in a round.

    The first player keeps its place while the others move on by one: the circle method.
    """
    circle = [*range(num_players)] + ([-1] if num_players % 2 else [])  # -1: nobody.
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(index, other) for index, other in pairs if index >= 0 and other >= 0]
        circle[1:] = [circle[-1], *circle[1:-1]]
