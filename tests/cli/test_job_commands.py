"""`planaria status`, and the options by which commands ask a job elsewhere."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Final

import msgspec
import pytest
from typer.testing import Result

from helpers.command import assert_mistake, command, keep_request_sockets_in
from helpers.jobs import shaped_plan
from planaria.core.job import JobConfig
from planaria.nodes.head.remote.network_requests import NetworkRequests
from planaria.nodes.head.request_socket import serve_requests
from planaria.nodes.head.requests import Request, RequestReply, json_reply
from planaria.observe.metrics import EventRecord
from planaria.observe.status import Standing, job_status
from planaria.transport.acceptor import Acceptor, Handshakes, Purpose, listen
from planaria.transport.credentials import read_credentials, write_credentials
from planaria.transport.sockets import address_text

LOSS: Final = EventRecord(kind="lost", nodes=(3,), iteration=5, reason="its connection closed")
STATUS: Final = job_status(
    JobConfig(name="mine"),
    Standing(plan=shaped_plan((2,), 4), term=1, num_committed=9, is_training=True),
    hosts={0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.3"},
    live=(0, 1, 2),
    last_event=LOSS,
)
EMPTY: Final = job_status(JobConfig(name="mine"), Standing(), hosts={})


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here is a token file, and no job but those of the test."""
    monkeypatch.chdir(tmp_path)
    keep_request_sockets_in(tmp_path / "sockets", monkeypatch)
    monkeypatch.setenv("PLANARIA_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "sockets").mkdir(mode=0o700)
    write_credentials(tmp_path / "token")


def asked_here(reply: RequestReply, *arguments: str) -> Result:
    """A command that asks a job on this machine."""

    async def answer(_: Request) -> RequestReply:
        return reply

    async def run() -> Result:
        async with serve_requests("mine", answer, note=print):
            return await asyncio.to_thread(command, *arguments)

    return asyncio.run(run())


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "0", "1e10"])
def test_a_drain_waits_for_a_number_of_seconds(seconds: str) -> None:
    """Others ended in a traceback, or said that the job had ended."""
    assert_mistake(command("drain", "3", f"--timeout={seconds}"), "--timeout", "above 0")


def test_the_reply_to_a_drain_is_one_line_as_it_is() -> None:
    """Brackets were left out as markup, and a long line was broken."""
    text = f"node 3 has left: it was [red]asked[/red] to, {'long ' * 30}ago"

    assert asked_here(RequestReply(is_done=True, text=text), "drain", "3").output == f"{text}\n"


def asked_over_network(reply: RequestReply, *arguments: str) -> tuple[Result, list[Request]]:
    """A command that asks a head, and what it asks; HEAD stands for the head's address."""
    requests: list[Request] = []

    async def answer(request: Request) -> RequestReply:
        requests.append(request)
        return reply

    async def run() -> Result:
        served = NetworkRequests(Handshakes(read_credentials(Path("token"))), answer)
        listeners, address = listen("127.0.0.1:0")
        acceptor = Acceptor(listeners, {Purpose.REQUEST: served.accept})
        acceptor.start()
        words = [word.replace("HEAD", address_text(address)) for word in arguments]
        result = await asyncio.to_thread(command, *words)
        acceptor.close()
        await served.close()
        return result

    return asyncio.run(run()), requests


def test_the_status_is_a_table() -> None:
    output = asked_here(json_reply(STATUS), "status").output
    lines = [line.split() for line in output.splitlines()]

    assert output.startswith("mine: iteration 9, plan 0, coordinator 1, policy adaptive\n")
    rows = [line for line in lines if line[:1] in (["0"], ["1"], ["2"])]
    assert rows == [
        ["0", "10.0.0.1", "training", "ok", "0", "0,", "1", "of", "2"],
        ["1", "10.0.0.2", "training", "ok", "1", "0,", "2", "of", "2"],
        ["2", "10.0.0.3", "standby", "ok", "2"],
    ]
    assert output.endswith("last event: iteration 5: node 3 was lost (its connection closed)\n")


def test_an_address_is_no_picture() -> None:
    """A part of it was shown as an input symbol, :abcd:."""
    hosts = {0: "fd00:abcd::5"}
    reply = json_reply(job_status(JobConfig(name="mine"), Standing(), hosts=hosts, live=(0,)))

    assert " fd00:abcd::5 " in asked_here(reply, "status").output


def test_the_status_says_what_links_carry() -> None:
    links = {"inter_domain": 2.5e7, "inter_node": 1.25e9}
    reply = json_reply(msgspec.structs.replace(EMPTY, links=links))

    assert asked_here(reply, "status").output.endswith(
        "links as measured: 10.00 Gbit/s within a domain, 0.20 Gbit/s between domains\n"
    )


def test_a_status_without_nodes_says_so() -> None:
    output = asked_here(json_reply(EMPTY), "status").output

    assert output == "mine: iteration 0, policy adaptive\nno node has been started yet\n"


def test_the_status_is_json_for_scripts_here_and_over_the_network() -> None:
    here = asked_here(json_reply(STATUS), "status", "--json")
    there, _ = asked_over_network(json_reply(STATUS), "status", "HEAD", "--json")

    assert here.output == there.output
    assert list(json.loads(here.output)) == [
        *("job", "iteration", "epoch", "term", "policy", "degraded"),
        *("nodes", "pipelines", "standby", "last_event", "links"),
    ]


def test_every_command_asks_a_head() -> None:
    events, told = asked_over_network(json_reply([LOSS]), "events", "--head", "HEAD")
    assert (events.output, str(told[0])) == (
        "iteration 5: node 3 was lost (its connection closed)\n",
        "TellEvents()",
    )
    drained, told = asked_over_network(
        RequestReply(is_done=True, text="node 3 has left"), "drain", "3", "--head", "HEAD"
    )
    assert (drained.output, str(told[0])) == ("node 3 has left\n", "Drain(node=3)")
    kept, told = asked_over_network(
        RequestReply(is_done=True, text="saves/best/9-0"),
        *("checkpoint", "save", "--name", "best", "--head", "HEAD"),
    )
    assert (kept.output, str(told[0])) == ("saves/best/9-0\n", "KeepSave(name='best')")


@pytest.mark.parametrize(
    "arguments", [("status", "HEAD"), ("events", "--head", "HEAD"), ("doctor", "HEAD")]
)
def test_a_job_of_another_version_is_named(arguments: tuple[str, ...]) -> None:
    """It was a traceback."""
    result, _ = asked_over_network(json_reply({"job": 7}), *arguments)

    assert_mistake(result, "another version of planaria")


def test_a_refusal_is_one_line() -> None:
    reply = RequestReply(is_done=False, text="there is no node 7; there are 0, 1")

    drained, _ = asked_over_network(reply, "drain", "7", "--head", "HEAD")
    assert_mistake(drained, "NODE = 7: there is no node 7; there are 0, 1\n")
    for arguments in (
        ("events", "--head", "HEAD"),
        ("status", "HEAD"),
        ("checkpoint", "save", "--name", "best", "--head", "HEAD"),
    ):
        refused, _ = asked_over_network(reply, *arguments)
        assert_mistake(refused, "there is no node 7")


def test_another_token_and_no_head_are_one_line_each() -> None:
    write_credentials(Path("other"))
    arguments = ("status", "HEAD", "--token-file", "other")

    wrong, told = asked_over_network(json_reply(STATUS), *arguments)
    assert_mistake(wrong, "--token-file = 'other': ", "another token file")
    assert told == []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = address_text(listener.getsockname()[:2])
    assert_mistake(command("status", free), f"HOST:PORT = '{free}': ", "cannot be reached")
    assert_mistake(command("drain", "1", "--head", free), f"--head = '{free}': ")
    assert_mistake(command("status", "nowhere"), "write HOST:PORT")
    assert_mistake(command("status", free, "--token-file", "none"), "cannot be read")


def test_options_that_do_not_go_together_are_refused() -> None:
    """Rather than ignored: the user meant something by them."""
    assert_mistake(command("status", "h:1", "--job", "x"), "--job = 'x': leave it out")
    assert_mistake(command("status", "--token-file", "token"), "only with HOST:PORT")
    assert_mistake(command("events", "--token-file", "token"), "only with --head HOST:PORT")
    assert_mistake(command("events", "r.json", "--head", "h:1"), "--head = 'h:1': leave it out")
    save = ("checkpoint", "save", "--name", "best")
    assert_mistake(command(*save, "elsewhere", "--head", "h:1"), "DIRECTORY = 'elsewhere': ")
    assert_mistake(command(*save, "--token-file", "token"), "only with --head")
