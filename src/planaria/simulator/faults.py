"""Faults, drawn from a seed: what happens, to which node, and when.

Each run first draws which kinds of faults it has at all (swarm testing), so that rare combinations
occur. A fault strikes at a given time, or when somebody is at a given place for the n-th time: so a
window of a millisecond is hit as often as one of a second.

Source: Groce et al., Swarm Testing (ISSTA '12).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Final, Protocol

from planaria.coordinator.membership.arrivals import arrival_s
from planaria.core.messages import Blame
from planaria.simulator.cluster import LAUNCHER, SimulatedCluster
from planaria.simulator.modelled.agent import ANYWHERE as AT_ANY_PLACE
from planaria.simulator.scenario import LEASE_S, TIMEOUT_S, Conduct


class FaultKind(Enum):
    """Kinds of faults."""

    KILL = "the node is killed"
    CRASH = "a worker is killed"
    HANG = "the node stands still for a while"
    STALL = "a worker stands still for a while"
    LEADER = "the coordinator is killed"
    REPLACE = "the coordinator stands still, another leads, and then the old one goes on"
    PAUSE = "the coordinator stands still for a while"
    CUT = "two nodes are cut off from each other for a while"
    ISOLATE = "a node is cut off from all others for a while, but not from the coordinator"
    DETACH = "the node is cut off from the coordinator for a while"
    BREAK = "the connection of the agent breaks, and is made anew"
    SLOW = "messages take long, and so pass those of other connections"
    DISK = "the store's disk is slow"
    FULL = "the store's disk is full, for good"
    STUCK = "the store's disk does nothing for a while"
    CLOCK = "a clock goes wrong by some percent"
    STOP = "the user asks to stop"
    JOIN = "a node comes"
    SPOIL = "all copies in the memory of a worker's node are spoilt"
    DAMAGE = "the newest save is damaged"
    NOTICE = "the node is told that it will be gone, and is killed then"
    DRAIN = "the user asks that the job go on without the node"
    RAISE = "the code in the node's workers raises for a while, and it is not the job's fault"
    MISTAKE = "the code in one of the node's workers raises, and it is the job's fault"


_LAST: Final = (FaultKind.HANG, FaultKind.STALL, FaultKind.DETACH)  # Some of these last for ever.
_LOSSES: Final = (
    *(FaultKind.KILL, FaultKind.CRASH, FaultKind.HANG, FaultKind.STALL),
    *(FaultKind.CUT, FaultKind.ISOLATE, FaultKind.DETACH, FaultKind.BREAK),
)
_OF_COPIES: Final = (FaultKind.SPOIL, FaultKind.DAMAGE)
_OF_CODE: Final = (FaultKind.RAISE, FaultKind.MISTAKE)
_NOT_OTHERS: Final = (*_LOSSES, *_OF_COPIES, *_OF_CODE, FaultKind.FULL, FaultKind.STUCK)
_PLACES: Final = ("layers", "layers", "start", "step", AT_ANY_PLACE)  # Where code raises.
# Faults after which the struck node, or any node, may be evicted; faults that make nodes drain.
LOOK_LIKE_LOSS: Final = (FaultKind.KILL, FaultKind.HANG, FaultKind.DETACH, FaultKind.BREAK)
ANYWHERE: Final = (FaultKind.CUT, FaultKind.ISOLATE, FaultKind.SLOW)
ASKED: Final = (FaultKind.NOTICE, FaultKind.DRAIN)
# "vector" is the place of the first rank that holds a commit vector: for a while it alone does.
TRAINING: Final = (
    *("start", "backward", "reduce", "commit", "vector", "vector", "vector"),
    *("optimizer", "save", "recorded node"),
)
RECOVERING: Final = (
    *("answer", "regroup", "transfer", "resume", "detect", "decide"),
    *("recorded members", "recorded outcome", "recorded plan"),
)
LASTS_S: Final = (0.005, 0.05, 0.5, 2.0, LEASE_S + 0.5, 2 * LEASE_S + 1.0, 4 * LEASE_S)
THERE: Final = -1  # The node that is at the fault's place.
BEFORE: Final = -2  # The node that was at the place of the previous fault.
FAULTS_S_MAX: Final = 12.0
_NUM_FAULTS_MAX: Final = 6
_CHANGING: Final = (
    *("recorded members", "recorded members", "regroup", "transfer", "resume", "start"),
    *("commit", "vector", "optimizer", "recorded plan"),
)
_WITNESS_SHARE: Final = 0.2
_CHANGE_SHARE: Final = 0.2
_CONNECTED_S: Final = 0.5
_FIRST_WRITES: Final = 8  # Writes until the first nodes are admitted, most of them in sequence.
_COMING_S: Final = 0.03
_FULL_SHARE: Final = 0.05
_STUCK_SHARE: Final = 0.1
_REPLACED_S_MIN: Final = 0.5  # Another must lead before the old one goes on and evicts everybody.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that strikes after `at_s`, or `delay_s` after somebody is at `place` for the
    `count`-th time.

    Attributes:
        node: node that it strikes; or THERE, or BEFORE.
        other: second node of a cut; otherwise the number that picks a worker of the node.
        lasts_s: duration; infinity: for ever.
        breaks: whether connections break as well.
        follows: whether times and counts start when the fault before it strikes, not with the run.
        blame: party whose fault it is that code raises.
        where: place of a worker at which code raises.
    """

    kind: FaultKind
    node: int
    other: int
    lasts_s: float
    breaks: bool
    at_s: float = -1.0
    place: str = ""
    count: int = 0
    delay_s: float = 0.0
    follows: bool = False
    blame: Blame = "node"
    where: str = "layers"

    def __str__(self) -> str:
        when = f"after {self.at_s:.3f} s"
        if self.place:
            when = f"{self.delay_s * 1000:.1f} ms after {self.place!r} no. {self.count}"
        then = "then " if self.follows else ""
        names = {THERE: "whoever is there", BEFORE: "whoever was there before"}
        whom = names.get(self.node, f"node {self.node}")
        what = f"{self.kind.name.lower()} of {whom} (other: {self.other}) for {self.lasts_s} s"
        if self.kind in _OF_CODE:
            what += f", {self.blame} at {self.where}"
        return f"{then}{when}: {what}{', breaking connections' if self.breaks else ''}"


def drawn_faults(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """The faults of a run."""
    losses = [kind for kind in _LOSSES if rng.random() < 0.5] or [FaultKind.KILL]
    others = [kind for kind in FaultKind if kind not in _NOT_OTHERS and rng.random() < 0.3]
    # A replaced coordinator that runs again may end leases while the new one is paused.
    if FaultKind.REPLACE in others:
        others = [kind for kind in others if kind is not FaultKind.PAUSE]
    faults = []
    for _ in range(rng.randint(1, _NUM_FAULTS_MAX)):
        kinds = losses if rng.random() < 0.65 or not others else others
        faults.append(_drawn(rng, rng.choice(kinds), num_nodes))
    share = rng.random()
    if share < _WITNESS_SHARE:
        return (*witness_lost(rng, num_nodes), *faults[4:])
    if share < _WITNESS_SHARE + _CHANGE_SHARE:
        return (*change_struck(rng, num_nodes), *faults[2:])
    return tuple(faults)


def more_faults(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """Nothing, or (in half of the runs) 1 to 3 faults that may strike copies, saves and standby
    nodes as well.

    Args:
        num_nodes: number of nodes, those on standby included.
    """
    if rng.random() < 0.5:
        return ()
    kinds = (*_OF_COPIES, *_OF_COPIES, FaultKind.KILL, FaultKind.CRASH)
    return tuple(_drawn(rng, rng.choice(kinds), num_nodes) for _ in range(rng.randint(1, 3)))


def drawn_conduct(rng: Random) -> Conduct:
    """The behaviour of the disk or store of saves: good in two of three runs."""
    if rng.random() < 2.0 / 3.0:
        return Conduct()
    refuses, hangs = rng.choice(((0.0, 0.0), (0.3, 0.0), (1.0, 0.0), (0.0, 0.2), (0.2, 0.1)))
    return Conduct(
        at_s=rng.choice((0.0, 0.0, rng.random(), rng.random() * FAULTS_S_MAX)),
        lasts_s=rng.choice((0.5, 3.0, 10.0, math.inf)),
        late_s=rng.choice((0.02, 0.2, 1.0, 2.0 * TIMEOUT_S)),
        refuses=refuses,
        hangs=hangs,
    )


def disk_faults(rng: Random) -> tuple[Fault, ...]:
    """Nothing, or a disk that is full from some time on (in few runs; it ends the job) or does
    nothing for a while. The coordinator may be lost soon after that."""
    share, at_s = rng.random(), rng.random() * FAULTS_S_MAX
    if share > _FULL_SHARE + _STUCK_SHARE:
        return ()
    is_full = share <= _FULL_SHARE
    fault = Fault(
        kind=FaultKind.FULL if is_full else FaultKind.STUCK,
        node=0,
        other=0,
        lasts_s=math.inf if is_full else rng.choice((0.5, 2.0, LEASE_S + 0.5, 2 * LEASE_S + 1.0)),
        breaks=False,
        at_s=at_s,
    )
    if rng.random() < 0.5:
        return (fault,)
    after_s = rng.random() * rng.choice((0.05, 0.5, 3.0))
    loss = replace(fault, kind=FaultKind.LEADER, lasts_s=0.0, at_s=after_s, follows=True)
    return (fault, loss)


def disk_filled(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """A disk of records that is full while the job trains, and in most runs a loss of the
    coordinator soon after that."""
    del num_nodes
    filled = Fault(
        kind=FaultKind.FULL,
        node=0,
        other=0,
        lasts_s=math.inf,
        breaks=False,
        at_s=_CONNECTED_S + 3.0 * rng.random(),
    )
    loss = replace(filled, kind=FaultKind.LEADER, at_s=rng.random() * 0.5, follows=True)
    return (filled, *((loss,) if rng.random() < 0.8 else ()))


def code_raises(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """One to three faults that make the code in workers raise."""
    kinds = (FaultKind.RAISE,) * rng.randint(1, 3)
    if rng.random() < 0.3:
        kinds = (*kinds[1:], FaultKind.MISTAKE)
    faults = [
        replace(
            _drawn(rng, kind, num_nodes),
            where=rng.choice(_PLACES),
            blame=rng.choice(("node", "memory")),
        )
        for kind in kinds
    ]
    if len(faults) > 1 and rng.random() < 0.5:  # The second one on another node at the same time.
        first, second, *more = faults
        second = replace(second, at_s=rng.random() * 0.01, place="", follows=True, node=first.other)
        second = replace(second, blame=first.blame, lasts_s=first.lasts_s)
        faults = [first, second, *more]
    return tuple(faults)


def raising_faults(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """The faults of `code_raises` in 3 of 10 runs, otherwise nothing."""
    return code_raises(rng, num_nodes) if rng.random() >= 0.7 else ()


def witness_lost(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """Four faults: the only rank that has a commit vector is isolated, another node is lost, the
    holder is lost in the recovery, and then a node or the coordinator.

    By chance this happens only once in thousands of runs.
    """
    ends = (FaultKind.KILL, FaultKind.CRASH, FaultKind.BREAK)
    alone = replace(
        _drawn(rng, FaultKind.ISOLATE, num_nodes),
        at_s=-1.0,
        place="vector",
        count=rng.randint(1, 5),
        delay_s=0.0,
        follows=False,
        node=THERE,
        breaks=False,
    )
    lost = replace(
        _drawn(rng, rng.choice(ends), num_nodes),
        place="",
        at_s=0.0,
        follows=True,
        node=rng.randrange(num_nodes),
    )
    witness = replace(_in_recovery(rng, rng.choice(ends), num_nodes), node=BEFORE)
    then = _in_recovery(rng, rng.choice((*ends, *(FaultKind.LEADER,) * 3)), num_nodes)
    return alone, lost, witness, then


def change_struck(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """A node that joins or is asked to leave, and a fault while that change is being made."""
    asked = rng.choice((FaultKind.JOIN, FaultKind.JOIN, FaultKind.DRAIN, FaultKind.NOTICE))
    first = replace(
        _drawn(rng, asked, num_nodes),
        place="",
        at_s=_CONNECTED_S + rng.random(),
        lasts_s=rng.choice((0.5, 2.0, 10.0)),
        node=rng.randrange(num_nodes),
        follows=False,
    )
    kind = rng.choice((*_LOSSES, *(FaultKind.LEADER,) * 3))
    then = replace(
        _drawn(rng, kind, num_nodes),
        at_s=-1.0,
        place=rng.choice(_CHANGING),
        count=rng.randint(1, 4),
        delay_s=rng.choice((0.0, 0.001, 0.005, 0.05)),
        follows=True,
        node=rng.choice((THERE, rng.randrange(num_nodes))),
    )
    return first, then


def _in_recovery(rng: Random, kind: FaultKind, num_nodes: int) -> Fault:
    """A fault in the recovery from the one before it."""
    return replace(
        _drawn(rng, kind, num_nodes),
        at_s=-1.0,
        place=rng.choice(RECOVERING),
        count=rng.randint(1, 2),
        delay_s=rng.choice((0.0, 0.001)),
        follows=True,
        node=rng.randrange(num_nodes),
    )


def held_back(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """A node that stands still or is cut off for ever, most likely before anybody heard of it; in
    half of the runs other faults too."""
    alone = replace(
        _drawn(rng, rng.choice((FaultKind.HANG, FaultKind.DETACH)), num_nodes),
        at_s=rng.random() * _COMING_S,
        place="",
        node=rng.randrange(num_nodes),
        lasts_s=math.inf,
        breaks=False,
        follows=False,
    )
    return (alone, *(drawn_faults(rng, num_nodes) if rng.random() < 0.5 else ()))


def _drawn(rng: Random, kind: FaultKind, num_nodes: int) -> Fault:
    lasts_s = rng.choice(LASTS_S)
    if kind in _LAST and rng.random() < 0.2:
        lasts_s = math.inf
    node = rng.randrange(num_nodes)
    fault = Fault(
        kind=kind,
        node=node,
        other=(node + rng.randint(1, num_nodes - 1)) % num_nodes,
        lasts_s=lasts_s,
        breaks=rng.random() < 0.5,
        follows=rng.random() < 0.5,
    )
    if rng.random() < 0.3:
        within_s = rng.choice((0.01, 1.0)) if fault.follows else FAULTS_S_MAX
        return replace(fault, at_s=rng.random() * within_s)
    is_recovering = fault.follows and rng.random() < 0.7
    place = rng.choice(RECOVERING if is_recovering else TRAINING)
    return replace(
        fault,
        node=rng.choice((node, node, THERE, BEFORE if fault.follows else THERE)),
        place=place,
        count=rng.randint(1, 6 if fault.follows or place == "vector" else 24),
        delay_s=rng.choice((0.0, 0.0, 0.0005, 0.002, 0.01)),
    )


class Slowed(Protocol):
    """Something of which a share of the operations is slow."""

    slow_share: float


class Faults:
    """Injects faults into a cluster.

    Attributes:
        struck: faults that have struck: (seconds, fault, node).
    """

    def __init__(self, cluster: SimulatedCluster, faults: tuple[Fault, ...]) -> None:
        self.struck: list[tuple[float, Fault, int]] = []
        self._cluster = cluster
        self._over_s = 0.0
        self._there = -1
        self._followers: dict[int, Fault] = {}
        for before, fault in zip((None, *faults), faults, strict=False):
            if before is not None and fault.follows:
                self._followers[id(before)] = fault
            else:
                self._arm(fault)

    @property
    def over_s(self) -> float:
        """When the last of the faults that have struck is over."""
        return self._over_s

    def last_until(self, moment_s: float) -> None:
        """Counts another disturbance, which lasts until a moment, as one of the faults."""
        self._over_s = max(self._over_s, moment_s)

    def _arm(self, fault: Fault) -> None:
        cluster = self._cluster
        if not fault.place:
            cluster.loop.after(fault.at_s, lambda: self._strike(fault, fault.node))
            return
        left = fault.count

        def reached(place: str, node: int) -> None:
            nonlocal left
            if place == fault.place:
                left -= 1
                if left == 0:
                    cluster.strikes.remove(reached)
                    whom = {THERE: node, BEFORE: self._there}.get(fault.node, fault.node)
                    whom = whom if whom >= 0 else fault.other
                    if fault.node != BEFORE:
                        self._there = node
                    # Never within the callback that reached the place: a real fault does not run
                    # inside the code that it strikes either.
                    cluster.loop.after(fault.delay_s, lambda: self._strike(fault, whom))

        cluster.strikes.append(reached)

    def _strike(self, fault: Fault, node: int) -> None:
        cluster = self._cluster
        if cluster.ended is not None:
            return
        if follower := self._followers.get(id(fault)):
            self._arm(follower)
        self.struck.append((cluster.loop.now_s, fault, node))
        cluster.happened("fault", fault.kind.name, node, fault.other, fault.lasts_s)
        self._note_end(fault)
        agent = cluster.agents[node]
        worker = agent.workers[fault.other % len(agent.workers)]
        match fault.kind:
            case FaultKind.KILL:
                self._kill(node, loses=fault.breaks)
            case FaultKind.CRASH:
                worker.process.kill()
            case FaultKind.HANG:
                processes = [agent.process, *(one.process for one in agent.workers)]
                self._for(fault.lasts_s, [p.stop for p in processes], [p.go_on for p in processes])
            case FaultKind.STALL:
                process = worker.process
                self._for(fault.lasts_s, [process.stop], [process.go_on])
            case FaultKind.LEADER if cluster.can_lose_leader:
                cluster.kill_leader()
            case FaultKind.REPLACE if cluster.can_lose_leader:
                cluster.replace_leader(max(fault.lasts_s, _REPLACED_S_MIN))
            case FaultKind.PAUSE:
                process = cluster.leader.process
                self._for(fault.lasts_s, [process.stop], [process.go_on])
            case FaultKind.CUT:
                self._cut(node, fault.other if fault.other != node else fault.node, fault)
            case FaultKind.ISOLATE:
                for one in set(cluster.agents) - {node}:
                    self._cut(node, one, fault)
            case FaultKind.DETACH:
                self._cut(node, LAUNCHER, fault)
            case FaultKind.BREAK:
                cluster.network.cut(node, LAUNCHER, breaks=True)
                cluster.network.join(node, LAUNCHER)
            case FaultKind.SLOW:
                self._set(cluster.network, fault.lasts_s, 0.2)
            case FaultKind.DISK | FaultKind.FULL | FaultKind.STUCK:
                self._strike_disk(fault)
            case FaultKind.STOP if not cluster.stop_requested:
                cluster.request_stop()
            case FaultKind.JOIN:
                cluster.join()
            case FaultKind.NOTICE:
                agent.notice(fault.lasts_s)
                cluster.loop.after(fault.lasts_s, lambda: self._kill(node, loses=fault.breaks))
            case FaultKind.DRAIN:
                cluster.drain(node)
            case FaultKind.SPOIL:
                agent.memories[fault.other % len(agent.memories)].spoil()
            case FaultKind.DAMAGE:
                cluster.damage()
            case FaultKind.RAISE:
                agent.raise_for(fault.lasts_s, fault.blame, fault.where)
            case FaultKind.MISTAKE:
                agent.mistake(fault.where)

    def _strike_disk(self, fault: Fault) -> None:
        disk = self._cluster.disk
        match fault.kind:
            case FaultKind.DISK:
                self._set(disk, fault.lasts_s, 0.5)
            case FaultKind.FULL:
                disk.fill()
            case FaultKind.STUCK:
                disk.hang(fault.lasts_s)

    def _note_end(self, fault: Fault) -> None:
        now_s = self._cluster.loop.now_s
        # A node that never connected is taken for lost later than one that did.
        connected_s = _CONNECTED_S + _FIRST_WRITES * 2.0 * self._cluster.disk.model.write_s
        may_be_awaited = now_s < connected_s and math.isinf(fault.lasts_s)
        lasts_s = arrival_s(LEASE_S) if may_be_awaited else fault.lasts_s
        # A fault that lasts for ever changes nothing after it has struck.
        self._over_s = max(self._over_s, now_s + (lasts_s if math.isfinite(lasts_s) else 0.0))

    def _kill(self, node: int, *, loses: bool) -> None:
        agent = self._cluster.agents[node]
        if loses:  # The machine is gone, and so is what its kernel had not sent yet.
            for process in (agent.process, *(worker.process for worker in agent.workers)):
                self._cluster.network.break_all(process)
        agent.kill()

    def _cut(self, node: int, other: int, fault: Fault) -> None:
        if other < LAUNCHER or node == other:
            return
        network = self._cluster.network
        network.cut(node, other, breaks=fault.breaks)
        if math.isfinite(fault.lasts_s):
            self._cluster.loop.after(fault.lasts_s, lambda: network.join(node, other))

    def _for(
        self, seconds: float, before: list[Callable[[], None]], after: list[Callable[[], None]]
    ) -> None:
        for callback in before:
            callback()
        for callback in after if math.isfinite(seconds) else ():
            self._cluster.loop.after(seconds, callback)

    def _set(self, slowed: Slowed, seconds: float, share: float) -> None:
        slowed.slow_share = share

        def end() -> None:
            slowed.slow_share = 0.0

        self._cluster.loop.after(seconds, end)
