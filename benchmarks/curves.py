"""Compares the loss of a small GPT-2 under failures and each policy with that without failures.

Every 70 iterations a random node is killed at a random step, and another joins; most jobs have four
nodes. The job trains under every policy, in deterministic and in fast mode, and once in each mode
without failures. In deterministic mode all runs must end with the same hashes of parameters and
optimizer state. In fast mode the mean loss of the last 100 iterations must be within 0.1 of that
without failures; runs differ because gradients are summed in another order.

At least a fifth of the answers must be of a kind that only the policy gives. For that, `absorb` has
two pipelines of three nodes, as with two of two a node that stands in for its neighbour would need
memory for the whole model. `repartition` has six nodes as well, since for three survivors the
layout of templates is as fast as any, apart from noise. `rollback` has a standby node.

It prints a line for each run, with the number of times that each answer was taken. `--plot FILE`
draws the curves. `make soak` runs 3,500 iterations, which takes an hour or more of two cores.
`--results FILE` keeps each run as a line, so that another call continues where one ended. Exits 1
if a run differs by more or does not survive; 2 if a picture is asked for without matplotlib.

Source: Odyssey, figure 13: the loss of GPT-3 over 3,500 iterations, with and without failures.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, cast

import msgspec

from planaria.core.inject import ITERATION_STEPS, parse_injection
from planaria.core.job import POLICIES, JobConfig, PolicyName
from planaria.core.specs import Prepared
from planaria.job.config import load_job
from planaria.job.planning import fork_server, given_profile, plan_job
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.planner.plans import PlanCatalog, plan_of_templates
from planaria.profiles.profile_json import encode_profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLE = Path(__file__).parents[1] / "examples" / "small.toml"
NODES: Final = 4
FIRST, EVERY = 30, 70  # Iterations before the first kill, and from one kill to the next.
JOINS_AFTER: Final = 3  # Iterations from a kill to the join.
SAVE_EVERY: Final = 35  # Iterations; some policies go back to the newest save.
# Memory of a device by mode: enough for a neighbour's layers as well, but not for all layers.
MEMORY_BYTES: Final = {True: 960_000, False: 800_000}
LAST: Final = 100  # Number of last iterations whose mean loss is compared.
DIFFERENCE_MAX: Final = 0.1
SEED: Final = 13
MODES: Final = {True: "deterministic", False: "fast"}
PEACE: Final = "no faults"
OWN_SHARE: Final = 0.2
# By policy, the beginning of the answers that no other policy gives.
OWN_ANSWERS: Final = {
    "absorb": "absorb",
    "morph": "grid",
    "repartition": "repartition",
    "reroute": "reroute",
    "rollback": "standby",
}
_POINTS: Final = 140  # Points of a drawn curve; each is the mean of equally many iterations.


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The result of a run.

    Attributes:
        name: name of its policy, or PEACE: there were no failures.
        losses: loss of each iteration.
        hashes: hashes of parameters and of optimizer state at the end.
        kills: (number of kills that were answered, number of kills).
        answers: number of times that each answer was taken.
        error: why it ended early; empty: it did not.
    """

    name: str
    is_deterministic: bool
    losses: tuple[float, ...]
    hashes: tuple[str, str]
    kills: tuple[int, int]
    answers: dict[str, int]
    error: str

    @property
    def last(self) -> float:
        """The mean loss of the last iterations."""
        return statistics.fmean(self.losses[-LAST:])


def main() -> int:
    """Runs the jobs and prints the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--plot", default="", help="an SVG file to draw the curves into")
    parser.add_argument("--results", type=Path, help="what keeps the runs")
    arguments = parser.parse_args()
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        print("matplotlib draws the curves: pip install -e '.[plots]'")
        return 2
    curves: list[Curve] = []
    known = _known(arguments.results, arguments.iterations)
    missed = 0
    header = f"{'mode':<14} {'policy':<14} {'kills':>6} {'loss':>7} {'from peace':>11}"
    print(f"{header}  answers", flush=True)
    example = load_job(EXAMPLE, overrides=(f"training.iterations={arguments.iterations}",))
    with tempfile.TemporaryDirectory() as directory, closing(fork_server(example)) as server:
        for is_deterministic in MODES:
            job = _job(example, Path(directory), server, is_deterministic=is_deterministic)
            calm: Curve | None = None
            for name in (PEACE, *POLICIES):
                curve = known.get((name, is_deterministic))
                if curve is None:
                    curve = _curve(job, server, name)
                    _keep(curve, arguments.results)
                calm = calm or curve
                curves.append(curve)
                missed += _told(curve, calm)
    if arguments.plot:
        _draw(curves, Path(arguments.plot))
    print(f"{missed} of {len(curves)} runs differ by more than they may, or ended early")
    return 1 if missed else 0


def _known(path: Path | None, iterations: int) -> dict[tuple[str, bool], Curve]:
    """The runs with a number of iterations that earlier calls have kept, by name and mode."""
    if path is None or not path.exists():
        return {}
    kept = [msgspec.json.decode(line, type=Curve) for line in path.read_bytes().splitlines()]
    return {(c.name, c.is_deterministic): c for c in kept if len(c.losses) == iterations}


def _keep(curve: Curve, path: Path | None) -> None:
    if path is not None:
        with path.open("ab") as lines:
            lines.write(msgspec.json.encode(curve) + b"\n")


def _job(
    example: JobConfig, directory: Path, server: ForkServer, *, is_deterministic: bool
) -> JobConfig:
    """The job with a measured profile, so that all runs have the same plans."""
    mode = MODES[is_deterministic]
    job = replace(
        example,
        training=replace(example.training, deterministic=is_deterministic),
        checkpoint=replace(
            example.checkpoint, directory=str(directory / mode), persist_every=SAVE_EVERY
        ),
        cluster=replace(
            example.cluster,
            nodes=NODES,
            max_nodes=NODES + 1,
            device_memory_bytes=MEMORY_BYTES[is_deterministic],
            rejoin_delay_s=0.0,
        ),
    )
    path = directory / f"{mode}.json"
    path.write_bytes(encode_profile(Job(job).profile(server=server)))
    return replace(job, model=replace(job.model, profile=str(path)))


def specs(job: JobConfig, rng: Random) -> tuple[str, ...]:
    """The faults of a run: again and again a node that trains is killed, and then one joins."""
    num_nodes, num_standby = job.cluster.nodes, job.cluster.standby
    at_work, found = list(range(num_nodes)), []
    last = job.training.iterations - JOINS_AFTER - 1
    for index, at in enumerate(range(FIRST, last, EVERY)):
        node = at_work.pop(rng.randrange(len(at_work)))
        found.append(f"kill:{node}@{at}.{rng.choice(ITERATION_STEPS)}")
        found.append(f"join:1@{at + JOINS_AFTER}")
        at_work.append(num_nodes + index)  # The standby node, or the one that joins.
    assert num_standby <= 1
    return tuple(found)


def _curve(job: JobConfig, server: ForkServer, name: str) -> Curve:
    iterations = job.training.iterations
    directory = f"{job.checkpoint.directory}-{name.replace(' ', '-')}"
    job = replace(job, checkpoint=replace(job.checkpoint, directory=directory))
    faults: tuple[str, ...] = ()
    if name != PEACE:
        job = _under(job, cast(PolicyName, name))
        faults = specs(job, Random(SEED))
    catalog = _of_two_pipelines(job) if name == "absorb" else None
    result = Job(job).run(
        injections=[parse_injection(spec) for spec in faults],
        server=server,
        plan=catalog.plans[job.cluster.nodes] if catalog else None,
        catalog=catalog,
    )
    answered = [e for e in result.report.events if e.kind == "kill" and e.fired and e.answer]
    return Curve(
        name=name,
        is_deterministic=job.training.deterministic,
        losses=tuple(record.loss for record in result.report.iterations),
        hashes=(result.report.final.parameters_sha256, result.report.final.optimizer_sha256),
        kills=(len(answered), len(faults) // 2),
        answers=dict(Counter(event.answer for event in answered)),
        error=_error(result, iterations),
    )


def _under(job: JobConfig, policy: PolicyName) -> JobConfig:
    """The job with a policy, and with the nodes that this policy needs."""
    cluster = job.cluster
    if policy in ("absorb", "repartition"):
        cluster = replace(cluster, nodes=6, max_nodes=6)
    if policy == "absorb":
        memory_bytes = cluster.device_memory_bytes * 5 // 4
        cluster = replace(cluster, device_memory_bytes=memory_bytes)
    if policy == "rollback":
        cluster = replace(cluster, standby=1)
    return replace(job, resilience=replace(job.resilience, policy=policy), cluster=cluster)


def _of_two_pipelines(job: JobConfig) -> PlanCatalog:
    """Prepared plans of which the only one, for all nodes, has two pipelines."""
    planned = plan_job(job, Prepared(profile=given_profile(job)))
    num_nodes = job.cluster.nodes
    halves = [planned.templates[num_nodes // 2]] * 2
    plan = plan_of_templates(planned.problem, halves, range(num_nodes), epoch=0)
    return replace(planned.catalog, plans={num_nodes: plan})


def _error(result: TrainingResult, iterations: int) -> str:
    if result.error is not None:
        return str(result.error)
    done = len(result.report.iterations)
    return "" if done == iterations else f"{done} of {iterations} iterations"


def _told(curve: Curve, calm: Curve) -> bool:
    """Prints the line of a run; returns whether it misses a goal."""
    difference = curve.last - calm.last
    is_same = curve.hashes == calm.hashes and all(curve.hashes)
    is_near = is_same if curve.is_deterministic else abs(difference) <= DIFFERENCE_MAX
    own = OWN_ANSWERS.get(curve.name, "")
    num_own = sum(n for answer, n in curve.answers.items() if answer.startswith(own))
    is_met = is_near and not curve.error and curve.kills[0] == curve.kills[1]
    is_met &= num_own >= OWN_SHARE * curve.kills[1]
    verdict = "" if is_met else f"  MISSED {curve.error}"
    far = f"{difference:+.4f}"
    if curve.is_deterministic:
        far = "no bit" if is_same else "bits"
    answers = ", ".join(
        f"{count} {answer}" for answer, count in Counter(curve.answers).most_common()
    )
    print(
        f"{MODES[curve.is_deterministic]:<14} {curve.name:<14} "
        f"{curve.kills[0]:>3}/{curve.kills[1]:<2} {curve.last:>7.4f} {far:>11}  {answers}{verdict}",
        flush=True,
    )
    return not is_met


def _draw(curves: Sequence[Curve], path: Path) -> None:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "planaria"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(1, len(MODES), sharey=True)
        for panel, (is_deterministic, mode) in zip(panels, MODES.items(), strict=True):
            in_mode = [one for one in curves if one.is_deterministic == is_deterministic]
            _draw_panel(panel, in_mode)
            panel.set_title(f"{mode}, {max(one.kills[1] for one in in_mode)} nodes killed")
        panels[0].set_ylabel("loss")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _draw_panel(panel: "Axes", curves: Sequence[Curve]) -> None:
    """Draws curves; later ones are thinner, so that curves that coincide stay visible."""
    for index, curve in enumerate(curves):
        size = max(1, len(curve.losses) // _POINTS)
        starts = range(0, len(curve.losses), size)
        panel.plot(
            [start + size / 2 for start in starts],
            [statistics.fmean(curve.losses[start : start + size]) for start in starts],
            label=curve.name,
            linewidth=1.2 * (len(curves) - index),
        )
    panel.set_xlabel("iteration")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)


if __name__ == "__main__":
    sys.exit(main())
