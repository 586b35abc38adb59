"""The manifest that runs a job on machines of Kubernetes: an indexed Job, its headless Service, and
what lets its head end the pods of lost machines.

Source: Kubernetes, "Indexed Job for Parallel Processing with Static Work Assignment", "Pod failure
policy", "Success policy".
"""

import json
import math
import re
from collections.abc import Mapping
from textwrap import indent
from typing import Final

from planaria.cli.launch.request import (
    IS_FORGOTTEN,
    AtTemplate,
    LaunchRequest,
    shell_command,
)
from planaria.cli.run_role import PORT

_MANIFEST: Final = AtTemplate("""\
# @{job} on @{nodes} machines of Kubernetes (1.33 or newer).
# `planaria launch --on kubernetes` wrote this.
#
#   kubectl create secret generic @{name}-token --from-file=token=TOKEN_FILE@{in_namespace}
#   kubectl apply -f @{name}.yaml
#
# The volume @{volume} holds the directory of the job, and its saves; all machines write to it.
apiVersion: v1
kind: Service
metadata:
  name: @{own}
@{namespace}spec:
  clusterIP: None  # The first pod, with the head, has the name @{name}-0.@{name}.
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: @{own}
---
# The head calls the pod of a machine that it has lost failed, so that the Job makes another, and
# deletes it.
apiVersion: v1
kind: ServiceAccount
metadata:
  name: @{own}
@{namespace}---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: @{own}
@{namespace}rules:
  - apiGroups: [""]
    resources: [pods]
    verbs: [list, delete]
  - apiGroups: [""]
    resources: [pods/status]
    verbs: [patch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: @{own}
@{namespace}roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: @{own}
subjects:
  - kind: ServiceAccount
    name: @{own}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: @{own}
  labels: {app.kubernetes.io/managed-by: planaria}
@{namespace}spec:
  completionMode: Indexed
  completions: @{max_nodes}
  parallelism: @{max_nodes}
  successPolicy:
    rules:
      - succeededIndexes: "0"  # The job is done when the head has ended with 0.
  # Pods that fail are made again; the job can go on without @{spare} of them.
  backoffLimitPerIndex: 20
  maxFailedIndexes: @{spare}
  podFailurePolicy:
    rules:
      - action: FailJob  # The head has ended so that starting the job again changes nothing.
        onExitCodes:
          containerName: planaria
          operator: In
          values: [1]
      - action: FailIndex  # Another machine has.
        onExitCodes:
          containerName: planaria
          operator: In
          values: [2]
      - action: Ignore  # The machine is taken away, and has left; the pod is made again.
        onExitCodes:
          containerName: planaria
          operator: In
          values: [76]
      - action: Ignore  # It was taken away.
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
  template:
    metadata:
      labels:
        app: @{own}
      annotations:  # No autoscaler takes the machine away to need fewer of them.
        cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
        karpenter.sh/do-not-disrupt: "true"
    spec:
      subdomain: @{own}
      serviceAccountName: @{own}
      restartPolicy: Never
      terminationGracePeriodSeconds: @{grace_s}  # More than cluster.notice_s, @{notice_s} s.
      tolerations:  # Of spot machines, which may be taken away.
        - key: cloud.google.com/gke-spot
          operator: Exists
        - key: kubernetes.azure.com/scalesetpriority
          operator: Exists
@{gpu_toleration}      affinity:
        podAntiAffinity:  # One pod on each machine.
          requiredDuringSchedulingIgnoredDuringExecution:
            - topologyKey: kubernetes.io/hostname
              labelSelector:
                matchLabels:
                  app: @{own}
      containers:
        - name: planaria
          image: @{image}
          workingDir: /job
          command: [bash, -c]
          args:
            - |
              @{is_forgotten}
              # The signal may come before the line that notes the process.
              trap 'is_told=yes
                if [ "$child" ]; then kill -TERM "$child"; else is_early=yes; fi' TERM
              # Whatever is to be started again is started here, because another pod might get the
              # machine of one that ends. A machine that may be unfit waits longer and longer.
              for pause_s in 10 20 40 80 160 320 600 600 600 600; do
                child=
                @{command} &
                child=$!
                [ -z "$is_early" ] || kill -TERM "$child"
                wait "$child"; code=$?
                if [ "$is_told" ] && ! is_forgotten "$child"; then wait "$child"; code=$?; fi
                case $JOB_COMPLETION_INDEX:$is_told:$code in
                  *:yes:* | *:130) break ;;
                  [1-9]*:75) ;;
                  *:3 | *:75 | *:129 | *:1[3-9]?) pause_s=10 ;;
                  *) break ;;
                esac
                sleep "${restart_s:-$pause_s}" &
                child=$!
                [ "$is_told" ] || wait "$child"
                [ -z "$is_told" ] || break
              done
              case $JOB_COMPLETION_INDEX:$is_told:$code in
                0:*:[01]) ;;
                0:*:2) code=1 ;;  # A mistake that the head finds is one of the whole job.
                *:yes:*) code=76 ;;  # Told to go. Another machine is to take its place.
                # The last pod of the head: without one the other machines would wait for ever.
                0:*) [ "${NUM_FAILURES:-0}" -lt 20 ] || code=1 ;;
                [1-9]*:1 | [1-9]*:130) code=2 ;;
              esac
              exit "$code"
          env:
            - name: PLANARIA_KUBERNETES_POD  # This and the next one are for --operator kubernetes.
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: PLANARIA_KUBERNETES_JOB
              valueFrom: {fieldRef: {fieldPath: "metadata.labels['batch.kubernetes.io/job-name']"}}
            - name: PLANARIA_KUBERNETES_NODE  # What the job calls this machine.
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            - name: NUM_FAILURES  # Pods of this index before, those that count.
              valueFrom:
                fieldRef:
                  fieldPath: metadata.annotations['batch.kubernetes.io/job-index-failure-count']
@{resources}          volumeMounts:
            - {name: job, mountPath: /job}
            - {name: token, mountPath: /etc/planaria}
            - {name: memory, mountPath: /dev/shm}
      volumes:
        - name: job
          persistentVolumeClaim: {claimName: @{volume_text}}
        - name: token
          secret: {secretName: @{name}-token, defaultMode: 0400}
        - name: memory
          emptyDir: {medium: Memory@{memory_limit}}
""")
_YAML_WORDS: Final = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_GRACE_S_MIN: Final = 60
_AFTER_NOTICE_S: Final = 30  # In which a node that has left in time ends its processes.
_GPU_TOLERATION: Final = """\
        - key: nvidia.com/gpu
          operator: Exists
"""


def kubernetes_manifest(
    request: LaunchRequest,
    *,
    image: str,
    namespace: str = "",
    volume: str = "",
    cpus: str = "",
    memory: str = "",
) -> str:
    """The text of the manifest.

    Args:
        image: image of a container in which planaria is installed.
        namespace: namespace of all objects; "": that of the user.
        volume: claim of the volume with the job's directory; "": the name of the job.
        cpus: number of processors that each machine is to have free; "": none is asked for.
        memory: memory that each machine is to have free, and that a pod may take at most, such as
            64Gi; "": none is asked for, and there is no limit.
    """
    low, high, num_devices = request.min_nodes, request.max_nodes, request.devices_per_node
    endpoint = f"--rdzv-endpoint {request.name}-0.{request.name}:{request.port or PORT}"
    token = "--token-file /etc/planaria/token"
    command = shell_command(request, endpoint, token, "--operator kubernetes", indent=16)
    requests = {"cpu": cpus, "memory": memory}
    limits = {"nvidia.com/gpu": str(num_devices or ""), "memory": memory}
    return _MANIFEST.substitute(
        job=request.job,
        name=request.name,
        nodes=f"{low} to {high}" if low < high else high,
        max_nodes=high,
        spare=high - low,
        image=json.dumps(image),  # Every JSON text is YAML.
        in_namespace=f" -n {namespace}" if namespace else "",
        namespace=f"  namespace: {_scalar(namespace)}\n" if namespace else "",
        own=_scalar(request.name),
        is_forgotten=indent(IS_FORGOTTEN, 14 * " ").strip(),
        volume=volume or request.name,
        volume_text=_scalar(volume or request.name),
        gpu_toleration=_GPU_TOLERATION if num_devices else "",
        resources=_resources(requests=requests, limits=limits),
        memory_limit=f", sizeLimit: {memory}" if memory else "",
        grace_s=max(_GRACE_S_MIN, math.ceil(request.notice_s) + _AFTER_NOTICE_S),
        notice_s=f"{request.notice_s:g}",
        command=re.sub(r"\$(?=[$(])", "$$", command),  # Kubernetes takes $$ for $, and $(NAME).
    )


def _scalar(text: str) -> str:
    """A name as a text of YAML, which takes plain ones that look like a number or a truth value for
    these."""
    is_plain = text[0].isalpha() and text.lower() not in _YAML_WORDS
    return text if is_plain else json.dumps(text)


def _resources(**parts: Mapping[str, str]) -> str:
    """The lines that say what a container asks for, and what it may take at most.

    Args:
        parts: amounts by resource; "" where there is none.
    """
    lines = []
    for name, amounts in parts.items():
        texts = [f"{resource}: {amount}" for resource, amount in amounts.items() if amount]
        lines += [f"            {name}: {{{', '.join(texts)}}}\n"] if texts else []
    return "".join(["          resources:\n", *lines]) if lines else ""
