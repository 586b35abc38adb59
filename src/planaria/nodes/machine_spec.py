"""What a machine that is offered to a job is told by its user."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planaria.core.job import JobConfig
from planaria.errors import ConfigError
from planaria.nodes.forkserver import ForkServer
from planaria.transport.credentials import Credentials
from planaria.transport.sockets import Address, is_link_local

ServerOf = Callable[[JobConfig, Sequence[str]], ForkServer]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """What a machine is told by its user.

    Attributes:
        heads: addresses at which the head may be.
        host: address at which others reach this machine; "": that of its route to the head.
        domain: name of its failure domain.
        notice: source of preemption notices (notices.py); "": that of the job, if it has one.
        has_code: whether the user's modules are here already, in the current directory or on
            Python's path, and those of the head must be the same.
        stays: whether it waits for the next job when one is over, and for the first one, without
            end.
        cache_directory: directory in which tokens and profiles are kept between jobs.
        server: returns a fork server for a job whose modules are also looked for in directories.
        note: shows the user a text.
    """

    heads: tuple[Address, ...]
    credentials: Credentials
    host: str
    domain: str
    notice: str
    has_code: bool
    stays: bool
    cache_directory: str
    server: ServerOf
    note: Callable[[str], None]

    def own_host(self, route_host: str, *, known: str) -> str:
        """The address at which others reach this machine.

        Args:
            route_host: this machine's address on its route to the head.
            known: address that others know already; "": none.

        Raises:
            ConfigError: only the address of the route is known, and it is link-local.
        """
        if self.host or not is_link_local(route_host):
            return self.host or route_host
        if known:
            return known
        remedy = (
            f"the route to the head begins at {route_host}, a link-local address, which others "
            "cannot use: join the head at another address, or name one of this machine with "
            "--advertise or --interface"
        )
        raise ConfigError("", "", remedy)
