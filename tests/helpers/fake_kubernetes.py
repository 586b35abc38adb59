"""A server of the part of Kubernetes' API that a head uses: machines, and pods of one namespace.

    python -m helpers.fake_kubernetes DIRECTORY HOST

serves on a test host until it is killed, and prints its port. Pods are files in a directory, so
that the test, which plays the controller, may be elsewhere. As there, a pod of a Job that is
deleted stays, with the time of that, until it has failed or succeeded: only then does the Job's
controller take its finalizer away.

Where kubernetes-validate is installed, what a request changes or says must be what the schema of
Kubernetes allows.
"""

import http.server
import ipaddress
import json
import ssl
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAMESPACE: Final = "team"
_TOKEN: Final = "a token of the service account"
_JOB_LABEL: Final = "batch.kubernetes.io/job-name"
_NETWORKS: Final = "k8s.v1.cni.cncf.io/network-status"
_FINALIZER: Final = "batch.kubernetes.io/job-tracking"
_PATCH: Final = "application/strategic-merge-patch+json"
_VERSION: Final = "1.33.0"
_DELETE_OPTIONS: Final = {"gracePeriodSeconds", "preconditions"}  # These are not in its schemas.
_TERMINAL: Final = ("Failed", "Succeeded")


class FakeKubernetes:
    """The pods, and what a pod finds of the server in its environment and its files.

    Args:
        directory: directory of all files; what is there from before counts.

    Attributes:
        account: directory with the service account.
        environment: variables of a pod.
        refusal: status with which everything is answered; 0: with what it should be.
        rights: what the service account may do with machines: "get", "patch".
        conditions: those of each machine, by type, beside that it is ready.
        conditions_since: time since when they are so; "": nobody says.
        machines: the machines that there are; empty: any.
        cordoned: machines that get no pods any more, by request.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.account = directory / "serviceaccount"
        self._pods = directory / "pods"
        for made in (self.account, self._pods):
            made.mkdir(parents=True, exist_ok=True)
        self._deleted = directory / "deleted.jsonl"
        self._patched = directory / "patched.jsonl"
        self.environment: dict[str, str] = {}
        self.refusal = 0
        self.rights: set[str] = set()
        self.conditions: dict[str, dict[str, str]] = {}
        self.conditions_since = ""
        self.machines: set[str] = set()
        self.cordoned: list[str] = []

    def put_pod(
        self,
        name: str,
        address: str,
        *,
        job: str = "cluster",
        phase: str = "Running",
        verdict: str = "",
        networks: str = "",
        machine: str = "host-3",
        since: str = "",
    ) -> None:
        """Makes a pod of a Job, or changes it; of no Job if that has no name.

        Args:
            verdict: reason why the pod is not ready; "": it is.
            networks: what Multus says of the pod's networks; "": there is no Multus.
            machine: the machine that it runs on.
            since: time at which it began there; "": nobody says.
        """
        ready = {"type": "Ready", "status": "False" if verdict else "True", "reason": verdict}
        pod = {
            "metadata": {
                "name": name,
                "uid": f"uid of {name}",
                "labels": {_JOB_LABEL: job} if job else {},
                "finalizers": [_FINALIZER] if job else [],
                **({"annotations": {_NETWORKS: networks}} if networks else {}),
            },
            "spec": {"nodeName": machine, "containers": [{"name": "planaria"}]},
            "status": {
                "podIP": address,
                "phase": phase,
                "conditions": [ready],
                **({"startTime": since} if since else {}),
            },
        }
        self._write(name, pod)

    def _write(self, name: str, pod: Mapping[str, Any]) -> None:
        """Keeps a pod, unless it is deleted and nothing holds it."""
        facts, phase = pod["metadata"], pod["status"]["phase"]
        if "deletionTimestamp" in facts and (not facts["finalizers"] or phase in _TERMINAL):
            self.delete_pod(name)
            return
        path = self._pods / name
        path.with_suffix(".new").write_text(json.dumps(pod))
        path.with_suffix(".new").replace(path)

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        """The pods by name."""
        paths = (path for path in self._pods.iterdir() if path.suffix != ".new")
        return {path.name: json.loads(path.read_text()) for path in paths}

    def delete_pod(self, name: str) -> None:
        """Forgets a pod."""
        (self._pods / name).unlink(missing_ok=True)

    @property
    def deleted(self) -> list[tuple[str, dict[str, Any]]]:
        """The name and the options of each pod that was deleted by request."""
        return [(name, options) for name, options in _entries(self._deleted)]

    @property
    def patched(self) -> list[dict[str, Any]]:
        """The status that pods got by request."""
        return _entries(self._patched)

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Any]:
        """Status and body of the answer to a request."""
        if self.refusal or headers.get("Authorization") != f"Bearer {_TOKEN}":
            return self.refusal or 401, {"kind": "Status", "message": "no, says the test"}
        url = urllib.parse.urlsplit(path)
        if url.path.startswith("/api/v1/nodes/"):
            content = headers.get("Content-Type")
            return self._machine_answer(method, url.path.rpartition("/")[2], content, body)
        prefix = f"/api/v1/namespaces/{NAMESPACE}/pods"
        pods = self.pods
        if method == "GET" and url.path == prefix:
            [selector] = urllib.parse.parse_qs(url.query)["labelSelector"]
            label, _, job = selector.partition("=")
            items = [p for p in pods.values() if p["metadata"]["labels"].get(label) == job]
            return 200, {"kind": "PodList", "items": items}
        name, _, part = url.path.removeprefix(f"{prefix}/").partition("/")
        if name not in pods:
            return 404, {"kind": "Status", "message": f"{name} not found"}
        pod, request = pods[name], json.loads(body)
        if method == "DELETE" and request.keys() - _DELETE_OPTIONS:
            return 422, {"kind": "Status", "message": f"what is {request}?"}
        facts = request["preconditions" if method == "DELETE" else "metadata"]
        if facts["uid"] != pod["metadata"]["uid"]:
            return 409, {"kind": "Status", "message": "the UID differs"}
        if (method, part) == ("DELETE", ""):
            with self._deleted.open("a") as file:
                file.write(json.dumps([name, request]) + "\n")
            pod["metadata"].setdefault("deletionTimestamp", "2026-01-31T12:00:00Z")
        elif (method, part) == ("PATCH", "status"):
            if headers.get("Content-Type") != _PATCH:
                return 415, {"kind": "Status", "message": f"the test knows {_PATCH} alone"}
            conditions = [*pod["status"]["conditions"], *request["status"]["conditions"]]
            by_type = {condition["type"]: condition for condition in conditions}
            pod["status"] |= {**request["status"], "conditions": [*by_type.values()]}
            if problem := _problem("Pod", pod):
                return 422, {"kind": "Status", "message": problem}
            with self._patched.open("a") as file:
                file.write(json.dumps(pod["status"]) + "\n")
        else:
            return 405, {"kind": "Status", "message": f"the test knows no {method} of {url.path}"}
        self._write(name, pod)
        return 200, pod

    def _machine_answer(
        self, method: str, name: str, content: str | None, body: bytes
    ) -> tuple[int, Any]:
        """The same for a request for a machine, of which the service account may have no right."""
        if method.lower() not in self.rights:
            return 403, {"kind": "Status", "message": f"cannot {method.lower()} resource nodes"}
        if method == "PATCH":
            problem = "" if content == _PATCH else f"the test knows {_PATCH} alone"
            if problem := problem or _problem("Node", json.loads(body)):
                return 422, {"kind": "Status", "message": problem}
            assert json.loads(body) == {"spec": {"unschedulable": True}}
            self.cordoned.append(name)
        kinds = {"Ready": "True", "MemoryPressure": "False"} | self.conditions.get(name, {})
        if self.machines and name not in self.machines:
            return 404, {"kind": "Status", "message": f"{name} not found"}
        since = {"lastTransitionTime": self.conditions_since} if self.conditions_since else {}
        conditions = [{"type": kind, "status": value, **since} for kind, value in kinds.items()]
        return 200, {"kind": "Node", "status": {"conditions": conditions}}


def _problem(kind: str, body: Mapping[str, Any]) -> str:
    """Why the schema of Kubernetes refuses an object; "": it does not, or is not installed."""
    try:
        import kubernetes_validate
    except ImportError:
        return ""
    try:
        named = {"apiVersion": "v1", "kind": kind, **body}
        kubernetes_validate.validate(named, _VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


def _entries(path: Path) -> list[Any]:
    """What the lines of a file say; nothing if there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def fake_kubernetes(directory: Path, host: str = "127.0.0.1") -> Iterator[FakeKubernetes]:
    """A server for the length of the context.

    Args:
        host: address at which it serves.
    """
    fake = FakeKubernetes(directory)

    class Handler(http.server.BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = fake.answer(self.command, self.path, dict(self.headers), body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_DELETE = _serve  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((host, 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_write_certificate(directory, fake.account / "ca.crt", host))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    (fake.account / "token").write_text(f"{_TOKEN}\n")
    (fake.account / "namespace").write_text(NAMESPACE)
    fake.environment = {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": str(server.server_port),
    }
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _write_certificate(directory: Path, path: Path, host: str) -> Path:
    """Writes a certificate of the server; returns a file that has its key, too."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.now(UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(alternative, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    path.write_bytes(pem)
    with_key = directory / "server.pem"
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with_key.write_bytes(pem + key_pem)
    return with_key


def main() -> None:
    """Serves until it is killed."""
    with fake_kubernetes(Path(sys.argv[1]), sys.argv[2]) as fake:
        print("serves at port", fake.environment["KUBERNETES_SERVICE_PORT"], flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
