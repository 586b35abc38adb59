"""Test hosts as machines of Kubernetes, for one Job: its controller and the kubelets are the test.

The first host has the API server (fake_kubernetes.py), which knows pods alone. Commands, variables,
secrets and the service account of a pod are as its manifest says, and so is what the controller
does when it ends. Not as there: a pod has its machine's name and files, and the volume of the job
is at another path.
"""

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from helpers.command import wait_for
from helpers.fake_kubernetes import FakeKubernetes
from helpers.hosts import Host, Hosts, Process

_ACCOUNT: Final = "/run/secrets/kubernetes.io/serviceaccount"
_FAILURES: Final = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
# Makes room for what pods find in /run and /etc, which no test may change for all.
_MOUNT: Final = f"""\
mount -t tmpfs none /run && mkdir -p {_ACCOUNT} && mount --bind "$1" {_ACCOUNT} &&
mkdir -p /run/etc/upper /run/etc/work &&
mount -t overlay none -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work /etc &&
mkdir /etc/planaria && install -m 600 "$2" /etc/planaria/token && mount --bind "$3" /etc/hosts
"""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that runs."""

    name: str
    index: int
    host: Host
    process: Process


class KubernetesCluster:
    """Machines, on which the pods of one Job run.

    Args:
        directory: directory of the job, which all hosts see, with the token file in "token".
        variables: further variables of pods.

    Attributes:
        pods: pods that run, by index.
        ended: pods that have ended, in that order, with their exit codes.
        is_complete: whether the Job is done.
    """

    def __init__(self, hosts: Hosts, directory: Path, variables: Mapping[str, str]) -> None:
        self._control, *self.machines = hosts
        self._directory = directory
        self._api = FakeKubernetes(directory / "api")
        self._names = directory / "names"
        self._names.touch()
        server = self._control.start(
            *("python", "-m", "helpers.fake_kubernetes"),
            *(str(self._api.directory), self._control.address),
        )
        port = server.wait_for_line(r"serves at port (\d+)")[1]
        self._environment = {
            **variables,
            "KUBERNETES_SERVICE_HOST": self._control.address,
            "KUBERNETES_SERVICE_PORT": port,
        }
        for host in self.machines:
            self._mount(host)
        self.pods: dict[int, Pod] = {}
        self.ended: list[tuple[Pod, int]] = []
        self.is_complete = False
        self._failures: Counter[int] = Counter()
        self._over: set[int] = set()  # Indices that have succeeded or failed for good.
        self._num_pods = 0

    def _mount(self, host: Host) -> None:
        paths = (self._api.account, self._directory / "token", self._names)
        host.run("bash", "-c", _MOUNT, "bash", *map(str, paths))

    def apply(self, job: Mapping[str, Any]) -> None:
        """Takes the Job, whose pods run from now on."""
        self._job = job
        self._step()

    def wait_for(self, condition: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """Waits for a condition, while the controller and the kubelets work."""

        def is_so() -> bool:
            self._step()
            return condition()

        try:
            wait_for(is_so, what=what, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{self.log}\n{error}") from None

    @property
    def log(self) -> str:
        """What the pods of the head have printed, the newest last."""
        heads = [pod for pod, _ in self.ended if pod.index == 0]
        heads += [self.pods[0]] if 0 in self.pods else []
        return "".join(pod.process.output for pod in heads)

    def lose_machine(self, index: int) -> Pod:
        """A machine loses its power; Kubernetes keeps its pod, which it cannot ask. Returns it."""
        pod = self.pods[index]
        pod.host.kill()
        name = self._job["metadata"]["name"]
        self._api.put_pod(pod.name, pod.host.address, job=name, verdict="NodeLost")
        return pod

    def restore_machine(self, pod: Pod) -> None:
        """The machine that a pod was lost with has power again."""
        pod.host.boot()
        self._mount(pod.host)

    def delete_machine(self, pod: Pod) -> None:
        """A person, or the cloud, deletes a machine, and Kubernetes the pod that it had."""
        self._api.delete_pod(pod.name)

    def drain(self, index: int) -> None:
        """Tells a pod to go, as `kubectl drain` does."""
        self.pods[index].process.signal(signal.SIGTERM)

    def _step(self) -> None:
        if self.is_complete:
            return
        known = self._api.pods
        for pod in list(self.pods.values()):
            code = pod.process.returncode if pod.host.is_up else None
            if pod.name not in known or known[pod.name]["status"]["phase"] == "Failed":
                del self.pods[pod.index]
                self.ended.append((pod, -1))
            elif code is not None:
                del self.pods[pod.index]
                self.ended.append((pod, code))
                self._on_end(pod, code)
        for index in range(self._job["spec"]["completions"]):
            if index not in self.pods and index not in self._over and not self.is_complete:
                self._start(index)

    def _on_end(self, pod: Pod, code: int) -> None:
        phase = "Failed" if code else "Succeeded"
        name = self._job["metadata"]["name"]
        self._api.put_pod(pod.name, pod.host.address, job=name, phase=phase)
        spec = self._job["spec"]
        actions = [
            rule["action"]
            for rule in spec["podFailurePolicy"]["rules"]
            if code in rule.get("onExitCodes", {"values": []})["values"]
        ]
        assert "FailJob" not in actions, self.log
        is_ignored = "Ignore" in actions
        self._failures[pod.index] += code != 0 and not is_ignored
        if (
            not code
            or (actions and not is_ignored)
            or self._failures[pod.index] > spec["backoffLimitPerIndex"]
        ):
            self._over.add(pod.index)
        if not code and str(pod.index) == spec["successPolicy"]["rules"][0]["succeededIndexes"]:
            self.is_complete = True
            for other in self.pods.values():
                other.process.signal(signal.SIGTERM)

    def _start(self, index: int) -> None:
        """Starts a pod on a free machine, if there is one."""
        taken = {pod.host.name for pod in self.pods.values()}
        free = [host for host in self.machines if host.is_up and host.name not in taken]
        if not free:
            return
        [container] = self._job["spec"]["template"]["spec"]["containers"]
        name = self._job["metadata"]["name"]
        self._num_pods += 1
        pod_name = f"{name}-{index}-{self._num_pods}"
        self._api.put_pod(pod_name, free[0].address, job=name)
        if index == 0:  # Written in place: each host has mounted this very file.
            subdomain = self._job["spec"]["template"]["spec"]["subdomain"]
            self._names.write_text(
                f"127.0.0.1 localhost\n{free[0].address} {name}-{index}.{subdomain}\n"
            )
        process = free[0].start(
            *container["command"],
            *container["args"],
            cwd=self._directory,
            env={
                **self._environment,
                **_pod_variables(
                    container,
                    {
                        "spec.nodeName": free[0].name,
                        "metadata.name": pod_name,
                        "metadata.labels['batch.kubernetes.io/job-name']": name,
                        _FAILURES: str(self._failures[index]),
                    },
                ),
                "JOB_COMPLETION_INDEX": str(index),
            },
        )
        self.pods[index] = Pod(pod_name, index, free[0], process)


def _pod_variables(container: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, str]:
    """The variables of a container, each of which names a field of its pod."""
    return {
        each["name"]: fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }


@contextmanager
def kubernetes_cluster(
    directory: Path, *, num_machines: int, variables: Mapping[str, str]
) -> Iterator[KubernetesCluster]:
    """So many machines of Kubernetes; see KubernetesCluster."""
    with Hosts(num_machines + 1, shared=[directory]) as hosts:
        yield KubernetesCluster(hosts, directory, variables)
