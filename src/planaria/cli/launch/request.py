"""The request of a person who has a scheduler start `planaria run`, and the words of that command.

Who starts a machine again acts on the exit codes that docs/CLUSTER.md lists: that of the head's
machine decides for the job, that of another machine for that machine.
"""

import shlex
import string
from dataclasses import dataclass
from typing import Final

# For scripts whose shell waits for a process and takes signals: bash (5.2) drops the status of a
# process that ends just as a signal interrupts the wait, and the next wait for it never ends.
IS_FORGOTTEN: Final = """\
# Whether bash has dropped how a process ended, because of a signal just then, and takes it
# to run.
is_forgotten() {
    ! kill -0 "$1" 2> /dev/null && [[ " $(echo $(jobs -rp)) " = *" $1 "* ]]
}
"""
_COLUMNS: Final = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What is to be launched.

    Attributes:
        job: path of the job file or script, as each machine finds it in its working directory.
        name: name of the job in its scheduler: lower-case letters, digits and hyphens.
        min_nodes: number of machines with which the job begins.
        max_nodes: largest number of machines at work.
        devices_per_node: number of devices in each machine; 0: as many as the job says, and no
            accelerator is asked for.
        token_file: path of the token file on each machine; "": the default one.
        port: port of the head; 0: one that follows from the job, in Kubernetes that of
            `planaria run`.
        domain: failure domain of each machine, in which its shell expands variables; "": none.
        interface: network interface at whose address others reach each machine; "": that of its
            route to the head.
        settings: overrides of the job file, KEY=VALUE.
        notice_s: the job's cluster.notice_s; its default where the job is not on this machine.
    """

    job: str
    name: str
    min_nodes: int
    max_nodes: int
    devices_per_node: int = 0
    token_file: str = ""
    port: int = 0
    domain: str = ""
    interface: str = ""
    settings: tuple[str, ...] = ()
    notice_s: float = 30.0


class AtTemplate(string.Template):
    """A text with @{name} for what differs; it leaves the $ of shells alone. "@@" is an @."""

    delimiter = "@"


def options(request: LaunchRequest) -> tuple[tuple[str, ...], ...]:
    """The options of `planaria run` that no machine and no scheduler changes, each with its value.

    --nnodes comes first. The failure domain is none of them.
    """
    words = [
        ("--nnodes", f"{request.min_nodes}:{request.max_nodes}"),
        ("--resume-if-saved",),
    ]
    if request.devices_per_node:
        words.append(("--nproc-per-node", str(request.devices_per_node)))
    if request.token_file:
        words.append(("--token-file", request.token_file))
    if request.interface:
        words.append(("--interface", request.interface))
    return (*words, *(("--set", setting) for setting in request.settings))


def shell_command(request: LaunchRequest, *parts: str, indent: int) -> str:
    """The command `planaria run` for a shell, in several lines if it is long.

    Args:
        parts: further options, quoted for the shell.
        indent: number of columns before the command.
    """
    domain = f'--domain "{request.domain}"' if request.domain else ""
    texts = [
        "planaria run",
        *map(shlex.join, options(request)),
        *(part for part in (*parts, domain) if part),
        shlex.quote(request.job),
    ]
    lines = [""]
    for text in texts:
        if lines[-1] and indent + len(lines[-1]) + len(text) > _COLUMNS:
            lines.append("   ")
        lines[-1] += f" {text}" if lines[-1] else text
    return f" \\\n{' ' * indent}".join(lines)
