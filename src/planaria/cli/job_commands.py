"""The commands `planaria status` and `planaria drain`, which ask a running job."""

import sys
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table

from planaria.cli.asking import Head, HeadTokenFile, JobName, ask_job, record_of
from planaria.cli.command_line import exit_codes, plain_table, text_console
from planaria.errors import ConfigError
from planaria.nodes.head.requests import Drain, TellStatus
from planaria.observe.status import JobStatus, NodeStatus
from planaria.show.story import event_lines
from planaria.show.words import ranges_text

_TIMEOUT_S_MAX: Final = 1e6


@exit_codes()
def drain(
    node: Annotated[int, typer.Argument(help="Number of the node that is to leave.")],
    head: Head = "",
    token_file: HeadTokenFile = "",
    job: JobName = "",
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", help="Wait at most this many seconds for the node to leave."),
    ] = 600.0,
) -> None:
    """Removes a node from a running job; returns when the node has left.

    No iteration is done again. If a standby node waits, it takes the place of the node.
    """
    if not 0.0 < timeout_s <= _TIMEOUT_S_MAX:
        remedy = f"must be above 0 and at most {_TIMEOUT_S_MAX:.0f}"
        raise ConfigError("--timeout", timeout_s, remedy)
    answer = ask_job(Drain(node), head=head, token_file=token_file, job=job, timeout_s=timeout_s)
    if not answer.is_done:
        raise ConfigError("NODE", node, answer.text)
    text_console(soft_wrap=True).print(answer.text)


@exit_codes()
def status(
    head: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT",
            help="Address of the job's head. Default: the job that runs on this machine.",
        ),
    ] = "",
    token_file: HeadTokenFile = "",
    job: JobName = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows what a running job does: its nodes, its pipelines, and what happened last."""
    answer = ask_job(TellStatus(), head=head, token_file=token_file, job=job, field="HOST:PORT")
    current = record_of(answer, JobStatus, head=head, field="HOST:PORT")
    if as_json:
        sys.stdout.write(msgspec.json.format(answer.text, indent=2) + "\n")
        return
    text_console(soft_wrap=True).print(_status_text(current))


def _status_text(current: JobStatus) -> RenderableType:
    """The record for a person."""
    numbers = f"iteration {current.iteration}"
    if current.epoch >= 0:
        numbers += f", plan {current.epoch}, coordinator {current.term}"
    lines: list[RenderableType] = [f"{current.job}: {numbers}, policy {current.policy}"]
    if current.degraded:
        lines.append(f"degraded: {current.degraded}")
    lines.append(_nodes_table(current) if current.nodes else "no node has been started yet")
    if current.links:
        lines.append(f"links as measured: {_links_text(current.links)}")
    if current.last_event is not None:
        lines.append(f"last event: {next(event_lines(current.last_event))}")
    return Group(*lines)


def _links_text(links: Mapping[str, float]) -> str:
    """The measured bandwidth of each kind of link."""
    names = {"inter_node": "within a domain", "inter_domain": "between domains"}
    return ", ".join(
        f"{links[kind] * 8e-9:.2f} Gbit/s {name}" for kind, name in names.items() if kind in links
    )


def _nodes_table(current: JobStatus) -> Table:
    table = plain_table("node", "host", "state", "health", "ranks", "pipeline")
    for node in current.nodes:
        ranks = ranges_text(node.ranks)
        row = (node.host, node.state, node.health, ranks, _pipeline_text(current, node))
        table.add_row(str(node.node), *row)
    return table


def _pipeline_text(current: JobStatus, node: NodeStatus) -> str:
    """The pipeline of a node, and its position there."""
    for index, nodes in enumerate(current.pipelines):
        if node.node in nodes:
            return f"{index}, {nodes.index(node.node) + 1} of {len(nodes)}"
    return ""
