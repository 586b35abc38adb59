"""The command `planaria plan`: plans pipelines for a profile, and says what they cost."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from planaria.checkpoint.memory.turns import Buffers
from planaria.cli.command_line import check_writable, exit_codes, text_console, write
from planaria.cli.node_kinds import parse_node_kinds
from planaria.core.job import CheckpointConfig
from planaria.core.plan import (
    ModelProfile,
    NodeKind,
    Plan,
    Recomputation,
    recomputing_profile,
)
from planaria.errors import ConfigError, FeasibleValue, InfeasibleError, Limit
from planaria.job.checks import NODES_MAX
from planaria.job.planning import check_size, infeasible_mistake, read_profile
from planaria.placement.idle import Sending, predicted_sending
from planaria.placement.interleave import PREDICTED_GAMMA
from planaria.placement.layer_copies import layer_copies
from planaria.placement.layer_survival import LayerSurvival, layer_survival
from planaria.placement.placement import check_copies, paper_placement
from planaria.planner.layout.paper_sets import PAPER_METHOD
from planaria.planner.layout.unequal import unequal_plans
from planaria.planner.plans import METHOD, PlanCatalog, foreseen_plans
from planaria.planner.problem import Problem
from planaria.planner.templates import RankedTemplate, paper_templates, ranked_templates
from planaria.policies.policy import profile_prices
from planaria.profiles.shipped import NAMES
from planaria.show.copies_tables import sending_json, sending_text, survival_json, survival_table
from planaria.show.pictures.figures import plan_figure
from planaria.show.pictures.page import picture_format
from planaria.show.tables import plan_json, plan_table
from planaria.show.words import range_text

_OPTIONS: Final = {
    Limit.NODES: "--nodes",
    Limit.MAX_NODES: "--max-nodes",
    Limit.KINDS: "nodes of different kinds",
    Limit.DEVICES_PER_NODE: "--devices-per-node",
    Limit.DEVICE_MEMORY: "--node-memory",
    Limit.FAILURES: "-f",
    Limit.MICROBATCHES: "--microbatches",
}


class Objective(StrEnum):
    """The objectives by which `planaria plan` chooses stage partitions."""

    EXACT = "exact"
    PAPER = "paper"


class Recomputing(StrEnum):
    """The choices of `training.activation_checkpointing`."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    AUTO = "auto"


Microbatches = Annotated[
    int | None,
    typer.Option(
        help="Number of microbatches of the job in an iteration. Default: 4 x all devices."
    ),
]
ChosenObjective = Annotated[
    Objective,
    typer.Option(
        help="What a plan minimises: the simulated time (exact), or Oobleck's T1 + T2 + T3 (paper)."
    ),
]
NodeSpeeds = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODES=FACTOR", help="Nodes of another speed, such as 0-3,7=0.5; repeatable."
    ),
]
NodeMemories = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODES=BYTES",
        help="Nodes whose devices have another memory, such as 0-3=40e9; repeatable.",
    ),
]
Copies = Annotated[
    int,
    typer.Option(help="Also say what this many copies of each layer in memory take; 0: nothing."),
]
Recompute = Annotated[
    Recomputing,
    typer.Option(
        metavar="MODE",
        help="What backwards compute again: none, selective (all but matrix products and "
        "attention), full, or auto (what memory needs).",
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(help="Draw the stages and the timeline to this file: .svg, .png or .pdf."),
]


@exit_codes()
def plan(
    profile: Annotated[
        Path,
        typer.Argument(
            metavar="PROFILE.json|NAME",
            help=f"A profile, or the name of a shipped one: {', '.join(NAMES)}.",
        ),
    ],
    nodes: Annotated[int, typer.Option(help="Number of nodes to plan for.")],
    max_nodes: Annotated[
        int, typer.Option(help="Largest number of nodes, once more have joined.")
    ] = 0,
    devices_per_node: Annotated[int, typer.Option(help="Number of devices in each node.")] = 1,
    failures: Annotated[
        int, typer.Option("-f", help="Number of nodes that may be lost at once.")
    ] = 1,
    microbatches: Microbatches = None,
    objective: ChosenObjective = Objective.EXACT,
    recompute: Recompute = Recomputing.NONE,
    node_speed: NodeSpeeds = None,
    node_memory: NodeMemories = None,
    copies: Copies = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: PlotFile = None,
) -> None:
    """Plans pipelines for a profile: their templates, how many of each, and each node's work."""
    picture = None if plot is None else picture_format("--plot", plot.name)
    check_writable("--plot", plot)
    for option, value in (("--nodes", nodes), ("--devices-per-node", devices_per_node)):
        if not 1 <= value <= NODES_MAX:
            raise ConfigError(option, value, f"must be between 1 and {NODES_MAX}")
    model = read_profile(profile)
    kinds = parse_node_kinds(nodes, speeds=node_speed or (), memories=node_memory or ())
    start_s = time.perf_counter()
    with _worded_for_options(nodes):
        problem = Problem(
            profile=_recomputing(model, recompute),
            devices_per_node=devices_per_node,
            num_microbatches=4 * nodes * devices_per_node if microbatches is None else microbatches,
            failures_tolerated=failures,
            splits_backward=recompute in (Recomputing.NONE, Recomputing.AUTO),
            chooses_recomputation=recompute is Recomputing.AUTO,
        )
        check_size(problem, nodes)
        catalog, templates = _plans(problem, kinds, objective, max_nodes=max_nodes)
    planning_s = time.perf_counter() - start_s
    if plot is not None and picture is not None:
        write("--plot", plot, plan_figure(catalog, catalog.plans[nodes], picture=picture))
    _print(catalog, templates, nodes, copies=copies, planning_s=planning_s if as_json else None)


def _recomputing(profile: ModelProfile, recomputing: Recomputing) -> ModelProfile:
    """The profile with what is computed again; the layers choose for themselves with AUTO.

    Raises:
        ConfigError: the profile does not say what that costs.
    """
    modes = {mode for layer in profile.layers for mode in layer.recomputed}
    if recomputing is Recomputing.NONE or (recomputing is Recomputing.AUTO and modes):
        return profile
    if recomputing.value not in modes:
        remedy = (
            "the profile does not say what it costs to compute activations again; planaria profile "
            "measures it for a job with training.activation_checkpointing"
        )
        raise ConfigError("--recompute", recomputing.value, remedy)
    mode: Recomputation = "selective" if recomputing is Recomputing.SELECTIVE else "full"
    return recomputing_profile(profile, mode)


@contextmanager
def _worded_for_options(num_nodes: int) -> Iterator[None]:
    """Turns what the planner refuses into mistakes of the command's options."""

    def text(way: FeasibleValue) -> str:
        more = " or more" if way.or_more else ""
        if way.limit is Limit.DEVICE_MEMORY:
            return f"{_OPTIONS[way.limit]} {range_text(0, num_nodes - 1)}={way.value}{more}"
        return f"{_OPTIONS[way.limit]} {way.value}{more}"

    try:
        yield
    except InfeasibleError as error:
        raise infeasible_mistake(
            error, setting=lambda limit, value: (_OPTIONS[limit], value), text=text
        ) from error


def _print(
    catalog: PlanCatalog,
    templates: Sequence[RankedTemplate],
    num_nodes: int,
    *,
    copies: int,
    planning_s: float | None,
) -> None:
    """Prints the plan for `num_nodes` nodes.

    Args:
        copies: number of copies of each layer to tell about; 0: none.
        planning_s: seconds that planning took, for JSON; None: prints tables instead.
    """
    plan = catalog.plans[num_nodes]
    sending, survival = _copy_costs(catalog.problem, plan, copies) if copies else ({}, ())
    if planning_s is not None:
        content = plan_json(catalog, plan, templates=templates, planning_s=planning_s)
        if copies:
            costs = sending_json(sending)
            content["copies"] = costs and costs | {"survival": survival_json(survival)}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return
    console = text_console(highlight=True)
    console.print(plan_table(catalog, plan, templates=templates))
    if copies:
        console.print(sending_text(sending, copies))
        console.print(survival_table(survival))


def _plans(
    problem: Problem, kinds: Mapping[int, NodeKind], objective: Objective, *, max_nodes: int
) -> tuple[PlanCatalog, Sequence[RankedTemplate]]:
    """The plans for nodes of these kinds, and the templates to choose from.

    For unequal nodes the second item is the templates that were chosen.
    """
    is_paper = objective is Objective.PAPER
    if max_nodes:
        if not len(kinds) <= max_nodes <= NODES_MAX:
            remedy = f"must be between {len(kinds)} and {NODES_MAX}"
            raise ConfigError("--max-nodes", max_nodes, remedy)
        check_size(problem, max_nodes, limit=Limit.MAX_NODES)
    if set(kinds.values()) == {NodeKind()}:
        ranked_by_size = paper_templates if is_paper else ranked_templates
        by_size = ranked_by_size(problem, len(kinds), max_nodes=max_nodes)
        sizes = {size: ranked.template for size, ranked in by_size.items()}
        method = PAPER_METHOD if is_paper else METHOD
        catalog = foreseen_plans(problem, len(kinds), sizes, max_nodes=max_nodes, method=method)
        return catalog, tuple(by_size.values())
    if max_nodes:
        raise ConfigError(
            "--max-nodes", max_nodes, "works only if all nodes are as the profile says"
        )
    if is_paper:
        raise ConfigError("--objective", "paper", "works only if all nodes are as the profile says")
    return unequal_plans(problem, kinds)


def _copy_costs(
    problem: Problem, plan: Plan, copies: int
) -> tuple[Mapping[int, Sending], Sequence[LayerSurvival]]:
    """The copies that each rank of a plan sends, and how likely each layer survives with them.

    Copies are placed and sent by the default settings of a job.
    """
    check_copies(len(plan.nodes), copies)
    defaults = CheckpointConfig()
    layer_bytes = profile_prices(problem.profile, regroup_s=0.0).layer_bytes
    placement = paper_placement(len(plan.nodes), copies, "mixed")
    placed = layer_copies(plan, copies=copies, placement=placement, layer_bytes=layer_bytes)
    sending = predicted_sending(
        problem,
        plan,
        placed,
        layer_bytes=layer_bytes,
        chunk_bytes=Buffers(defaults.buffer_bytes, defaults.num_buffers).piece_bytes,
        gamma=PREDICTED_GAMMA,
    )
    return sending, layer_survival(plan, placed, copies=copies, rng=np.random.default_rng(0))
