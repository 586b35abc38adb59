"""The command `planaria placement`: places copies of state, and says how likely it survives."""

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from planaria.cli.command_line import check_writable, exit_codes, text_console, write
from planaria.cli.node_kinds import parse_nodes, parse_value
from planaria.errors import ConfigError
from planaria.job.checks import NODES_MAX
from planaria.placement.placement import (
    PaperStrategy,
    Placement,
    check_copies,
    paper_placement,
    paper_probability,
)
from planaria.placement.spread import Limits, optimised_placement, risk
from planaria.placement.survival import (
    DOMAIN_FAILURE,
    NODE_FAILURE,
    Estimate,
    Failures,
    survival_by_lost,
)
from planaria.show.copies_tables import PlacementResult, placement_figure, placement_table
from planaria.show.pictures.page import picture_format
from planaria.show.words import count_text


class Strategy(StrEnum):
    """The ways to place copies."""

    MIXED = "mixed"
    GROUP = "group"
    RING = "ring"
    OPTIMISED = "optimised"


_PAPER_STRATEGIES: Final[Mapping[Strategy, PaperStrategy]] = {
    Strategy.MIXED: "mixed",
    Strategy.GROUP: "group",
    Strategy.RING: "ring",
}


ChosenStrategy = Annotated[
    Strategy,
    typer.Option(
        metavar="STRATEGY",
        help="How copies are placed: mixed, group or ring, as Gemini does; or optimised, with the "
        "least risk under the failures that the options below describe.",
    ),
]
Domains = Annotated[
    list[str] | None,
    typer.Option(metavar="NODES", help="Nodes that may fail together, such as 0-3; repeatable."),
]
Probabilities = Annotated[
    list[str] | None,
    typer.Option(metavar="NODES=P", help="The same for some nodes, such as 0-3,7=0.1; repeatable."),
]
StatesKept = Annotated[
    int | None,
    typer.Option(
        help="Number of states that a node can keep; its own state counts. Default: as many as "
        "copies."
    ),
]
StatesReceived = Annotated[
    int | None,
    typer.Option(
        help="Number of states that a node can receive for each checkpoint. Default: all that "
        "it can keep."
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(help="Draw which node keeps what to this file: .svg, .png or .pdf."),
]


@exit_codes()
def placement(
    nodes: Annotated[int, typer.Option(help="Number of nodes of the job.")],
    copies: Annotated[
        int, typer.Option(help="Number of copies of each node's state; the node's own copy counts.")
    ],
    lost: Annotated[
        int | None,
        typer.Option(help="Number of nodes that are lost at once. Default: as many as copies."),
    ] = None,
    strategy: ChosenStrategy = Strategy.MIXED,
    domain: Domains = None,
    node_failure: Annotated[
        float, typer.Option(metavar="P", help="Probability that a node fails by itself.")
    ] = NODE_FAILURE,
    probability: Probabilities = None,
    domain_failure: Annotated[
        float, typer.Option(metavar="P", help="Probability that a domain fails with all its nodes.")
    ] = DOMAIN_FAILURE,
    memory: StatesKept = None,
    receive: StatesReceived = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: PlotFile = None,
) -> None:
    """Places copies of each node's state on other nodes, and says how likely all state survives."""
    picture = None if plot is None else picture_format("--plot", plot.name)
    check_writable("--plot", plot)
    num_lost = copies if lost is None else lost
    _check_numbers(nodes, copies, num_lost)
    node = _probabilities(nodes, node_failure, probability or ())
    failures = Failures(node, _domains(nodes, domain or (), domain_failure))
    limits = _limits(nodes, copies, strategy, memory=memory, receive=receive)
    chosen, risks = _chosen_placement(nodes, copies, strategy, limits=limits, failures=failures)
    shown = range(1, min(nodes, 2 * copies) + 1)
    numbers = (num_lost,) if as_json and plot is None else sorted({*shown, num_lost})
    by_lost = _survival(chosen, copies, strategy, numbers=numbers)
    result = PlacementResult(strategy.value, chosen, copies, by_lost, risks)
    if plot is not None and picture is not None:
        write("--plot", plot, placement_figure(result, picture=picture))
    if as_json:
        sys.stdout.write(json.dumps(_json(result, num_lost), indent=2) + "\n")
        return
    text_console(highlight=True).print(placement_table(result))


def _check_numbers(nodes: int, copies: int, num_lost: int) -> None:
    if not 1 <= nodes <= NODES_MAX:
        raise ConfigError("--nodes", nodes, f"must be between 1 and {NODES_MAX}")
    check_copies(nodes, copies)
    if not 0 <= num_lost <= nodes:
        raise ConfigError("--lost", num_lost, f"must be between 0 and {nodes}, the number of nodes")


def _probabilities(num_nodes: int, of_all: float, some: Sequence[str]) -> tuple[float, ...]:
    """The probability of each node to fail by itself.

    Args:
        of_all: probability of a node that `some` does not name.
        some: texts NODES=P; if two name a node, the last one counts.

    Raises:
        ConfigError: a value is no probability, or a node does not exist.
    """
    _check_probability("--node-failure", of_all, of_all)
    probabilities = [of_all] * num_nodes
    for text in some:
        nodes, value = parse_value("--probability", text, num_nodes)
        _check_probability("--probability", text, value)
        for node in nodes:
            probabilities[node] = value
    return tuple(probabilities)


def _check_probability(option: str, given: str | float, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise ConfigError(option, given, "a probability must be above 0 and below 1")


def _domains(num_nodes: int, domains: Sequence[str], each: float) -> dict[frozenset[int], float]:
    """The sets of nodes that fail together, each with the probability that it does.

    Raises:
        ConfigError: `each` is no probability, or a node is in two domains.
    """
    _check_probability("--domain-failure", each, each)
    together: dict[frozenset[int], float] = {}
    for text in domains:
        nodes = frozenset(parse_nodes("--domain", text, num_nodes))
        for other in together:
            if nodes & other:
                remedy = f"node {min(nodes & other)} is in another domain already"
                raise ConfigError("--domain", text, remedy)
        together[nodes] = each
    return together


def _limits(
    nodes: int, copies: int, strategy: Strategy, *, memory: int | None, receive: int | None
) -> Limits:
    """The numbers of states that each node can keep and receive.

    Raises:
        ConfigError: a limit is given for a strategy that ignores it, or is too small.
    """
    for option, value, least in (("--memory", memory, 1), ("--receive", receive, 0)):
        if value is not None and strategy is not Strategy.OPTIMISED:
            raise ConfigError(option, value, "works only with --strategy optimised")
        if value is not None and value < least:
            raise ConfigError(option, value, f"must be at least {least}")
    if memory is not None and memory < copies:
        missing = count_text(nodes * (copies - memory), "state")
        remedy = (
            f"all nodes together lack room for {missing}; {copies} copies of each state need "
            f"--memory {copies}"
        )
        raise ConfigError("--memory", memory, remedy)
    kept = copies if memory is None else memory
    received = kept - 1 if receive is None else receive
    return Limits((1,) * nodes, (kept,) * nodes, (received,) * nodes)


def _chosen_placement(
    nodes: int, copies: int, strategy: Strategy, *, limits: Limits, failures: Failures
) -> tuple[Placement, Mapping[str, float]]:
    """The placement, and the risks under these failures of it and of `mixed`, by name."""
    mixed = paper_placement(nodes, copies, "mixed")
    if strategy is Strategy.OPTIMISED:
        chosen = optimised_placement(copies, failures=failures, limits=limits)
    else:
        chosen = paper_placement(nodes, copies, _PAPER_STRATEGIES[strategy])
    placements = {"mixed": mixed} | {strategy.value: chosen}
    return chosen, {
        name: risk(failures, placement.holders) for name, placement in placements.items()
    }


def _survival(
    chosen: Placement, copies: int, strategy: Strategy, *, numbers: Sequence[int]
) -> Mapping[int, Estimate]:
    """The probability that all state survives, for each of these numbers of lost nodes."""
    num_nodes = len(chosen.holders)
    if strategy is Strategy.OPTIMISED:
        rng = np.random.default_rng(0)
        by_lost = survival_by_lost(num_nodes, chosen.holders, most_lost=max(numbers), rng=rng)
        return {number: by_lost[number] for number in numbers}
    paper = _PAPER_STRATEGIES[strategy]
    return {
        number: Estimate(paper_probability(num_nodes, copies, paper, num_lost=number))
        for number in numbers
    }


def _json(result: PlacementResult, num_lost: int) -> dict[str, Any]:
    estimate = result.by_lost[num_lost]
    return {
        "strategy": result.strategy,
        "holders": [list(nodes) for nodes in result.placement.holders],
        "lost": num_lost,
        "recovery_probability": estimate.probability,
        "recovery_probability_error": estimate.error,
        "risks": dict(result.risks),
    }
