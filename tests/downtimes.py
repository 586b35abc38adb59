"""Kills nodes of a job on six machines, shows it, and compares the downtimes with one machine's.

    python tests/downtimes.py [--kills N]

The machines are test hosts (helpers/hosts.py): namespaces on a bridge, so it is run by root. The
job is the example GPT-2, made small as in tests/hosts/test_six_machines.py. Both runs have the same
kills, injected at the same steps, and nodes that come in place of the killed ones: on machines by
themselves, on one machine by an injected join. A kill's downtime is the time from the kill until
all go on (`downtime_s` of its event in the report).

Each comparison appends a line to benchmarks/results/hosts.jsonl:

    {"commit": .., "started": .., "load": .., "hosts_s": [one for each kill], "local_s": [..]}

`load` is the number of processes that ran or waited to run, on average over the minute before. The
exit status is 1 if the median on machines is more than GOAL_S or the bits of the two runs differ.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from helpers.command import wait_for
from helpers.gpt2_machines import ITERATIONS, NUM_NODES, gpt2_machines, gpt2_settings, gpt2_words
from helpers.host_networks import obstacle
from helpers.hosts import Process
from helpers.machine_jobs import Machines, digests
from planaria.job.planning import PRELOAD
from planaria.nodes.forkserver import ForkServer

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "hosts.jsonl"
GOAL_S: Final = 0.5
TIMEOUT_S: Final = 900.0
FIRST_KILL: Final = 5
STEPS: Final = ("backward", "start", "reduce", "forward", "commit")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job on machines, then on one; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=8, help="number of kills in each run")
    num_kills = parser.parse_args(arguments).kills
    if problem := obstacle():
        print(f"needs hosts in namespaces, but {problem}")
        return 2
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "shared"
        directory.mkdir()
        with closing(ForkServer(PRELOAD)) as server:
            settings = gpt2_settings(directory, server)
        print(f"\nsix machines, {num_kills} of whose nodes will be killed\n", flush=True)
        with gpt2_machines(directory, settings) as machines:
            on_hosts = _report_on_machines(machines, directory / "hosts", num_kills)
        print("\nthe same job on one machine\n", flush=True)
        local = _report_here(directory / "local", settings, num_kills)
    kept = {
        "commit": _commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": round(load, 1),
        "hosts_s": downtimes_s(on_hosts),
        "local_s": downtimes_s(local),
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(kept) + "\n")
    is_same = digests(on_hosts) == digests(local)
    print(table(on_hosts, local))
    print("not one bit differs" if is_same else "THE RESULT DEPENDS ON THE MACHINES")
    is_met = statistics.median(downtimes_s(on_hosts)) <= GOAL_S
    return 0 if is_same and is_met else 1


def kill_specs(num_kills: int) -> list[str]:
    """The specs of the kills, spread over the job; node by node, and one step after the other."""
    period = (ITERATIONS - FIRST_KILL) // num_kills
    return [
        f"kill:{index}@{FIRST_KILL + index * period}.{STEPS[index % len(STEPS)]}"
        for index in range(num_kills)
    ]


def downtimes_s(report: Any) -> list[float]:
    """The downtime of each kill that struck, in seconds."""
    kills = [event for event in report["events"] if event["kind"] == "kill" and event["fired"]]
    return [round(event["downtime_s"], 3) for event in kills]


def table(on_hosts: Any, local: Any) -> str:
    """The downtimes beside each other, kill by kill, and their medians."""
    columns = downtimes_s(on_hosts), downtimes_s(local)
    kills = [event for event in on_hosts["events"] if event["kind"] == "kill" and event["fired"]]
    lines = [f"{'kill':<22}{'six machines':>14}{'one machine':>14}"]
    for event, *seconds in zip(kills, *columns, strict=False):
        name = f"node {event['nodes'][0]}, iteration {event['iteration']}"
        lines.append(f"{name:<22}" + "".join(f"{1e3 * one:>11.0f} ms" for one in seconds))
    medians = "".join(f"{1e3 * statistics.median(column):>11.0f} ms" for column in columns)
    return "\n".join([*lines, f"{'median':<22}{medians}   goal {1e3 * GOAL_S:.0f} ms"])


def _report_on_machines(machines: Machines, directory: Path, num_kills: int) -> Any:
    directory.mkdir()
    machines.make_ready()
    faults = (word for spec in kill_specs(num_kills) for word in ("--inject", spec))
    head = machines.start_head(f"{NUM_NODES}:{NUM_NODES}", directory, *faults)
    _show(head)
    assert head.wait(TIMEOUT_S) == 0, head.output
    return json.loads((directory / "report.json").read_text())


def _show(head: Process) -> None:
    """Prints what the head prints, until it ends."""
    num_shown = 0

    def show() -> bool:
        nonlocal num_shown
        has_ended, output = head.returncode is not None, head.output
        print(output[num_shown:], end="", flush=True)
        num_shown = len(output)
        return has_ended

    wait_for(show, what="the job ends", timeout_s=TIMEOUT_S)


def _report_here(directory: Path, settings: tuple[str, ...], num_kills: int) -> Any:
    """The report of the job on this machine, where a node joins a while after each kill."""
    directory.mkdir()
    kills = kill_specs(num_kills)
    starts = [int(spec.partition("@")[2].partition(".")[0]) for spec in kills]
    faults = [*kills, *(f"join:1@{start + 2}" for start in starts)]
    command = [
        *(sys.executable, "-m", "planaria", "train"),
        *gpt2_words(settings, directory / "checkpoints"),
        *("--nodes", str(NUM_NODES), "--set", f"cluster.max_nodes={NUM_NODES}"),
        *("--report", str(directory / "report.json")),
        *(word for spec in faults for word in ("--inject", spec)),
    ]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return json.loads((directory / "report.json").read_text())


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
