"""Odyssey's Figures 7 and 8: nine hours in which NPUs fail, with Oobleck, ReCycle and Odyssey.

The paper states 32 NPUs, a failure rate of 10% per hour and 9 hours. It does not state whether the
rate is of an NPU or of the cluster, whether NPUs come back, the layout (PP, DP), the batch, or what
a transition costs. Fixed here: the rate is that of an NPU, for with one of the cluster there is
hardly a failure; none comes back; a batch of 64 microbatches; 32 layers, at least 2 stages. The
rest is swept.

All three use the paper's equations: an iteration takes (N_pp + N_m - 1) stage times (Eq. 9), or as
long as that of the slowest pipeline where they differ (Eq. 10). Rerouting adds N_m F_i / (N_dp -
F_i) for each stage i that lost F_i nodes: their sum (Eq. 13), or their largest, which is what a
schedule takes. Where a stage has lost all nodes, pipelines are formed anew. Numbers of pipelines
change by one at a time. A loss in a transition adds another one behind it. Oobleck always forms
pipelines anew, ReCycle always reroutes, Odyssey takes what Eq. 8 prefers, with the time to the next
failure known ("oracle") or its mean.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from math import exp, inf
from random import Random
from typing import Final

from planaria.papers.rows import How, Key, PublishedRow
from planaria.systems.odyssey import (
    Duration,
    effective_iterations,
    rerouted_microbatches,
    scaled_losses,
    step_time,
)

_NUM_NODES: Final = 32
_RATE_PER_S: Final = 0.1 / 3600
_DURATION_S: Final = 9 * 3600.0
_MICROBATCHES: Final = 64
LAYERS: Final = 32
DEPTH_MIN: Final = 2
_NUM_SEEDS: Final = 40
_LAYOUTS: Final = ((2, 16), (4, 8), (8, 4), (16, 2))  # (PP, DP); all that 32 nodes come out even in
_OVER_OOBLECK, _OVER_RECYCLE = 1.229, 1.355  # Section V-B.
_HALVINGS: Final = 9
_FAST_S, _SLOW_S = 15.0, 60.0


class Form(Enum):
    """Ways to add up what rerouting costs."""

    SUM = "Eq. 13, sum"
    LARGEST = "largest"


@dataclass(frozen=True, slots=True)
class EquationPlan:
    """Pipelines as they were formed last, and the nodes that they have lost since.

    Attributes:
        depths: number of stages of each pipeline; nodes fill them in order of their numbers.
        nodes: nodes that were alive when the pipelines were formed.
        iteration: time of an iteration without losses; 1 is the time of a microbatch in a layer.
        dead: nodes that were lost since.
    """

    depths: tuple[int, ...]
    nodes: tuple[int, ...]
    iteration: float
    dead: frozenset[int] = frozenset()

    @property
    def num_lost(self) -> tuple[int, ...]:
        """The number of lost nodes of each stage; a longer pipeline's stages are scaled."""
        places = [(index, s) for index, depth in enumerate(self.depths) for s in range(depth)]
        lost = [p for node, p in zip(self.nodes, places, strict=True) if node in self.dead]
        return tuple(scaled_losses(self.depths, lost))

    def rerouted_iteration(self, form: Form) -> float:
        """The time of an iteration that goes around lost nodes; infinite if it cannot."""
        number, num_lost = len(self.depths), self.num_lost
        more = rerouted_microbatches(_MICROBATCHES / number, number, num_lost)
        stage = -(-LAYERS // len(num_lost))
        return self.iteration + (sum(more) if form is Form.SUM else max(more)) * stage

    def best_plan(self) -> "EquationPlan":
        """The fastest pipelines on all live nodes, at most one more or less than there are, or as
        many as fit."""
        alive = tuple(node for node in self.nodes if node not in self.dead)
        number = len(self.depths)
        near = range(max(1, number - 1), number + 2)
        fewest = max(1, len(alive) // DEPTH_MIN)  # Several nodes may be missing at once.
        options = [count for count in near if count <= fewest] or [fewest]
        iteration, depths = min(
            even_pipelines(len(alive), count, _MICROBATCHES) for count in options
        )
        return EquationPlan(depths, alive, iteration)


@cache
def even_pipelines(
    num_nodes: int, num_pipelines: int, num_microbatches: int
) -> tuple[float, tuple[int, ...]]:
    """The time of an iteration of pipelines as even as can be (Eq. 9, 10), and their depths."""
    shallow, num_deep = divmod(num_nodes, num_pipelines)
    depths = (*(shallow + 1,) * num_deep, *(shallow,) * (num_pipelines - num_deep))
    stages = [-(-LAYERS // depth) for depth in depths]
    counts = [0] * num_pipelines
    for _ in range(num_microbatches):
        ends = [(d + n) * stage for d, n, stage in zip(depths, counts, stages, strict=True)]
        counts[ends.index(min(ends))] += 1
    last = max(step_time(d, n, stage) for d, n, stage in zip(depths, counts, stages, strict=True))
    return float(last), depths


# Answers a loss, given the seconds until the next one: pipelines, their time of an iteration, and
# the seconds of the transition.
_Answer = Callable[[EquationPlan, float], tuple[EquationPlan, float, float]]


def oobleck(transition_s: float) -> _Answer:
    """Pipelines formed anew at each loss."""

    def answer(plan: EquationPlan, duration_s: float) -> tuple[EquationPlan, float, float]:
        del duration_s
        best = plan.best_plan()
        return best, best.iteration, transition_s

    return answer


def recycle(transition_s: float, form: Form) -> _Answer:
    """Microbatches rerouted until a stage has no node left."""

    def answer(plan: EquationPlan, duration_s: float) -> tuple[EquationPlan, float, float]:
        iteration = plan.rerouted_iteration(form)
        if iteration == inf:
            return oobleck(transition_s)(plan, duration_s)
        return plan, iteration, 0.0

    return answer


def odyssey(transition_s: float, form: Form) -> _Answer:
    """Whichever of both trains more until the next loss (Eq. 8)."""

    def answer(plan: EquationPlan, duration_s: float) -> tuple[EquationPlan, float, float]:
        iteration = plan.rerouted_iteration(form)
        best = plan.best_plan()
        formed_anew = effective_iterations(best.iteration, transition_s, duration_s)
        if effective_iterations(iteration, 0.0, duration_s) >= formed_anew:
            return plan, iteration, 0.0
        return best, best.iteration, transition_s

    return answer


@cache
def failures_of(seed: int) -> tuple[tuple[float, int], ...]:
    """The failures of a run, as pairs of seconds and a node; no node comes back."""
    rng = Random(seed)
    times = sorted((rng.expovariate(_RATE_PER_S), node) for node in range(_NUM_NODES))
    return tuple((at_s, node) for at_s, node in times if at_s < _DURATION_S)


def iterations_done(
    layout: tuple[int, int], answer: _Answer, *, duration: Duration, seed: int
) -> float:
    """The iterations of a run, in units of the time of a microbatch in a layer."""
    depth, number = layout
    iteration, depths = even_pipelines(_NUM_NODES, number, _MICROBATCHES)
    assert depths == (depth,) * number
    plan = EquationPlan(depths, tuple(range(_NUM_NODES)), iteration)
    free_s = done = 0.0
    failures = failures_of(seed)
    nexts = [*(at_s for at_s, _ in failures[1:]), _DURATION_S]
    for (at_s, node), next_s in zip(failures, nexts, strict=True):
        done += max(0.0, at_s - free_s) / iteration
        plan = EquationPlan(plan.depths, plan.nodes, plan.iteration, plan.dead | {node})
        num_alive = len(plan.nodes) - len(plan.dead)
        mean_s = 1 / (_RATE_PER_S * num_alive)
        known_s = next_s - at_s if duration is Duration.ORACLE else mean_s
        plan, iteration, transition_s = answer(plan, known_s)
        free_s = max(free_s, at_s) + transition_s
    return done + max(0.0, _DURATION_S - free_s) / iteration


def ratio(
    layout: tuple[int, int],
    *,
    form: Form,
    duration: Duration,
    transition_s: float,
    other: _Answer,
) -> float:
    """Odyssey's mean throughput over another system's, on the same failures."""
    others = sum(
        iterations_done(layout, other, duration=duration, seed=seed) for seed in range(_NUM_SEEDS)
    )
    return _odyssey_iterations(layout, form, duration, transition_s) / others


@cache
def _odyssey_iterations(
    layout: tuple[int, int], form: Form, duration: Duration, transition_s: float
) -> float:
    answer = odyssey(transition_s, form)
    return sum(
        iterations_done(layout, answer, duration=duration, seed=seed) for seed in range(_NUM_SEEDS)
    )


def figure_7() -> tuple[PublishedRow, ...]:
    """Mean number of NPUs that are left after nine hours."""
    drawn = sum(_NUM_NODES - len(failures_of(seed)) for seed in range(_NUM_SEEDS)) / _NUM_SEEDS
    note = "the paper draws one run; 10% an hour of what is not stated"
    return tuple(
        PublishedRow({"rate of": what, "by": by}, None, left, how, note)
        for what, by, left, how in (
            ("an NPU", "expected", _NUM_NODES * exp(-0.9), How.FIRST_PRINCIPLES),
            ("an NPU", f"mean of {_NUM_SEEDS} seeds", drawn, How.SIMULATED),
            ("the cluster", "expected", _NUM_NODES - 0.9, How.FIRST_PRINCIPLES),
        )
    )


def figure_8() -> tuple[PublishedRow, ...]:
    """Odyssey's throughput over Oobleck's and ReCycle's, as far as the paper says what to run."""
    return (*_recycle_rows(), *_recycle_points(), *_oobleck_rows())


def _recycle_rows() -> Iterator[PublishedRow]:
    for depth, number in _LAYOUTS:
        for form in Form:
            for transition_s in (_FAST_S, _SLOW_S, 180.0, 600.0):
                for duration in Duration:
                    yield PublishedRow(
                        {
                            "over": "ReCycle",
                            "PP, DP": f"{depth}, {number}",
                            "transition s": transition_s,
                            "way": f"{form.value}, {duration.value}",
                            "quantity": "times",
                        },
                        _OVER_RECYCLE,
                        ratio(
                            (depth, number),
                            form=form,
                            duration=duration,
                            transition_s=transition_s,
                            other=recycle(transition_s, form),
                        ),
                        How.SIMULATED,
                        "layout, batch and transitions are not stated; the same for both here",
                    )


def _recycle_points() -> Iterator[PublishedRow]:
    """The transition at which 1.355 holds in each layout, if rerouting costs the largest share."""
    for layout in _LAYOUTS:

        def over_recycle(transition_s: float, layout: tuple[int, int] = layout) -> float:
            return ratio(
                layout,
                form=Form.LARGEST,
                duration=Duration.MEAN,
                transition_s=transition_s,
                other=recycle(transition_s, Form.LARGEST),
            )

        holds = over_recycle(0.0) >= _OVER_RECYCLE
        yield PublishedRow(
            {
                "over": "ReCycle",
                "PP, DP": f"{layout[0]}, {layout[1]}",
                "transition s": "-",
                "way": "both, where 1.355 holds",
                "quantity": "seconds",
            },
            None,
            _crossing(lambda s: -over_recycle(s), -_OVER_RECYCLE, 0.0) if holds else None,
            How.SIMULATED if holds else How.NOT,
            "" if holds else "even free transitions give less; Equation 13 as printed gives more",
        )


def _oobleck_rows() -> Iterator[PublishedRow]:
    for layout in _LAYOUTS:
        for transition_s in (_FAST_S, _SLOW_S):
            for theirs_s in (transition_s, 120.0, 300.0, 600.0):
                keys: dict[str, Key] = {
                    "over": "Oobleck",
                    "PP, DP": f"{layout[0]}, {layout[1]}",
                    "transition s": transition_s,
                    "way": f"Oobleck {theirs_s:g} s",
                    "quantity": "times",
                }
                yield PublishedRow(
                    keys,
                    _OVER_OOBLECK,
                    _over_oobleck(layout, transition_s, theirs_s),
                    How.SIMULATED,
                    "transitions are not stated; with equal ones there is next to nothing to gain",
                )
            yield PublishedRow(
                {
                    "over": "Oobleck",
                    "PP, DP": f"{layout[0]}, {layout[1]}",
                    "transition s": transition_s,
                    "way": "Oobleck, where 1.229 holds",
                    "quantity": "seconds",
                },
                None,
                _crossing(
                    partial(_over_oobleck, layout, transition_s), _OVER_OOBLECK, transition_s
                ),
                How.SIMULATED,
                "Oobleck's artifact charges 2 to 10 s for a transition",
            )


def _over_oobleck(layout: tuple[int, int], transition_s: float, theirs_s: float) -> float:
    return ratio(
        layout,
        form=Form.LARGEST,
        duration=Duration.MEAN,
        transition_s=transition_s,
        other=oobleck(theirs_s),
    )


def _crossing(value: Callable[[float], float], wanted: float, low_s: float) -> float:
    """The seconds at which a value that rises with them is the wanted one."""
    high_s = 1800.0
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        if value(middle_s) < wanted:
            low_s = middle_s
        else:
            high_s = middle_s
    return (low_s + high_s) / 2
