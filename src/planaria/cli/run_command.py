"""`planaria run`: the same command on each machine of a job, under any scheduler.

It finds out whether this machine is the head (run_role.py), says so in one line, and starts the
commands `planaria train --listen` and `planaria agent --join` as processes of their own. A signal
goes to the head, or else to the agent; they know what it means. All of them end together.
"""

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from planaria.cli.command_line import JobFile, Settings, exit_codes, text_console
from planaria.cli.machine_commands import (
    Advertise,
    Domain,
    Interface,
    Notice,
    TokenFile,
    own_address,
)
from planaria.cli.run_role import RunFlags, RunRole, run_role
from planaria.cli.train_command import Operator, Resume, ResumeIfSaved, State
from planaria.job.lost_heads import reachable_addresses
from planaria.nodes.forkserver import die_with_parent
from planaria.nodes.head.process_events import LEAVE_SIGNALS
from planaria.nodes.notices import check_notice_source
from planaria.nodes.output import unfailing
from planaria.transport.acceptor import parse_address
from planaria.transport.credentials import read_credentials, token_path
from planaria.transport.sockets import is_loopback

_MISTAKE: Final = 2
_INTERRUPTED: Final = 130
_AGENT_TIMEOUT_S: Final = 20.0  # Time for the agent to end by itself once the head has ended.
_LEAVE_TIMEOUT_S: Final = 5.0
_SAVE_TIMEOUT_S: Final = 3600.0  # An agent that runs ends much earlier if nothing more is written.


NumMachines = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Number of machines with which the job begins, and the most that it may use.",
    ),
]
NumDevices = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="Number of devices in each machine. Default, and auto: "
        "cluster.devices_per_node of the job.",
    ),
]
Endpoint = Annotated[
    str,
    typer.Option(
        metavar="HOST[:PORT]",
        help="The machine of the head, the same on each machine; the port is 29400 if none is "
        "given.",
    ),
]
Rank = Annotated[
    str,
    typer.Option(
        metavar="N", help="Number of this machine, from 0; the machine of number 0 is the head."
    ),
]
Report = Annotated[
    Path | None, typer.Option(help="Write the report to this JSON file, on the head.")
]


@exit_codes()
def run(
    job: JobFile,
    nnodes: NumMachines = "",
    nproc_per_node: NumDevices = "",
    rdzv_endpoint: Endpoint = "",
    node_rank: Rank = "",
    token_file: TokenFile = "",
    notice: Notice = "",
    report: Report = None,
    resume: Resume = False,
    resume_if_saved: ResumeIfSaved = False,
    advertise: Advertise = "",
    interface: Interface = "",
    domain: Domain = "",
    operator: Operator = "",
    state: State = "",
    settings: Settings = None,
) -> None:
    """Trains a job on several machines: start the same command on each of them.

    One machine is the head and all are agents. Which is which follows from the options, which are
    torchrun's, and else from the variables of torchrun (PET_*), Slurm, Kubernetes and Kubeflow. The
    exit code is the head's, on other machines the agent's.
    """
    flags = RunFlags(
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        rdzv_endpoint=rdzv_endpoint,
        node_rank=node_rank,
    )
    is_here = functools.cache(is_own_host)
    role = run_role(os.environ, flags, hostname=socket.gethostname(), is_here=is_here)
    if notice:
        check_notice_source(notice)
    own_address(advertise, interface)  # Else a head would wait for agents that all end with this.
    read_credentials(token_path(token_file))  # One error is better than one of each process.
    console = text_console(unfailing(sys.stdout), soft_wrap=True)
    console.print(f"planaria run: {role.why}")
    token = ("--token-file", token_file) if token_file else ()
    advertise = advertise or ("" if interface else _address_for_others(role))
    own = {"notice": notice, "domain": domain, "advertise": advertise, "interface": interface}
    source = [word for name, text in own.items() if text for word in (f"--{name}", text)]
    more = [
        *token,
        *(["--resume"] if resume else []),
        *(["--resume-if-saved"] if resume_if_saved else []),
        *(["--operator", operator, "--advertise", role.join] if operator else []),
    ]
    head = _train_arguments(job, role, report=report, state=state, settings=settings, more=more)
    raise typer.Exit(
        supervise(
            head=_planaria(*head) if role.is_head else (),
            agent=_planaria("agent", "--join", role.join, *source, *token),
            note=lambda text: console.print(f"planaria run: {text}"),
        )
    )


def _train_arguments(
    job: Path,
    role: RunRole,
    *,
    report: Path | None,
    state: str,
    settings: Sequence[str] | None,
    more: Sequence[str],
) -> list[str]:
    """The command line of the head, without the program.

    Args:
        more: further options.
    """
    words = ["train", "--listen", role.listen, "--nodes", f"{role.min_nodes}:{role.max_nodes}"]
    if role.devices_per_node:
        words += ["--devices-per-node", str(role.devices_per_node)]
    if report is not None:
        words += ["--report", str(report)]
    if state:
        words += ["--state", state]
    for setting in settings or ():
        words += ["--set", setting]
    return [*words, *more, "--", str(job)]


def _address_for_others(role: RunRole) -> str:
    """The address at which others reach the agent beside the head; "": that of its route there.

    On many systems a machine's own name is a loopback address to itself (127.0.1.1).
    """
    host, port = parse_address(role.join, field="--rdzv-endpoint")
    if role.max_nodes < 2 or is_loopback(host):
        return ""
    with contextlib.suppress(OSError, UnicodeError):
        *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if is_loopback(str(address[0])):
            return next((own for own, _ in reachable_addresses(("", port))), "")
    return ""


def _planaria(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "planaria", *arguments)


def is_own_host(host: str) -> bool:
    """Whether a host name or address is one of this machine's. It may take seconds to resolve."""
    if host == socket.gethostname():
        return True
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.bind(address)  # A machine can bind its own addresses only.
                return True
    return False


# -- processes ------------------------------------------------------------------------------------


def supervise(*, head: Sequence[str], agent: Sequence[str], note: Callable[[str], None]) -> int:
    """Runs a head, if there is one, and an agent until they have ended; returns the exit code.

    Args:
        head: command line of the head; empty: this machine has none.
        agent: command line of the agent.
        note: shows the user a text.
    """
    processes: list[subprocess.Popen[bytes]] = []
    early: list[int] = []
    with _forwarding_signals(processes, early):
        main, *others = [_start(command) for command in (head, agent) if command]
        processes.append(main)
        for number in early:
            main.send_signal(number)
        _wait_main(main, others, note)
        processes[:] = others  # Who does not want to wait for the agent can interrupt it twice.
        is_mistake = main.returncode == _MISTAKE  # The agent may not even have found the head.
        for process in others:
            # Else a node that has lost its head saves what it holds, and waits for others first.
            is_told = is_mistake or main.returncode == 0
            _end(
                process,
                timeout_s=0.0 if is_mistake else _AGENT_TIMEOUT_S,
                leave_timeout_s=_LEAVE_TIMEOUT_S if is_told else _SAVE_TIMEOUT_S,
            )
    if main.returncode >= 0:
        return main.returncode
    # A signal that ends a command came before it could handle it, or somebody else has killed it.
    is_interrupted = -main.returncode in (signal.SIGINT, *LEAVE_SIGNALS)
    return _INTERRUPTED if is_interrupted else 128 - main.returncode


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a command that dies with this process.

    It has a session of its own: Ctrl-C would reach it twice, from the terminal and from here, and
    the second one ends a job without a save.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )


@contextmanager
def _forwarding_signals(
    processes: Sequence[subprocess.Popen[bytes]], early: list[int]
) -> Iterator[None]:
    """Passes signals to the first process, and notes those that come while there is none.

    A signal that this process ignores (SIGHUP under nohup) is ignored by its children, too.
    """

    def forward(number: int, _: object) -> None:
        if processes:
            processes[0].send_signal(number)
        else:
            early.append(number)

    before = {}
    for number in (signal.SIGINT, *LEAVE_SIGNALS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_main(
    main: subprocess.Popen[bytes],
    others: Sequence[subprocess.Popen[bytes]],
    note: Callable[[str], None],
) -> None:
    """Waits until the main process ends; tells if another one ends before it."""
    with contextlib.ExitStack() as stack:
        running = {}
        for process in (main, *others):
            running[os.pidfd_open(process.pid)] = process
        for pidfd in running:
            stack.callback(os.close, pidfd)
        while main.poll() is None:
            ended, _, _ = select.select([*running], [], [])
            for pidfd in ended:
                process = running.pop(pidfd)
                if process.wait() and process is not main and main.poll() is None:
                    code = process.returncode
                    note(f"the agent here has ended with exit code {code}; the head goes on")


def _end(process: subprocess.Popen[bytes], *, timeout_s: float, leave_timeout_s: float) -> None:
    """Waits for a process to end by itself, tells it to after `timeout_s`, and then kills it."""
    for number, pause_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, leave_timeout_s)):
        try:
            process.wait(timeout=pause_s)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
    process.wait()
