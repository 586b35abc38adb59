"""What `planaria agent` refuses before it looks for a head."""

import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
import typer

from helpers.command import assert_mistake, command
from planaria.cli import machine_commands
from planaria.nodes import output
from planaria.nodes.head.process_events import restore_handlers
from planaria.nodes.known_heads import connection_problem
from planaria.nodes.machine_spec import MachineSpec
from planaria.transport.credentials import write_credentials
from planaria.transport.sockets import address_text


@pytest.mark.parametrize("head", [":7320", "head:0", "head"])
def test_a_head_without_host_or_port_is_refused(head: str) -> None:
    """It was looked for in vain for ten minutes."""
    assert_mistake(command("agent", "--join", head), "--join = ", "HOST:PORT")


@pytest.mark.parametrize("host", ["10.0.0.1:7320", "a..b"])
def test_an_address_for_others_that_nobody_can_look_up_is_refused(host: str) -> None:
    """The agents of other machines died of it when they measured the network."""
    refused = command("agent", "--join", "head:7320", "--advertise", host)

    assert_mistake(refused, "--advertise = ", "without a port")


@pytest.mark.parametrize("host", ["fe80::1", "[fe80::1]", "fe80::1%eth0"])
def test_a_link_local_address_is_none_for_others(host: str) -> None:
    """Workers could not listen there, nor others connect, without the interface that they mean."""
    refused = command("agent", "--join", "head:7320", "--advertise", host)

    assert_mistake(refused, "--advertise = ", "link-local")


def test_a_service_that_is_no_head_is_a_mistake_of_the_address(tmp_path: Path) -> None:
    """The token file was named, which is right."""
    token = tmp_path / "token"
    write_credentials(token)

    def answer(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            while sock.recv(1 << 12):
                pass

    with restore_handlers(), socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        head = address_text(listener.getsockname())
        refused = command("agent", "--join", head, "--token-file", str(token))
        thread.join()

    assert_mistake(refused, "--join = ", "does not speak planaria's TLS")


def test_a_connection_that_breaks_names_the_head() -> None:
    """`[Errno 110] Connection timed out` did not say to whom."""
    broken = connection_problem(OSError(errno.ETIMEDOUT, "Connection timed out"), ("head", 7320))

    assert broken == "the connection to head:7320 broke: Connection timed out"
    assert connection_problem(ConnectionError("refused by it"), ("head", 7320)) == "refused by it"


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A stream to a pipe that is full, and that nobody reads."""
    near, far = os.pipe()
    os.set_blocking(far, False)
    with suppress(BlockingIOError):
        while True:
            os.write(far, bytes(1 << 16))
    os.set_blocking(far, True)
    with open(far, "w", encoding="utf-8") as stream:
        yield stream
        os.close(near)  # What waits to be written is dropped by it.


def test_an_agent_whose_output_nobody_reads_goes_on(
    unread: TextIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its event loop stood still, and notices and signals were not heeded."""
    told: list[str] = []

    def run(spec: MachineSpec) -> int:
        spec.note("runs node 0")
        told.append("it has gone on")
        return 0

    monkeypatch.setattr(sys, "stdout", unread)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(output, "OUTPUT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(machine_commands, "run_machine", run)
    token = tmp_path / "token"
    write_credentials(token)
    with pytest.raises(typer.Exit) as end:
        machine_commands.agent(join=["head:7320"], token_file=str(token))

    assert (end.value.exit_code, told) == (0, ["it has gone on"])
