"""Notices of Amazon EC2, and what it has against an instance, from a server of the test's own."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from helpers.metadata_server import Metadata, in_seconds, metadata_server
from planaria.nodes import notices
from planaria.nodes.notices import ec2_problem, parse_notice_source

SLACK_S = 60.0  # A bound for what a busy machine takes between two lines of a test.
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    with metadata_server(monkeypatch) as metadata:
        yield metadata


def read_ec2(server: Metadata) -> float | None:
    return parse_notice_source("ec2", metadata_url=server.url).read()


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_ec2_says_when_a_spot_instance_is_interrupted(action: str, server: Metadata) -> None:
    """Before, there is no such item."""
    assert read_ec2(server) is None
    server.answers[ACTION] = (200, f'{{"action": "{action}", "time": "{in_seconds(100.0)}"}}')

    after_s = read_ec2(server)
    assert after_s is not None
    assert 100.0 - SLACK_S < after_s <= 100.0


def test_ec2_gives_two_minutes_whatever_the_clock_of_the_machine_says(server: Metadata) -> None:
    """A clock that is an hour slow does not make it an hour and two minutes."""
    server.answers[ACTION] = (200, f'{{"action": "stop", "time": "{in_seconds(3720.0)}"}}')

    assert read_ec2(server) == 120.0


def test_ec2_is_asked_with_one_token_until_it_expires(server: Metadata) -> None:
    """Version 2 of its protocol: a token by PUT, and another one after a 401."""
    source = parse_notice_source("ec2", metadata_url=server.url)
    source.read()
    source.read()
    assert server.paths("PUT") == ["/latest/api/token"]
    server.token = "token-2"
    server.answers[ACTION] = (200, f'{{"action": "stop", "time": "{in_seconds(100.0)}"}}')

    assert source.read() is not None
    assert server.paths("PUT") == ["/latest/api/token"] * 2
    tokens = [headers.get("X-aws-ec2-metadata-token") for _, _, headers in server.requests]
    assert tokens[-3:] == ["token-1", None, "token-2"]


def test_ec2_with_two_refusals_in_a_row_is_an_error(server: Metadata) -> None:
    """A new token is tried once, not for ever."""
    server.answers[ACTION] = (401, "")

    with pytest.raises(OSError, match="status 401"):
        read_ec2(server)
    assert len(server.paths("PUT")) == 2


def test_a_container_without_a_token_is_told_what_to_change(
    server: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the PUT does not pass a second hop, unless the instance allows it."""
    monkeypatch.setattr(notices, "_HTTP_TIMEOUT_S", 0.05)
    server.is_silent.set()

    with pytest.raises(OSError, match="needs a hop limit of 2"):
        read_ec2(server)


@pytest.mark.parametrize(
    "text",
    ["<html>log in</html>", "{}", '{"action": "reboot", "time": "2026-01-31T12:00:00Z"}', "[]"],
)
def test_garbage_is_no_notice_of_ec2(text: str, server: Metadata) -> None:
    """As from a proxy that answers for everybody."""
    server.answers[ACTION] = (200, text)

    with pytest.raises(ValueError, match="spot/instance-action is"):
        read_ec2(server)


def test_a_recommendation_to_rebalance_is_logged_once(
    server: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    """The instance may live for hours after it, or for ever."""
    server.answers[REBALANCE] = (200, f'{{"noticeTime": "{in_seconds(0.0)}"}}')
    source = parse_notice_source("ec2", metadata_url=server.url)

    assert source.read() is None
    assert source.read() is None
    assert caplog.text.count("elevated risk") == 1


SCHEDULED = "/latest/meta-data/events/maintenance/scheduled"


def scheduled(code: str, seconds: float, *, state: str = "active") -> str:
    """An event as EC2's metadata have it."""
    at = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%d %b %Y %H:%M:%S GMT")
    return json.dumps(
        [
            {
                "NotBefore": at,
                "Code": code,
                "Description": "The instance is running on degraded hardware",
                "EventId": "instance-event-0d59937288b749b32",
                "NotAfter": at,
                "State": state,
            }
        ]
    )


@pytest.mark.parametrize("code", ["instance-retirement", "instance-stop", "system-reboot"])
def test_an_event_that_ec2_has_scheduled_is_a_notice_when_it_is_near(
    code: str, server: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    """Two weeks before, the user is told, once."""
    server.answers[SCHEDULED] = (200, scheduled(code, 1_000_000.0))
    source = parse_notice_source("ec2", metadata_url=server.url)
    assert source.read() is None
    assert source.read() is None
    assert caplog.text.count(f"EC2 has scheduled {code} of this machine") == 1
    server.answers[SCHEDULED] = (200, scheduled(code, 300.0))

    after_s = source.read()
    assert after_s is not None
    assert 300.0 - SLACK_S < after_s <= 300.0
    server.answers[SCHEDULED] = (200, scheduled(code, -300.0))
    assert source.read() == 0.0


@pytest.mark.parametrize(
    "text",
    [
        scheduled("system-maintenance", 60.0),  # Its network may stutter.
        scheduled("instance-stop", 60.0, state="canceled"),
        "[]",
    ],
)
def test_other_events_of_ec2_are_no_notice(text: str, server: Metadata) -> None:
    server.answers[SCHEDULED] = (200, text)

    assert read_ec2(server) is None
    assert ec2_problem(server.url) == ""


@pytest.mark.parametrize("text", ["no JSON", "{}", '[{"Code": "instance-stop", "NotBefore": "x"}]'])
def test_scheduled_events_that_make_no_sense_are_an_error(text: str, server: Metadata) -> None:
    server.answers[SCHEDULED] = (200, text)

    with pytest.raises(ValueError, match=r"events/maintenance/scheduled is|nvalid date"):
        read_ec2(server)


def test_hardware_that_ec2_retires_makes_a_machine_unfit(
    server: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker has failed there, and nobody knows better why. A reboot says nothing of it."""
    assert ec2_problem(server.url) == ""
    server.answers[SCHEDULED] = (200, scheduled("system-reboot", 60.0))
    assert ec2_problem(server.url) == ""
    server.answers[SCHEDULED] = (200, scheduled("instance-retirement", 1_000_000.0))
    told = ec2_problem(server.url)
    assert told.startswith("EC2 has scheduled instance-retirement at ")
    assert "degraded hardware" in told
    assert not caplog.text
    server.answers[SCHEDULED] = (500, "")

    assert ec2_problem(server.url) == ""
    assert "what EC2 has against this machine cannot be read" in caplog.text
