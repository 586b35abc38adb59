"""What the comparison of downtimes on machines and on one machine prints."""

import downtimes
from helpers.gpt2_machines import ITERATIONS
from planaria.core.inject import check_injections, parse_injection


def event(node: int, downtime_s: float, *, kind: str = "kill", is_fired: bool = True) -> object:
    fired = {"kind": kind, "nodes": [node], "iteration": 7, "fired": is_fired}
    return {**fired, "downtime_s": downtime_s}


def test_kills_strike_within_the_job_nodes_that_are_there() -> None:
    """Node 6 comes in place of node 0, and so on; the last kill leaves time for an answer."""
    injections = [parse_injection(spec) for spec in downtimes.kill_specs(8)]

    assert [injection.nodes for injection in injections] == [(node,) for node in range(8)]
    assert max(injection.place.iteration for injection in injections) < ITERATIONS - 5
    check_injections(injections, num_nodes=8)


def test_the_table_has_each_kill_that_struck_and_the_medians() -> None:
    on_hosts = {"events": [event(0, 0.2), event(1, 0.4), event(5, 9.0, kind="join")]}
    local = {"events": [event(0, 0.1), event(1, 0.3), event(2, 0.0, is_fired=False)]}

    lines = downtimes.table(on_hosts, local).splitlines()

    assert lines[1].split() == ["node", "0,", "iteration", "7", "200", "ms", "100", "ms"]
    assert lines[2].split() == ["node", "1,", "iteration", "7", "400", "ms", "300", "ms"]
    assert lines[3].split()[:5] == ["median", "300", "ms", "200", "ms"]
    assert len(lines) == 4
