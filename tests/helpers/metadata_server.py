"""A server of the metadata of a cloud's machine, whose answers are the test's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

Answer = tuple[int, str]


class Metadata(ThreadingHTTPServer):
    """A server whose answers a test sets.

    Attributes:
        answers: answer to the GET of each path; 404 for all others.
        flavor: value of the header Metadata-Flavor of each answer.
        requests: method, path and headers of each request so far.
        token: token that a GET under /latest needs; the next PUT gives it.
        is_silent: whether requests get no answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, Answer] = {}
        self.flavor = "Google"
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.token = "token-1"
        self.is_silent = threading.Event()
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self, method: str) -> list[str]:
        return [path for name, path, _ in self.requests if name == method]


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        self._note()
        needs_token = self.path.startswith("/latest/")
        if needs_token and self.headers["X-aws-ec2-metadata-token"] != self.server.token:
            self._answer(401, "")
        else:
            self._answer(*self.server.answers.get(self.path, (404, "there is no such thing")))

    def do_PUT(self) -> None:
        self._note()
        has_life = self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        is_right = self.path == "/latest/api/token" and has_life
        self._answer(*((200, self.server.token) if is_right else (400, "")))

    def _note(self) -> None:
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        if self.server.is_silent.is_set():
            self.server.is_over.wait()

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Metadata-Flavor", self.server.flavor)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def metadata_server(patch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """A server for the length of the context.

    The environment names a proxy that does not exist: who asks it gets no answer.
    """
    patch.setenv("http_proxy", "http://127.0.0.1:9")
    patch.delenv("PLANARIA_METADATA_URL", raising=False)
    with Metadata() as metadata:
        thread = threading.Thread(target=metadata.serve_forever, args=(0.01,))
        thread.start()
        yield metadata
        metadata.is_over.set()
        metadata.shutdown()
        thread.join()


def in_seconds(seconds: float) -> str:
    """A time as RFC 3339 writes it."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
