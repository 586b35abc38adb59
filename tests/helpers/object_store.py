"""An S3 server of this process, on loopback, that refuses or delays what a test wants it to."""

import math
import os
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "planaria-tests"
_SENT_BYTES = 1 << 10  # What a slow server sends at a time.


def _nothing(_method: str, _path: str) -> float:
    return 0.0


@contextmanager
def object_store(
    late_s: Callable[[str, str], float] = _nothing, *, bytes_per_s: float = math.inf
) -> Iterator[str]:
    """The URL of an empty prefix; the environment tells where its server is, and who asks.

    Args:
        late_s: by method and path, how long a request is kept waiting; infinite: it is refused;
            negative: it is carried out, and its answer is lost.
        bytes_per_s: rate at which the content of each answer is sent.
    """
    app = DomainDispatcherApplication(create_backend_app)
    is_over = threading.Event()  # Nobody waits for the rest of a delay.

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        wait_s = late_s(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if wait_s == math.inf:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>No.</Message></Error>"]
        if wait_s < 0.0:
            list(app(environ, lambda *_: None))
            start_response("503 Slow Down", [])
            return []
        is_over.wait(wait_s)
        answer: Iterable[bytes] = app(environ, start_response)
        return answer if bytes_per_s == math.inf else slow_pieces(b"".join(answer))

    def slow_pieces(content: bytes) -> Iterator[bytes]:
        for first in range(0, len(content), _SENT_BYTES):
            piece = content[first : first + _SENT_BYTES]
            is_over.wait(len(piece) / bytes_per_s)
            yield piece

    server = make_server("127.0.0.1", 0, serve, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        with patch.dict(os.environ, settings(endpoint)):
            yield f"s3://{BUCKET}/jobs/{uuid4().hex}"  # Servers of one process share buckets.
    finally:
        is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def settings(endpoint: str) -> dict[str, str]:
    """What a user would set to reach a store of their own."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "planaria",
        "AWS_SECRET_ACCESS_KEY": "planaria",
        "AWS_REGION": "us-east-1",
    }
