"""Measures the regret of the adaptive policy against the best fixed policy, in simulation.

In every case (a cluster, and how its nodes fail and come back) all policies train through the same
20 failures, for many seeds; no two cases are alike. The samples of adaptive are compared with those
of the fixed policy that is best for the case, which nobody knows beforehand. The goals:

- The mean over cases of what adaptive has more, seed by seed, is not below 0, and neither is the
  lower end of its 95% interval. Seeds of a case are not independent of each other, so the interval
  is one over cases.
- Of all cases 95% lose at most 5%.

Fixed policies are all others that `resilience.policy` names. Only policies that give the job what
it asks for can be compared, so each case is run twice:

- `failures_tolerated = 1`: every layer is on two nodes while there are enough. Morph does not
  ensure that: where links are slow its grid is often one pipeline, which reduces no gradients and
  holds each layer once. So it does not count here. The result with morph is printed as well; it
  shows what second holders of layers cost.
- `failures_tolerated = 0`: every policy counts, morph included, as adaptive may now have a single
  pipeline.

Absorb needs twice the memory from the start, so a job has to ask for it, and adaptive does not
choose it; a case in which nodes have too little memory has no samples of absorb. There are no
standby nodes and no copies in memory, so rollback answers like reinstantiate.

The jobs are simulated as by `planaria simulate`: the coordinator is the real one, and answers to a
loss that comes less than a second after the one before are found in a hurry.

`--cases N --seeds M --most-nodes K` sets the size: a full study is 200, 100 and 7 and takes an hour
or two; the default is a quick look. `--results FILE` keeps the samples of each case as a line of
JSON; cases that are in the file are not run again, unless they are of another version of the study.
`--page FILE` writes the result with all cases that lose. Exits 1 if a goal is missed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, sqrt
from multiprocessing import Pool
from pathlib import Path
from typing import Final

from planaria.core.job import PolicyName
from planaria.simulator.economics.compare import ClusterScenario, play
from planaria.simulator.economics.planaria_system import PlanariaSystem
from planaria.systems.system import Setting
from regret_cases import Case, CaseFailures, drawn_cases, drawn_occurrences, setting_of

VERSION: Final = 6  # Version of the study, kept with its samples.
ADAPTIVE: Final[PolicyName] = "adaptive"
POLICIES: Final[tuple[PolicyName, ...]] = (
    ADAPTIVE,
    "reinstantiate",
    "rollback",
    "reroute",
    "repartition",
    "absorb",
    "morph",
)
NOT_KEEPING: Final = ("morph",)  # Policies that may hold layers on fewer nodes than the job asks.
TOLERATED: Final = (1, 0)
NUM_FAILURES: Final = 20
REGRET_MAX: Final = 0.05
# Mean samples of the best fixed policy. In cases with fewer, jobs are dead most of the time.
ALIVE_SAMPLES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a case.

    Attributes:
        samples: samples of each seed, by policy; policies that lack memory are missing.
    """

    case: Case
    samples: Mapping[str, Sequence[float]]

    @property
    def best_fixed(self) -> str:
        """The fixed policy with the most samples."""
        fixed = [name for name in self.samples if name != ADAPTIVE]
        return max(fixed, key=lambda name: sum(self.samples[name]))

    @property
    def most_samples(self) -> float:
        """The mean samples of the best fixed policy over the seeds."""
        return statistics.fmean(self.samples[self.best_fixed])

    @property
    def differences(self) -> list[float]:
        """The samples that adaptive has more than the best fixed policy, by seed, as a share of
        that policy's mean."""
        best = self.samples[self.best_fixed]
        mean = max(1.0, self.most_samples)
        return [(a - b) / mean for a, b in zip(self.samples[ADAPTIVE], best, strict=True)]

    def without(self, names: Sequence[str]) -> "Result":
        """The result without some policies."""
        return Result(self.case, {n: v for n, v in self.samples.items() if n not in names})

    @property
    def regret(self) -> float:
        """The share of samples by which the best fixed policy exceeds adaptive; may be negative."""
        return -statistics.fmean(self.differences)


def main() -> int:
    """Runs all cases and prints the summary; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most-nodes", type=int, default=7)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    drawn = drawn_cases(options.cases, most_nodes=options.most_nodes)
    cases = [replace(case, failures_tolerated=f) for f in TOLERATED for case in drawn]
    known = known_samples(options.results, num_seeds=options.seeds) if options.results else {}
    missing = [case for case in cases if str(case) not in known]
    with Pool() as pool:
        for one in pool.imap(partial(result, num_seeds=options.seeds), missing):
            known[str(one.case)] = one.samples
            print(_row(one), flush=True)
            if options.results:
                with options.results.open("a") as lines:
                    lines.write(result_line(one))
    results = [Result(case, known[str(case)]) for case in cases]
    texts, is_met = verdicts(results)
    print("\n".join(texts))
    if options.page:
        options.page.write_text(page(results, texts))
    return 0 if is_met else 1


_TOLERATING: Final = "With one failure tolerated, so with every layer on two nodes, the goals are"
_WITH_MORPH: Final = "The same cases with morph, too, which may hold a layer once (no goal)"
_TOLERATING_NONE: Final = "With no failure tolerated, so with every policy, the goals are"


def verdicts(results: Sequence[Result]) -> tuple[list[str], bool]:
    """The results in words, and whether all goals are met."""
    asked = [one for one in results if one.case.failures_tolerated]
    kept, is_met_kept = summary([one.without(NOT_KEEPING) for one in asked])
    besides, _ = summary(asked)
    free, is_met_free = summary([one for one in results if not one.case.failures_tolerated])
    texts = [
        f"{_TOLERATING} {_verdict(is_met_kept)}. {kept}",
        f"{_WITH_MORPH}. {besides}",
        f"{_TOLERATING_NONE} {_verdict(is_met_free)}. {free}",
    ]
    return texts, is_met_kept and is_met_free


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def result_line(one: Result) -> str:
    """A case's samples, for a file of results."""
    return json.dumps({"version": VERSION, "case": str(one.case), "samples": one.samples}) + "\n"


def known_samples(path: Path, *, num_seeds: int) -> dict[str, Mapping[str, Sequence[float]]]:
    """The samples by policy of each case in a file that has this version and number of seeds."""
    if not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        one["case"]: one["samples"]
        for one in found
        if one.get("version") == VERSION
        and all(len(samples) == num_seeds for samples in one["samples"].values())
    }


def result(case: Case, *, num_seeds: int, num_failures: int = NUM_FAILURES) -> Result:
    """The result of a case: all policies train through the same failures."""
    samples: dict[str, list[float]] = {}
    for name in POLICIES:
        setting = setting_of(case, name)
        if setting is not None:
            samples[name] = [
                samples_of(case, setting, seed, num_failures=num_failures)
                for seed in range(num_seeds)
            ]
    return Result(case, samples)


def samples_of(case: Case, setting: Setting, seed: int, *, num_failures: int) -> float:
    """The samples of one job until its last failure and for a mean gap after it."""
    last_s = drawn_occurrences(case, seed, num_failures=num_failures)[-1].at_s
    scenario = ClusterScenario(
        name="regret",
        setting=setting,
        failures=CaseFailures(case, seed, num_failures),
        price_per_node_hour=0.0,
        horizon_s=last_s + case.gap_s,
    )
    return play(scenario, PlanariaSystem(), seed).samples


def summary(results: Sequence[Result]) -> tuple[str, bool]:
    """Both goals in words, and whether they are met."""
    num_runs = sum(len(one.differences) for one in results)
    mean, half = mean_interval([-one.regret for one in results])
    regrets = sorted(one.regret for one in results)
    p95 = regrets[min(len(regrets) - 1, int(0.95 * len(regrets)))]
    is_met = mean - half >= 0.0 and p95 <= REGRET_MAX
    alive = [-one.regret for one in results if one.most_samples >= ALIVE_SAMPLES]
    text = (
        f"In {len(results)} cases, with {num_runs} runs of {NUM_FAILURES} failures, the samples of "
        f"adaptive differ from those of the best fixed policy by {100 * mean:+.2f}%, on average "
        f"over the cases (95% interval: {100 * (mean - half):+.2f}% to "
        f"{100 * (mean + half):+.2f}%; goal: not below 0). Of the cases 95% lose at "
        f"most {100 * p95:.2f}% (goal: {100 * REGRET_MAX:.0f}%); the worst one loses "
        f"{100 * regrets[-1]:.2f}%."
    )
    if 1 < len(alive) < len(results):
        mean, half = mean_interval(alive)
        some = f"{len(alive)} cases with {ALIVE_SAMPLES:,} samples or more"
        text += f" In the {some} it is {100 * mean:+.2f}% (95% interval: +-{100 * half:.2f}%)."
    return text, is_met


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of the width of its 95% interval; infinite for a single value."""
    half = 1.96 * statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else inf
    return statistics.fmean(values), half


_HOW_TO_READ: Final = (
    "A case is read so: the model; the number of nodes; microbatches for each node; the speed of "
    "the links (1/10: a tenth of the profile's); the mean time between failures and the largest "
    "number of nodes that fail at once; the time until a node is back; the time between saves; the "
    "failures tolerated. The regret is the share by which the best fixed policy has more samples."
)


def page(results: Sequence[Result], texts: Sequence[str]) -> str:
    """A page with the results in words; for each number of tolerated failures it has a table of the
    fixed policies, and one of all cases in which one that counts has more samples."""
    lines = [
        "# Regret of the adaptive policy",
        "",
        "`benchmarks/regret.py --page` writes this page; the script says how it measures.",
        *(line for text in texts for line in ("", text)),
        "",
        _HOW_TO_READ,
    ]
    for tolerated in TOLERATED:
        some = [one for one in results if one.case.failures_tolerated == tolerated]
        counted = [one.without(NOT_KEEPING) for one in some] if tolerated else some
        losing = sorted((one for one in counted if one.regret > 0), key=lambda one: -one.regret)
        lines += [
            "",
            f"## Failures tolerated: {tolerated}",
            "",
            "| fixed policy | cases in which it runs | best in | samples compared with adaptive |",
            "|---|---|---|---|",
            *_policy_rows(some),
            "",
            f"In {len(losing)} cases a fixed policy that counts trains more samples than adaptive.",
            "",
            "| regret | best fixed policy | case |",
            "|---|---|---|",
            *(f"| {100 * one.regret:.2f}% | {one.best_fixed} | {one.case} |" for one in losing),
        ]
    return "\n".join(lines) + "\n"


def _policy_rows(results: Sequence[Result]) -> list[str]:
    """A row for each fixed policy: the number of cases in which it could run and in which it is the
    best, and how many more samples than adaptive it has on average."""
    rows = []
    for name in POLICIES[1:]:
        ran = [one for one in results if name in one.samples]
        num_best = sum(one.best_fixed == name for one in ran)
        more = [_more(one.samples[name], one.samples[ADAPTIVE]) for one in ran]
        text = f"{100 * statistics.fmean(more):+.2f}%" if more else ""
        rows.append(f"| {name} | {len(ran)} | {num_best} | {text} |")
    return rows


def _more(samples: Sequence[float], others: Sequence[float]) -> float:
    """The share by which the mean of some samples exceeds that of others."""
    mean = statistics.fmean(others)
    return (statistics.fmean(samples) - mean) / max(1.0, mean)


def _row(one: Result) -> str:
    means = ", ".join(f"{n} {statistics.fmean(v):.0f}" for n, v in one.samples.items())
    return f"{100 * one.regret:+6.2f}%  {means}; {one.case}"


if __name__ == "__main__":
    sys.exit(main())
