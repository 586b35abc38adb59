"""Faults of simulated runs, drawn from a seed: what happens, to which node, and when.

Each run first draws which kinds of faults it has at all (swarm testing), so that rare combinations
occur. A fault strikes at a given time, or when somebody is at a given place for the n-th time: so a
window of a millisecond is hit as often as one of a second.

Source: Groce et al., Swarm Testing (ISSTA '12).
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Final

from planaria.core.messages import Blame
from planaria.simulator.modelled.agent import ANY_PLACE
from planaria.simulator.scenario import LEASE_S, TIMEOUT_S, StoreTrouble


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
    BLIND = "the node cannot read saves for a while"
    NOTICE = "the node is told that it will be gone, and is killed then"
    DRAIN = "the user asks that the job go on without the node"
    RAISE = "the code in the node's workers raises for a while, and it is not the job's fault"
    MISTAKE = "the code in one of the node's workers raises, and it is the job's fault"
    HEAD_CUT = "the coordinator is cut off from all nodes for a while"
    HEAD_DOWN = "the coordinator is killed, and started again only after a while"


_LAST: Final = (FaultKind.HANG, FaultKind.STALL, FaultKind.DETACH)  # Some of these last for ever.
_LOSSES: Final = (
    *(FaultKind.KILL, FaultKind.CRASH, FaultKind.HANG, FaultKind.STALL),
    *(FaultKind.CUT, FaultKind.ISOLATE, FaultKind.DETACH, FaultKind.BREAK),
)
_OF_COPIES: Final = (FaultKind.SPOIL, FaultKind.DAMAGE)
_OF_CODE: Final = (FaultKind.RAISE, FaultKind.MISTAKE)
OF_HEAD: Final = (FaultKind.HEAD_CUT, FaultKind.HEAD_DOWN)  # Between machines only.
_NOT_OTHERS: Final = (
    *(*_LOSSES, *_OF_COPIES, *_OF_CODE, *OF_HEAD),
    *(FaultKind.FULL, FaultKind.STUCK, FaultKind.BLIND),
)
_PLACES: Final = ("layers", "layers", "start", "step", ANY_PLACE)  # Where code raises.
# Faults after which the struck node, or any node, may be evicted; faults that make nodes drain.
LOOK_LIKE_LOSS: Final = (FaultKind.KILL, FaultKind.HANG, FaultKind.DETACH, FaultKind.BREAK)
LOOK_LIKE_ANY_LOSS: Final = (FaultKind.CUT, FaultKind.ISOLATE, FaultKind.SLOW)
MAKE_NODES_LEAVE: Final = (FaultKind.NOTICE, FaultKind.DRAIN)
# "vector" is the place of the first rank that holds a commit vector: for a while it alone does.
TRAINING: Final = (
    *("start", "backward", "reduce", "commit", "vector", "vector", "vector"),
    *("optimizer", "save", "recorded node"),
)
RECOVERING: Final = (
    *("answer", "regroup", "transfer", "resume", "detect", "decide"),
    *("recorded members", "recorded outcome", "recorded plan"),
)
DURATIONS_S: Final = (0.005, 0.05, 0.5, 2.0, LEASE_S + 0.5, 2 * LEASE_S + 1.0, 4 * LEASE_S)
OUTAGES_S: Final = (0.02, 0.5, 1.5, LEASE_S + 0.5, 2 * LEASE_S + 1.0, 4 * LEASE_S)
AT_PLACE: Final = -1  # The node that is at the fault's place.
AT_PREVIOUS_PLACE: Final = -2  # The node that was at the place of the previous fault.
FAULTS_S_MAX: Final = 12.0
_NUM_FAULTS_MAX: Final = 6
_CHANGING: Final = (
    *("recorded members", "recorded members", "regroup", "transfer", "resume", "start"),
    *("commit", "vector", "optimizer", "recorded plan"),
)
_WITNESS_SHARE: Final = 0.2
_CHANGE_SHARE: Final = 0.2
CONNECTED_S: Final = 0.5
_COMING_S: Final = 0.03
_FULL_SHARE: Final = 0.05
_STUCK_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that strikes after `at_s`, or `delay_s` after somebody is at `place` for the
    `count`-th time.

    Attributes:
        node: node that it strikes; or AT_PLACE, or AT_PREVIOUS_PLACE.
        other: second node of a cut; otherwise the number that picks a worker of the node.
        duration_s: duration; infinity: for ever.
        breaks: whether connections break as well.
        follows: whether times and counts start when the fault before it strikes, not with the run.
        blame: party whose fault it is that code raises.
        where: place of a worker at which code raises.
    """

    kind: FaultKind
    node: int
    other: int
    duration_s: float
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
        names = {AT_PLACE: "whoever is there", AT_PREVIOUS_PLACE: "whoever was there before"}
        whom = names.get(self.node, f"node {self.node}")
        what = f"{self.kind.name.lower()} of {whom} (other: {self.other}) for {self.duration_s} s"
        if self.kind in _OF_CODE:
            what += f", {self.blame} at {self.where}"
        return f"{then}{when}: {what}{', breaking connections' if self.breaks else ''}"


def draw_faults(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """The faults of a run."""
    losses = [kind for kind in _LOSSES if rng.random() < 0.5] or [FaultKind.KILL]
    others = [kind for kind in FaultKind if kind not in _NOT_OTHERS and rng.random() < 0.3]
    # A replaced coordinator that runs again may end leases while the new one is paused.
    if FaultKind.REPLACE in others:
        others = [kind for kind in others if kind is not FaultKind.PAUSE]
    faults = []
    for _ in range(rng.randint(1, _NUM_FAULTS_MAX)):
        kinds = losses if rng.random() < 0.65 or not others else others
        faults.append(_draw_fault(rng, rng.choice(kinds), num_nodes))
    share = rng.random()
    if share < _WITNESS_SHARE:
        return (*draw_witness_loss(rng, num_nodes), *faults[4:])
    if share < _WITNESS_SHARE + _CHANGE_SHARE:
        return (*draw_change_and_loss(rng, num_nodes), *faults[2:])
    return tuple(faults)


def draw_more_faults(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """Nothing, or (in half of the runs) 1 to 3 faults that may strike copies, saves and standby
    nodes as well.

    Args:
        num_nodes: number of nodes, those on standby included.
    """
    if rng.random() < 0.5:
        return ()
    kinds = (*_OF_COPIES, *_OF_COPIES, FaultKind.KILL, FaultKind.CRASH)
    return tuple(_draw_fault(rng, rng.choice(kinds), num_nodes) for _ in range(rng.randint(1, 3)))


def draw_store_trouble(rng: Random) -> StoreTrouble:
    """The behaviour of the disk or store of saves: good in two of three runs."""
    if rng.random() < 2.0 / 3.0:
        return StoreTrouble()
    refuses, hangs = rng.choice(((0.0, 0.0), (0.3, 0.0), (1.0, 0.0), (0.0, 0.2), (0.2, 0.1)))
    return StoreTrouble(
        at_s=rng.choice((0.0, 0.0, rng.random(), rng.random() * FAULTS_S_MAX)),
        duration_s=rng.choice((0.5, 3.0, 10.0, math.inf)),
        late_s=rng.choice((0.02, 0.2, 1.0, 2.0 * TIMEOUT_S)),
        refuses=refuses,
        hangs=hangs,
    )


def draw_disk_faults(rng: Random) -> tuple[Fault, ...]:
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
        duration_s=math.inf
        if is_full
        else rng.choice((0.5, 2.0, LEASE_S + 0.5, 2 * LEASE_S + 1.0)),
        breaks=False,
        at_s=at_s,
    )
    if rng.random() < 0.5:
        return (fault,)
    after_s = rng.random() * rng.choice((0.05, 0.5, 3.0))
    loss = replace(fault, kind=FaultKind.LEADER, duration_s=0.0, at_s=after_s, follows=True)
    return (fault, loss)


def draw_full_disk(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """A disk of records that is full while the job trains, and in most runs a loss of the
    coordinator soon after that."""
    del num_nodes
    full = Fault(
        kind=FaultKind.FULL,
        node=0,
        other=0,
        duration_s=math.inf,
        breaks=False,
        at_s=CONNECTED_S + 3.0 * rng.random(),
    )
    loss = replace(full, kind=FaultKind.LEADER, at_s=rng.random() * 0.5, follows=True)
    return (full, *((loss,) if rng.random() < 0.8 else ()))


def draw_code_errors(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """One to three faults that make the code in workers raise."""
    kinds = (FaultKind.RAISE,) * rng.randint(1, 3)
    if rng.random() < 0.3:
        kinds = (*kinds[1:], FaultKind.MISTAKE)
    faults = [
        replace(
            _draw_fault(rng, kind, num_nodes),
            where=rng.choice(_PLACES),
            blame=rng.choice(("node", "memory")),
        )
        for kind in kinds
    ]
    if len(faults) > 1 and rng.random() < 0.5:  # The second one on another node at the same time.
        first, second, *more = faults
        second = replace(second, at_s=rng.random() * 0.01, place="", follows=True, node=first.other)
        second = replace(second, blame=first.blame, duration_s=first.duration_s)
        faults = [first, second, *more]
    return tuple(faults)


def draw_rare_code_errors(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """The faults of `draw_code_errors` in 3 of 10 runs, otherwise nothing."""
    return draw_code_errors(rng, num_nodes) if rng.random() >= 0.7 else ()


def draw_blind_node(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """A node that cannot read the saves for a while, and a loss meanwhile, after which the job may
    have to go back to one."""
    blind = Fault(
        kind=FaultKind.BLIND,
        node=rng.randrange(num_nodes),
        other=0,
        duration_s=rng.choice((0.5, 2.0, 6.0, 12.0)),
        breaks=False,
        place="save",
        count=rng.randint(1, 8),
        delay_s=rng.choice((0.0, 0.1, 0.3)),
    )
    kinds = (FaultKind.KILL, FaultKind.CRASH, FaultKind.DAMAGE, FaultKind.LEADER)
    losses = [_draw_fault(rng, rng.choice(kinds), num_nodes) for _ in range(rng.randint(1, 2))]
    return blind, *(
        replace(loss, place="", at_s=rng.random() * rng.choice((0.1, 1.0)), follows=True, node=node)
        for loss in losses
        for node in [rng.randrange(num_nodes)]
    )


def draw_head_faults(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """One to three faults of a job on several machines: most of them cut off its head or take it
    away; the others are nodes that are lost or come meanwhile."""
    others = (FaultKind.KILL, FaultKind.DETACH, FaultKind.BREAK, FaultKind.JOIN, FaultKind.NOTICE)
    first = rng.choice(OF_HEAD)
    kinds = [first, *rng.choices((*OF_HEAD, *OF_HEAD, *others), k=rng.randint(0, 2))]
    faults = [_draw_fault(rng, kind, num_nodes) for kind in kinds]
    return tuple(
        replace(fault, duration_s=rng.choice(OUTAGES_S)) if fault.kind in OF_HEAD else fault
        for fault in faults
    )


def draw_spot_faults(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """Many nodes that are lost at about the same time, most of them with a notice, and one to three
    that come later."""
    at_s = CONNECTED_S + 2.0 * rng.random()
    nodes = rng.sample(range(num_nodes), rng.randint(max(1, num_nodes // 2), num_nodes))
    kinds = (FaultKind.NOTICE, FaultKind.NOTICE, FaultKind.KILL)
    lost = [
        replace(
            _draw_fault(rng, rng.choice(kinds), num_nodes),
            node=node,
            at_s=at_s + rng.random() * rng.choice((0.01, 0.5)),
            duration_s=rng.choice((0.05, 0.5, 2.0)),
            place="",
            follows=False,
        )
        for node in nodes
    ]
    later = [
        replace(_draw_fault(rng, FaultKind.JOIN, num_nodes), node=0, place="", follows=False)
        for _ in range(rng.randint(1, 3))
    ]
    come = [replace(fault, at_s=at_s + rng.random() * FAULTS_S_MAX) for fault in later]
    return (*lost, *come)


def draw_witness_loss(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """Four faults: the only rank that has a commit vector is isolated, another node is lost, the
    holder is lost in the recovery, and then a node or the coordinator.

    By chance this happens only once in thousands of runs.
    """
    ends = (FaultKind.KILL, FaultKind.CRASH, FaultKind.BREAK)
    isolated = replace(
        _draw_fault(rng, FaultKind.ISOLATE, num_nodes),
        at_s=-1.0,
        place="vector",
        count=rng.randint(1, 5),
        delay_s=0.0,
        follows=False,
        node=AT_PLACE,
        breaks=False,
    )
    loss = replace(
        _draw_fault(rng, rng.choice(ends), num_nodes),
        place="",
        at_s=0.0,
        follows=True,
        node=rng.randrange(num_nodes),
    )
    witness = replace(
        _draw_recovery_fault(rng, rng.choice(ends), num_nodes), node=AT_PREVIOUS_PLACE
    )
    then = _draw_recovery_fault(rng, rng.choice((*ends, *(FaultKind.LEADER,) * 3)), num_nodes)
    return isolated, loss, witness, then


def draw_change_and_loss(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """A node that joins or is asked to leave, and a fault while that change is being made."""
    asked = rng.choice((FaultKind.JOIN, FaultKind.JOIN, FaultKind.DRAIN, FaultKind.NOTICE))
    first = replace(
        _draw_fault(rng, asked, num_nodes),
        place="",
        at_s=CONNECTED_S + rng.random(),
        duration_s=rng.choice((0.5, 2.0, 10.0)),
        node=rng.randrange(num_nodes),
        follows=False,
    )
    kind = rng.choice((*_LOSSES, *(FaultKind.LEADER,) * 3))
    then = replace(
        _draw_fault(rng, kind, num_nodes),
        at_s=-1.0,
        place=rng.choice(_CHANGING),
        count=rng.randint(1, 4),
        delay_s=rng.choice((0.0, 0.001, 0.005, 0.05)),
        follows=True,
        node=rng.choice((AT_PLACE, rng.randrange(num_nodes))),
    )
    return first, then


def _draw_recovery_fault(rng: Random, kind: FaultKind, num_nodes: int) -> Fault:
    """A fault in the recovery from the one before it."""
    return replace(
        _draw_fault(rng, kind, num_nodes),
        at_s=-1.0,
        place=rng.choice(RECOVERING),
        count=rng.randint(1, 2),
        delay_s=rng.choice((0.0, 0.001)),
        follows=True,
        node=rng.randrange(num_nodes),
    )


def draw_unheard_node(rng: Random, num_nodes: int) -> tuple[Fault, ...]:
    """A node that stands still or is cut off for ever, most likely before anybody heard of it; in
    half of the runs other faults too."""
    isolated = replace(
        _draw_fault(rng, rng.choice((FaultKind.HANG, FaultKind.DETACH)), num_nodes),
        at_s=rng.random() * _COMING_S,
        place="",
        node=rng.randrange(num_nodes),
        duration_s=math.inf,
        breaks=False,
        follows=False,
    )
    return (isolated, *(draw_faults(rng, num_nodes) if rng.random() < 0.5 else ()))


def _draw_fault(rng: Random, kind: FaultKind, num_nodes: int) -> Fault:
    duration_s = rng.choice(DURATIONS_S)
    if kind in _LAST and rng.random() < 0.2:
        duration_s = math.inf
    node = rng.randrange(num_nodes)
    fault = Fault(
        kind=kind,
        node=node,
        other=(node + rng.randint(1, num_nodes - 1)) % num_nodes,
        duration_s=duration_s,
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
        node=rng.choice((node, node, AT_PLACE, AT_PREVIOUS_PLACE if fault.follows else AT_PLACE)),
        place=place,
        count=rng.randint(1, 6 if fault.follows or place == "vector" else 24),
        delay_s=rng.choice((0.0, 0.0, 0.0005, 0.002, 0.01)),
    )
