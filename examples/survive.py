"""Trains the example job on six nodes, kills two of them, and trains it again without failures.

The parameters and the optimizer's state of both runs must be the same, bit for bit. Run it in the
repository with `make demo`, or with `python examples/survive.py DIRECTORY` to choose the directory
of checkpoints and reports.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("gpt2-text.toml")
FAULTS = ("--inject", "kill:4@15.backward", "--inject", "kill:1@30.commit")


def main() -> int:
    """Runs the job twice and compares the results; returns 0 if all bits are the same."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "reports/demo")
    shutil.rmtree(directory, ignore_errors=True)
    print("six nodes, two of which will be killed\n", flush=True)
    struck = trained(directory / "struck", *FAULTS)
    print("\nthe same job without faults\n", flush=True)
    calm = trained(directory / "calm")
    print()
    for event in struck["events"]:
        if event["kind"] == "kill":
            print(
                f"node {event['nodes'][0]} was killed in iteration {event['iteration']}: "
                f"{1000 * event['downtime_s']:.0f} ms until all went on ({event['answer']}), "
                f"{event['transfer_bytes'] / 1e6:.1f} MB moved"
            )
    print(f"nodes       {len(struck['final']['nodes'])} of 6 at the end, {kept(struck)}")
    same = [struck["final"][key] == calm["final"][key] for key in HASHES]
    for key, is_same in zip(HASHES, same, strict=True):
        print(f"{key:<18}  {struck['final'][key]}  {'the same' if is_same else 'DIFFERS'}")
    print("not one bit differs" if all(same) else "THE RESULT DEPENDS ON THE FAILURES")
    return 0 if all(same) else 1


HASHES = ("parameters_sha256", "optimizer_sha256")


def trained(directory: Path, *options: str) -> dict[str, Any]:
    """The report of one run of the job on six nodes."""
    directory.mkdir(parents=True)
    report = directory / "report.json"
    command = [
        *(sys.executable, "-m", "planaria", "train", str(JOB), "--nodes", "6"),
        *("--report", str(report), "--set", f"checkpoint.directory={directory / 'checkpoints'}"),
        *options,
    ]
    subprocess.run(command, check=True)
    loaded: dict[str, Any] = json.loads(report.read_text())
    return loaded


def kept(report: dict[str, Any]) -> str:
    """Whether the processes at the end are those of the start, in words."""
    final = set(report["final"]["nodes"])
    at_start = [w for w in report["workers"] if w["node"] in final and w["first_epoch"] == 0]
    is_kept = {worker["node"] for worker in at_start} == final
    return "each in the process it started in" if is_kept else "some in new processes"


if __name__ == "__main__":
    sys.exit(main())
