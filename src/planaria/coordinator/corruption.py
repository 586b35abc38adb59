"""Who is to be believed where holders of a layer have different parameters.

Sound memory is more likely than the same fault twice, so the hash that most holders have is the
right one, and the nodes of the others are odd. Without a strict majority nobody can tell. A vote
is a hash with the age that it is of; whoever gives it need not train the layer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planaria.core.messages import Corrupted, Stopped

Votes = Mapping[tuple[int, int], Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What votes show.

    Attributes:
        layer: the first whose holders differ, -1 if none do.
        odd: the nodes that most others outvote.
        undecided: the nodes of which nobody can tell who is right; then `odd` says nothing.
    """

    layer: int = -1
    odd: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()


def votes(facts: Iterable[Stopped | Corrupted]) -> Votes:
    """By layer and age, the hash that each rank has."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    for fact in facts:
        for layer, hashed in fact.hashes.items():
            age = fact.age if isinstance(fact, Corrupted) else fact.ages[layer]
            found.setdefault((layer, age), {})[fact.rank] = hashed
    return found


def verdict(votes: Votes, *, devices_per_node: int) -> Verdict:
    """Whose parameters are wrong."""
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
        odd |= {rank // devices_per_node for rank, one in hashes.items() if one != common}
    return Verdict(first, odd=tuple(sorted(odd)))
