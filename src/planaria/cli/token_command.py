"""The command `planaria token`: makes the file by which the machines of a job know one another."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from planaria.cli.command_line import exit_codes, text_console
from planaria.transport.credentials import (
    FIELD,
    VARIABLE,
    read_credentials,
    token_path,
    write_credentials,
)


@exit_codes()
def token(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="The new file; with --check, a file that exists. Default: where agents look.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Make nothing: check the file, and print its fingerprint."),
    ] = False,
) -> None:
    """Makes a token file, by which the machines of a job know one another.

    It holds a new secret, and a certificate with its key that is valid for ten years. Whoever has
    the file may join the job, run code on its machines, and read its model.
    """
    path = (token_path("") if file is None else file.expanduser()).absolute()
    if check:
        _print(*_facts(path))
    else:
        write_credentials(path)
        _print(f"wrote {path}, which only its owner may read", *_advice(path), *_facts(path))


def _facts(path: Path) -> tuple[str, ...]:
    """Facts about a token file that nobody can misuse."""
    credentials = read_credentials(path)
    comparison = "planaria token --check prints the same on every machine that has this file"
    return (
        f"fingerprint {credentials.fingerprint()}: {comparison}",
        f"valid until {credentials.last_instant():%Y-%m-%d}",
    )


def _advice(path: Path) -> tuple[str, ...]:
    """The next steps with a new token file."""
    name = shlex.quote(str(path))
    make_directory = shlex.join(("mkdir", "-p", str(path.parent)))
    if path == token_path("").absolute():
        use = "planaria looks for it there by itself"
    else:
        use = f"name it on each machine: {FIELD} {name}, or export {VARIABLE}={name}"
    return (
        f"copy it to every machine of the job: scp -p {name} MACHINE:{name}",
        f"where its directory is not there yet: ssh MACHINE {shlex.quote(make_directory)}",
        use,
        "if somebody else may have read it, remove it everywhere and make a new one",
    )


def _print(first: str, *others: str) -> None:
    console = text_console(soft_wrap=True)
    console.print(first)
    for line in others:
        console.print(f"  {line}")
