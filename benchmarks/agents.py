"""Measures a head with hundreds of agents: how fast they join, decisions, and its load at rest.

The head is real (`planaria train --listen`), and so are the connections to it and the protocol. The
agents are light (light/nodes.py): all of them are in this process, and what they train is
modelled. For each number of nodes and each run, this measures

    join       seconds in which all machines come (from the first connection until the head has
               taken the last one), plus those in which all nodes come (from the first request for
               a node until the coordinator has admitted the last one). The planning in between is
               printed beside it.
    rest       share of a core that the launcher and the coordinator take while the job trains and
               nothing happens. The search for answers to the next losses, which runs at a low
               priority until it is done, is printed beside it.
    decision   seconds from the loss of a machine, whose connections close, until the plan without
               it is on record and sent to all: `detect_s` + `decide_s` of the report. Workers
               answer at once, because they are waiting for a commit. NUM_LOSSES in each run.

The goals, for the medians at up to 200 nodes: join in 5 s, decision in 200 ms, rest at most 20% of
a core. The agents share the machine's processors with the head, so the figures are upper bounds.

`--nodes`, `--runs` set what is measured. `--results FILE` keeps the figures of each run as a line
of JSON. Exits 1 if a goal is missed.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from light.head import Head
from light.nodes import LightNodes
from planaria.nodes.head.remote.network_requests import head_connection
from planaria.nodes.head.requests import TellEvents
from planaria.observe.metrics import EventRecord

VERSION: Final = 1  # Version of the figures of a run.
NODES: Final = (50, 100, 200)
NUM_RUNS: Final = 3
NUM_LOSSES: Final = 5
JOIN_S_GOAL: Final = 5.0
DECISION_S_GOAL: Final = 0.2
REST_GOAL: Final = 0.2
_REST_S: Final = 10.0
_STEP_TIMEOUT_S: Final = 120.0
_SEARCH_TIMEOUT_S: Final = 20.0
_IDLE_POLL_S: Final = 0.05
_NUM_IDLE: Final = 20  # Polls in a row at which nothing computes, once the search is over.
_POLL_S: Final = 0.01
_TERMINATED: Final = 143


@dataclass(frozen=True, slots=True)
class Loss:
    """The answer to the loss of a machine.

    Attributes:
        detect_s, decide_s: see EventRecord.
        told_s: seconds from the loss until the last node of this process had the new order.
        cpu_s: processor seconds of launcher and coordinator until then.
    """

    detect_s: float
    decide_s: float
    told_s: float
    cpu_s: float

    @property
    def decision_s(self) -> float:
        """Seconds until the new plan was sent."""
        return self.detect_s + self.decide_s


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one head.

    Attributes:
        machines_s, nodes_s: seconds in which all machines, and all nodes, came.
        planned_s: seconds between the two.
        join_cpu_s: processor seconds of the head in both.
        rest: share of a core that it took at rest.
        search: share of a core that the search ahead took meanwhile.
        agents: share of a core that this process took meanwhile.
        load: the machine's load of the last minute, at the end.
    """

    num_nodes: int
    machines_s: float
    nodes_s: float
    planned_s: float
    join_cpu_s: float
    rest: float
    search: float
    agents: float
    losses: tuple[Loss, ...]
    load: float

    @property
    def join_s(self) -> float:
        """Seconds in which all agents joined."""
        return self.machines_s + self.nodes_s


def main() -> int:
    """Does the runs and prints the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # The head must end, too.
    are_met = True
    for num_nodes in options.nodes:
        runs = []
        for _ in range(options.runs):
            runs.append(_measured_run(num_nodes))
            _print_run(runs[-1])
            if options.results:
                with options.results.open("a") as lines:
                    lines.write(json.dumps({"version": VERSION, **asdict(runs[-1])}) + "\n")
        are_met &= are_goals_met(runs)
    return 0 if are_met else 1


def _measured_run(num_nodes: int) -> Run:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        head = Head(directory, num_nodes=num_nodes)
        try:
            return asyncio.run(_Measurement(head, directory, num_nodes).run())
        except BaseException:
            print(head.output)
            raise
        finally:
            head.close()


class _Measurement:
    def __init__(self, head: Head, directory: Path, num_nodes: int) -> None:
        self._head = head
        self._num_nodes = num_nodes
        address = head.address(timeout_s=_STEP_TIMEOUT_S)
        self._nodes = LightNodes(address, head.credentials, cache=directory)

    async def run(self) -> Run:
        machines_s, nodes_s, planned_s, join_cpu_s = await self._join()
        await self._wait_seen("IterationDone", 2 * self._num_nodes)
        await self._wait_search()
        rest, search, agents = await self._rest()
        losses = [await self._lose(index) for index in range(NUM_LOSSES)]
        await self._nodes.close()
        return Run(
            num_nodes=self._num_nodes,
            machines_s=machines_s,
            nodes_s=nodes_s,
            planned_s=planned_s,
            join_cpu_s=join_cpu_s,
            rest=rest,
            search=search,
            agents=agents,
            losses=tuple(losses),
            load=os.getloadavg()[0],
        )

    async def _join(self) -> tuple[float, float, float, float]:
        """Has all machines come; returns the first four figures of a run."""
        nodes, before = self._nodes, self._head.cpu_s()
        nodes.add_machines(self._num_nodes)
        machines = nodes.machines
        await self._wait(lambda: min(m.asked_s for m in machines) <= time.monotonic())
        came = self._head.cpu_s() - before
        asked_s = min(m.asked_s for m in machines)
        await self._wait(lambda: min(m.requested_s for m in machines) <= time.monotonic())
        requested_s, before = min(m.requested_s for m in machines), self._head.cpu_s()
        await self._wait_seen("Welcome", self._num_nodes)
        joined = self._head.cpu_s() - before
        last_s = max(sight.at_s for sight in nodes.sights if sight.kind == "Welcome")
        return (
            asked_s - min(m.began_s for m in machines),
            last_s - requested_s,
            requested_s - asked_s,
            came.serving_s + joined.serving_s,
        )

    async def _wait_search(self) -> None:
        """Waits until the search for answers to the next losses is over, up to a limit."""
        end_s = time.monotonic() + _SEARCH_TIMEOUT_S
        num_idle = 0
        while time.monotonic() < end_s and num_idle < _NUM_IDLE:
            await asyncio.sleep(_IDLE_POLL_S)
            num_idle = 0 if self._head.is_searching() else num_idle + 1

    async def _rest(self) -> tuple[float, float, float]:
        """Shares of a core that the head, its search and this process take while all is well."""
        began_s, own_s, before = time.monotonic(), time.process_time(), self._head.cpu_s()
        await asyncio.sleep(_REST_S)
        taken = self._head.cpu_s() - before
        own_s = time.process_time() - own_s
        wall_s = time.monotonic() - began_s
        return taken.serving_s / wall_s, taken.searching_s / wall_s, own_s / wall_s

    async def _lose(self, index: int) -> Loss:
        """Has a machine vanish while all workers wait; returns how that was answered."""
        nodes, events = self._nodes, len(await self._events())
        await self._wait_search()
        await self._wait(lambda: not nodes.is_held)
        await self._wait(lambda: nodes.is_held)
        num_seen, before = len(nodes.sights), self._head.cpu_s()
        began_s = time.monotonic()
        nodes.kill(1 + index * (self._num_nodes - 2) // NUM_LOSSES)
        num_left = self._num_nodes - 1 - index
        await self._wait_seen("StartEpoch", num_left, first=num_seen)
        cpu_s = (self._head.cpu_s() - before).serving_s
        sights = nodes.sights[num_seen:]
        told_s = max(sight.at_s for sight in sights if sight.kind == "StartEpoch") - began_s
        await self._wait_seen("IterationDone", num_left, first=num_seen)
        record = next(e for e in (await self._events())[events:] if e.kind == "lost")
        return Loss(record.detect_s, record.decide_s, told_s, cpu_s)

    async def _events(self) -> tuple[EventRecord, ...]:
        """The events of the job so far."""
        async with head_connection(self._nodes.head, self._nodes.credentials) as connection:
            reply = await connection.ask(TellEvents(), timeout_s=_STEP_TIMEOUT_S)
        return msgspec.json.decode(reply.text, type=tuple[EventRecord, ...])

    async def _wait_seen(self, kind: str, num_nodes: int, *, first: int = 0) -> None:
        """Waits until so many messages of a kind were seen, from `first` on."""
        sights = self._nodes.sights
        await self._wait(lambda: sum(s.kind == kind for s in sights[first:]) >= num_nodes)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + _STEP_TIMEOUT_S
        while not condition():
            self._head.check()
            assert time.monotonic() < end_s
            await asyncio.sleep(_POLL_S)


def _print_run(run: Run) -> None:
    print(
        f"{run.num_nodes} nodes: joined in {run.machines_s:.2f} + {run.nodes_s:.2f} s "
        f"({run.join_cpu_s:.1f} s of a processor; planned in {run.planned_s:.1f} s between); at "
        f"rest {100 * run.rest:.1f}% of a core, the search {100 * run.search:.0f}%, the agents "
        f"{100 * run.agents:.0f}%; load {run.load:.1f}"
    )
    for loss in run.losses:
        print(
            f"  loss: decision {1000 * loss.decision_s:.0f} ms (detect {1000 * loss.detect_s:.0f}, "
            f"decide {1000 * loss.decide_s:.0f}), all told after {1000 * loss.told_s:.0f}; "
            f"{1000 * loss.cpu_s:.0f} of a processor",
            flush=True,
        )


def are_goals_met(runs: Sequence[Run]) -> bool:
    """Prints medians of runs with equal numbers of nodes; returns whether they meet the goals."""
    join_s = statistics.median(run.join_s for run in runs)
    decision_s = statistics.median(loss.decision_s for run in runs for loss in run.losses)
    rest = statistics.median(run.rest for run in runs)
    met = (join_s <= JOIN_S_GOAL, decision_s <= DECISION_S_GOAL, rest <= REST_GOAL)
    print(
        f"{runs[0].num_nodes} nodes, medians: join {join_s:.2f} s, goal {JOIN_S_GOAL:.0f} s: "
        f"{_verdict(met[0])}; decision {1000 * decision_s:.0f} ms, goal "
        f"{1000 * DECISION_S_GOAL:.0f} ms: {_verdict(met[1])}; rest {100 * rest:.1f}% of a core, "
        f"goal {100 * REST_GOAL:.0f}%: {_verdict(met[2])}",
        flush=True,
    )
    return all(met)


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
