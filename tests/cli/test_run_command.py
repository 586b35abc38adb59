"""How `planaria run` keeps a head and an agent: which exit code it has, and who gets signals."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from helpers.command import wait_for
from planaria.cli import run_command
from planaria.cli.main import app
from planaria.cli.run_command import is_own_host, supervise
from planaria.transport.credentials import write_credentials

# No signal.pause(): a signal that comes just before it is handled after the next one.
FOR_EVER = "import time\nwhile True: time.sleep(0.02)"


def python(code: str, *arguments: object) -> list[str]:
    """The command line of a process that runs this code."""
    return [sys.executable, "-S", "-c", code, *map(str, arguments)]


def supervised(head: list[str], agent: list[str]) -> tuple[int, list[str]]:
    """The exit code, and what the user is shown."""
    notes: list[str] = []
    return supervise(head=head, agent=agent, note=notes.append), notes


def once(condition: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """A running thread that acts once the condition holds."""

    def wait_and_act() -> None:
        wait_for(condition, what="the condition of the test")
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_the_exit_code_is_the_head_s_and_the_agent_may_end_after_it(tmp_path: Path) -> None:
    """An agent leaves once the head has told it that the job is over."""
    ended = tmp_path / "ended"
    head = python("import sys; open(sys.argv[1], 'x'); sys.exit(3)", tmp_path / "head")
    agent = python(
        "import os, sys, time\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "time.sleep(0.05); open(sys.argv[2], 'x')",
        *(tmp_path / "head", ended),
    )

    assert supervised(head, agent) == (3, [])
    assert ended.exists()


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_machine_without_a_head_has_the_exit_code_of_its_agent(code: int) -> None:
    """A scheduler decides by it whether to start the machine again."""
    assert supervised([], python(f"raise SystemExit({code})")) == (code, [])


def test_a_mistake_in_the_job_ends_the_agent_at_once() -> None:
    """It would look for a head that never listened."""
    assert supervised(python("raise SystemExit(2)"), python(FOR_EVER)) == (2, [])


def test_an_agent_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGTERM first, at which it leaves in peace, and then by force."""
    monkeypatch.setattr(run_command, "_AGENT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(run_command, "_LEAVE_TIMEOUT_S", 0.5)
    path, deaf = tmp_path / "pid", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    write = "import os, signal, sys; open(sys.argv[1], 'x').write(str(os.getpid()))"
    head = python(
        "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)", path
    )

    assert supervised(head, python(f"import signal\n{deaf}\n{write}\n{FOR_EVER}", path)) == (0, [])
    assert not Path(f"/proc/{path.read_text()}").exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(1)"])
def test_the_agent_of_a_head_that_has_crashed_has_time_to_save(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node waits for the answers of others before it writes a layer. It was killed before."""
    monkeypatch.setattr(run_command, "_AGENT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(run_command, "_LEAVE_TIMEOUT_S", 0.0)
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    head = python(
        f"import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n{end}",
        ready,
    )
    agent = python(
        "import signal, sys, time\n"
        "def save(*_): time.sleep(0.3); open(sys.argv[2], 'x'); sys.exit(3)\n"
        f"signal.signal(signal.SIGTERM, save); open(sys.argv[1], 'x')\n{FOR_EVER}",
        *(ready, saved),
    )

    supervised(head, agent)

    assert saved.exists()


def test_an_agent_whose_head_has_crashed_gets_the_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user need not wait until it has saved."""
    monkeypatch.setattr(run_command, "_AGENT_TIMEOUT_S", 0.0)
    ready, saving = tmp_path / "ready", tmp_path / "saving"
    agent = python(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[2], 'x'))\n"
        "signal.signal(signal.SIGINT, lambda *_: os._exit(1))\n"
        f"open(sys.argv[1], 'x')\n{FOR_EVER}",
        *(ready, saving),
    )
    head = python(
        "import os, sys, time\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nos.kill(os.getpid(), 9)",
        ready,
    )
    thread = once(saving.exists, lambda: os.kill(os.getpid(), signal.SIGINT))
    code, _ = supervised(head, agent)
    thread.join()

    assert code == 137


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_goes_once_to_the_head_and_not_to_the_agent(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It stops the job, and twice it would end it without a save. The agent ends with the job."""
    names = [tmp_path / name for name in ("ready", "signals")]
    head = python(
        "import signal, sys, time\n"
        "numbers = []\n"
        f"signal.signal({number.value}, lambda number, _: numbers.append(number))\n"
        "open(sys.argv[1], 'x')\n"
        "while not numbers: time.sleep(0.01)\n"
        "time.sleep(0.1)\n"
        "open(sys.argv[2], 'x').write(repr(numbers))\n"
        "sys.exit(130)",
        *names,
    )
    agent = python(
        "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "open(sys.argv[2], 'x')",
        *(names[1], tmp_path / "agent"),
    )
    thread = once(names[0].exists, lambda: os.kill(os.getpid(), number))
    # A shell has what it starts in the background ignore Ctrl-C.
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, handler)
    try:
        assert supervised(head, agent) == (130, [])
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    thread.join()
    assert names[1].read_text() == repr([number.value])
    assert (tmp_path / "agent").exists()


def test_a_signal_that_is_ignored_is_not_passed_on(tmp_path: Path) -> None:
    """As SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        def send() -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            (tmp_path / "sent").touch()

        thread = once((tmp_path / "ready").exists, send)
        agent = python(
            "import os, sys, time\nopen(sys.argv[1], 'x')\n"
            "while not os.path.exists(sys.argv[2]): time.sleep(0.01)",
            *(tmp_path / "ready", tmp_path / "sent"),
        )
        assert supervised([], agent) == (0, [])
        thread.join()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_before_the_head_can_handle_it_is_an_interruption(
    tmp_path: Path,
) -> None:
    """It ends the process that still imports; the exit code is that of Ctrl-C."""
    ready = tmp_path / "ready"
    head = python(f"import sys; open(sys.argv[1], 'x')\n{FOR_EVER}", ready)
    thread = once(ready.exists, lambda: os.kill(os.getpid(), signal.SIGTERM))

    assert supervised(head, python("")) == (130, [])
    thread.join()


def test_a_signal_that_comes_while_processes_are_started_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler may take a machine back as soon as it has given it."""
    real_start = run_command._start

    def start(command: list[str]) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return real_start(command)

    monkeypatch.setattr(run_command, "_start", start)

    assert supervised([], python(FOR_EVER)) == (130, [])


def test_a_head_that_is_killed_is_told_as_shells_do() -> None:
    """128 and the signal; by the kernel, say, that was short of memory."""
    head = python("import os; os.kill(os.getpid(), 9)")

    assert supervised(head, python("")) == (137, [])


def test_a_head_goes_on_without_the_agent_of_its_machine(tmp_path: Path) -> None:
    """Other machines may do for the job; its end is said."""
    noted = tmp_path / "noted"
    head = python(
        "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)", noted
    )
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        noted.touch()

    assert supervise(head=head, agent=python("raise SystemExit(75)"), note=note) == 0
    assert notes == ["the agent here has ended with exit code 75; the head goes on"]


def test_ctrl_c_in_a_terminal_reaches_no_process_but_this_one(tmp_path: Path) -> None:
    """Each has a session of its own; else it would get the terminal's signal and this one's."""
    path = tmp_path / "session"
    agent = python("import os, sys; open(sys.argv[1], 'x').write(str(os.getsid(0)))", path)

    supervised([], agent)
    assert int(path.read_text()) != os.getsid(0)


def test_this_machine_has_its_name_and_its_addresses_and_no_other() -> None:
    """An address of the documentation (RFC 5737) is nobody's."""
    assert all(map(is_own_host, (socket.gethostname(), "localhost", "127.0.0.1", "127.0.0.9")))
    assert not any(map(is_own_host, ("192.0.2.1", "no.such.host.invalid", "2001:db8::1", "\xff")))


def test_a_mistake_is_told_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contradiction, and a token file that is not there, which both processes would tell."""
    monkeypatch.setattr(run_command, "supervise", lambda **_: pytest.fail("it was started"))
    arguments = ["run", "job.toml", "--token-file", str(tmp_path / "none")]
    no_token = CliRunner().invoke(app, arguments)
    no_place = CliRunner().invoke(app, [*arguments, "--nnodes", "2"])

    assert (no_token.exit_code, no_place.exit_code) == (2, 2)
    assert "planaria token" in no_token.stderr
    assert "--rdzv-endpoint" in no_place.stderr


@pytest.mark.parametrize("option", [("--interface", "none9"), ("--advertise", "10.0.0.1:7320")])
def test_an_address_for_others_that_is_none_ends_the_head_too(
    option: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent alone ended, as all others did, and the head waited ten minutes for machines.

    A scheduler started it again then, twenty times.
    """
    monkeypatch.setattr(run_command, "supervise", lambda **_: pytest.fail("it was started"))
    token = str(tmp_path / "token")
    write_credentials(Path(token))
    ended = CliRunner().invoke(app, ["run", "job.toml", "--token-file", token, *option])

    assert ended.exit_code == 2
    assert f"planaria: {option[0]} = {option[1]!r}: " in ended.stderr


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """The command lines of the head and the agent, which are noted instead of started."""
    noted: dict[str, tuple[str, ...]] = {}

    def note_commands(**words: tuple[str, ...]) -> int:
        noted.update(words)
        return 0

    monkeypatch.setattr(run_command, "supervise", note_commands)
    return noted


def test_the_head_and_the_agent_get_the_options_that_are_theirs(
    tmp_path: Path, commands: dict[str, tuple[str, ...]]
) -> None:
    """The head's command had its token file behind the job, where it takes no option."""
    token = str(tmp_path / "token")
    write_credentials(Path(token))
    options = ["--token-file", token, "--resume-if-saved", "--domain", "rack-1"]
    options += ["--operator", "./ask", "--advertise", "node-1"]
    ended = CliRunner().invoke(app, ["run", "job.toml", *options])

    assert ended.exit_code == 0, ended.output
    head, agent = (" ".join(commands[name][3:]) for name in ("head", "agent"))
    assert head.startswith("train --listen 127.0.0.1:29400 --nodes 1:1 ")
    asks = "--operator ./ask --advertise 127.0.0.1:29400"
    assert head.endswith(f" --token-file {token} --resume-if-saved {asks} -- job.toml")
    own = "--domain rack-1 --advertise node-1"
    assert agent == f"agent --join 127.0.0.1:29400 {own} --token-file {token}"


@pytest.mark.parametrize(
    ("options", "own"),
    [
        (("--nnodes", "1:4"), "--advertise 192.0.2.7"),
        (("--nnodes", "1:4", "--interface", "eth1"), "--interface eth1"),
        (("--nnodes", "1:4", "--advertise", "me"), "--advertise me"),
        (("--nnodes", "1"), ""),  # Nobody else has to reach it.
        (("--nnodes", "1:4", "--node-rank", "1"), ""),  # The head is elsewhere.
    ],
)
@pytest.mark.parametrize(("address", "is_loopback"), [("127.0.1.1", True), ("192.0.2.7", False)])
def test_the_agent_beside_the_head_is_reached_where_the_machine_s_name_is_a_loopback_address(
    address: str,
    is_loopback: bool,
    options: tuple[str, ...],
    own: str,
    tmp_path: Path,
    commands: dict[str, tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian writes 127.0.1.1 NAME to /etc/hosts. The agent joined from there, and was refused."""
    entry = (socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    monkeypatch.setattr(run_command, "reachable_addresses", lambda _: (("192.0.2.7", 7320),))
    interfaces = {"eth1": [SimpleNamespace(family=socket.AF_INET, address="192.0.2.8")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    token = str(tmp_path / "token")
    write_credentials(Path(token))
    place = ("--rdzv-endpoint", "node-1:7320", "--node-rank", "0")
    ended = CliRunner().invoke(app, ["run", "job.toml", *place, *options, "--token-file", token])

    assert ended.exit_code == 0, ended.output
    is_own = is_loopback or own != "--advertise 192.0.2.7"
    expected = f"{own} " if own and is_own else ""
    agent = " ".join(commands["agent"][3:])
    assert agent == f"agent --join node-1:7320 {expected}--token-file {token}"
