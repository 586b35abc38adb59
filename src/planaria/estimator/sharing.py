"""A schedule run in virtual time by ranks that share processors, as emulated nodes of one host do.

All busy threads share the processors equally: n busy threads on P processors each advance at
min(1, P / n) of their full speed, as under a fair kernel over some milliseconds. So a forward takes
longer while other ranks are busy, and an iteration never takes less than all work divided by P. A
rank that waits for a message uses no processor. With as many processors as ranks the result is that
of time.py.

The slowness of a slow node is separate from sharing: its actions get the same share of processors
as any other, but end only 1 / speed times as long after their start.

A reduction is work for all its ranks: each sends, receives and sums on RANK_THREADS threads for the
time that the link needs. Messages between stages take time on their links but no processor time,
because that is below one percent of the work between messages.

All busy threads advance by the same amount. So one running sum, `_Processors.served_s`, tells when
each job is done, and the next job to end is the top of a heap.
Complexity: O(actions * log(ranks)).

Source: processor sharing, Kleinrock, "Queueing Systems" (1976), volume 2, section 4.4.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

from planaria.schedule.action import (
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    Kind,
    Schedule,
    slots_of,
)
from planaria.schedule.lower import execution_order

# Busy threads of a rank during a reduction: one sends or sums, one receives. Measured.
RANK_THREADS: Final = 2


class LinkUse(NamedTuple):
    """A link direction between two hops, and the time of their message on it.

    Attributes:
        link: number of the link direction; -1: none.
        transfer_s: time for which the message occupies the link.
        latency_s: time from the end of the transfer to the arrival.
    """

    link: int
    transfer_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times of the actions of a schedule, by kind.

    Each kind has one entry per hop of each microbatch, in the order of `slots_of`; reductions have
    one entry per bucket.

    Attributes:
        durations_s: time of each action with a processor for itself, and of each transfer.
        link_uses: link direction and times of each message.
        speeds: speed of each rank's node; the times in `durations_s` already contain it.
    """

    durations_s: Mapping[Kind, Sequence[float]]
    link_uses: Mapping[Kind, Sequence[LinkUse]]
    speeds: Mapping[int, float]


class Times(NamedTuple):
    """Start and duration of each action, by kind as in `Costs`, and the end of the last one."""

    starts_s: Mapping[Kind, Sequence[float]]
    durations_s: Mapping[Kind, Sequence[float]]
    end_s: float


def shared_times(schedule: Schedule, costs: Costs, *, processors: int) -> Times:
    """The times of a schedule that is run by ranks which share the processors.

    Raises:
        DeadlockError: the schedule cannot finish.
    """
    for _ in execution_order(schedule):  # It raises if the schedule cannot finish.
        pass
    return _SharedRun(schedule, costs, processors).times()


def last_end_s(works_s: Iterable[float], *, processors: int) -> float:
    """The end of the last of these jobs, which begin together at 0 and share the processors."""
    end_s, before_s = 0.0, 0.0
    ascending = sorted(works_s)
    for index, work_s in enumerate(ascending):
        end_s += (work_s - before_s) / _rate(processors, len(ascending) - index)
        before_s = work_s
    return end_s


def _rate(processors: int, num_busy: int) -> float:
    """The fraction of full speed at which each of num_busy busy threads advances."""
    return min(1.0, processors / num_busy) if num_busy else 1.0


class _Job(NamedTuple):
    """Work on the processors: an action of a rank, or the reduction of a bucket (rank -1)."""

    rank: int
    kind: Kind
    slot: int
    num_threads: int


@dataclass(slots=True)
class _Processors:
    """Processors that all busy threads share equally.

    Attributes:
        number: number of processors.
        served_s: processor time so far of a thread that was always busy.
    """

    number: int
    now_s: float = 0.0
    served_s: float = 0.0
    _num_busy: int = 0
    _order: int = 0
    _jobs: list[tuple[float, int, _Job]] = field(default_factory=list)

    def begin(self, job: _Job, work_s: float) -> None:
        """Begins a job; work_s is the processor time that each of its threads needs."""
        self._order += 1  # If jobs end together, the one that began first comes first.
        heappush(self._jobs, (self.served_s + work_s, self._order, job))
        self._num_busy += job.num_threads

    def next_end_s(self) -> float:
        """End of the next job to end, if no other job begins; infinite if there is none."""
        if not self._jobs:
            return inf
        left_s = max(0.0, self._jobs[0][0] - self.served_s)
        return self.now_s + left_s / _rate(self.number, self._num_busy)

    def advance(self, now_s: float) -> None:
        """Moves the time forward to now_s; no job may end before that."""
        self.served_s += (now_s - self.now_s) * _rate(self.number, self._num_busy)
        self.now_s = now_s

    def end_next(self) -> _Job:
        """Moves the time forward to the end of the next job, and removes and returns the job."""
        self.now_s = self.next_end_s()
        self.served_s, _, job = heappop(self._jobs)
        self._num_busy -= job.num_threads
        return job


class _SharedRun:
    """The state of a run: the next action of each rank, and the messages sent."""

    def __init__(self, schedule: Schedule, costs: Costs, processors: int) -> None:
        self._schedule = schedule
        self._costs = costs
        self._slots = slots_of(schedule.routes)
        self._processors = _Processors(processors)
        self._starts_s = {kind: [0.0] * len(each_s) for kind, each_s in costs.durations_s.items()}
        self._durations_s = {kind: list(each_s) for kind, each_s in costs.durations_s.items()}
        self._next = dict.fromkeys(schedule.actions, 0)  # Next action, by rank.
        self._links_s: defaultdict[int, float] = defaultdict(float)
        self._arrivals_s: dict[tuple[Kind, int], float] = {}  # By (receive, slot).
        self._waiting: dict[tuple[Kind, int], int] = {}
        self._wakes: list[tuple[float, int]] = []  # (when it goes on, rank)
        # Number of ranks that have not handed over each bucket; and by rank its next buckets.
        actions = (action for of_rank in schedule.actions.values() for action in of_rank)
        self._num_missing = Counter(action.bucket for action in actions if action.kind is REDUCE)
        self._pending_buckets: defaultdict[int, deque[int]] = defaultdict(deque)
        for index, bucket in enumerate(schedule.buckets):
            for rank in bucket.ranks:
                self._pending_buckets[rank].append(index)

    def times(self) -> Times:
        """Runs the schedule to its end."""
        for rank in self._schedule.actions:
            self._resume(rank)
        while True:
            wake_s = self._wakes[0][0] if self._wakes else inf
            end_s = self._processors.next_end_s()
            if wake_s == end_s == inf:
                break
            if wake_s <= end_s:
                self._processors.advance(wake_s)
                self._resume(heappop(self._wakes)[1])
            else:
                self._end(self._processors.end_next())
        assert all(
            len(self._schedule.actions[rank]) == next_index
            for rank, next_index in self._next.items()
        )
        return Times(self._starts_s, self._durations_s, self._processors.now_s)

    def _end(self, job: _Job) -> None:
        now_s = self._processors.now_s
        duration_s = now_s - self._starts_s[job.kind][job.slot]
        if job.kind is not REDUCE:
            slowed_s = duration_s / self._share_busy(job.rank)
            self._durations_s[job.kind][job.slot] = slowed_s
            if slowed_s > duration_s:
                heappush(self._wakes, (now_s - duration_s + slowed_s, job.rank))
            else:
                self._resume(job.rank)
            return
        self._durations_s[REDUCE][job.slot] = duration_s
        ranks = self._schedule.buckets[job.slot].ranks
        for rank in ranks:
            self._pending_buckets[rank].popleft()
        for bucket in sorted(
            {self._pending_buckets[rank][0] for rank in ranks if self._pending_buckets[rank]}
        ):
            self._reduce(bucket)

    def _share_busy(self, rank: int) -> float:
        """The part of an action's time in which it uses a processor; below 1 on a slow node."""
        return min(1.0, self._costs.speeds[rank])

    def _resume(self, rank: int) -> None:
        """Takes the next actions of a rank, until one of them takes time or has to wait."""
        actions, now_s = self._schedule.actions[rank], self._processors.now_s
        while self._next[rank] < len(actions):
            kind, microbatch, hop, bucket = actions[self._next[rank]]
            slot = bucket if kind is REDUCE else self._slots[microbatch] + hop
            if kind in (RECEIVE_FORWARD, RECEIVE_BACKWARD):
                if not self._has_arrived(rank, kind, slot):
                    return
                self._next[rank] += 1
                continue
            self._next[rank] += 1
            if kind is REDUCE:
                self._num_missing[bucket] -= 1
                self._reduce(bucket)
            elif kind is SEND_FORWARD:
                self._send(kind, slot, (RECEIVE_FORWARD, slot + 1))
            elif kind is SEND_BACKWARD:
                self._send(kind, slot, (RECEIVE_BACKWARD, slot - 1))
            else:
                self._starts_s[kind][slot] = now_s
                work_s = self._costs.durations_s[kind][slot] * self._share_busy(rank)
                self._processors.begin(_Job(rank, kind, slot, num_threads=1), work_s)
                return

    def _has_arrived(self, rank: int, kind: Kind, slot: int) -> bool:
        """Whether a message has arrived; if not, the rank is woken when it arrives."""
        arrival_s = self._arrivals_s.get((kind, slot))
        if arrival_s is None:
            self._waiting[kind, slot] = rank
            return False
        if arrival_s > self._processors.now_s:
            heappush(self._wakes, (arrival_s, rank))
            return False
        return True

    def _send(self, kind: Kind, slot: int, receive: tuple[Kind, int]) -> None:
        use = self._costs.link_uses[kind][slot]
        start_s = max(self._processors.now_s, self._links_s[use.link])
        self._starts_s[kind][slot] = start_s
        self._links_s[use.link] = end_s = start_s + use.transfer_s
        self._arrivals_s[receive] = end_s + use.latency_s
        if receive in self._waiting:
            heappush(self._wakes, (end_s + use.latency_s, self._waiting.pop(receive)))

    def _reduce(self, bucket: int) -> None:
        """Begins a reduction if all its ranks are ready and have finished the buckets before."""
        ranks = self._schedule.buckets[bucket].ranks
        is_first = all(self._pending_buckets[rank][0] == bucket for rank in ranks)
        if self._num_missing[bucket] or not is_first:
            return
        self._starts_s[REDUCE][bucket] = self._processors.now_s
        job = _Job(-1, REDUCE, bucket, num_threads=RANK_THREADS * len(ranks))
        self._processors.begin(job, self._costs.durations_s[REDUCE][bucket])
