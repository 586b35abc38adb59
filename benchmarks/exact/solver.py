"""Proves the best schedule around lost places with CP-SAT: routes, orders and times in one problem.

A block is a run of layers between two adjacent stage boundaries of any pipelines. For every
microbatch one holder of a block computes its forward, and its backward in two parts, once each:

    home        The pipeline in which the microbatch begins; its blocks run on that pipeline's
                places.
    detour      Blocks of empty places run on any holder.
    precedence  A forward waits for the forward of the block before, the first part of a backward
                for that of the block behind. A message between ranks takes time on its link, and
                its latency.
    ranks       A rank computes one action at a time; a link direction carries one message at a
                time.
    memory      Activations are kept from the begin of a forward to the end of its backward,
                gradients between layers from the first part of a backward to the second.
    hops        Consecutive blocks of a microbatch on one rank are one action. A detour covers the
                whole stage that it visits. The backward of a route's first hop is not split,
                because its input has no gradient.

The objective is the end of the last backward, without reductions and the commit vector. All times
are integers.

Source: ReCycle (SOSP '24), whose planner solves such a program for every number of failures; here
the greedy schedule is compared with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from ortools.sat.python import cp_model

from planaria.core.plan import Plan
from planaria.planner.problem import Problem

_FORWARD, _INPUT, _WEIGHT = "forward", "input", "weight"
_NUM_WORKERS: Final = 2


class Optimum(NamedTuple):
    """Result of the solver.

    Attributes:
        end: end of the best schedule found, in units; the given end_max if none was found.
        bound: lower bound on the end of every schedule, in units.
    """

    end: int
    bound: int

    @property
    def is_proven(self) -> bool:
        """Whether no schedule ends earlier than the one found."""
        return self.end == self.bound


def optimum(
    problem: Problem, plan: Plan, *, unit_s: float, end_max: int, timeout_s: float, seed: int = 0
) -> Optimum:
    """The earliest end of all forwards and backwards around the empty places of a plan.

    Args:
        plan: plan with one device per node; its routes are ignored.
        unit_s: seconds of one unit; all times of the problem are multiples of it.
        end_max: an end, in units, that is known to be feasible.
        timeout_s: time limit of the solver.
        seed: random seed of the solver.
    """
    blocks = _Blocks(problem, plan, unit_s)
    model = _Model(blocks, problem.num_microbatches, end_max)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = timeout_s
    solver.parameters.num_workers = _NUM_WORKERS
    solver.parameters.random_seed = seed
    status = solver.solve(model.model)
    assert status != cp_model.INFEASIBLE, "the end that is known cannot be had"
    assert status != cp_model.MODEL_INVALID, model.model.validate()
    bound = round(solver.best_objective_bound)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Optimum(round(solver.objective_value) if found else end_max, bound)


@dataclass(frozen=True, slots=True)
class _Message:
    """An output, or its gradient, on a link.

    Attributes:
        takes: units for which it occupies the link.
        latency: units from then until it has arrived.
    """

    takes: int
    latency: int


class _Blocks:
    """Cost of each block on each of its holders, in units and bytes."""

    def __init__(self, problem: Problem, plan: Plan, unit_s: float) -> None:
        assert problem.devices_per_node == 1
        self._unit_s = unit_s
        held = plan.layers_by_rank
        cuts = {0, plan.num_layers}
        for pipeline in plan.pipelines:
            cuts.update(stage.first_layer for stage in pipeline.template.stages)
        self.spans = list(pairwise(sorted(cuts)))
        layers = problem.profile.layers
        speeds = {
            node: kind.speed
            for pipeline in plan.pipelines
            for node, kind in zip(pipeline.nodes, pipeline.template.node_kinds, strict=True)
        }
        self.ranks = sorted(held)
        self.holders = [
            [r for r in self.ranks if held[r].start <= u and v <= held[r].stop]
            for u, v in self.spans
        ]
        # Units of the three parts of each block, by rank.
        self.takes: list[Mapping[int, dict[str, int]]] = [
            {
                rank: {
                    _FORWARD: self._units(sum(x.forward_s[1] for x in layers[u:v]), speeds[rank]),
                    _INPUT: self._units(
                        sum(x.backward_input_s[1] for x in layers[u:v]), speeds[rank]
                    ),
                    _WEIGHT: self._units(
                        sum(x.backward_weight_s[1] for x in layers[u:v]), speeds[rank]
                    ),
                }
                for rank in holders
            }
            for (u, v), holders in zip(self.spans, self.holders, strict=True)
        ]
        # Rank at the place of each block in each pipeline; None: the place is empty.
        self.places = [
            [self._place(pipeline.nodes, u, held) for u, _ in self.spans]
            for pipeline in plan.pipelines
        ]
        self.alike = [
            (p.template, tuple(place is None for place in places))
            for p, places in zip(plan.pipelines, self.places, strict=True)
        ]
        link = problem.profile.links["inter_node"]
        self.messages = [
            _Message(
                self._units(layers[v - 1].output_bytes / link.bandwidth_bytes_per_s, 1.0),
                self._units(link.latency_s, 1.0),
            )
            for _, v in self.spans
        ]
        self.activation_bytes = [
            sum(x.activation_bytes for x in layers[u:v]) for u, v in self.spans
        ]
        self.gradient_bytes = [sum(x.output_bytes for x in layers[u:v]) for u, v in self.spans]
        self.free_bytes = self._free_bytes(problem, plan)

    def _units(self, seconds: float, speed: float) -> int:
        units = seconds / speed / self._unit_s
        assert abs(units - round(units)) < 1e-6, f"{seconds / speed} s are no multiple of a unit"
        return round(units)

    def _place(self, nodes: tuple[int, ...], layer: int, held: Mapping[int, range]) -> int | None:
        return next((node for node in nodes if node in held and layer in held[node]), None)

    def _free_bytes(self, problem: Problem, plan: Plan) -> dict[int, int]:
        """Bytes left for activations, by rank; ranks without a memory limit are left out."""
        free = {}
        for pipeline in plan.pipelines:
            template = pipeline.template
            for node, kind, stage in zip(
                pipeline.nodes, template.node_kinds, template.stages, strict=True
            ):
                limit_bytes = kind.device_memory_bytes or problem.profile.device_memory_bytes
                layers = problem.profile.layers[stage.first_layer : stage.end_layer]
                state_bytes = sum(
                    x.parameter_bytes * (1 + problem.gradient_copies) + x.optimizer_bytes
                    for x in layers
                )
                if limit_bytes and node in self.ranks:
                    free[node] = limit_bytes - state_bytes
        return free


class _Model:
    """The constraints, and the end as the objective."""

    def __init__(self, blocks: _Blocks, num_microbatches: int, end_max: int) -> None:
        self.model = cp_model.CpModel()
        self._blocks = blocks
        self._end_max = end_max
        self._on_rank: dict[int, list[cp_model.IntervalVar]] = {rank: [] for rank in blocks.ranks}
        self._on_link: dict[tuple[int, int], list[cp_model.IntervalVar]] = {}
        self._kept: dict[int, list[tuple[cp_model.IntervalVar, int]]] = {
            rank: [] for rank in blocks.ranks
        }
        end = self.model.new_int_var(0, end_max, "end")
        all_of = [self._microbatch(m, end) for m in range(num_microbatches)]
        for intervals in (*self._on_rank.values(), *self._on_link.values()):
            self.model.add_no_overlap(intervals)
        for rank, free_bytes in blocks.free_bytes.items():
            intervals = [interval for interval, _ in self._kept[rank]]
            sizes = [size for _, size in self._kept[rank]]
            self.model.add_cumulative(intervals, sizes, free_bytes)
        self._add_shared(all_of)
        self._break_symmetries(all_of)
        self.model.minimize(end)

    def _time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self._end_max, "")

    def _microbatch(self, m: int, end: cp_model.IntVar) -> "_Variables":
        """Adds the variables of microbatch m (see `_Variables`) and their constraints."""
        model, blocks = self.model, self._blocks
        homes = [model.new_bool_var(f"{m} home {p}") for p in range(len(blocks.places))]
        for home, places in zip(homes, blocks.places, strict=True):
            if all(place is None for place in places):
                model.add(home == 0)
        model.add_exactly_one(homes)
        at: list[dict[int, cp_model.IntVar]] = []
        starts: list[dict[str, cp_model.IntVar]] = []
        ends: list[dict[str, cp_model.IntVar]] = []
        for block, holders in enumerate(blocks.holders):
            chosen = {rank: model.new_bool_var(f"{m} block {block} at {rank}") for rank in holders}
            model.add_exactly_one(chosen.values())
            for home, places in zip(homes, blocks.places, strict=True):
                place = places[block]
                if place is not None:
                    model.add_implication(home, chosen[place])
            at.append(chosen)
            begin, done = self._parts(block, chosen)
            starts.append(begin)
            ends.append(done)
            self._keep(block, chosen, begin, done)
            model.add(end >= done[_WEIGHT])
        variables = _Variables(homes, at, starts, ends)
        self._join_hops(variables)
        for block, (near, far) in enumerate(pairwise(range(len(at)))):
            self._send(at[near], at[far], ends[near][_FORWARD], starts[far][_FORWARD], block)
            self._send(at[far], at[near], ends[far][_INPUT], starts[near][_INPUT], block)
        model.add(starts[-1][_INPUT] >= ends[-1][_FORWARD])
        return variables

    def _parts(
        self, block: int, chosen: Mapping[int, cp_model.IntVar]
    ) -> tuple[dict[str, cp_model.IntVar], dict[str, cp_model.IntVar]]:
        """Variables for begin and end of a block's parts; each part occupies the block's holder."""
        model, takes = self.model, self._blocks.takes[block]
        starts = {part: self._time() for part in (_FORWARD, _INPUT, _WEIGHT)}
        ends = {part: self._time() for part in (_FORWARD, _INPUT, _WEIGHT)}
        model.add(starts[_INPUT] >= ends[_FORWARD])
        model.add(starts[_WEIGHT] >= ends[_INPUT])
        for rank, literal in chosen.items():
            for part, start in starts.items():
                interval = model.new_optional_interval_var(
                    start, takes[rank][part], ends[part], literal, ""
                )
                self._on_rank[rank].append(interval)
        return starts, ends

    def _join_hops(self, one: "_Variables") -> None:
        """Makes consecutive blocks on one rank one action, and the first hop's backward, too."""
        model, places = self.model, self._blocks.places
        first = one.at[0]
        in_first = [model.new_constant(1)]
        for block in range(1, len(one.at)):
            in_first.append(model.new_bool_var(""))
            both = first.keys() & one.at[block].keys()
            pairs = [self._both(first[rank], one.at[block][rank]) for rank in both]
            model.add(in_first[block] == sum(pairs))
        for block, after in pairwise(range(len(one.at))):
            for rank in one.at[block].keys() & one.at[after].keys():
                same = one.at[block][rank], one.at[after][rank]
                for part, near, far in (
                    (_FORWARD, block, after),
                    (_INPUT, after, block),
                    (_WEIGHT, after, block),
                ):
                    follows = one.starts[far][part] == one.ends[near][part]
                    model.add(follows).only_enforce_if(*same)
                for home, of_home in zip(one.homes, places, strict=True):
                    if of_home[block] is None and of_home[after] is None:
                        model.add_bool_or([home.negated(), same[0].negated(), same[1]])
        for block, is_in in enumerate(in_first):
            is_last = [is_in, *(i.negated() for i in in_first[block + 1 : block + 2])]
            begins = one.starts[block][_WEIGHT] == one.ends[0][_INPUT]
            model.add(begins).only_enforce_if(*is_last)

    def _both(self, one: cp_model.IntVar, other: cp_model.IntVar) -> cp_model.IntVar:
        both = self.model.new_bool_var("")
        self.model.add_bool_or([one.negated(), other.negated(), both])
        self.model.add_implication(both, one)
        self.model.add_implication(both, other)
        return both

    def _keep(
        self,
        block: int,
        chosen: Mapping[int, cp_model.IntVar],
        starts: Mapping[str, cp_model.IntVar],
        ends: Mapping[str, cp_model.IntVar],
    ) -> None:
        """Adds the memory of activations and of gradients between layers, while they are kept."""
        model, blocks = self.model, self._blocks
        for first, last, num_bytes in (
            (starts[_FORWARD], ends[_WEIGHT], blocks.activation_bytes[block]),
            (ends[_INPUT], starts[_WEIGHT], blocks.gradient_bytes[block]),
        ):
            if num_bytes and blocks.free_bytes:
                lasts = self._time()
                for rank, literal in chosen.items():
                    kept = model.new_optional_interval_var(first, lasts, last, literal, "")
                    self._kept[rank].append((kept, num_bytes))

    def _send(
        self,
        source: Mapping[int, cp_model.IntVar],
        target: Mapping[int, cp_model.IntVar],
        ready: cp_model.IntVar,
        start: cp_model.IntVar,
        block: int,
    ) -> None:
        """Makes a part wait until its input is ready and, on another rank, has arrived."""
        model, message = self.model, self._blocks.messages[block]
        model.add(start >= ready)
        if not message.takes and not message.latency:
            return
        sent = self._time()
        model.add(sent >= ready + message.takes)
        for rank, here in source.items():
            for other, there in target.items():
                if rank == other:
                    continue
                both = self._both(here, there)
                model.add(start >= sent + message.latency).only_enforce_if(both)
                if message.takes:
                    begin = self._time()
                    way = model.new_optional_interval_var(begin, message.takes, sent, both, "")
                    model.add(begin >= ready).only_enforce_if(both)
                    self._on_link.setdefault((rank, other), []).append(way)

    def _add_shared(self, all_of: "list[_Variables]") -> None:
        """Adds an implied constraint that helps the solver: no more parts at once than holders."""
        for block, holders in enumerate(self._blocks.holders):
            if len(holders) == len(self._blocks.ranks):
                continue
            intervals = []
            for one in all_of:
                for part, start in one.starts[block].items():
                    sizes = {takes[part] for takes in self._blocks.takes[block].values()}
                    if len(sizes) == 1:
                        ending = one.ends[block][part]
                        intervals.append(
                            self.model.new_interval_var(start, sizes.pop(), ending, "")
                        )
            self.model.add_cumulative(intervals, [1] * len(intervals), len(holders))

    def _break_symmetries(self, all_of: "list[_Variables]") -> None:
        """Orders what is interchangeable.

        Microbatches are sorted by home and, within a home, by their first forward. Of adjacent
        pipelines with equal templates and no empty places, the first is home of at least as many.
        """
        model = self.model
        num_homes = len(self._blocks.places)
        for one, after in pairwise(all_of):
            homes = [sum(p * x.homes[p] for p in range(num_homes)) for x in (one, after)]
            model.add(homes[0] <= homes[1])
            for p in range(num_homes):
                begin, then = one.starts[0][_FORWARD], after.starts[0][_FORWARD]
                model.add(begin <= then).only_enforce_if(one.homes[p], after.homes[p])
        for p, q in pairwise(range(num_homes)):
            alike = self._blocks.alike
            if alike[p] == alike[q] and not any(alike[p][1]):
                model.add(sum(x.homes[p] for x in all_of) >= sum(x.homes[q] for x in all_of))


class _Variables(NamedTuple):
    """Variables of one microbatch.

    Attributes:
        homes: whether a pipeline is the home, by pipeline.
        at: whether a rank computes a block, by block and rank.
        starts: begin of each part, by block.
        ends: end of each part, by block.
    """

    homes: list[cp_model.IntVar]
    at: list[dict[int, cp_model.IntVar]]
    starts: list[dict[str, cp_model.IntVar]]
    ends: list[dict[str, cp_model.IntVar]]
