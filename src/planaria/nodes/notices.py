"""Sources of preemption notices: what a machine is told before it is taken away.

    /run/leave            a file; while it exists there is a notice
    http://HOST:PORT/X    a URL; an answer with status 2xx and a body is a notice, 404 is none
    ec2                   the metadata of an instance of Amazon EC2: that a spot instance is
                          interrupted, or that any is stopped, retired or rebooted in ten minutes
    gcp                   the metadata of a virtual machine of Google Compute Engine
    slurm                 the state of this machine in Slurm, which interrupts nothing on a machine
                          that it drains

The text of a file or body may say when the machine will be gone: a number of seconds, from when
the notice is first seen, or a time as RFC 3339 writes it (2026-01-31T12:00:00Z), which is compared
with this machine's clock. No proxy is asked. $PLANARIA_METADATA_URL names another server of
metadata.

A source is polled by a process of its own, the watcher, because a read of a network file system may
hang, and because an agent, which forks workers, must not have threads.

Source: "Spot Instance interruption notices", "Scheduled events for Amazon EC2 instances" and "Use
the Instance Metadata Service" (Amazon EC2);
"Preemptible VM instances" and "Handle GPU host maintenance events" (Google Compute Engine);
scontrol(1), "drain".
"""

import asyncio
import contextlib
import http.client
import logging
import math
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from planaria.errors import ConfigError
from planaria.nodes.child_answers import fork_answer

logger = logging.getLogger(__name__)

_METADATA_URL: Final = "http://169.254.169.254"  # Also Google's, metadata.google.internal.
_HTTP_TIMEOUT_S: Final = 2.0
_TEXT_BYTES_MAX: Final = 4096
_FILE_PAUSE_S: Final = 0.5
_HTTP_PAUSE_S: Final = 2.0
_WRITING_S: Final = 0.05  # Time between the making of a file and its first text.

_EC2_NOTICE_S: Final = 120.0  # Amazon gives no longer notice.
_EC2_TOKEN_S: Final = 21_600  # The longest life of a token of IMDSv2.
_EC2_EVENT_S: Final = 600.0  # Time before a scheduled event at which it becomes a notice.
_EC2_RETIREMENTS: Final = ("instance-retirement", "instance-stop")  # The hardware is failing.
_EC2_ENDS: Final = (*_EC2_RETIREMENTS, "instance-reboot", "system-reboot")
_EC2_TOKEN_HEADER: Final = "X-aws-ec2-metadata-token"
_GCP_PREEMPTION_S: Final = 30.0
# One hour for a machine with GPUs; the metadata do not say which it is.
_GCP_MAINTENANCE_S: Final = 60.0
_GCP_HEADERS: Final = {"Metadata-Flavor": "Google"}
_SLURM_PAUSE_S: Final = 30.0  # Thousands of machines ask one controller.
_SLURM_TIMEOUT_S: Final = 20.0
_SLURM_NODE: Final = "SLURMD_NODENAME"
_SLURM_STATE: Final = re.compile(r"\bState=(\S+)")


class NoticeSource(Protocol):
    """A place where it is said that the machine will be taken away."""

    @property
    def pause_s(self) -> float:
        """Seconds to wait between two reads."""
        ...

    def read(self) -> float | None:
        """Seconds until the machine is gone; None while there is no notice.

        Raises:
            OSError: the source does not answer, or refuses to.
            ValueError: the answer makes no sense.
        """
        ...


def parse_notice_source(
    text: str, *, field: str = "--notice", default_s: float = 30.0, metadata_url: str = ""
) -> NoticeSource:
    """The source that a text names: an absolute path, a URL, "ec2", "gcp" or "slurm".

    Args:
        field: key or option that the text was given for, for the error.
        default_s: seconds until the machine is gone, where a notice does not say it.
        metadata_url: server of metadata; empty: $PLANARIA_METADATA_URL, or else the clouds' own.

    Raises:
        ConfigError: the text names no source.
    """
    server = metadata_url or os.environ.get("PLANARIA_METADATA_URL") or _METADATA_URL
    if text == "ec2":
        return _Ec2Source(server.rstrip("/"), default_s=default_s)
    if text == "gcp":
        return _GcpSource(server.rstrip("/"))
    if text == "slurm":
        return _SlurmSource(default_s=default_s)
    if text.startswith(("http://", "https://")):
        if not _is_url(text):
            raise ConfigError(field, text, "must name a host, and a port from 1 to 65535 if any")
        return _UrlSource(text, default_s=default_s)
    if text.startswith("/"):
        return _FileSource(Path(text), default_s=default_s)
    remedy = "must be the absolute path of a file, an http:// or https:// URL, ec2, gcp or slurm"
    raise ConfigError(field, text, remedy)


def check_notice_source(text: str, *, field: str = "--notice") -> None:
    """Refuses a source that this machine cannot have, beside a text that names none.

    Raises:
        ConfigError: naming `field`.
    """
    parse_notice_source(text, field=field)
    if text == "slurm" and not os.environ.get(_SLURM_NODE):
        remedy = f"is of use only in a job of Slurm, where ${_SLURM_NODE} names the machine"
        raise ConfigError(field, text, remedy)


def wait_notice(
    source: NoticeSource, *, pause_s: float, is_over: threading.Event | None = None
) -> float:
    """Polls a source until it has a notice; returns the seconds until the machine is gone.

    The first error of the source is logged; it may pass.

    Args:
        is_over: event that ends the polling; infinity is returned then.
    """
    has_failed, is_over = False, is_over or threading.Event()
    while not is_over.is_set():
        try:
            after_s = source.read()
        except (OSError, ValueError) as error:
            if not has_failed:
                logger.warning("no preemption notice can be read from %s: %s", source, error)
            has_failed = True
        else:
            if after_s is not None:
                return after_s
        is_over.wait(pause_s)
    return math.inf


def ec2_problem(metadata_url: str = "") -> str:
    """What Amazon EC2 has against the hardware of this instance; "": nothing, or it does not say.

    Args:
        metadata_url: see parse_notice_source.
    """
    source = parse_notice_source("ec2", metadata_url=metadata_url)
    assert isinstance(source, _Ec2Source)
    try:
        for event in source.events():
            if event.code in _EC2_RETIREMENTS:
                text = f"{event.code} at {event.not_before} ({event.description})"
                return f"EC2 has scheduled {text}; stop it and start it anew, on other hardware"
    except (OSError, ValueError) as error:
        logger.warning("what EC2 has against this machine cannot be read: %s", error)
    return ""


class NoticeWatch:
    """Polls a source of notices in a thread, until it has one or the watch is closed.

    Args:
        on_notice: callback, called in the event loop that runs when the watch is made.

    Attributes:
        text: source, as `parse_notice_source` takes it.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, text: str, on_notice: Callable[[], object]) -> None:
        self.text = text
        self._source, self._on_notice = parse_notice_source(text), on_notice
        self._loop, self._is_over = asyncio.get_running_loop(), threading.Event()
        threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def _watch(self) -> None:
        wait_notice(self._source, pause_s=self._source.pause_s, is_over=self._is_over)
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        if not self._is_over.is_set():
            self._on_notice()

    def close(self) -> None:
        """Ends the watch; a read that is under way is not waited for."""
        self._is_over.set()


def fork_watcher(source: NoticeSource) -> tuple[int, socket.socket]:
    """Forks a process that ends once it has written the source's first notice to a socket.

    It dies with its parent, and ignores the signals that are notices themselves.

    Returns:
        Pid of the process, and a socket from which a line with the seconds until the machine is
        gone can be read. A socket that ends without a line means that the process was killed.
    """
    return fork_answer(lambda: b"%f\n" % wait_notice(source, pause_s=source.pause_s))


class _FileSource:
    """A file that somebody makes to say that the machine will be taken away."""

    pause_s = _FILE_PAUSE_S

    def __init__(self, path: Path, *, default_s: float) -> None:
        self._path = path
        self._default_s = default_s

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> float | None:
        try:
            text = self._text()
            if not text:  # Its writer may be between making and filling it.
                time.sleep(_WRITING_S)
                text = self._text()
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise OSError(f"there is no directory {self._path.parent}") from None
            return None
        return _seconds_left(text, self._default_s)

    def _text(self) -> str:
        with self._path.open("rb") as file:
            return file.read(_TEXT_BYTES_MAX).decode(errors="replace").strip()


class _UrlSource:
    """A service that says whether the machine will be taken away."""

    pause_s = _HTTP_PAUSE_S

    def __init__(self, url: str, *, default_s: float) -> None:
        self._url = url
        self._default_s = default_s

    def __str__(self) -> str:
        return self._url

    def read(self) -> float | None:
        answer = _ask("GET", self._url)
        if answer.status == http.HTTPStatus.NOT_FOUND or not _body(answer):
            return None
        return _seconds_left(answer.text, self._default_s)


class _InstanceAction(msgspec.Struct, frozen=True):
    """What Amazon EC2 will do to a spot instance, and when."""

    action: Literal["terminate", "stop", "hibernate"]
    time: str


class _ScheduledEvent(msgspec.Struct, frozen=True, rename="pascal"):
    """What Amazon EC2 has in mind with an instance; `not_before`: "21 Jan 2019 09:00:43 GMT"."""

    code: str
    not_before: str
    state: str = "active"
    description: str = ""

    def after_s(self) -> float:
        """Seconds until it begins; ValueError if its time makes no sense."""
        return parsedate_to_datetime(self.not_before).timestamp() - time.time()


class _Ec2Source:
    """The metadata of an instance of Amazon EC2, by version 2 of its protocol (IMDSv2)."""

    pause_s = _HTTP_PAUSE_S

    def __init__(self, server: str, *, default_s: float) -> None:
        self._server = server
        self._default_s = default_s
        self._token = ""
        self._is_at_risk = False  # Whether Amazon recommends to rebalance, which is no notice.
        self._seen: set[_ScheduledEvent] = set()

    def __str__(self) -> str:
        return f"EC2's metadata at {self._server}"

    def read(self) -> float | None:
        text = self._value("spot/instance-action")
        if not text:
            self._log_recommendation()
            return self._event_after_s()
        try:
            action = msgspec.json.decode(text, type=_InstanceAction)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"spot/instance-action is {text[:200]!r} ({error})") from error
        return min(_EC2_NOTICE_S, _seconds_left(action.time, self._default_s))

    def events(self) -> list[_ScheduledEvent]:
        """The events after which the instance does not run as before; see `read` for errors."""
        text = self._value("events/maintenance/scheduled")
        try:
            events = msgspec.json.decode(text or "[]", type=list[_ScheduledEvent])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"events/maintenance/scheduled is {text[:200]!r} ({error})") from error
        return [event for event in events if event.state == "active" and event.code in _EC2_ENDS]

    def _event_after_s(self) -> float | None:
        """Seconds until the next scheduled event, if that is soon."""
        events = self.events()
        for event in set(events) - self._seen:
            logger.warning("EC2 has scheduled %s of this machine: %s", event.code, event.not_before)
        self._seen.update(events)
        soon = [after_s for e in events if (after_s := e.after_s()) <= _EC2_EVENT_S]
        return max(0.0, min(soon)) if soon else None

    def _log_recommendation(self) -> None:
        if not self._is_at_risk and self._value("events/recommendations/rebalance"):
            self._is_at_risk = True
            logger.warning("EC2 says that this instance is at elevated risk of interruption")

    def _value(self, name: str) -> str:
        """A value of the metadata; "" if there is none."""
        if not self._token:
            self._renew_token()
        answer = self._get(name)
        if answer.status == http.HTTPStatus.UNAUTHORIZED:  # The token has expired.
            self._renew_token()
            answer = self._get(name)
        return "" if answer.status == http.HTTPStatus.NOT_FOUND else _body(answer)

    def _get(self, name: str) -> "_Answer":
        url = f"{self._server}/latest/meta-data/{name}"
        return _ask("GET", url, headers={_EC2_TOKEN_HEADER: self._token})

    def _renew_token(self) -> None:
        headers = {f"{_EC2_TOKEN_HEADER}-ttl-seconds": str(_EC2_TOKEN_S)}
        try:
            answer = _ask("PUT", f"{self._server}/latest/api/token", headers=headers)
        except TimeoutError as error:
            hint = "in a container the instance needs a hop limit of 2 (HttpPutResponseHopLimit)"
            raise OSError(f"{error}; {hint}") from error
        self._token = _body(answer)


class _GcpSource:
    """The metadata of a virtual machine of Google Compute Engine."""

    pause_s = _HTTP_PAUSE_S

    def __init__(self, server: str) -> None:
        self._server = server

    def __str__(self) -> str:
        return f"Google's metadata at {self._server}"

    def read(self) -> float | None:
        if self._value("preempted", among=("TRUE", "FALSE")) == "TRUE":
            return _GCP_PREEMPTION_S
        events = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE")
        if self._value("maintenance-event", among=events) == "TERMINATE_ON_HOST_MAINTENANCE":
            return _GCP_MAINTENANCE_S
        return None  # A machine that migrates stands still for some seconds at most.

    def _value(self, name: str, *, among: tuple[str, ...]) -> str:
        url = f"{self._server}/computeMetadata/v1/instance/{name}"
        answer = _ask("GET", url, headers=_GCP_HEADERS)
        value = _body(answer)
        if answer.flavor != "Google":
            raise ValueError(f"{url} was not answered by Google's metadata server")
        if value not in among:
            raise ValueError(f"{name} is {value[:200]!r}, not one of {', '.join(among)}")
        return value


class _SlurmSource:
    """What Slurm says of one of its nodes. A drained one is given back once nothing runs on it."""

    pause_s = _SLURM_PAUSE_S

    def __init__(self, *, default_s: float) -> None:
        self._node = os.environ.get(_SLURM_NODE, "")
        self._default_s = default_s

    def __str__(self) -> str:
        return f"Slurm's state of {self._node or 'this machine'}"

    def read(self) -> float | None:
        if not self._node:
            raise OSError(f"no job of Slurm runs here: ${_SLURM_NODE} is not set")
        words = ("scontrol", "--oneliner", "show", "node", self._node)
        try:
            asked = subprocess.run(
                words, capture_output=True, text=True, timeout=_SLURM_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"scontrol got no answer in {_SLURM_TIMEOUT_S:g} s") from error
        state = _SLURM_STATE.search(asked.stdout)
        if asked.returncode or state is None:
            raise OSError(f"scontrol ended with {asked.returncode}: {asked.stderr[:200].strip()}")
        return self._default_s if "DRAIN" in state[1] else None


def _seconds_left(text: str, default_s: float) -> float:
    """The seconds until the machine is gone, as the text of a notice says them."""
    text = text.strip()
    with contextlib.suppress(ValueError):
        if 0.0 <= (seconds := float(text)) < float("inf"):
            return seconds
    with contextlib.suppress(ValueError):
        deadline = datetime.fromisoformat(text)
        if deadline.tzinfo is not None:
            return max(0.0, deadline.timestamp() - time.time())
    if text:
        form = "neither a number of seconds nor a time such as 2026-01-31T12:00:00Z"
        logger.warning("a preemption notice says %r, %s; %g s are left", text[:80], form, default_s)
    return default_s


# -- HTTP: urllib.request would ask the proxies that the environment names -------------------------


class _Answer(NamedTuple):
    url: str
    status: int
    text: str
    flavor: str


def _ask(method: str, url: str, *, headers: Mapping[str, str] | None = None) -> _Answer:
    """The answer to an HTTP request, whatever its status.

    Raises:
        OSError: there is no answer.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    is_secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
    # Without a port it would take one from an address of IPv6.
    port = parts.port or kind.default_port
    connection = kind(parts.hostname, port, timeout=_HTTP_TIMEOUT_S)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target, headers=dict(headers or {}))
        response = connection.getresponse()
        text = response.read(_TEXT_BYTES_MAX).decode(errors="replace").strip()
        return _Answer(url, response.status, text, response.headers.get("Metadata-Flavor", ""))
    except TimeoutError as error:
        raise TimeoutError(f"{method} {url} got no answer in {_HTTP_TIMEOUT_S:g} s") from error
    except http.client.HTTPException as error:
        raise OSError(f"{method} {url} was not answered in HTTP: {error!r}") from error
    finally:
        connection.close()


def _body(answer: _Answer) -> str:
    """The text of an answer; OSError if its status says that the request failed."""
    if not 200 <= answer.status < 300:
        raise OSError(f"{answer.url} answered with status {answer.status}")
    return answer.text


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # The port is no number, or too large.
        return False
