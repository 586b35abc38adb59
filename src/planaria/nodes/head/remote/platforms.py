"""Where machines come from: asks Slurm, Kubernetes, or a command for one in place of a lost one.

    slurm         a job of one machine, which runs `planaria agent`, with the further options in
                  $PLANARIA_AGENT_OPTIONS as the shell there reads them
    kubernetes    the lost machine's pod is called failed and deleted, so that its Job makes another
    any other     a command for a shell, which asks whoever has machines; it finds the lost machine
                  in $PLANARIA_LOST_NAME and $PLANARIA_LOST_HOST, and in $PLANARIA_HEAD the
                  HOST:PORT at which agents join

Ray needs none of these: it starts a lost actor anew by itself, and asks its autoscaler for room.

Source: sbatch(1), scancel(1); Kubernetes API reference, "Pod" (v1); Kubernetes, "Pod garbage
collection", whose controller does the same with pods of machines that are deleted; Kubernetes
Network Custom Resource Definition De-facto Standard (v1), "Network Status Annotation".
"""

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import ssl
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from planaria.errors import ConfigError
from planaria.nodes.child_answers import program_result
from planaria.nodes.machine import EXIT_LEFT

_TIMEOUT_S: Final = 60.0
_TEXT_CHARACTERS_MAX: Final = 300
_OPTION: Final = "--operator"
_SLURM_JOB: Final = "SLURM_JOB_ID"
_SLURM_UNKNOWN_NODE: Final = "Invalid node name"
# What `scontrol show job` says: 'Features=a&b TresPerNode=gres/gpu:8,gres/nic:1', or gres:gpu:8.
_SLURM_FEATURES: Final = re.compile(r"(?<!\S)Features=(?!\(null\))([^\s*]+)(?!\S)")
_SLURM_TRES: Final = re.compile(r"(?<!\S)TresPerNode=(\S+)")
_SLURM_GRES: Final = re.compile(r"(?:gres[:/])+(.+)")
_SLURM_TIME: Final = re.compile(r"(\d+-)?\d+(:\d+)*")
# Of the variables that Slurm gives to a job, those that its programs need to find Slurm.
_SLURM_OWN: Final = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER"))
_SIGNAL_S: Final = 120  # Time before the end of a machine's job in which its node leaves.
# What a spare machine runs. Slurm may signal this shell alone, and do so before the line that notes
# the agent. An agent whose machine was drained has done as it was told: Slurm would call any other
# code than 0 a failure.
_SLURM_SCRIPT: Final = (
    "agent= is_early=; "
    "trap 'is_told=yes; kill -TERM \"$agent\" 2> /dev/null || is_early=yes' USR1 TERM; "
    '{command} & agent=$!; [ -z "$is_early" ] || kill -TERM "$agent"; '
    'while is_told=; wait "$agent"; code=$?; [ "$is_told" ]; do :; done; '
    '[ "$code" != {left} ] || code=0; exit "$code"'
)
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_JOB_LABEL: Final = "batch.kubernetes.io/job-name"
_NETWORKS: Final = "k8s.v1.cni.cncf.io/network-status"
_POD: Final = "PLANARIA_KUBERNETES_POD"
_JOB: Final = "PLANARIA_KUBERNETES_JOB"
_OK: Final = range(200, 300)
# Kubernetes calls the pods of a silent machine unready after 40 to 50 s, and binds no pod to it
# from then on. One that stays ready for so long runs on a machine that the job alone cannot reach.
_READY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LostMachine:
    """A machine that the job has lost, or that is being taken away.

    Attributes:
        name: its name in Slurm or Kubernetes, else its host name.
        host: address at which others reached it.
        is_leaving: whether it was told to leave, so that its scheduler knows of it already.
    """

    name: str
    host: str
    is_leaving: bool


class Platform(Protocol):
    """Where machines come from."""

    def ask_for_machine(self, lost: LostMachine) -> str:
        """Asks for a machine in place of a lost one; returns what was done, in words.

        Blocks until the platform has taken the request, at most a minute or two.

        Raises:
            OSError: it was refused, or not answered.
        """

    def cancel_requests(self) -> None:
        """Takes back what was asked for and is not granted yet. Blocks likewise.

        Raises:
            OSError: the same.
        """


def open_platform(
    text: str,
    *,
    heads: Sequence[str],
    token_file: str,
    environment: Mapping[str, str] = os.environ,
    account: Path = _ACCOUNT,
) -> Platform:
    """The platform that a text names: "slurm", "kubernetes" or a command.

    Args:
        heads: HOST:PORT at which new machines find the head.
        token_file: path of the token file on each machine.
        environment: variables of this process.
        account: directory with the service account of this pod.

    Raises:
        ConfigError: this machine is not one of that platform, or lacks the platform's program. Or
            no machine could find the head.
    """
    if text == "kubernetes":  # Its pods know the head by the name of their service.
        return KubernetesPlatform(environment, account)
    if not text.strip():
        raise ConfigError(_OPTION, text, "must be slurm, kubernetes, or a command")
    if not heads:
        remedy = (
            "no network interface of this machine has an address at which another one could find "
            "the head; name one, or a name that others resolve: --listen ADDR:PORT"
        )
        raise ConfigError(_OPTION, text, remedy)
    if text == "slurm":
        return SlurmPlatform(heads, token_file=token_file, environment=environment)
    return CommandPlatform(text, head=heads[0], environment=environment)


class CommandPlatform:
    """A command that asks for a machine; see the head of this module."""

    def __init__(self, command: str, *, head: str, environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = {**environment, "PLANARIA_HEAD": head}

    def ask_for_machine(self, lost: LostMachine) -> str:
        """See Platform."""
        environment = {
            **self._environment,
            "PLANARIA_LOST_NAME": lost.name,
            "PLANARIA_LOST_HOST": lost.host,
        }
        text = _output(("/bin/sh", "-c", self._command), environment, what="the command")
        return text.partition("\n")[0] or "the command has asked for one"

    def cancel_requests(self) -> None:
        """See Platform. A command cannot be asked to; agents find the job's end by themselves."""


class SlurmPlatform:
    """Slurm, which is asked for one machine more, in a job of its own.

    That job ends with this one, and has its partition, account and quality of service, its features
    and devices, and the time that it has left.
    """

    def __init__(
        self, heads: Sequence[str], *, token_file: str, environment: Mapping[str, str]
    ) -> None:
        if not environment.get(_SLURM_JOB):
            remedy = f"is of use only in a job of Slurm, where ${_SLURM_JOB} names the job"
            raise ConfigError(_OPTION, "slurm", remedy)
        if shutil.which("sbatch", path=environment.get("PATH")) is None:
            remedy = "there is no sbatch on this machine, which has the head; install it there"
            raise ConfigError(_OPTION, "slurm", remedy)
        self._job = environment
        self._number = _slurm_number(environment)
        self._agent = (
            *(sys.executable, "-m", "planaria", "agent"),
            *("--join", ",".join(heads), "--notice", "slurm"),
            *(("--token-file", token_file) if token_file else ()),
        )
        self._agent_options = environment.get("PLANARIA_AGENT_OPTIONS", "")
        # What describes this job must not describe the other one.
        self._environment = {
            name: value
            for name, value in environment.items()
            if name in _SLURM_OWN or not name.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        self._asked: list[str] = []  # Numbers of the jobs.
        self._lost: dict[str, None] = {}  # Names of machines that are not to be given again.
        self._lock = threading.Lock()
        self._is_closed = False

    def ask_for_machine(self, lost: LostMachine) -> str:
        """See Platform."""
        self._lost[lost.name] = None
        try:
            number = self._submit()
        except OSError as error:
            if _SLURM_UNKNOWN_NODE not in str(error):
                raise
            del self._lost[lost.name]
            number = self._submit()
        with self._lock:
            self._asked.append(number)
            is_closed = self._is_closed
        if is_closed:  # The job has ended meanwhile.
            self.cancel_requests()
        return f"job {number} of Slurm is to bring one{self._verdict(lost)}"

    def _submit(self) -> str:
        """Submits the job of one machine; returns its number."""
        script = _SLURM_SCRIPT.format(command=self._command, left=EXIT_LEFT)
        words = ("sbatch", "--parsable", *self._options(), "--wrap", script)
        # The number of the job, and the name of the cluster if there are several.
        return _output(words, self._environment, what="sbatch").partition(";")[0].strip()

    def _verdict(self, lost: LostMachine) -> str:
        """What Slurm says of a machine, to follow a text; "": nothing."""
        words = ("sinfo", "--noheader", f"--nodes={lost.name}", "--format=%T (%E)")
        with contextlib.suppress(OSError):
            if text := _output(words, self._environment, what="sinfo").partition("\n")[0]:
                return f"; Slurm calls {lost.name} {text}"
        return ""

    @property
    def _command(self) -> str:
        return f"{shlex.join(self._agent)} {self._agent_options}".rstrip()

    def _options(self) -> list[str]:
        name = self._job.get("SLURM_JOB_NAME", "planaria")
        options = [
            *("--nodes=1", "--ntasks=1", "--exclusive", "--mem=0"),
            # The machine that is lost again is asked for again, by this head.
            "--no-requeue",
            f"--job-name={name}-more",
            f"--output={name}-more-%j.log",
            f"--signal=B:USR1@{_SIGNAL_S}",
            *([f"--exclude={','.join(self._lost)}"] if self._lost else []),
        ]
        features, devices = self._features_and_devices()
        options += [f"--constraint={features}"] if features else []
        options += [f"--gres={devices}"] if devices else []
        for option, variable in (
            ("partition", "SLURM_JOB_PARTITION"),
            ("account", "SLURM_JOB_ACCOUNT"),
            ("qos", "SLURM_JOB_QOS"),
            ("reservation", "SLURM_JOB_RESERVATION"),
            *(() if devices else (("gpus-per-node", "SLURM_GPUS_PER_NODE"),)),
        ):
            if value := self._job.get(variable):
                options.append(f"--{option}={value}")
        if _SLURM_TIME.fullmatch(left := self._time_left()):
            options.append(f"--time={left}")
        return options

    def _features_and_devices(self) -> tuple[str, str]:
        """The features and the generic resources of each machine of this job; "": none, or unknown.

        Left out are features of which the job wants several machines each.
        """
        words = ("scontrol", "--oneliner", "show", "job", self._number)
        with contextlib.suppress(OSError):
            record = _output(words, self._environment, what="scontrol")
            features, tres = _SLURM_FEATURES.search(record), _SLURM_TRES.search(record)
            items = map(_SLURM_GRES.fullmatch, tres[1].split(",") if tres else ())
            return features[1] if features else "", ",".join(item[1] for item in items if item)
        return "", ""

    def _time_left(self) -> str:
        """The time that this job may still take, as Slurm writes it; "": not known."""
        words = ("squeue", "--noheader", f"--jobs={self._number}", "--format=%L")
        with contextlib.suppress(OSError):
            return _output(words, self._environment, what="squeue").strip()
        return ""

    def cancel_requests(self) -> None:
        """See Platform."""
        with self._lock:
            self._is_closed, asked = True, tuple(self._asked)
        if asked:
            _output(("scancel", "--state=PENDING", *asked), self._environment, what="scancel")


def _slurm_number(environment: Mapping[str, str]) -> str:
    """The number of a job of Slurm, or of a task of an array, of which one has the array's own."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment[_SLURM_JOB]


class KubernetesPlatform:
    """Kubernetes, whose Job makes another pod once the lost machine's has failed.

    By itself it would keep the pod of a machine that is gone until a person deletes the machine,
    because nobody there confirms that the pod has ended. To delete the pod is not enough: the Job
    holds it by a finalizer until its phase says that it has ended. This job needs no confirmation:
    whoever comes back from there has no lease.
    """

    def __init__(self, environment: Mapping[str, str], account: Path) -> None:
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        try:
            self._port = int(environment.get("KUBERNETES_SERVICE_PORT", "443"))
            self._namespace = (account / "namespace").read_text(encoding="utf-8").strip()
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (OSError, ValueError) as error:
            remedy = f"is of use only in a pod that has a service account: {error}"
            raise ConfigError(_OPTION, "kubernetes", remedy) from error
        if not host:
            remedy = "is of use only in a pod, where $KUBERNETES_SERVICE_HOST names the API server"
            raise ConfigError(_OPTION, "kubernetes", remedy)
        self._host, self._account = host, account
        self._pod, self._job = (environment.get(name, "") for name in (_POD, _JOB))
        self._seen_s: dict[str, float] = {}  # When each pod was first taken for lost, by its UID.
        if not (self._pod and self._job):
            remedy = f"${_POD} and ${_JOB} must name this pod and its Job, as the manifest has them"
            raise ConfigError(_OPTION, "kubernetes", remedy)

    def ask_for_machine(self, lost: LostMachine) -> str:
        """See Platform."""
        if lost.is_leaving:
            return "the Job makes another pod once its own has ended"
        query = urllib.parse.urlencode({"labelSelector": f"{_JOB_LABEL}={self._job}"})
        running, has_ended = [], False
        for pod in self._call("GET", f"pods?{query}").get("items", []):
            if lost.host not in _pod_addresses(pod):
                continue
            if pod["metadata"]["name"] == self._pod:
                return "its pod is that of the head, and stays"
            if pod.get("status", {}).get("phase") == "Running":
                running.append(pod)
            else:
                has_ended = True
        if not running and has_ended:
            return "its pod has ended; the Job makes another, as far as its limits allow"
        if not running:
            return f"no pod of the Job {self._job} has that address, so none is deleted"
        self._check_unready(running)
        for pod in running:
            self._fail_and_delete(pod["metadata"]["name"], uid=pod["metadata"]["uid"])
        names = ", ".join(pod["metadata"]["name"] for pod in running)
        verdicts = [text for pod in running for text in _verdicts(pod["status"])]
        text = f"pod {names} is deleted, so that the Job makes another"
        return f"{text}; Kubernetes says {', '.join(verdicts)} of it" if verdicts else text

    def _check_unready(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Refuses to go on while pods are ready, for a while: another one might come to them.

        Raises:
            OSError: a pod is ready.
        """
        now_s = time.monotonic()
        for pod in pods:
            since_s = self._seen_s.setdefault(pod["metadata"]["uid"], now_s)
            if _has_condition(pod["status"], "Ready", "True") and now_s - since_s < _READY_S:
                name = pod["metadata"]["name"]
                raise OSError(f"Kubernetes has not missed its machine yet, and calls {name} ready")

    def _fail_and_delete(self, name: str, *, uid: str) -> None:
        """Has the Job make another pod, without counting this one as a failure of its index.

        It is deleted as well, so that a machine that comes back ends it.
        """
        path = f"pods/{urllib.parse.quote(name)}"
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "MachineLost",
            "message": "the head of the job has lost the machine",
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        status = {"phase": "Failed", "conditions": [condition]}
        self._call("PATCH", f"{path}/status", {"metadata": {"uid": uid}, "status": status})
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        self._call("DELETE", path, options)

    def cancel_requests(self) -> None:
        """See Platform. Pods of the Job end with it."""

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer of the API server to a request for an object of this namespace."""
        token = (self._account / "token").read_text(encoding="utf-8").strip()  # It is renewed.
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=_TIMEOUT_S, context=self._context
        )
        what = f"{method} {path.partition('?')[0]}"
        # A patch of this kind leaves the other conditions of a pod alone.
        kind = "strategic-merge-patch+json" if method == "PATCH" else "json"
        try:
            connection.request(
                method,
                f"/api/v1/namespaces/{self._namespace}/{path}",
                body=None if body is None else json.dumps(body),
                headers={"Authorization": f"Bearer {token}", "Content-Type": f"application/{kind}"},
            )
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            if response.status == http.HTTPStatus.NOT_FOUND and method != "GET":
                return {}  # Somebody else was quicker.
            if response.status not in _OK:
                reason = text[:_TEXT_CHARACTERS_MAX]
                raise OSError(f"{what}: Kubernetes answered {response.status}: {reason}")
            return json.loads(text)
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"{what}: Kubernetes' answer makes no sense: {error!r}") from error
        finally:
            connection.close()


def _pod_addresses(pod: Mapping[str, Any]) -> set[str | None]:
    """The addresses of a pod; those in further networks (Multus) are only in an annotation."""
    status, annotations = pod.get("status", {}), pod["metadata"].get("annotations", {})
    addresses = {status.get("podIP"), *(each["ip"] for each in status.get("podIPs", ()))}
    with contextlib.suppress(ValueError):
        for network in json.loads(annotations.get(_NETWORKS, "[]")):
            addresses.update(network.get("ips", ()))
    return addresses


def _has_condition(status: Mapping[str, Any], kind: str, value: str) -> bool:
    return any((c["type"], c["status"]) == (kind, value) for c in status.get("conditions", ()))


def _verdicts(status: Mapping[str, Any]) -> list[str]:
    """What Kubernetes says against a pod: that it is not ready, or is to be taken away."""
    against = {"Ready": ("False", "Unknown"), "DisruptionTarget": ("True",)}
    return [
        str(condition.get("reason") or "not ready")
        for condition in status.get("conditions", ())
        if condition["status"] in against.get(condition["type"], ())
    ]


def _output(words: Sequence[str], environment: Mapping[str, str], *, what: str) -> str:
    """What a program writes to its standard output.

    Raises:
        OSError: it fails, or takes too long.
    """
    try:
        status, output, errors = program_result(
            words, timeout_s=_TIMEOUT_S, environment=environment
        )
    except TimeoutError as error:
        raise TimeoutError(f"{what} got no answer in {_TIMEOUT_S:g} s") from error
    if status:
        reason = (errors.strip() or output.strip())[-_TEXT_CHARACTERS_MAX:]
        raise OSError(f"{what} ended with {status}: {reason}")
    return output.strip()
