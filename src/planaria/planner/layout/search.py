"""The search for a layout: how many pipelines, and nodes, layers and microbatches of each.

1. Parallelism: spread the nodes over pipelines in all ways within two ranges: how far the number of
   pipelines may differ from the present one, and a depth from an even share of the nodes. The most
   even spreads come first, after that of the present pipelines if these have all nodes. Spreads
   that promise much with split backwards are tried besides, whatever the ranges (split_sets.py).
2. Batch: distribute microbatches in proportion to nodes, at least one to each pipeline; then so
   that the last pipeline ends as early as possible.
3. Layers: for each pipeline take the partition that suits its nodes and microbatches
   (partitions.py); or that of a present pipeline, so that few layers move.
4. Estimate: compute the time of the whole iteration under its own schedule, with whole backwards
   and with split ones.

Depths that cannot be faster than the best layout are skipped: n microbatches take a pipeline at
least n times the seconds of its busiest stage, and these are at least the whole work divided by its
devices. The search can be stopped at any step, and has an answer after one of the first. What it
finds depends on its arguments alone.

Source: Odyssey, section IV-A and algorithm 1.
Differs: algorithm 1 compares plans for 1 .. N_f losses with each other, and so always prefers a
plan for nodes that are lost; here a plan is for the nodes that there are. Its time is that of the
slowest pipeline; here reductions count as well, and gradients of weights may be put off into
bubbles.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import zip_longest
from math import inf
from typing import Final, NamedTuple

import numpy as np

from planaria.core.plan import PipelineTemplate
from planaria.planner.layout.depths import Ranges, by_share, numbers_to_try, spreads
from planaria.planner.layout.sets import distribute_microbatches
from planaria.planner.layout.split_sets import SplitSets
from planaria.planner.partition.partitions import Partitions, Size
from planaria.planner.problem import Problem, stage_costs
from planaria.planner.times import PlainTimes, iteration_after

FRONT_MAX: Final = 4  # Bound on the layouts in the front that are doubled, and on the others.
_RECUTS_MAX: Final = 3
_IMPROVED_MAX: Final = 6  # Number of fastest spreads whose partitions are improved in the end.


@dataclass(frozen=True, slots=True)
class Layout:
    """Pipelines that are not bound to nodes.

    Attributes:
        microbatches: number of microbatches of each pipeline.
        num_kept: number of pipelines whose template is that of a present pipeline.
    """

    templates: tuple[PipelineTemplate, ...]
    microbatches: tuple[int, ...]
    splits_backward: bool
    iteration_s: float
    num_kept: int

    @property
    def is_doubled(self) -> bool:
        """Whether every layer has a second holder; not so in a single pipeline."""
        return len(self.templates) > 1


def layouts(
    problem: Problem,
    num_nodes: int,
    *,
    present: Sequence[PipelineTemplate],
    ranges: Ranges,
) -> Iterator[tuple[Layout, ...]]:
    """Ever better layouts that use all nodes, in steps of a few ms for tens of nodes.

    Each step yields the best layouts so far, at first none: the fastest one, then slower ones that
    keep more of the present pipelines, or that have two holders of each layer where the fastest one
    does not. A layout has f + 1 pipelines or more, or as many as there can be.

    Args:
        present: templates of the present pipelines, whose nodes must all be as the profile says.
    """
    return _layouts(SearchResults(problem), num_nodes, present=present, ranges=ranges)


def _layouts(
    results: "SearchResults",
    num_nodes: int,
    *,
    present: Sequence[PipelineTemplate],
    ranges: Ranges,
) -> Iterator[tuple[Layout, ...]]:
    assert not any(template.kinds for template in present)
    problem = results.problem
    numbers = numbers_to_try(problem, num_nodes, len(present), ranges)
    search = _LayoutSearch(results, present)
    by_number = [
        spreads(problem, num_nodes, number, range_of_depths=ranges.pp) for number in numbers
    ]
    by_number.insert(0, iter(results.spreads(num_nodes)))
    present_depths = tuple(sorted(template.num_nodes for template in present))
    if sum(present_depths) == num_nodes and len(present) in numbers:
        # The present pipelines may be less even than any spread; nothing moves to split backwards.
        by_number.insert(0, iter([present_depths]))
    for turn in zip_longest(*by_number):
        for depths in filter(None, turn):
            for _ in search.search_depths(depths):
                yield search.front
    for _ in search.improve_partitions():
        yield search.front


_Key = tuple[int, tuple[PipelineTemplate, ...]]  # Number of nodes, templates that are present.


class LayoutSearches:
    """Results of the searches for several numbers of nodes, so far.

    A search goes on where it was left. So searches can run between failures, and their results are
    ready when a failure happens. What one search has computed the others look up; each still takes
    the steps that it would take alone, so what it has found after some steps stays the same.

    Args:
        results: results of other searches of the problem, which these look up and add to.
    """

    def __init__(self, ranges: Ranges, results: "SearchResults") -> None:
        self._results = results
        self._ranges = ranges
        self._fronts: dict[_Key, tuple[Layout, ...]] = {}
        self._searches: dict[_Key, Iterator[tuple[Layout, ...]]] = {}

    def front(self, num_nodes: int, present: Sequence[PipelineTemplate]) -> tuple[Layout, ...]:
        """The layouts that the search for these nodes has found so far, see `layouts`."""
        return self._fronts.get((num_nodes, tuple(sorted(present))), ())

    def steps(self, num_nodes: int, present: Sequence[PipelineTemplate]) -> Iterator[None]:
        """Goes on with the search for these nodes; yields after each step, until its end."""
        key = num_nodes, tuple(sorted(present))
        if key not in self._searches:
            self._searches[key] = _layouts(
                self._results, num_nodes, present=key[1], ranges=self._ranges
            )
        for front in self._searches[key]:
            self._fronts[key] = front
            yield


class _Slot(NamedTuple):
    """A pipeline of a future layout.

    Attributes:
        num_nodes: number of its nodes.
        template: template of a present pipeline that it takes over; None: a new one is made.
    """

    num_nodes: int
    template: PipelineTemplate | None


class _Pause(Enum):
    """When the search pauses after a step."""

    NEVER = auto()
    IF_NEW = auto()  # If this search has not looked up the step's size before.
    ALWAYS = auto()


class _LayoutStep(NamedTuple):
    """A step towards a layout.

    Attributes:
        size: size whose partition is looked up; None: other work.
    """

    size: Size | None
    pause: _Pause


_WORK: Final = _LayoutStep(None, _Pause.ALWAYS)
_Steps = Generator[_LayoutStep, None, Layout | None]
_Pauses = Generator[None, None, Layout | None]


class _FoundLayout(NamedTuple):
    """A layout of new pipelines, with the steps that lead to it.

    Attributes:
        layout: layout, as if no pipeline were present; None: some pipeline has no partition.
    """

    steps: tuple[_LayoutStep, ...]
    layout: Layout | None


class SearchResults:
    """What all searches of a problem have in common: it does not depend on what is present.

    Args:
        templates: templates of a job by number of nodes; sets of them are tried with split
            backwards.

    Attributes:
        found_layouts: layouts of new pipelines before partitions are improved, by the depths of
            the pipelines and whether backwards are split.
    """

    def __init__(
        self, problem: Problem, templates: Mapping[int, PipelineTemplate] | None = None
    ) -> None:
        self.problem = problem
        self._split_sets = SplitSets(problem, templates or {})
        self._spreads: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.costs = stage_costs(problem)
        self.partitions = Partitions(problem)
        self.times = PlainTimes(problem)
        self.found_layouts: dict[tuple[tuple[int, ...], bool], _FoundLayout] = {}

    def spreads(self, num_nodes: int) -> tuple[tuple[int, ...], ...]:
        """The depths that promise most with split backwards."""
        if not self.problem.splits_backward:
            return ()
        if num_nodes not in self._spreads:
            self._spreads[num_nodes] = self._split_sets.spreads(num_nodes)
        return self._spreads[num_nodes]


class _LayoutSearch:
    """The state of a search.

    Attributes:
        front: layouts that no other known layout equals or beats in speed, num_kept and is_doubled
            at once; the fastest first.
    """

    def __init__(self, results: SearchResults, present: Sequence[PipelineTemplate]) -> None:
        self._results = results
        self._problem = results.problem
        self._present = Counter(present)
        self._partitions, self._times = results.partitions, results.times
        self._sizes: set[Size] = set()  # Sizes whose partition was looked up.
        self._improved: dict[Size, PipelineTemplate] = {}
        costs = results.costs
        layers = np.arange(costs.num_layers)
        seconds = [costs.seconds[count][layers, layers + 1] for count in costs.counts]
        work_s = [count * layer_s for count, layer_s in zip(costs.counts, seconds, strict=True)]
        self._alone_s = np.min(seconds, axis=0)
        self._work_s = float(np.min(work_s, axis=0).sum())
        self._seconds: dict[tuple[int, ...], float] = {}
        self.front: tuple[Layout, ...] = ()

    def search_depths(self, depths: tuple[int, ...]) -> Iterator[None]:
        """Adds the layouts with these depths to the front; yields after each piece of work."""
        new_slots = tuple(_Slot(depth, None) for depth in depths)
        layouts_found = []
        for slots in dict.fromkeys((self._slots_that_keep(depths), new_slots)):
            if self._least_s(depths, is_split=False) < self._best_s(depths):
                layouts_found.append((yield from self._found_layout(slots, is_split=False)))
                self._add(layouts_found[-1])
                yield
            if not self._problem.splits_backward:
                continue
            if self._least_s(depths, is_split=True) < self._best_s(depths):
                layouts_found.append((yield from self._found_layout(slots, is_split=True)))
                self._add(layouts_found[-1])
                yield
        if layouts_found:
            self._seconds[depths] = min(
                (layout.iteration_s for layout in layouts_found if layout), default=inf
            )

    def improve_partitions(self) -> Iterator[None]:
        """Improves partitions for split backwards, the fastest spreads first."""
        if not self._problem.splits_backward:
            return
        fastest_first = sorted(self._seconds, key=lambda depths: (self._seconds[depths], depths))
        for depths in fastest_first[:_IMPROVED_MAX]:
            if self._least_s(depths, is_split=True) < self._best_s(depths):
                yield from self._improve(depths)

    def _improve(self, depths: tuple[int, ...]) -> Iterator[None]:
        """Adds layouts with these depths and split backwards to the front.

        Their partitions are improved for the microbatches that the pipelines get.
        """
        slots = [_Slot(depth, None) for depth in depths]
        improved_sizes: set[Size] = set()
        first_sizes = set(zip(depths, self._by_share(slots), strict=True))
        while True:
            layout = yield from self._take(self._split_layout(slots), [])
            self._add(layout)
            yield
            wanted_sizes = set(first_sizes)
            if layout is not None:
                # A pipeline with a better partition may get one microbatch more.
                for depth, count in zip(depths, layout.microbatches, strict=True):
                    wanted_sizes |= {(depth, count), (depth, count + 1)}
            sizes = wanted_sizes - improved_sizes
            if not sizes:
                return
            for size in sorted(sizes):
                if size not in self._improved:
                    self._sizes.add(size)
                    template = yield from self._partitions.split_template(size)
                    if template is not None:
                        self._improved[size] = template
            improved_sizes |= sizes

    def _slots_that_keep(self, depths: Sequence[int]) -> tuple[_Slot, ...]:
        """Pipelines of these depths, as many as possible with the templates of present ones."""
        unused = sorted(self._present.elements())
        slots = []
        for depth in depths:
            kept = next((template for template in unused if template.num_nodes == depth), None)
            if kept is not None:
                unused.remove(kept)
            slots.append(_Slot(depth, kept))
        return tuple(slots)

    def _best_s(self, depths: Sequence[int]) -> float:
        """Shortest iteration in the front, of the layouts that have two holders of each layer if
        pipelines of these depths do; infinite if there is none."""
        is_doubled = len(depths) > 1
        return min(
            (layout.iteration_s for layout in self.front if layout.is_doubled >= is_doubled),
            default=inf,
        )

    def _least_s(self, depths: Sequence[int], *, is_split: bool) -> float:
        """Lower bound on the iteration time of pipelines of these depths.

        Let x be the seconds of the busiest stage. A pipeline finishes at most T / x microbatches in
        a time T. With whole backwards it finishes at most (T - W) / x + 1, where W are the seconds
        of one microbatch alone.
        """
        if not self._work_s:  # All layers of a profile may take no time.
            return 0.0
        devices = self._problem.devices_per_node
        rates = [
            1 / max(float(self._alone_s.max()), self._work_s / (depth * devices))
            for depth in depths
        ]
        num_microbatches = self._problem.num_microbatches
        if is_split:
            return num_microbatches / sum(rates)
        alone_s = float(self._alone_s.sum())
        return max(alone_s, alone_s + (num_microbatches - len(depths)) / sum(rates))

    def _found_layout(self, slots: tuple[_Slot, ...], *, is_split: bool) -> _Pauses:
        """Finds a layout, or takes the steps by which another search has found it."""
        steps = self._split_layout(slots) if is_split else self._whole_layout(slots)
        if any(slot.template for slot in slots):
            return (yield from self._take(steps, []))
        key = tuple(slot.num_nodes for slot in slots), is_split
        known_layout = self._results.found_layouts.get(key)
        if known_layout is not None:
            for step in known_layout.steps:
                if self._pauses(step):
                    yield
            bare = known_layout.layout
            return bare and replace(bare, num_kept=self._num_kept(bare.templates))
        steps_taken: list[_LayoutStep] = []
        layout = yield from self._take(steps, steps_taken)
        bare = layout and replace(layout, num_kept=0)
        self._results.found_layouts[key] = _FoundLayout(tuple(steps_taken), bare)
        return layout

    def _take(self, steps: _Steps, steps_taken: list[_LayoutStep]) -> _Pauses:
        """Takes the steps, adds each to the list, and returns their layout."""
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                layout: Layout | None = end.value
                return layout
            steps_taken.append(step)
            if self._pauses(step):
                yield

    def _pauses(self, step: _LayoutStep) -> bool:
        """Whether the search pauses after a step; a size counts as looked up from now on."""
        is_new = step.size is not None and step.size not in self._sizes
        if step.size is not None:
            self._sizes.add(step.size)
        return step.pause is _Pause.ALWAYS or (step.pause is _Pause.IF_NEW and is_new)

    def _whole_layout(self, slots: Sequence[_Slot]) -> _Steps:
        """Finds a layout with whole backwards; returns None if some pipeline has no partition.

        Partitions and microbatches are fitted to each other in turn, until that makes the layout no
        faster.
        """
        best: Layout | None = None
        microbatches = self._by_share(slots)
        for _ in range(_RECUTS_MAX):
            templates = []
            for slot, count in zip(slots, microbatches, strict=True):
                template = slot.template
                if template is None:
                    size = slot.num_nodes, count
                    template = self._partitions.whole_template(size)
                    yield _LayoutStep(size, _Pause.IF_NEW)
                if template is None:
                    return best
                templates.append(template)
            new_microbatches = distribute_microbatches(self._problem, templates, times=self._times)
            layout = self._layout(templates, new_microbatches, is_split=False)
            if best is not None and layout.iteration_s >= best.iteration_s:
                return best
            best = layout
            if new_microbatches == microbatches:
                return best
            microbatches = new_microbatches
            yield _WORK
        return best

    def _split_layout(self, slots: Sequence[_Slot]) -> _Steps:
        """Finds a layout with split backwards; returns None if some pipeline does not fit.

        A microbatch of the pipeline that ends last moves to another one, as long as the other one
        with it ends earlier than that.
        """
        counts = list(self._by_share(slots))
        # This ends: the end times in descending order get lexicographically smaller in each turn.
        while True:
            pairs = list(zip(slots, counts, strict=True))
            ends_s: dict[tuple[_Slot, int], float] = {}
            for pair in dict.fromkeys(pairs):
                ends_s[pair] = yield from self._end_s(*pair)
            last = max(ends_s, key=lambda pair: ends_s[pair])
            if ends_s[last] == inf:
                return None
            ends_with_one_more_s: dict[tuple[_Slot, int], float] = {}
            for slot, count in ends_s:
                if (slot, count) != last:
                    ends_with_one_more_s[slot, count] = yield from self._end_s(slot, count + 1)
            target = min(
                ends_with_one_more_s, key=lambda pair: ends_with_one_more_s[pair], default=last
            )
            if last[1] == 1 or target == last or ends_with_one_more_s[target] >= ends_s[last]:
                break
            counts[pairs.index(last)] -= 1
            counts[pairs.index(target)] += 1
        templates = [template for pair in pairs if (template := self._split_template(*pair))]
        layout = self._layout(templates, counts, is_split=True)
        # A pipeline that ends earlier does not have to be as fast as it can. With the partition of
        # the one that ends last it may be slower, but equal partitions need fewer reductions.
        slowest = templates[pairs.index(last)]
        alike_templates = [
            slowest if pair[0] == last[0] else template
            for pair, template in zip(pairs, templates, strict=True)
        ]
        if alike_templates == templates or any(
            self._partitions.split_times.ends_s(*pair) is None
            for pair in zip(alike_templates, counts, strict=True)
        ):
            return layout
        yield _WORK
        alike_layout = self._layout(alike_templates, counts, is_split=True)
        return min(layout, alike_layout, key=lambda layout: layout.iteration_s)

    def _by_share(self, slots: Sequence[_Slot]) -> tuple[int, ...]:
        return by_share([slot.num_nodes for slot in slots], self._problem.num_microbatches)

    def _end_s(self, slot: _Slot, count: int) -> Generator[_LayoutStep, None, float]:
        """Seconds until a pipeline ends with split backwards; infinite if it does not fit."""
        size = None if slot.template else (slot.num_nodes, count)
        template = self._split_template(slot, count)
        if template is None:
            yield _LayoutStep(size, _Pause.NEVER)
            return inf
        ends_s = self._partitions.split_times.ends_s(template, count)
        yield _LayoutStep(size, _Pause.ALWAYS)
        return max(ends_s) if ends_s is not None else inf

    def _split_template(self, slot: _Slot, count: int) -> PipelineTemplate | None:
        """The partition for split backwards that this search knows for a slot; None if none
        fits."""
        size = slot.num_nodes, count
        improved = self._improved.get(size)
        return slot.template or improved or self._partitions.whole_template(size)

    def _layout(
        self,
        templates: Sequence[PipelineTemplate],
        microbatches: Sequence[int],
        *,
        is_split: bool,
    ) -> Layout:
        """The layout of these pipelines with its iteration time."""
        if is_split:
            all_ends_s = [
                self._partitions.split_times.ends_s(*pair)
                for pair in zip(templates, microbatches, strict=True)
            ]
            ends_s = [ends for ends in all_ends_s if ends is not None]
            iteration_s = iteration_after(self._problem, templates, ends_s).end_s
        else:
            iteration_s = self._times.iteration_s(templates, microbatches)
        num_kept = self._num_kept(templates)
        return Layout(tuple(templates), tuple(microbatches), is_split, iteration_s, num_kept)

    def _num_kept(self, templates: Sequence[PipelineTemplate]) -> int:
        return (Counter(templates) & self._present).total()

    def _add(self, layout: Layout | None) -> None:
        """Puts a layout into the front, unless one there is as good.

        Layouts in the front that are no better than it go. If there are still too many, the slowest
        go, except for the one that keeps the most pipelines.
        """
        if layout is None or any(_is_as_good(known_layout, layout) for known_layout in self.front):
            return
        unbeaten = [
            known_layout for known_layout in self.front if not _is_as_good(layout, known_layout)
        ]
        front: list[Layout] = []
        for is_doubled in (False, True):
            layouts = [
                known_layout
                for known_layout in (*unbeaten, layout)
                if known_layout.is_doubled is is_doubled
            ]
            layouts.sort(key=lambda known_layout: known_layout.iteration_s)
            front += (*layouts[: FRONT_MAX - 1], *layouts[FRONT_MAX - 1 :][-1:])
        self.front = tuple(sorted(front, key=lambda known_layout: known_layout.iteration_s))


def _is_as_good(layout: Layout, other: Layout) -> bool:
    return (
        layout.iteration_s <= other.iteration_s
        and layout.num_kept >= other.num_kept
        and layout.is_doubled >= other.is_doubled
    )
