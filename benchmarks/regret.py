"""What it costs to let the job choose: the adaptive policy beside each fixed one, in simulation.

Of every case (a cluster, and how its nodes fail and come back) all policies train through the same
failures, for many seeds. Their samples are compared with those of the fixed policy that is best for
the case, which nobody knows beforehand. The goals: on average over all runs adaptive is not below
it (95% interval of paired differences), and of all cases 95% lose at most 5%.

`--cases N --seeds M --most-nodes K` says how much is run: a full study is 200, 100 and 7, which
takes hours, and the default a glance at it. `--results FILE` keeps the samples of each case as a
line of JSON; what is there is not run again. `--page FILE` writes the result with all cases that
lose. Exits 1 if a goal is missed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from multiprocessing import Pool
from pathlib import Path
from typing import Final

from planaria.config import load_job
from planaria.policies.named import policy_of
from study.cases import Case, drawn_case, every_of, happenings
from study.job import Answers, Job

ADAPTIVE: Final = "adaptive"
POLICIES: Final = (ADAPTIVE, "reinstantiate", "reroute", "repartition")  # It chooses from these.
EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "paced.toml"
NUM_FAILURES: Final = 20
REGRET_MAX: Final = 0.05


@dataclass(frozen=True, slots=True)
class Result:
    """Samples of one case by policy, seed by seed."""

    case: Case
    samples: Mapping[str, Sequence[float]]

    @property
    def best_fixed(self) -> str:
        """The fixed policy with the most samples."""
        fixed = [name for name in self.samples if name != ADAPTIVE]
        return max(fixed, key=lambda name: sum(self.samples[name]))

    @property
    def differences(self) -> list[float]:
        """By seed, what adaptive has more than the best fixed one, as a share of its mean."""
        best = self.samples[self.best_fixed]
        mean = max(1.0, statistics.fmean(best))
        return [(a - b) / mean for a, b in zip(self.samples[ADAPTIVE], best, strict=True)]

    @property
    def regret(self) -> float:
        """The share of samples that the best fixed policy has more; below 0 if it has fewer."""
        return -statistics.fmean(self.differences)


def main() -> int:
    """Runs all cases and prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most-nodes", type=int, default=7)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    cases = [drawn_case(seed, most_nodes=options.most_nodes) for seed in range(options.cases)]
    known = known_samples(options.results, num_seeds=options.seeds) if options.results else {}
    missing = [case for case in dict.fromkeys(cases) if str(case) not in known]
    with Pool() as pool:
        for one in pool.imap(partial(result, num_seeds=options.seeds), missing):
            known[str(one.case)] = one.samples
            print(_row(one), flush=True)
            if options.results:
                with options.results.open("a") as lines:
                    lines.write(json.dumps({"case": str(one.case), "samples": one.samples}) + "\n")
    results = [Result(case, known[str(case)]) for case in cases]
    text, is_met = summary(results)
    print(text)
    if options.page:
        options.page.write_text(page(results, text))
    return 0 if is_met else 1


def known_samples(path: Path, *, num_seeds: int) -> dict[str, Mapping[str, Sequence[float]]]:
    """Of each case that has been run so often, the samples by policy."""
    if not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        one["case"]: one["samples"]
        for one in found
        if all(len(samples) == num_seeds for samples in one["samples"].values())
    }


def result(case: Case, *, num_seeds: int, num_failures: int = NUM_FAILURES) -> Result:
    """All policies through the same failures."""
    every = every_of(case)
    samples: dict[str, list[float]] = {name: [] for name in POLICIES}
    for name in POLICIES:
        job = load_job(EXAMPLE, overrides=[f'resilience.policy="{name}"'])
        answers = Answers(every, policy_of(job, every))
        for seed in range(num_seeds):
            samples[name].append(trained(case, answers, name, seed, num_failures=num_failures))
    return Result(case, samples)


def trained(case: Case, answers: Answers, name: str, seed: int, *, num_failures: int) -> float:
    """The samples of one job until its last failure, and a mean gap after that."""
    plan = answers.every.plans[case.num_nodes]
    templates = [pipeline.template for pipeline in plan.pipelines]
    problem = answers.every.problem
    run = Job(
        answers=answers,
        batch=problem.num_microbatches * problem.profile.microbatch_size,
        save_every_s=case.save_every_s,
        is_adaptive=name == ADAPTIVE,
        plan=plan,
        iteration_s=answers.every.distribution(templates)[0],
        alive=set(range(case.num_nodes)),
    )
    what = happenings(case, seed, num_failures=num_failures)
    for one in what:
        run.answer(one)
    run.go_on(what[-1].at_s + case.gap_s)
    return run.samples


def summary(results: Sequence[Result]) -> tuple[str, bool]:
    """Both goals in words, and whether they are met."""
    paired = [difference for one in results for difference in one.differences]
    mean = statistics.fmean(paired)
    half = 1.96 * statistics.stdev(paired) / sqrt(len(paired)) if len(paired) > 1 else 0.0
    regrets = sorted(one.regret for one in results)
    p95 = regrets[min(len(regrets) - 1, int(0.95 * len(regrets)))]
    is_met = mean + half >= 0.0 and p95 <= REGRET_MAX
    verdict = "met" if is_met else "MISSED"
    text = (
        f"{len(results)} cases, {len(paired)} runs of {NUM_FAILURES} failures: adaptive has "
        f"{100 * mean:+.2f}% (95%: {100 * (mean - half):+.2f}% to {100 * (mean + half):+.2f}%) of "
        f"the samples of the best fixed policy more; regret p95 {100 * p95:.2f}%, at most "
        f"{100 * regrets[-1]:.2f}% (goals: not below, 5%: {verdict})"
    )
    return text, is_met


def page(results: Sequence[Result], text: str) -> str:
    """The result, and all cases in which a fixed policy has more samples."""
    losing = sorted((one for one in results if one.regret > 0), key=lambda one: -one.regret)
    lines = [
        "# Regret of the adaptive policy",
        "",
        "Written by `benchmarks/regret.py --page`, which says how it is measured.",
        "",
        f"{text}.",
        "",
        f"Cases in which a fixed policy has more samples: {len(losing)}.",
        "",
        "| regret | best fixed | case |",
        "|---|---|---|",
        *(f"| {100 * one.regret:.2f}% | {one.best_fixed} | {one.case} |" for one in losing),
    ]
    return "\n".join(lines) + "\n"


def _row(one: Result) -> str:
    means = ", ".join(f"{n} {statistics.fmean(v):.0f}" for n, v in one.samples.items())
    return f"{100 * one.regret:+6.2f}%  {means}; {one.case}"


if __name__ == "__main__":
    sys.exit(main())
