"""Chooses the machines that keep copies of each shard, and says how likely all shards survive.

The ranks of a node share its fate, so nodes are placed and not ranks. The copies of a rank's shard
are kept by the ranks of the same place on the nodes that keep copies of its node's state.

Source: Gemini (SOSP '23), section 4.
Differs: `optimised` also keeps copies out of the failure domain of their shard, see
placement/spread.py.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, get_args

import numpy as np
import torch.distributed as dist

from planaria.core.copies import Label
from planaria.errors import ConfigError
from planaria.placement.placement import Placement, Strategy, paper_placement
from planaria.placement.spread import Limits, optimised_placement
from planaria.placement.survival import DOMAIN_FAILURE, NODE_FAILURE, Failures, survival_by_lost
from planaria.torchrun.gathering import gather_records

logger = logging.getLogger(__name__)

_LOST_MAX: Final = 8  # Survival is told for up to so many lost nodes.


def check_strategy(strategy: str, domain: str) -> None:
    """Refuses a way of placing copies that does not exist, and a domain that it would not heed.

    Raises:
        ConfigError: one of the two is refused.
    """
    choices = get_args(Strategy)
    if strategy not in choices:
        raise ConfigError("placement", strategy, f"the choices are {', '.join(choices)}")
    if domain and strategy != "optimised":
        remedy = f'placement {strategy!r} takes no notice of domains; use placement="optimised"'
        raise ConfigError("domain", domain, remedy)


def place_on_all(
    nodes: Sequence[str], copies: int, *, strategy: Strategy, domains: Sequence[str]
) -> Placement:
    """See `place_nodes`; all ranks must call it.

    Groups of nodes of which some were lost may not come out even: then it is "mixed", which has as
    many copies, and rank 0 logs that.
    """
    num_nodes = len({*nodes})
    copies = min(copies, num_nodes)
    if strategy == "group" and num_nodes % copies:
        if not dist.get_rank():
            what = "%s nodes do not make groups of %s: copies are placed as with placement='mixed'"
            logger.warning(what, num_nodes, copies)
        strategy = "mixed"
    if strategy != "optimised":
        return place_nodes(nodes, copies, strategy=strategy, domains=domains)
    # A search that takes seconds; its result must be the same on all machines.
    own = Placement(())
    if not dist.get_rank():
        own = place_nodes(nodes, copies, strategy=strategy, domains=domains)
    return Placement(gather_records(tuple[tuple[int, ...], ...], own.holders)[0])


def place_nodes(
    nodes: Sequence[str], copies: int, *, strategy: Strategy, domains: Sequence[str]
) -> Placement:
    """The placement of the nodes' states, in the order in which nodes first occur.

    Args:
        nodes: name of each rank's node.
        copies: number of copies of each state; fewer are made if there are fewer nodes.
        domains: name of each rank's failure domain; "": none.

    Raises:
        ConfigError: the copies cannot be placed in this way.
    """
    num_ranks = Counter(nodes)
    names = list(num_ranks)
    copies = min(copies, len(names))
    if strategy != "optimised":
        return paper_placement(len(names), copies, strategy)
    domain_of = dict(zip(nodes, domains, strict=True))
    members = {
        domain: frozenset(n for n, name in enumerate(names) if domain_of[name] == domain)
        for domain in sorted({*domains} - {""})
    }
    failures = Failures(
        (NODE_FAILURE,) * len(names),
        {nodes: DOMAIN_FAILURE for nodes in members.values() if len(nodes) > 1},
    )
    state = tuple(num_ranks.values())
    limits = Limits(
        state=state,
        memory=(copies * max(state),) * len(names),
        receive=((copies - 1) * max(state),) * len(names),
    )
    return optimised_placement(copies, failures=failures, limits=limits)


def survival(placement: Placement) -> tuple[float, ...]:
    """The probabilities that memory has all shards if 0, 1, 2, .. nodes are lost at once.

    Every set of as many nodes is equally likely.
    """
    num_nodes = len(placement.holders)
    estimates = survival_by_lost(
        num_nodes,
        placement.holders,
        most_lost=min(num_nodes, _LOST_MAX),
        rng=np.random.default_rng(0),
    )
    return tuple(estimate.probability for estimate in estimates)


def whole_everywhere(nodes: Sequence[str]) -> Placement:
    """The placement of a state that every node holds whole."""
    numbers = range(len({*nodes}))
    return Placement(tuple((node, *(n for n in numbers if n != node)) for node in numbers))


def keepers_of(label: Label, versions: Sequence[Mapping[int, Sequence[Label]]]) -> dict[int, int]:
    """A rank that keeps each shard of a version, by shard: the rank of its number, if that does.

    Args:
        versions: labels that each rank keeps, by shard.
    """
    keepers: dict[int, int] = {}
    for rank, labels_by_shard in enumerate(versions):
        for shard, labels in labels_by_shard.items():
            if label in labels and (shard == rank or shard not in keepers):
                keepers[shard] = rank
    return keepers
