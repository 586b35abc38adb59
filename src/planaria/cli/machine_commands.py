"""`planaria agent`: offers this machine to the head of a job."""

import socket
import sys
from functools import partial
from typing import Annotated

import psutil
import typer

from planaria.cli.command_line import exit_codes, text_console
from planaria.errors import AuthenticationError, ConfigError, StrangerError
from planaria.job.planning import cache_directory, fork_server
from planaria.nodes.machine import run_machine
from planaria.nodes.machine_spec import MachineSpec
from planaria.nodes.notices import check_notice_source
from planaria.nodes.output import Outlet, finish, unfailing
from planaria.transport.acceptor import parse_address
from planaria.transport.credentials import FIELD, read_credentials, token_path
from planaria.transport.sockets import Address, address_text, can_be_host, is_link_local

TokenFile = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="File with the secret and the certificate that all machines share; "
        "`planaria token` makes it. Default: $PLANARIA_TOKEN_FILE, or "
        "~/.config/planaria/token.",
    ),
]
Notice = Annotated[
    str,
    typer.Option(
        metavar="SOURCE",
        help="Where this machine looks for a notice that it will be taken away: the absolute path "
        "of a file, a URL, ec2, gcp or slurm. Default: cluster.notice of the job.",
    ),
]

Advertise = Annotated[
    str,
    typer.Option(
        metavar="HOST",
        help="Address at which other machines reach this one. Default: the address from which "
        "it reaches the head.",
    ),
]
Interface = Annotated[
    str, typer.Option(metavar="NAME", help="Network interface whose address is that address.")
]
Domain = Annotated[
    str,
    typer.Option(metavar="NAME", help="Failure domain of this machine, such as its rack or zone."),
]


@exit_codes()
def agent(
    join: Annotated[
        list[str],
        typer.Option(
            metavar="HOST:PORT", help="Address of the head; several are tried at once; repeatable."
        ),
    ],
    token_file: TokenFile = "",
    advertise: Advertise = "",
    interface: Interface = "",
    domain: Domain = "",
    notice: Notice = "",
    no_code: Annotated[
        bool,
        typer.Option(
            "--no-code",
            help="Take no modules from the head; the same files must be here, in the current "
            "directory or on PYTHONPATH.",
        ),
    ] = False,
    stay: Annotated[
        bool,
        typer.Option("--stay", help="Serve job after job, and wait for a head without end."),
    ] = False,
) -> None:
    """Offers this machine to the head of a job, and runs a node of it.

    Exit codes: 0 the job is done, or the machine left in peace; 2 a mistake; 3 the job ended
    unfinished, also by its user, or the head was lost and the node saved what it held; 75 there was
    no head for too long: start the agent again; 76 the notice says that the machine will be taken
    away, and it left in peace; 130 a second Ctrl-C.
    """
    sys.stdout, sys.stderr = unfailing(sys.stdout), unfailing(sys.stderr)
    if notice:
        check_notice_source(notice)
    show = text_console(sys.stdout, soft_wrap=True).print
    outlet = Outlet(show)
    spec = MachineSpec(
        heads=tuple(_head_address(head) for text in join for head in text.split(",")),
        host=own_address(advertise, interface),
        credentials=read_credentials(token_path(token_file)),
        domain=domain,
        notice=notice,
        has_code=no_code,
        stays=stay,
        cache_directory=cache_directory(),
        server=lambda job, paths: fork_server(job, search_path=paths),
        note=lambda text: outlet.post(partial(show, text), num_bytes=len(text)),
    )
    try:
        raise typer.Exit(_exit_code(spec, token_file))
    finally:
        finish(outlet)


def _exit_code(spec: MachineSpec, token_file: str) -> int:
    try:
        return run_machine(spec)
    except StrangerError as error:
        named = ",".join(map(address_text, spec.heads))
        raise ConfigError("--join", named, f"{error}; name the port of the head") from error
    except AuthenticationError as error:
        raise ConfigError(FIELD, str(token_path(token_file)), str(error)) from error


def _head_address(text: str) -> Address:
    host, port = parse_address(text, field="--join")
    if not host or not port:
        raise ConfigError("--join", text, "name the head's machine and its port: HOST:PORT")
    return host, port


def own_address(advertise: str, interface: str) -> str:
    """The address at which others reach this machine; "": that of the route to the head.

    Raises:
        ConfigError: others cannot use it, or this machine has no such interface.
    """
    if not interface:
        if advertise and not can_be_host(advertise):
            raise ConfigError("--advertise", advertise, "name a host or an address, without a port")
        if is_link_local(advertise):
            remedy = "others cannot use a link-local address; name another one of this machine"
            raise ConfigError("--advertise", advertise, remedy)
        return advertise
    if advertise:
        raise ConfigError("--interface", interface, "leave it out where --advertise is given")
    addresses = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses.get(interface, ()):
            is_local = address.address.startswith(("fe80:", "127.")) or address.address == "::1"
            if address.family == family and not is_local:
                return str(address.address).partition("%")[0]
    there = ", ".join(sorted(addresses))
    raise ConfigError("--interface", interface, f"has no address; the interfaces are {there}")
