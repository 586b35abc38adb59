"""Where all go on after a loss: after the newest vector's iteration, or back at an older state.

An older state must have a copy of every layer, in the memory of nodes that are left or on disk. It
becomes the new origin, on which all later iterations are built. Layers and answers from before it
count no more, however late a rank learns of it, and iterations after it are committed again. Nobody
goes back in an epoch whose outcome is on record, so that a coordinator that finds the record
decides as the one before it did.

Source: docs/protocol.md, "Going back"; Varuna (EuroSys '22) for going back.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.saves import newest_save
from planaria.coordinator.state import JobState
from planaria.core.cluster import SavePoint
from planaria.core.copies import Label
from planaria.core.messages import Corrupted, Stopped
from planaria.core.records import Origin, Outcome


def answer_since_origin(state: JobState, answer: Stopped) -> Stopped:
    """The answer, without layers that the rank has from before the job went back to its origin."""
    if answer.since == state.commits.origin.epoch:
        return answer
    return Stopped(rank=answer.rank, epoch=answer.epoch, ages={}, complete=(), copies=answer.copies)


def outcome_of(state: JobState) -> Outcome:
    """The outcome by the newest vector that a member holds or that is on record.

    There are no answers if no member is left and the job waits for machines.
    """
    answers = state.facts.answers.values()
    iteration, vector = state.commits.origin.iteration, b""
    newest = max(answers, key=lambda answer: answer.vector_iteration, default=None)
    if newest is not None and newest.vector:
        iteration, vector = newest.vector_iteration + 1, newest.vector
    recorded = state.commits.outcome
    if recorded is not None and recorded.iteration > iteration:
        iteration, vector = recorded.iteration, recorded.vector
    # If it is older, all ranks that trained are new workers without layers.
    if iteration < state.commits.next_iteration:
        iteration, vector = state.commits.next_iteration, b""
    ages = {age for answer in answers for age in answer.ages.values()}
    is_redo = iteration - 1 not in ages
    return Outcome(
        epoch=state.epoch,
        iteration=iteration,
        vector=vector,
        is_redo=is_redo,
        origin=state.commits.origin,
    )


def held_layers(rules: Rules, state: JobState, outcome: Outcome) -> dict[int, frozenset[int]]:
    """The layers that each rank has, or will have, at the age at which all go on."""
    origin = state.commits.origin
    is_begun = outcome.iteration > origin.iteration
    if not is_begun and not origin.copied and origin.source not in state.saves.spoilt:
        # Nothing has been trained since the origin, so a rank that needs a layer initialises it or
        # loads it, as at the start.
        return dict.fromkeys(state.ranks, frozenset(range(rules.num_layers)))
    answers = {rank: state.facts.answers[rank] for rank in state.ranks}
    if is_begun:
        return {rank: _live_layers(answer, outcome.iteration) for rank, answer in answers.items()}
    # If all go back in this very epoch, they drop their live layers.
    return {
        rank: _copied_layers(answer, origin)
        | (_live_layers(answer, outcome.iteration) if answer.since == origin.epoch else frozenset())
        for rank, answer in answers.items()
    }


def settled_holders(
    state: JobState, outcome: Outcome, held: Mapping[int, frozenset[int]]
) -> frozenset[int]:
    """The ranks that hold what the plan gives them, and need no optimizer step for that.

    Args:
        held: the layers that each rank has, or will have, at the outcome.
    """
    plan = state.plan.layers_by_rank
    return frozenset(
        rank
        for rank, layers in held.items()
        if all(
            layer in layers
            and state.facts.answers[rank].ages.get(layer, outcome.iteration) == outcome.iteration
            for layer in plan.get(rank, ())
        )
    )


def writers_of(state: JobState, held: Mapping[int, frozenset[int]]) -> dict[int, tuple[int, ...]]:
    """The layers that each rank is to write: each layer by its holder with the fewest so far.

    Ranks that have crashed since the last commit might do so again, so of several holders those
    write that have crashed least often.
    """
    crashes = Counter(crash.rank for crash in state.troubles.crashes)
    writers: dict[int, list[int]] = {rank: [] for rank in held}
    for layer in sorted(frozenset[int]().union(*held.values())):
        ranks = [rank for rank, layers in held.items() if layer in layers]
        best = min(ranks, key=lambda rank: (crashes[rank], len(writers[rank]), rank))
        writers[best].append(layer)
    return {rank: tuple(layers) for rank, layers in writers.items() if layers}


def _live_layers(answer: Stopped, iteration: int) -> frozenset[int]:
    return frozenset(
        layer
        for layer, age in answer.ages.items()
        if age == iteration or (age == iteration - 1 and layer in answer.complete)
    )


def _copied_layers(answer: Stopped, origin: Origin) -> frozenset[int]:
    return frozenset(layer for layer, those in answer.copies.items() if origin.copied in those)


def newest_copies(rules: Rules, state: JobState) -> Label | None:
    """The newest version of which members have copies of all layers; None if there is none.

    If the job went back to copies, older versions of their history count, too: those copies may be
    lost before any rank is told to use them.
    """
    versions = _versions(rules, state, with_older=True)
    return max(versions, key=lambda label: (label.age, label.epoch), default=None)


def safest_copies(rules: Rules, state: JobState, *, most: float) -> Label | None:
    """The version that most likely has all layers after one more loss; None if there is none.

    It is the one whose rarest layer is on the most nodes, then the next rarest, and so on; the
    newest of those that are alike. A version that was under way has all layers, too: each rank's
    own copies come first. But it protects from nothing.

    Args:
        most: highest age that counts.
    """
    whole = _versions(rules, state, with_older=False).items()
    versions = {label: nodes for label, nodes in whole if label.age <= most}
    return max(
        versions,
        key=lambda label: (sorted(map(len, versions[label].values())), label.age, label.epoch),
        default=None,
    )


def _versions(
    rules: Rules, state: JobState, *, with_older: bool
) -> dict[Label, dict[int, set[int]]]:
    """The nodes that keep copies, by layer, of each version of which members have all layers.

    Copies from before the job went back belong to another history, except the version that it went
    back to, and older ones of that version's history.
    """
    origin = state.commits.origin
    versions: dict[Label, dict[int, set[int]]] = {}
    for rank, answer in state.facts.answers.items():
        for layer, labels in answer.copies.items():
            for label in labels:
                if (
                    label.since == origin.epoch
                    or label == origin.copied
                    or (with_older and _is_older(label, origin))
                ):
                    nodes = versions.setdefault(label, {}).setdefault(layer, set())
                    nodes.add(rank // state.devices_per_node)
    num_layers = rules.num_layers
    return {label: nodes for label, nodes in versions.items() if len(nodes) == num_layers}


def _is_older(label: Label, origin: Origin) -> bool:
    """Whether a version is an older state in the history of the copies that all went back to."""
    copied = origin.copied
    return copied is not None and label.since == copied.since and label.age <= copied.age


def back_point(rules: Rules, state: JobState, outcome: Outcome) -> SavePoint | None:
    """The newest state that has all layers, as copies in memory or as a save on disk.

    None if there is no such state, or if the outcome of this epoch is on record.
    """
    if _is_recorded(state):
        return None
    iteration, source = newest_save(rules, state) or (-1, "")
    label = newest_copies(rules, state)
    if label is not None and (label.age >= iteration or not source):
        iteration, source = label.age, ""
    elif source:
        label = None
    else:
        return None
    num_undone = max(0, outcome.iteration - iteration) + outcome.is_redo
    redone = num_undone * rules.job.training.global_batch_size
    return SavePoint(iteration, source, redone, label)


def save_point(rules: Rules, state: JobState, outcome: Outcome, redone: int) -> SavePoint | None:
    """The state that all could go back to, or have just gone back to.

    None if there is no such state, or if it is on record that all go on in this epoch.
    """
    origin = state.commits.origin
    iteration, source, copied = origin.iteration, origin.source, origin.copied
    saved, is_begun = newest_save(rules, state), outcome.iteration > iteration
    if is_begun and _is_recorded(state):
        return None
    # The copies that the job went back to may be lost by now.
    whole = _versions(rules, state, with_older=False)
    is_left = copied is None or (not is_begun and bool(whole))
    is_gone = source in state.saves.spoilt or not is_left
    if saved is None and is_gone:
        return None
    if saved is not None and (is_gone or (is_begun and saved[0] > iteration)):
        (iteration, source), copied = saved, None
    num_undone = max(0, outcome.iteration - iteration)
    redone += num_undone * rules.job.training.global_batch_size
    return SavePoint(iteration, source, redone, copied)


def is_elsewhere(state: JobState, outcome: Outcome, saved: SavePoint) -> bool:
    """Whether going back to the save point changes the state that all have now."""
    origin = state.commits.origin
    target = (saved.iteration, saved.source, saved.copied)
    return outcome.iteration > origin.iteration or target != (
        origin.iteration,
        origin.source,
        origin.copied,
    )


def _is_recorded(state: JobState) -> bool:
    """Whether the outcome of this epoch is on record."""
    outcome = state.commits.outcome
    return outcome is not None and outcome.epoch == state.epoch


def go_back(state: JobState, saved: SavePoint) -> tuple[JobState, Outcome]:
    """The job at that older state, and the outcome; later iterations are committed again."""
    origin = Origin(
        iteration=saved.iteration, source=saved.source, epoch=state.epoch, copied=saved.copied
    )
    reports = {i: done for i, done in state.commits.reports.items() if i < origin.iteration}
    state = replace(
        state,
        commits=replace(
            state.commits,
            origin=origin,
            reports=reports,
            next_iteration=min(state.commits.next_iteration, origin.iteration),
            ends=False,
            is_trained=False,
        ),
        saves=replace(state.saves, files={}),
    )
    return state, Outcome(epoch=state.epoch, iteration=origin.iteration, origin=origin)


# -- which nodes to believe where holders of a layer have different parameters ---------------------
# Two sound memories are more likely than the same fault twice, so the hash that most holders have
# is right, and the nodes of the other holders are odd. Without a strict majority nobody can tell. A
# vote is the hash of a layer at an age; the rank that gives it need not train the layer.

Votes = Mapping[tuple[int, int], Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the votes.

    Attributes:
        layer: first layer whose holders differ; -1: none differ.
        odd: nodes that the majority outvotes.
        undecided: nodes of a layer without a majority; if any, `odd` is empty.
    """

    layer: int = -1
    odd: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()


def votes(facts: Iterable[Stopped | Corrupted]) -> Votes:
    """The hash that each rank has, by (layer, age)."""
    hashes: dict[tuple[int, int], dict[int, int]] = {}
    for fact in facts:
        for layer, hashed in fact.hashes.items():
            age = fact.age if isinstance(fact, Corrupted) else fact.ages[layer]
            hashes.setdefault((layer, age), {})[fact.rank] = hashed
    return hashes


def verdict(votes: Votes, *, devices_per_node: int) -> Verdict:
    """The verdict of the majority on every layer and age."""
    first, odd = -1, set[int]()
    for (layer, _), hashes in sorted(votes.items()):
        counts = Counter(hashes.values())
        if len(counts) == 1:
            continue
        common, count = counts.most_common(1)[0]
        if 2 * count <= len(hashes):
            undecided = {rank // devices_per_node for rank in hashes}
            return Verdict(layer, undecided=tuple(sorted(undecided)))
        first = layer if first < 0 else first
        odd |= {
            rank // devices_per_node for rank, rank_hash in hashes.items() if rank_hash != common
        }
    return Verdict(first, odd=tuple(sorted(odd)))
