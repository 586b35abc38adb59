"""Searches for what pays most on a cluster whose nodes fail: policy, f, spares, saves and copies.

All choices are played through the same failures, so they are compared seed by seed. No seed that
chose the leader measures it:

1. Screening: every policy with every f, without spares and with two, with two seeds; the leaders
   with more. Then the leader with every number of spares. Policies that search long for an answer
   are tried with the leader's f and spares only.
2. Saves: the leader with every time between saves, and with copies in memory.
3. Restarts under torchrun, with every time between saves; on a static cluster with spares, too.
4. Measurement, with other seeds: the leader, and what differs from it in one respect. If one of
   them is surely better, it is the leader, and further seeds measure again.

Runs that have policy, f and spares in common share the answers of the policy, so that a search is
made once for all their seeds. They are one task of one process, so the number of processes changes
nothing. Choices that differ by less than `CLOSE` are alike, and the plainer one is taken.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import log
from statistics import fmean
from typing import Final, Literal

from planaria.coordinator.job_rules import Rules
from planaria.core.job import PolicyName
from planaria.errors import ConfigError
from planaria.policies.traits import TRAITS
from planaria.simulator.economics.compare import (
    LEVEL,
    ClusterScenario,
    Interval,
    JobOutcome,
    interval,
    play,
    spread,
)
from planaria.simulator.economics.planaria_run import PlanariaRun
from planaria.simulator.economics.planaria_system import plans_of, rules_of_setting
from planaria.simulator.economics.virtual_foresight import VirtualForesight
from planaria.systems.restart import Restart, StaticRestart
from planaria.systems.system import Setting, System, SystemRun

SystemName = Literal["planaria", "restart", "static"]
CLOSE: Final = 0.001  # Share by which choices must differ to be told apart.
SAVE_MIN: Final = 30  # Minutes between saves, where another time is no better.
CHOOSING_SEEDS: Final = 4
_SCREENING_SEEDS: Final = 2
_SCREENING_SPARES: Final = (0, 2)
_LEADERS: Final = 6
_ROUNDS_MAX: Final = 3
_MULTIPLES: Final = (2, 4, 8, 16, 32)  # Of the failure rate, at which spares are tried.
# From the plainest on.
_PLAIN: Final[tuple[PolicyName, ...]] = (
    *("reinstantiate", "adaptive", "reroute", "repartition", "rollback", "absorb", "morph"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a user chooses.

    Attributes:
        policy: policy of planaria; "" for another system.
        failures_tolerated: f, which planaria plans for.
        num_spares: number of nodes of the cluster that wait to take the places of lost ones.
        save_min: minutes from one save to the next.
        copies: number of copies of each layer in memory; 0: none.
        whole_backwards: whether the policy is kept from splitting backwards, which tells what they
            give; never advised.
    """

    system: SystemName
    policy: PolicyName | Literal[""] = ""
    failures_tolerated: int = 0
    num_spares: int = 0
    save_min: int = SAVE_MIN
    copies: int = 0
    whole_backwards: bool = False

    @property
    def answers_key(self) -> tuple[object, ...]:
        """A key that is the same for choices that share the answers of their policy."""
        shared = self.system, self.policy, self.failures_tolerated, self.num_spares
        return *shared, self.whole_backwards

    @property
    def plainness(self) -> tuple[float, ...]:
        """A key by which plainer choices come first."""
        policy = _PLAIN.index(self.policy) if self.policy else 0
        away = abs(log(self.save_min / SAVE_MIN))
        return policy, abs(self.failures_tolerated - 1), self.num_spares, self.copies, away


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values among which is chosen.

    Attributes:
        policies: policies that answer at once.
        slow_policies: policies that search long for an answer.
    """

    policies: tuple[PolicyName, ...]
    slow_policies: tuple[PolicyName, ...]
    failures_tolerated: tuple[int, ...]
    num_spares: tuple[int, ...]
    save_min: tuple[int, ...]
    copies: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparesPay:
    """When spares pay, by the failure rate.

    Attributes:
        policy: policy that was played.
        multiple: lowest multiple of the failure rate at which the seeds show that they do; 0: none
            that was tried. The intervals of all multiples hold at once.
        multiple_max: the highest multiple that was tried.
        num_spares: number of spares that was played there.
    """

    policy: PolicyName
    multiple: int
    multiple_max: int
    num_spares: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What pays most, and by how much.

    Attributes:
        leader: the choice that is advised.
        outcomes: outcomes of everything that was measured, by choice, in the order of the seeds.
        gains: goodput of the leader over that of each other choice, less 1; None where the other
            trained nothing with some seed. All intervals hold at once, by Bonferroni.
        reasons: why a choice cannot be played, by choice.
        spares_pay: answer for higher failure rates; None if spares pay now or cannot be had, or
            nothing fails.
    """

    leader: Choice
    outcomes: Mapping[Choice, tuple[JobOutcome, ...]]
    gains: Mapping[Choice, Interval | None]
    reasons: Mapping[Choice, str]
    spares_pay: SparesPay | None


SettingOf = Callable[[Choice], Setting]  # Raises ConfigError where there is no plan.
Watch = Callable[[str, int, int], None]  # Gets the stage, and how many of its tasks are done.


class Trials:
    """The choices that were played in one scenario, each with every seed once.

    Attributes:
        reasons: why a choice cannot be played, by choice.
    """

    def __init__(
        self, scenario: ClusterScenario, setting_of: SettingOf, *, num_processes: int, watch: Watch
    ) -> None:
        self.reasons: dict[Choice, str] = {}
        self._scenario, self._setting_of = scenario, setting_of
        self._num_processes, self._watch = num_processes, watch
        self._outcomes: dict[Choice, dict[int, JobOutcome]] = {}

    def play(self, stage: str, choices: Iterable[Choice], seeds: Sequence[int]) -> list[Choice]:
        """Plays what has not been played yet; returns the choices that can be."""
        can_play = [choice for choice in dict.fromkeys(choices) if self._can_play(choice)]
        groups: dict[object, list[_Trial]] = {}
        for choice in can_play:
            known = self._outcomes.setdefault(choice, {})
            missing = tuple(seed for seed in seeds if seed not in known)
            if missing:
                groups.setdefault(choice.answers_key, []).append(
                    _Trial(choice, self._setting_of(choice), missing)
                )
        tasks = list(groups.values())
        results = spread(partial(_play_group, self._scenario), tasks, self._num_processes)
        self._watch(stage, 0, len(tasks))
        for number, (task, result) in enumerate(zip(tasks, results, strict=True), start=1):
            for trial, outcomes in zip(task, result, strict=True):
                self._outcomes[trial.choice].update({outcome.seed: outcome for outcome in outcomes})
            self._watch(stage, number, len(tasks))
        return can_play

    def _can_play(self, choice: Choice) -> bool:
        if choice in self.reasons:
            return False
        try:
            self._setting_of(choice)
        except ConfigError as error:
            self.reasons[choice] = error.remedy
            return False
        return True

    def outcomes(self, choice: Choice, seeds: Sequence[int]) -> tuple[JobOutcome, ...]:
        """The outcomes of a choice that was played with these seeds."""
        return tuple(self._outcomes[choice][seed] for seed in seeds)

    def ranking(self, choices: Iterable[Choice], seeds: Sequence[int]) -> list[Choice]:
        """The choices from the best one on, by their mean goodput."""
        goodput = {choice: _goodput(self.outcomes(choice, seeds)) for choice in choices}
        return sorted(goodput, key=lambda choice: (-goodput[choice], choice.plainness))

    def best(self, choices: Sequence[Choice], seeds: Sequence[int]) -> Choice:
        """The plainest of the choices that are as good as the best one."""
        goodput = {choice: _goodput(self.outcomes(choice, seeds)) for choice in choices}
        least = max(goodput.values()) * (1.0 - CLOSE)
        return min((c for c in choices if goodput[c] >= least), key=lambda c: c.plainness)


def _goodput(outcomes: Sequence[JobOutcome]) -> float:
    return fmean(outcome.samples_per_s for outcome in outcomes)


# -- one task -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Trial:
    choice: Choice
    setting: Setting
    seeds: tuple[int, ...]


def _play_group(
    scenario: ClusterScenario, trials: Sequence[_Trial]
) -> list[tuple[JobOutcome, ...]]:
    """The outcomes of trials that have policy, f and spares in common."""
    first = trials[0].setting
    policy = rules_of_setting(first).policy if trials[0].choice.policy else None
    played = []
    for trial in trials:
        system: System = Restart()
        if policy is not None:
            rules = replace(rules_of_setting(trial.setting), policy=policy)
            system = _Planaria(rules, trial.setting)
        elif trial.choice.system == "static":
            system = StaticRestart(trial.choice.num_spares)
        own = replace(scenario, setting=trial.setting)
        outcomes = (play(own, system, seed) for seed in trial.seeds)
        # What is only drawn is left out, since it would have to be sent.
        played.append(tuple(replace(outcome, curve=(), lost_at_s=()) for outcome in outcomes))
    return played


@dataclass(frozen=True, slots=True)
class _Planaria:
    """Planaria with a policy whose answers are kept from run to run; implements `System`."""

    rules: Rules
    setting: Setting

    @property
    def name(self) -> str:
        """See `System`."""
        return "planaria"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> SystemRun:
        """See `System`."""
        if isinstance(self.rules.policy, VirtualForesight):
            self.rules.policy.is_ready = False
        problem = setting.catalog.problem
        return PlanariaRun(self.rules, plans_of(setting), setting.costs, problem, absent=absent)


# -- the search -----------------------------------------------------------------------------------


def advice(
    space: Space, trials: Trials, *, num_seeds: int, trials_at: Callable[[int], Trials] | None
) -> Advice:
    """What pays most.

    Args:
        num_seeds: number of seeds that measure at a time, 2 or more.
        trials_at: function from a multiple of the failure rate to trials at that rate; None if
            nothing fails.

    Raises:
        ConfigError: no choice can be played.
    """
    choosing = range(num_seeds, num_seeds + CHOOSING_SEEDS)
    screened = _screen(space, trials, choosing)
    leader = trials.best(screened, choosing)
    stage = "choosing saves and copies"
    varied = trials.play(stage, _with_saves(space, leader), choosing)
    leader = trials.best(varied, choosing)
    baselines = _baselines(space, trials, choosing)
    measuring = range(num_seeds)
    measured: list[Choice] = []
    gains: dict[Choice, Interval | None] = {}
    for rounds_left in reversed(range(_ROUNDS_MAX)):
        rivals = [*_policy_rivals(leader, screened, trials, choosing), *_neighbours(space, leader)]
        rivals = [leader, *measured, *rivals, *baselines]
        measured = trials.play("measuring", rivals, measuring)
        gains = _gains(leader, measured, trials, measuring)
        better = [c for c, gain in gains.items() if gain and gain.high and gain.high < -CLOSE]
        better = [choice for choice in better if choice.policy and not choice.whole_backwards]
        if not (better and rounds_left):
            break
        leader = trials.best(better, measuring)
        first = max(measuring.stop, choosing.stop)
        measuring = range(first, first + num_seeds)  # The others made it look better than it is.
    return Advice(
        leader=leader,
        outcomes={choice: trials.outcomes(choice, measuring) for choice in measured},
        gains=gains,
        reasons=trials.reasons,
        spares_pay=_spares_pay(space, leader, screened, trials_at, (choosing, measuring)),
    )


def _screen(space: Space, trials: Trials, choosing: Sequence[int]) -> list[Choice]:
    """The choices that remain after screening; all have been played with all these seeds.

    Raises:
        ConfigError: no choice can be played.
    """
    quick = space.policies or space.slow_policies
    everything = [
        Choice(system="planaria", policy=policy, failures_tolerated=f, num_spares=spares)
        for policy in quick
        for f in space.failures_tolerated
        for spares in space.num_spares
        if spares in _SCREENING_SPARES
        if spares or policy != "rollback"  # Without spares it is reinstantiate.
    ]
    first = choosing[:_SCREENING_SEEDS]
    can_play = trials.play("screening", everything, first)
    if not can_play:
        reason = next(iter(trials.reasons.values()), "there is no policy to play")
        raise ConfigError("", "", f"nothing fits on these nodes: {reason}")
    ranking = trials.ranking(can_play, first)
    of_policy = {choice.policy: choice for choice in reversed(ranking)}
    leaders = dict.fromkeys([*ranking[:_LEADERS], *of_policy.values()])
    screened = trials.play("choosing", leaders, choosing)
    leader = trials.best(screened, choosing)
    if leader.policy not in space.slow_policies:
        spares = [replace(leader, num_spares=number) for number in space.num_spares]
        screened = list(dict.fromkeys([*screened, *trials.play("choosing", spares, choosing)]))
        leader = trials.best(screened, choosing)
    slow = [
        replace(leader, policy=policy, num_spares=spares)
        for policy in space.slow_policies
        if policy not in quick
        for spares in dict.fromkeys((0, leader.num_spares))
    ]
    return [*screened, *trials.play("trying policies that search", slow, choosing)]


def _with_saves(space: Space, leader: Choice) -> list[Choice]:
    saves = [replace(leader, save_min=save_min) for save_min in space.save_min]
    return [*saves, *(replace(leader, copies=copies) for copies in space.copies)]


def _baselines(space: Space, trials: Trials, choosing: Sequence[int]) -> list[Choice]:
    """The best restarts under torchrun, and the best ones for each number of spares."""
    pairs: list[tuple[SystemName, int]] = [("restart", 0)]
    pairs += [("static", number) for number in space.num_spares]
    choices = {
        pair: [Choice(system=pair[0], num_spares=pair[1], save_min=m) for m in space.save_min]
        for pair in pairs
    }
    can_play = trials.play("choosing restarts", chain.from_iterable(choices.values()), choosing)
    return [
        trials.best(of_pair, choosing) for of_pair in choices.values() if of_pair[0] in can_play
    ]


def _policy_rivals(
    leader: Choice, screened: Iterable[Choice], trials: Trials, choosing: Sequence[int]
) -> list[Choice]:
    """The best choice of each other policy, with the saves and copies of the leader."""
    of_policy: dict[str, list[Choice]] = {}
    for choice in screened:
        of_policy.setdefault(choice.policy, []).append(choice)
    of_policy.pop(leader.policy, None)
    best = [trials.best(choices, choosing) for choices in of_policy.values()]
    return [replace(choice, save_min=leader.save_min, copies=leader.copies) for choice in best]


def _neighbours(space: Space, leader: Choice) -> list[Choice]:
    """What differs from the leader in f, spares, saves, copies or whole backwards alone."""
    splits_backwards = leader.policy and TRAITS[leader.policy].splits_backwards
    return [
        *(replace(leader, failures_tolerated=f) for f in space.failures_tolerated),
        *(replace(leader, num_spares=number) for number in space.num_spares),
        *(replace(leader, save_min=save_min) for save_min in space.save_min),
        *(replace(leader, copies=copies) for copies in space.copies),
        *([replace(leader, whole_backwards=True)] if splits_backwards else []),
    ]


def _gains(
    leader: Choice, measured: Sequence[Choice], trials: Trials, seeds: Sequence[int]
) -> dict[Choice, Interval | None]:
    """What the leader gains over each choice, with intervals that hold at once."""
    level = _level(len(measured) - 1)
    return {choice: _gain(leader, choice, trials, seeds, level=level) for choice in measured}


def _level(num_comparisons: int) -> float:
    """The confidence of each of so many intervals that hold at once, by Bonferroni."""
    return 1.0 - (1.0 - LEVEL) / max(1, num_comparisons)


def _gain(
    leader: Choice, choice: Choice, trials: Trials, seeds: Sequence[int], *, level: float
) -> Interval | None:
    """What the leader gains; None where the other trained nothing with some seed."""
    pairs = list(zip(trials.outcomes(leader, seeds), trials.outcomes(choice, seeds), strict=True))
    if not all(other.samples for _, other in pairs):
        return None
    return interval(
        [outcome.samples_per_s / other.samples_per_s - 1.0 for outcome, other in pairs], level=level
    )


def _spares_pay(
    space: Space,
    leader: Choice,
    screened: Sequence[Choice],
    trials_at: Callable[[int], Trials] | None,
    seeds: tuple[Sequence[int], Sequence[int]],
) -> SparesPay | None:
    """The lowest failure rate at which spares surely pay, by a policy that answers at once.

    Args:
        seeds: seeds that choose the number of spares, and others that measure it.
    """
    choosing, measuring = seeds
    policy = leader.policy
    if policy in space.slow_policies:
        policy = next(
            (choice.policy for choice in screened if choice.policy in space.policies), policy
        )
    numbers = [number for number in space.num_spares if number]
    if trials_at is None or leader.num_spares or not numbers or not policy:
        return None
    without = replace(leader, policy=policy)
    for multiple in _MULTIPLES:
        trials = trials_at(multiple)
        with_spares = [replace(without, num_spares=number) for number in numbers]
        played = trials.play("more failures", [without, *with_spares], choosing)
        if without not in played or len(played) < 2:
            continue
        best = trials.ranking(played[1:], choosing)[0]
        trials.play("measuring spares", [without, best], measuring)
        gain = _gain(best, without, trials, measuring, level=_level(len(_MULTIPLES)))
        if gain is None:  # Without spares nothing is trained with some seed.
            pays = all(outcome.samples for outcome in trials.outcomes(best, measuring))
        else:
            pays = gain.low is not None and gain.low > CLOSE
        if pays:
            return SparesPay(
                policy=policy,
                multiple=multiple,
                multiple_max=multiple,
                num_spares=best.num_spares,
            )
    return SparesPay(policy=policy, multiple=0, multiple_max=_MULTIPLES[-1], num_spares=0)
