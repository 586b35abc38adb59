"""Judges a run under faults from outside: by its report, compared with a run without faults.

A run must end with the same bits as the run without faults (the baseline run), unless it had to end
early. It may end with exit code 3 if too few nodes were left, or a layer had no holder. It may end
as a failure of its own code if workers ended in the same way on several nodes, so that no node is
to blame. Both are worked out from the nodes that were struck and from the holders of layers in its
plans, without the code that decided it.

Struck nodes are counted generously: a fault that strikes only a node's workers, or for less than a
lease, counts as if it took their layers. So an early end is sometimes called justified when it was
not. A run with wrong bits is called right only if nobody could tell (`undecidable`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planaria.core.plan import Plan
from planaria.observe.metrics import EventRecord, Report

# Faults after which a node, a worker, or the layers that a node holds are gone, for good or for a
# while.
_LOSES_NODE = ("kill", "hang", "preempt", "flip", "cut")
_LOSES_WORKER = ("crash", "stall")
_LOSES_STATE = (*_LOSES_NODE, *_LOSES_WORKER)
# Ways in which a worker ends, and the faults that may cause each.
_CRASHES = {"crash": ("crash",), "stall": ("stall", "hang")}
_EVICTED_AT = 3  # Number of ends of one worker; a fault ends each worker of a node once.
_LEDGER_TOLERANCE_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRun:
    """The results of the job without faults.

    Attributes:
        sample_digests: digest of the samples of every iteration.
        training_s: seconds of all iterations together.
        wall_s: seconds from the start of the run to its end.
        num_needed: smallest number of nodes with which the job goes on.
        num_nodes_max: largest number of nodes that the job can keep at work.
        num_layers: number of layers of the model.
    """

    parameters_sha256: str
    optimizer_sha256: str
    sample_digests: Mapping[int, str]
    training_s: float
    wall_s: float
    num_needed: int
    num_nodes_max: int
    num_layers: int


def baseline_run(
    report: Report, *, num_needed: int, num_nodes_max: int, num_layers: int
) -> BaselineRun:
    """The results in the report of a run without faults."""
    return BaselineRun(
        parameters_sha256=report.final.parameters_sha256,
        optimizer_sha256=report.final.optimizer_sha256,
        sample_digests={record.iteration: record.sample_digest for record in report.iterations},
        training_s=sum(record.seconds for record in report.iterations),
        wall_s=report.ledger["wall"],
        num_needed=num_needed,
        num_nodes_max=num_nodes_max,
        num_layers=num_layers,
    )


def violations(report: Report, baseline: BaselineRun, *, first: int = 0) -> tuple[str, ...]:
    """What is wrong with a run that trained to its end.

    Args:
        first: iteration at which the run began.
    """
    return (*violations_until_end(report, baseline, first=first), *_wrong_ends(report, baseline))


def violations_until_end(
    report: Report, baseline: BaselineRun, *, first: int = 0
) -> tuple[str, ...]:
    """What is wrong with the iterations and times of a run, even if it ended early."""
    return tuple(_wrong_iterations(report, baseline, first)) + tuple(_wrong_sums(report))


def _wrong_iterations(report: Report, baseline: BaselineRun, first: int) -> Iterator[str]:
    numbers = [record.iteration for record in report.iterations]
    if numbers != list(range(first, first + len(numbers))):
        yield f"iterations are not each committed once: {numbers}"
    for record in report.iterations:
        if baseline.sample_digests.get(record.iteration) != record.sample_digest:
            yield f"iteration {record.iteration} used other samples than in the baseline run"


def _wrong_ends(report: Report, baseline: BaselineRun) -> Iterator[str]:
    final, end = report.final, len(baseline.sample_digests)
    if final.iteration != end:
        yield f"{final.iteration} iterations are done in the end, not {end}"
    for name in ("parameters_sha256", "optimizer_sha256"):
        run_hash, baseline_hash = getattr(final, name), getattr(baseline, name)
        if run_hash != baseline_hash:
            yield (
                f"{name} is {run_hash or 'missing'}, and in the baseline run it is {baseline_hash}"
            )


def _wrong_sums(report: Report) -> Iterator[str]:
    parts_s = sum(seconds for name, seconds in report.ledger.items() if name != "wall")
    if abs(parts_s - report.ledger["wall"]) > _LEDGER_TOLERANCE_S:
        yield f"the ledger's parts are {parts_s} s, its wall is {report.ledger['wall']} s"
    negative = [name for name, seconds in report.ledger.items() if seconds < 0]
    if negative:
        yield f"negative seconds in the ledger: {', '.join(negative)}"
    wasted_s = sum(tier["wasted_s"] for tier in report.wasted.values())
    lost_s = report.ledger.get("redo", 0.0) + report.ledger.get("transfer", 0.0)
    if report.wasted and abs(wasted_s - lost_s) > _LEDGER_TOLERANCE_S:
        yield f"{wasted_s} s are wasted by tier, and {lost_s} s of redo and transfer in the ledger"
    for event in report.events:
        phases_s = event.detect_s + event.decide_s + event.regroup_s + event.transfer_s
        is_recovery = event.answer and event.redone_samples >= 0 and event.detect_s
        if is_recovery and abs(phases_s - event.downtime_s) > _LEDGER_TOLERANCE_S:
            yield f"phases of {phases_s} s, downtime of {event.downtime_s} s: {event.kind}"


def justification(report: Report, plans: Sequence[Plan], *, num_needed: int) -> str:
    """The reason why a run had to end early; empty if it did not have to.

    Args:
        plans: all plans of the run, the first one included.
    """
    injected = injected_events(report)
    gone = _struck_nodes(injected, _LOSES_NODE) | _often_struck_nodes(injected, _LOSES_WORKER)
    planned = {node for plan in plans for node in plan.nodes}
    if len(planned - gone) < num_needed:
        return f"{len(planned - gone)} of {len(planned)} nodes were left, {num_needed} are needed"
    emptied = _struck_nodes(injected, _LOSES_STATE)
    flipped = _struck_nodes(injected, ("flip",))
    since = _last_epoch_that_ran(report)
    for plan in plans:
        for layer, holders in _holders(plan).items() if plan.epoch >= since else ():
            if holders <= emptied:
                return f"all holders of layer {layer} were struck: {sorted(holders)}"
            voters = holders - (emptied - flipped)
            if holders & flipped and len(voters) <= 2:
                return f"of layer {layer} only {sorted(voters)} could be compared"
    return ""


def failure_justification(report: Report, plans: Sequence[Plan], *, num_needed: int) -> str:
    """The reason why a run had to end as a failure of its own code; empty if it did not have to.

    Its workers ended in the same way three times on one node, and on another node too, or the job
    cannot go on without that node. All faults of the run count, even those between which an
    iteration was committed.
    """
    injected = injected_events(report)
    gone = _struck_nodes(injected, _LOSES_NODE)
    planned = {node for plan in plans for node in plan.nodes}
    for how, kinds in _CRASHES.items():
        often = _often_struck_nodes(injected, kinds)
        struck = _struck_nodes(injected, kinds)
        if often and len(struck) > 1:
            return f"workers ended of the same {how} on nodes {sorted(struck)}"
        if often and len(planned - gone - often) < num_needed:
            return f"workers of node {min(often)} ended of a {how} again and again; it is needed"
        for plan in plans:
            for layer, holders in _holders(plan).items():
                if often & holders and holders <= often | gone:
                    return f"of a {how} ended all who held layer {layer}: {sorted(holders)}"
    return ""


def injected_events(report: Report) -> list[EventRecord]:
    """The events of injected faults; events that the run noticed by itself have no `step`."""
    return [event for event in report.events if event.fired and event.step]


def _last_epoch_that_ran(report: Report) -> int:
    """The last epoch that is known to have trained; 0 if none is.

    A single committed iteration does not prove it, since an iteration that was in flight at a loss
    may be committed in the next epoch before that epoch trains.
    """
    counts = Counter(record.epoch for record in report.iterations)
    return max((epoch for epoch, count in counts.items() if count > 1), default=0)


def undecidable(report: Report, plans: Sequence[Plan]) -> str:
    """The reason why a flipped bit could not be noticed; empty if it could, or if none flipped.

    If all other holders of a layer are struck, nothing is left to compare the layer with.
    """
    injected = injected_events(report)
    flipped, emptied = _struck_nodes(injected, ("flip",)), _struck_nodes(injected, _LOSES_STATE)
    for plan in plans:
        for layer, holders in _holders(plan).items():
            if holders & flipped and len(holders - (emptied - flipped)) == 1:
                return f"of layer {layer} only {sorted(holders & flipped)} was left"
    return ""


def _holders(plan: Plan) -> dict[int, set[int]]:
    """The nodes that hold each layer."""
    per_node = plan.devices_per_node
    return {
        layer: {rank // per_node for rank in plan.holders(layer)}
        for layer in range(plan.num_layers)
    }


def _often_struck_nodes(events: Iterable[EventRecord], kinds: Sequence[str]) -> set[int]:
    """The nodes of which one worker may have ended often enough to have the node evicted."""
    counts = Counter(node for event in events if event.kind in kinds for node in event.nodes)
    return {node for node, count in counts.items() if count >= _EVICTED_AT}


def _struck_nodes(events: Iterable[EventRecord], kinds: Sequence[str]) -> set[int]:
    return {node for event in events if event.kind in kinds for node in event.nodes}
