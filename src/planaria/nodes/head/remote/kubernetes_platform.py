"""Kubernetes: the lost machine's pod is called failed and deleted, so that its Job makes another.

Source: Kubernetes API reference, "Pod" and "Node" (v1); Kubernetes, "Pod garbage collection", whose
controller does the same with pods of machines that are deleted; node-problem-detector, "Problem
Daemon"; Kubernetes Network Custom Resource Definition De-facto Standard (v1), "Network Status
Annotation".
"""

import contextlib
import http.client
import json
import logging
import re
import ssl
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from planaria.errors import ConfigError
from planaria.nodes.head.remote.platforms import (
    OPTION,
    REQUEST_TIMEOUT_S,
    TEXT_CHARACTERS_MAX,
    LostMachine,
)

logger = logging.getLogger(__name__)

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_JOB_LABEL: Final = "batch.kubernetes.io/job-name"
_NETWORKS: Final = "k8s.v1.cni.cncf.io/network-status"
_OWN_POD_TEXT: Final = "its pod is that of the head, and stays"
_POD: Final = "PLANARIA_KUBERNETES_POD"
_JOB: Final = "PLANARIA_KUBERNETES_JOB"
_OK: Final = range(200, 300)
_ERRORS: Final = {403: PermissionError, 404: FileNotFoundError}
# Kubernetes calls the pods of a silent machine unready after 40 to 50 s, and binds no pod to it
# from then on. One that is ready so long after its loss was told is on a machine that the job alone
# cannot reach.
_READY_S: Final = 90.0
# Conditions of a machine that are true while all is well. Any other one is true if it is not.
_GOOD: Final = re.compile(r"(?<!Not)(?<!Un)(Ready|Healthy|Available)$")
# Those that what runs on a machine may bring about by itself.
_OWN_CONDITIONS: Final = ("MemoryPressure", "DiskPressure", "PIDPressure")


class KubernetesPlatform:
    """Kubernetes, whose Job makes another pod once the lost machine's has failed.

    By itself it would keep the pod of a machine that is gone until a person deletes the machine,
    because nobody there confirms that the pod has ended. To delete the pod is not enough: the Job
    holds it by a finalizer until its phase says that it has ended. This job needs no confirmation:
    whoever comes back from there has no lease.
    """

    def __init__(self, environment: Mapping[str, str], account: Path = _ACCOUNT) -> None:
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        try:
            self._port = int(environment.get("KUBERNETES_SERVICE_PORT", "443"))
            self._namespace = (account / "namespace").read_text(encoding="utf-8").strip()
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (OSError, ValueError) as error:
            remedy = f"is of use only in a pod that has a service account: {error}"
            raise ConfigError(OPTION, "kubernetes", remedy) from error
        if not host:
            remedy = "is of use only in a pod, where $KUBERNETES_SERVICE_HOST names the API server"
            raise ConfigError(OPTION, "kubernetes", remedy)
        self._host, self._account = host, account
        self._pod, self._job = (environment.get(name, "") for name in (_POD, _JOB))
        self._has_warned = False  # That what Kubernetes knows of machines cannot be read.
        if not (self._pod and self._job):
            remedy = f"${_POD} and ${_JOB} must name this pod and its Job, as the manifest has them"
            raise ConfigError(OPTION, "kubernetes", remedy)

    def ask_for_machine(self, lost: LostMachine) -> str:
        """See Platform."""
        if lost.is_leaving:
            return "the Job makes another pod once its own has ended"
        pods = self._pods_at(lost.host)
        if self._is_own(pods):
            return _OWN_POD_TEXT
        running = [pod for pod in pods if _is_running(pod)]
        if not running and pods:
            return "its pod has ended; the Job makes another, as far as its limits allow"
        if not running:
            return f"no pod of the Job {self._job} has that address, so none is deleted"
        _check_unready(running, lost_s=lost.lost_s)
        names = self._delete(running, "MachineLost", "the head of the job has lost the machine")
        text = f"pod {names} is deleted, so that the Job makes another"
        verdicts = ", ".join(reason for pod in running for reason in _pod_verdicts(pod["status"]))
        return f"{text}; Kubernetes says {verdicts} of it" if verdicts else text

    def verdict_on(self, name: str, host: str) -> str:
        """See Platform: conditions of its pod, and its own if the service account may read them."""
        pods = [pod for pod in self._pods_at(host) if _is_running(pod)]
        reasons = [reason for pod in pods for reason in _pod_verdicts(pod["status"])]
        name = next((pod["spec"]["nodeName"] for pod in pods), name)
        since = min((pod["status"].get("startTime", "") for pod in pods), default="")
        try:
            machine = self._call("GET", f"nodes/{urllib.parse.quote(name)}")
            reasons += _machine_verdicts(machine["status"], since=since)
        except PermissionError as error:
            self._warn_once(error)
        except FileNotFoundError:
            reasons.append("there is no such machine")
        except OSError:
            if not reasons:
                raise
        return f"Kubernetes says of it: {', '.join(dict.fromkeys(reasons))}" if reasons else ""

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            hint = "docs/CLUSTER.md says how the job may"
            logger.warning("what Kubernetes knows of machines is not read: %s; %s", error, hint)
        self._has_warned = True

    def give_back(self, machine: LostMachine) -> str:
        """See Platform: keeps new pods away from it, and deletes its pod, if it may."""
        pods = [pod for pod in self._pods_at(machine.host) if _is_running(pod)]
        if not pods:
            return ""
        if self._is_own(pods):
            return _OWN_POD_TEXT
        name = pods[0]["spec"]["nodeName"]
        done = f"{name} is cordoned"
        try:
            path = f"nodes/{urllib.parse.quote(name)}"
            self._call("PATCH", path, {"spec": {"unschedulable": True}})
        except PermissionError as error:
            if any(_has_condition(pod["status"], "Ready", "True") for pod in pods):
                pod = pods[0]["metadata"]["name"]
                raise PermissionError(
                    f"it is not for this job to take {name} away from Kubernetes: kubectl cordon "
                    f"{name}; kubectl delete pod {pod}"
                ) from error
            done = f"Kubernetes gives {name} no pods"  # Its machine has been silent.
        names = self._delete(pods, "MachineUnfit", "a worker has failed on the machine")
        return f"{done}, and pod {names} is deleted; the Job makes another"

    def _pods_at(self, host: str) -> list[Mapping[str, Any]]:
        """The pods of the Job that have an address."""
        query = urllib.parse.urlencode({"labelSelector": f"{_JOB_LABEL}={self._job}"})
        pods = self._call("GET", f"{self._pods_path}?{query}").get("items", [])
        return [pod for pod in pods if host in _pod_addresses(pod)]

    def _is_own(self, pods: Sequence[Mapping[str, Any]]) -> bool:
        return any(pod["metadata"]["name"] == self._pod for pod in pods)

    def _delete(self, pods: Sequence[Mapping[str, Any]], reason: str, message: str) -> str:
        """Has the Job make others in place of pods; returns the names of these.

        Args:
            reason, message: those of the condition with which they end.
        """
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": reason,
            "message": message,
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        for pod in pods:
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            self._fail_and_delete(name, uid=uid, condition=condition)
        return ", ".join(pod["metadata"]["name"] for pod in pods)

    def _fail_and_delete(self, name: str, *, uid: str, condition: Mapping[str, str]) -> None:
        """Has the Job make another pod, without counting this one as a failure of its index.

        It is deleted as well, so that a machine that comes back ends it.
        """
        path = f"{self._pods_path}/{urllib.parse.quote(name)}"
        status = {"phase": "Failed", "conditions": [condition]}
        self._call("PATCH", f"{path}/status", {"metadata": {"uid": uid}, "status": status})
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        self._call("DELETE", path, options)

    def cancel_requests(self) -> None:
        """See Platform. Pods of the Job end with it."""

    @property
    def _pods_path(self) -> str:
        return f"namespaces/{self._namespace}/pods"

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer of the API server to a request for an object.

        Raises:
            PermissionError: this service account may not do that.
            FileNotFoundError: there is no such object to read.
            OSError: the server does not answer, or refuses for another reason.
        """
        token = (self._account / "token").read_text(encoding="utf-8").strip()  # It is renewed.
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=REQUEST_TIMEOUT_S, context=self._context
        )
        short = path.removeprefix(f"namespaces/{self._namespace}/").partition("?")[0]
        what = f"{method} {short}"
        # A patch of this kind leaves the other conditions of a pod alone.
        kind = "strategic-merge-patch+json" if method == "PATCH" else "json"
        try:
            connection.request(
                method,
                f"/api/v1/{path}",
                body=None if body is None else json.dumps(body),
                headers={"Authorization": f"Bearer {token}", "Content-Type": f"application/{kind}"},
            )
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            if response.status == http.HTTPStatus.NOT_FOUND and method != "GET":
                return {}  # Somebody else was quicker.
            if response.status not in _OK:
                error = _ERRORS.get(response.status, OSError)
                reason = text[:TEXT_CHARACTERS_MAX]
                raise error(f"{what}: Kubernetes answered {response.status}: {reason}")
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


def _check_unready(pods: Sequence[Mapping[str, Any]], *, lost_s: float) -> None:
    """Refuses to go on while pods are ready, for a while: another one might come to them.

    Args:
        lost_s: time by the monotonic clock at which the loss of their machine was told.

    Raises:
        OSError: a pod is ready.
    """
    ready = [pod for pod in pods if _has_condition(pod["status"], "Ready", "True")]
    if ready and time.monotonic() - lost_s < _READY_S:
        name = ready[0]["metadata"]["name"]
        raise OSError(f"Kubernetes has not missed its machine yet, and calls {name} ready")


def _is_running(pod: Mapping[str, Any]) -> bool:
    return bool(pod.get("status", {}).get("phase") == "Running")


def _pod_verdicts(status: Mapping[str, Any]) -> list[str]:
    """What Kubernetes says against a pod: that it is not ready, or is to be taken away."""
    against = {"Ready": ("False", "Unknown"), "DisruptionTarget": ("True",)}
    return [
        str(condition.get("reason") or "not ready")
        for condition in status.get("conditions", ())
        if condition["status"] in against.get(condition["type"], ())
    ]


def _machine_verdicts(status: Mapping[str, Any], *, since: str) -> list[str]:
    """What Kubernetes, or a detector of problems, says against a machine.

    Args:
        since: time at which the job's pod there began. A condition that is older did not keep the
            machine from working, whatever it means.
    """
    reasons = []
    for condition in status.get("conditions", ()):
        kind, value = condition["type"], condition["status"]
        is_bad = value == ("False" if _GOOD.search(kind) else "True")
        is_silent = kind == "Ready" and value == "Unknown"
        is_old = since and condition.get("lastTransitionTime", since) < since
        if (is_bad or is_silent) and not is_old and kind not in _OWN_CONDITIONS:
            reason = condition.get("reason")
            reasons.append(f"{kind} = {value}" + (f" ({reason})" if reason else ""))
    return reasons
