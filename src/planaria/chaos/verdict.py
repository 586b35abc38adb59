"""Judges a run under faults from outside: by its report and its files, against a run in peace.

A run ends well with the bits of the run in peace, or early where it had to: with exit code 3 where
too few nodes, or some layer, were left, and as its own code's failure where its workers ended alike
on several nodes, so that no node is to blame. Both are worked out from which nodes were struck and
from who held what in the plans since the last that ran, without asking the code that decided it.

Nodes that were struck are counted generously: what strikes a node's workers only, or for less than
its lease, takes what they hold for a moment. So an end is called justified a little too often;
that a run ends well, never.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planaria.core.plan import Plan
from planaria.observe.metrics import EventRecord, Report

# What of a node is gone afterwards, for good or for a while.
_TAKES_NODE = ("kill", "hang", "preempt", "flip", "cut")
_TAKES_WORKER = ("crash", "stall")
_TAKES_STATE = (*_TAKES_NODE, *_TAKES_WORKER)
# What a worker ends of, and the faults of which one may.
_CRASHES = {"crash": ("crash",), "stall": ("stall", "hang")}
_EVICTED_AT = 3  # Ends of one worker; a fault ends each of a node once.
_LEDGER_TOLERANCE_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """The job in peace.

    Attributes:
        sample_digests: of every iteration.
        training_s: of all iterations.
        wall_s: from the start of the run to its end.
        num_needed: nodes without which the job ends.
        num_layers: of the model.
    """

    parameters_sha256: str
    optimizer_sha256: str
    sample_digests: Mapping[int, str]
    training_s: float
    wall_s: float
    num_needed: int
    num_layers: int


def calm_of(report: Report, *, num_needed: int, num_layers: int) -> Calm:
    """What the report of a run in peace says."""
    return Calm(
        parameters_sha256=report.final.parameters_sha256,
        optimizer_sha256=report.final.optimizer_sha256,
        sample_digests={record.iteration: record.sample_digest for record in report.iterations},
        training_s=sum(record.seconds for record in report.iterations),
        wall_s=report.ledger["wall"],
        num_needed=num_needed,
        num_layers=num_layers,
    )


def wrongs(report: Report, calm: Calm, *, first: int = 0) -> tuple[str, ...]:
    """What is wrong with a run that ended well; `first` is the iteration at which it began."""
    return (*wrongs_until_end(report, calm, first=first), *_wrong_ends(report, calm))


def wrongs_until_end(report: Report, calm: Calm, *, first: int = 0) -> tuple[str, ...]:
    """What is wrong with what was done before a run ended, well or early."""
    return tuple(_wrong_iterations(report, calm, first)) + tuple(_wrong_sums(report))


def _wrong_iterations(report: Report, calm: Calm, first: int) -> Iterator[str]:
    numbers = [record.iteration for record in report.iterations]
    if numbers != list(range(first, first + len(numbers))):
        yield f"iterations are not each committed once: {numbers}"
    for record in report.iterations:
        if calm.sample_digests.get(record.iteration) != record.sample_digest:
            yield f"iteration {record.iteration} used other samples than in peace"


def _wrong_ends(report: Report, calm: Calm) -> Iterator[str]:
    final, end = report.final, len(calm.sample_digests)
    if final.iteration != end:
        yield f"{final.iteration} iterations are done in the end, not {end}"
    for name in ("parameters_sha256", "optimizer_sha256"):
        ours, theirs = getattr(final, name), getattr(calm, name)
        if ours != theirs:
            yield f"{name} is {ours or 'missing'}, in peace it is {theirs}"


def _wrong_sums(report: Report) -> Iterator[str]:
    parts_s = sum(seconds for name, seconds in report.ledger.items() if name != "wall")
    if abs(parts_s - report.ledger["wall"]) > _LEDGER_TOLERANCE_S:
        yield f"the ledger's parts are {parts_s} s, its wall is {report.ledger['wall']} s"
    negative = [name for name, seconds in report.ledger.items() if seconds < 0]
    if negative:
        yield f"negative seconds in the ledger: {', '.join(negative)}"
    for event in report.events:
        phases_s = event.detect_s + event.decide_s + event.regroup_s + event.transfer_s
        is_recovery = event.answer and event.redone_samples >= 0 and event.detect_s
        if is_recovery and abs(phases_s - event.downtime_s) > _LEDGER_TOLERANCE_S:
            yield f"phases of {phases_s} s, downtime of {event.downtime_s} s: {event.kind}"


def justification(report: Report, plans: Sequence[Plan], *, num_needed: int) -> str:
    """Why a run had to end early; empty if it need not have.

    Args:
        plans: all that the run had, the first one included.
    """
    fired = injected(report)
    gone = _struck(fired, _TAKES_NODE) | _struck_often(fired, _TAKES_WORKER)
    known = {node for plan in plans for node in plan.nodes}
    if len(known - gone) < num_needed:
        return f"{len(known - gone)} of {len(known)} nodes were left, {num_needed} are needed"
    emptied = _struck(fired, _TAKES_STATE)
    flipped = _struck(fired, ("flip",))
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
    """Why a run had to end as its own code's failure; empty if it need not have.

    Its workers ended in the same way three times in a row on a node, and on another node, too; or
    the job cannot go on without that node. Strikes count for the whole run, so also those in
    between which an iteration was committed.
    """
    fired = injected(report)
    gone = _struck(fired, _TAKES_NODE)
    known = {node for plan in plans for node in plan.nodes}
    for how, kinds in _CRASHES.items():
        often = _struck_often(fired, kinds)
        struck = _struck(fired, kinds)
        if often and len(struck) > 1:
            return f"workers ended of the same {how} on nodes {sorted(struck)}"
        if often and len(known - gone - often) < num_needed:
            return f"workers of node {min(often)} ended of a {how} again and again; it is needed"
        for plan in plans:
            for layer, holders in _holders(plan).items():
                if often & holders and holders <= often | gone:
                    return f"of a {how} ended all who held layer {layer}: {sorted(holders)}"
    return ""


def injected(report: Report) -> list[EventRecord]:
    """What was done to the run; what it noticed itself has no place at which it was to happen."""
    return [event for event in report.events if event.fired and event.step]


def _last_epoch_that_ran(report: Report) -> int:
    """The last one that is known to have computed. An iteration that was in flight at a loss may be
    committed in the next epoch before that begins, so one alone proves nothing."""
    counts = Counter(record.epoch for record in report.iterations)
    return max((epoch for epoch, count in counts.items() if count > 1), default=0)


def undecidable(report: Report, plans: Sequence[Plan]) -> str:
    """Why nobody could tell that a bit had flipped; empty if somebody could, or none had.

    Where all other holders of a layer are struck, nothing is left to compare it with.
    """
    fired = injected(report)
    flipped, emptied = _struck(fired, ("flip",)), _struck(fired, _TAKES_STATE)
    for plan in plans:
        for layer, holders in _holders(plan).items():
            if holders & flipped and len(holders - (emptied - flipped)) == 1:
                return f"of layer {layer} only {sorted(holders & flipped)} was left"
    return ""


def _holders(plan: Plan) -> dict[int, set[int]]:
    """The nodes that hold each layer."""
    per_node = plan.pipelines[0].template.devices_per_node
    return {
        layer: {rank // per_node for rank in plan.holders(layer)}
        for layer in range(plan.num_layers)
    }


def _struck_often(events: Iterable[EventRecord], kinds: Sequence[str]) -> set[int]:
    """Nodes of which one worker may have ended often enough in a row to have the node evicted."""
    counts = Counter(node for event in events if event.kind in kinds for node in event.nodes)
    return {node for node, count in counts.items() if count >= _EVICTED_AT}


def _struck(events: Iterable[EventRecord], kinds: Sequence[str]) -> set[int]:
    return {node for event in events if event.kind in kinds for node in event.nodes}
