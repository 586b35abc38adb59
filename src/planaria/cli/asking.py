"""Options of the commands that ask a running job, here or over the port of its head."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final, TypeVar

import msgspec
import typer

from planaria.errors import AuthenticationError, ConfigError, StrangerError
from planaria.nodes.head.remote.network_requests import ask_head
from planaria.nodes.head.request_socket import ask
from planaria.nodes.head.requests import Request, RequestReply
from planaria.transport.acceptor import parse_address
from planaria.transport.credentials import FIELD, read_credentials, token_path

_TIMEOUT_S: Final = 10.0  # Time for an answer that needs no work.
Record = TypeVar("Record")
Head = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT", help="Ask the head there. Default: the job that runs on this machine."
    ),
]
HeadTokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The head's token file. Default: $PLANARIA_TOKEN_FILE, or ~/.config/planaria/token.",
    ),
]
JobName = Annotated[
    str,
    typer.Option(
        "--job",
        metavar="NAME[-PID]",
        help="Name of the job, if several jobs run here; with its process, if they have one name.",
    ),
]


def ask_job(
    request: Request,
    *,
    head: str,
    token_file: str,
    job: str,
    timeout_s: float = _TIMEOUT_S,
    field: str = "--head",
) -> RequestReply:
    """The reply of a job to a request.

    Args:
        head: "HOST:PORT" of its head; "": a job that runs on this machine.
        token_file: value of --token-file.
        job: name of the job on this machine; "": the only one.
        timeout_s: maximum time to wait for the reply.
        field: name of the option or argument that `head` comes from.

    Raises:
        ConfigError: there is no such job or head, it has another token file, or does not answer.
    """
    if not head:
        if token_file:
            raise ConfigError(FIELD, token_file, f"it is of use only with {field} HOST:PORT")
        return ask(request, job=job, timeout_s=timeout_s)
    if job:
        raise ConfigError("--job", job, f"leave it out with {field}: a head runs one job")
    address = parse_address(head, field=field)
    credentials = read_credentials(token_path(token_file))
    with head_errors(head, token_file=token_file, field=field):
        return ask_head(address, credentials, request, timeout_s=timeout_s)


def record_of(reply: RequestReply, kind: type[Record], *, head: str, field: str) -> Record:
    """The record in the text of a reply.

    Args:
        head, field: see `ask_job`.

    Raises:
        ConfigError: the job has refused to tell, or another version of planaria runs it.
    """
    field = field if head else ""
    if not reply.is_done:
        raise ConfigError(field, head, reply.text)
    try:
        return msgspec.json.decode(reply.text, type=kind)
    except (RecursionError, ValueError) as error:
        remedy = f"the job is run by another version of planaria: {error}"
        raise ConfigError(field, head, remedy) from error


@contextmanager
def head_errors(head: str, *, token_file: str, field: str) -> Iterator[None]:
    """Turns the errors of a connection to a head into ConfigErrors; see `ask_job`."""
    try:
        yield
    except StrangerError as error:
        raise ConfigError(field, head, f"{error}; name the port of the head") from error
    except AuthenticationError as error:
        raise ConfigError(FIELD, str(token_path(token_file)), str(error)) from error
    except ConnectionError as error:
        raise ConfigError(field, head, str(error)) from error
