"""Injects the drawn faults of a run into its cluster, each when its time or its place comes."""

import math
from collections.abc import Sequence
from typing import Final, Protocol

from planaria.coordinator.membership.missing_members import arrival_s
from planaria.simulator.fault_draws import (
    AT_PLACE,
    AT_PREVIOUS_PLACE,
    CONNECTED_S,
    Fault,
    FaultKind,
)
from planaria.simulator.loop import Process
from planaria.simulator.scenario import LEASE_S
from planaria.simulator.simulated_cluster import LAUNCHER, SimulatedCluster

_FIRST_WRITES: Final = 8  # Writes until the first nodes are admitted, most of them in sequence.
_REPLACED_S_MIN: Final = 0.5  # Another must lead before the old one goes on and evicts everybody.


class SlowShare(Protocol):
    """Something of which a share of the operations is slow."""

    slow_share: float


class FaultInjection:
    """Injects faults into a cluster.

    Attributes:
        injected: faults that were injected: (seconds, fault, node).
    """

    def __init__(self, cluster: SimulatedCluster, faults: tuple[Fault, ...]) -> None:
        self.injected: list[tuple[float, Fault, int]] = []
        self._cluster = cluster
        self._end_s = 0.0
        self._previous_node = -1
        self._followers: dict[int, Fault] = {}
        for before, fault in zip((None, *faults), faults, strict=False):
            if before is not None and fault.follows:
                self._followers[id(before)] = fault
            else:
                self._schedule(fault)

    @property
    def end_s(self) -> float:
        """When the last of the injected faults is over."""
        return self._end_s

    def extend_until(self, moment_s: float) -> None:
        """Counts another disturbance, which lasts until a moment, as one of the faults."""
        self._end_s = max(self._end_s, moment_s)

    def _schedule(self, fault: Fault) -> None:
        cluster = self._cluster
        if not fault.place:
            cluster.loop.after(fault.at_s, lambda: self._inject(fault, fault.node))
            return
        num_left = fault.count

        def on_place(place: str, node: int) -> None:
            nonlocal num_left
            if place == fault.place:
                num_left -= 1
                if num_left == 0:
                    cluster.place_callbacks.remove(on_place)
                    struck_node = {AT_PLACE: node, AT_PREVIOUS_PLACE: self._previous_node}.get(
                        fault.node, fault.node
                    )
                    struck_node = struck_node if struck_node >= 0 else fault.other
                    if fault.node != AT_PREVIOUS_PLACE:
                        self._previous_node = node
                    # Never within the callback that reached the place: a real fault does not run
                    # inside the code that it strikes either.
                    cluster.loop.after(fault.delay_s, lambda: self._inject(fault, struck_node))

        cluster.place_callbacks.append(on_place)

    def _inject(self, fault: Fault, node: int) -> None:
        cluster = self._cluster
        if cluster.ended is not None:
            return
        if follower := self._followers.get(id(fault)):
            self._schedule(follower)
        self.injected.append((cluster.loop.now_s, fault, node))
        cluster.log_event("fault", fault.kind.name, node, fault.other, fault.duration_s)
        self._extend_end(fault)
        agent = cluster.agents[node]
        worker = agent.workers[fault.other % len(agent.workers)]
        match fault.kind:
            case FaultKind.KILL:
                self._kill(node, loses=fault.breaks)
            case FaultKind.CRASH:
                worker.process.kill()
            case FaultKind.HANG:
                processes = (agent.process, *(worker.process for worker in agent.workers))
                self._stop(processes, fault.duration_s)
            case FaultKind.STALL:
                self._stop((worker.process,), fault.duration_s)
            case FaultKind.LEADER | FaultKind.REPLACE | FaultKind.PAUSE:
                self._inject_leader_fault(fault)
            case FaultKind.HEAD_CUT | FaultKind.HEAD_DOWN:
                self._inject_leader_fault(fault)
            case FaultKind.CUT:
                self._cut(node, self._other_node(node, fault), fault)
            case FaultKind.ISOLATE:
                for other in set(cluster.agents) - {node}:
                    self._cut(node, other, fault)
            case FaultKind.DETACH:
                self._cut(node, LAUNCHER, fault)
            case FaultKind.BREAK:
                cluster.network.cut(node, LAUNCHER, breaks=True)
                cluster.network.reconnect(node, LAUNCHER)
            case FaultKind.SLOW:
                self._set_slow_share(cluster.network, fault.duration_s, 0.2)
            case FaultKind.DISK | FaultKind.FULL | FaultKind.STUCK:
                self._inject_disk_fault(fault)
            case FaultKind.STOP if not cluster.stop_requested:
                cluster.request_stop()
            case FaultKind.JOIN:
                cluster.add_node()
            case FaultKind.NOTICE:
                agent.give_notice(fault.duration_s)
                cluster.loop.after(fault.duration_s, lambda: self._kill(node, loses=fault.breaks))
            case FaultKind.DRAIN:
                cluster.drain(node)
            case FaultKind.SPOIL:
                agent.memories[fault.other % len(agent.memories)].spoil()
            case FaultKind.DAMAGE:
                cluster.damage()
            case FaultKind.BLIND:
                cluster.blind_until_s[node] = cluster.loop.now_s + fault.duration_s
            case FaultKind.RAISE:
                agent.raise_for(fault.duration_s, fault.blame, fault.where)
            case FaultKind.MISTAKE:
                agent.raise_once(fault.where)

    def _inject_leader_fault(self, fault: Fault) -> None:
        cluster = self._cluster
        match fault.kind:
            case FaultKind.LEADER if cluster.can_lose_leader:
                cluster.kill_leader()
            case FaultKind.HEAD_DOWN if cluster.can_lose_leader:
                cluster.kill_leader(fault.duration_s)
            case FaultKind.REPLACE if cluster.can_lose_leader:
                cluster.replace_leader(max(fault.duration_s, _REPLACED_S_MIN))
            case FaultKind.PAUSE:
                self._stop((cluster.leader.process,), fault.duration_s)
            case FaultKind.HEAD_CUT:
                cluster.network.isolate(LAUNCHER, breaks=fault.breaks)
                cluster.loop.after(fault.duration_s, lambda: cluster.network.rejoin(LAUNCHER))

    def _inject_disk_fault(self, fault: Fault) -> None:
        disk = self._cluster.disk
        match fault.kind:
            case FaultKind.DISK:
                self._set_slow_share(disk, fault.duration_s, 0.5)
            case FaultKind.FULL:
                disk.fill()
            case FaultKind.STUCK:
                disk.hang(fault.duration_s)

    def _extend_end(self, fault: Fault) -> None:
        now_s = self._cluster.loop.now_s
        # A node that never connected is taken for lost later than one that did.
        connected_s = CONNECTED_S + _FIRST_WRITES * 2.0 * self._cluster.disk.model.write_s
        may_be_awaited = now_s < connected_s and math.isinf(fault.duration_s)
        duration_s = arrival_s(LEASE_S) if may_be_awaited else fault.duration_s
        # A fault that lasts for ever changes nothing after it has struck.
        self._end_s = max(self._end_s, now_s + (duration_s if math.isfinite(duration_s) else 0.0))

    def _kill(self, node: int, *, loses: bool) -> None:
        agent, scenario = self._cluster.agents[node], self._cluster.job.scenario
        if loses and scenario.patience_s:  # Nobody is left who could close its connections.
            self._cluster.network.cut(node, LAUNCHER, breaks=False)
        if loses:  # The machine is gone, and so is what its kernel had not sent yet.
            processes = [worker.process for worker in agent.workers]
            for process in processes if scenario.patience_s else (agent.process, *processes):
                self._cluster.network.break_all(process)
        agent.kill()

    def _other_node(self, node: int, fault: Fault) -> int:
        """The second node of a cut; the node at the fault's place may be `fault.other`."""
        others = sorted(set(self._cluster.agents) - {node})
        return fault.other if fault.other != node else others[node % len(others)]

    def _cut(self, node: int, other: int, fault: Fault) -> None:
        assert node != other
        network = self._cluster.network
        network.cut(node, other, breaks=fault.breaks)
        if math.isfinite(fault.duration_s):
            self._cluster.loop.after(fault.duration_s, lambda: network.reconnect(node, other))

    def _stop(self, processes: Sequence[Process], seconds: float) -> None:
        for process in processes:
            process.stop()
        for process in processes if math.isfinite(seconds) else ():
            self._cluster.loop.after(seconds, process.resume)

    def _set_slow_share(self, target: SlowShare, seconds: float, share: float) -> None:
        target.slow_share = share

        def end() -> None:
            target.slow_share = 0.0

        self._cluster.loop.after(seconds, end)
