"""`planaria launch`: has what allocates machines start a job on them.

It writes the file that a person would have written for the scheduler, and submits it. The scheduler
then starts `planaria run` on each machine, and starts it again when the exit code asks for that.
"""

import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Final, NamedTuple, NoReturn

import typer

from planaria.cli.command_line import JobFile, Settings, check_writable, exit_codes, write
from planaria.cli.launch.kubernetes import kubernetes_manifest
from planaria.cli.launch.ray_actors import ray_program
from planaria.cli.launch.request import LaunchRequest
from planaria.cli.launch.slurm import slurm_script
from planaria.cli.launch.ssh_loop import check_hosts, ssh_script
from planaria.errors import ConfigError
from planaria.job.scripts import named_job

_TOOL_TIMEOUT_S: Final = 60.0
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?")
_PLAIN: Final = re.compile(r"[-\w./:@=,+]+")
_NO_DOMAIN: Final = re.compile(r"""["'`\\]|\$\(""")
_USERS_OWN: Final = ("SLURM_CONF", "SLURM_CLUSTERS")  # Which Slurm is meant.
_CPUS: Final = re.compile(r"[1-9][0-9]*")
_MEMORY: Final = re.compile(r"[1-9][0-9]*([KMGTP]i|[kMGTP])")
_PORT_MAX: Final = (1 << 16) - 1


class Scheduler(Enum):
    """What allocates machines."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    RAY = "ray"
    SSH = "ssh"


class Submission(NamedTuple):
    """A file for a scheduler, and how it is submitted.

    Attributes:
        file: name of the file, where the user names none.
        tool: program that submits it.
        words: command line that submits it; the path of the file is to be added.
    """

    file: str
    tool: str
    words: tuple[str, ...]


class SchedulerOptions(NamedTuple):
    """The options that only one scheduler has; "" where one is not given."""

    partition: str
    time: str
    image: str
    namespace: str
    volume: str
    cpus: str
    memory: str
    hosts: str


_OWN_OPTIONS: Final = {
    Scheduler.SLURM: {"partition", "time"},
    Scheduler.KUBERNETES: {"image", "namespace", "volume", "cpus", "memory"},
    Scheduler.RAY: set[str](),
    Scheduler.SSH: {"hosts"},
}


def _text(help_text: str, metavar: str) -> object:
    return typer.Option(metavar=metavar, help=help_text)


On = Annotated[Scheduler, typer.Option("--on", help="What allocates the machines.")]
Machines = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Number of machines with which the job begins, and the most that it may use.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the file; write and submit nothing.")
]
Name = Annotated[str, _text("Name of the job there. Default: that of the job file.", "NAME")]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Write this file. Default: one named as the job."),
]
Devices = Annotated[int, typer.Option(min=0, help="Number of GPUs that each machine is to have.")]
Token = Annotated[
    str,
    _text("Token file on each machine. Kubernetes has it as the secret NAME-token.", "FILE"),
]
Port = Annotated[int, typer.Option(min=0, max=_PORT_MAX, help="Port of the head.")]
MachineDomain = Annotated[
    str,
    _text("Failure domain of each machine; its shell expands variables ($NAME) in it.", "TEXT"),
]
NetworkInterface = Annotated[
    str, _text("Network interface at whose address others reach each machine.", "NAME")
]
Partition = Annotated[str, _text("Slurm: the partition.", "NAME")]
Time = Annotated[str, _text("Slurm: length of the job; it is saved before, and queued again.", "T")]
Image = Annotated[str, _text("Kubernetes: a container's image that has planaria.", "IMAGE")]
Namespace = Annotated[str, _text("Kubernetes: the namespace.", "NAME")]
Volume = Annotated[
    str,
    _text("Kubernetes: claim of a volume with the job's directory. Default: NAME.", "CLAIM"),
]
Cpus = Annotated[
    str, _text("Kubernetes: number of processors that each machine is to have free.", "N")
]
Memory = Annotated[
    str,
    _text("Kubernetes: memory to be free on each machine, and the most a pod takes.", "64Gi"),
]
HostsFile = Annotated[str, _text("ssh: a file of machines, a line each: HOST [DOMAIN].", "FILE")]


@exit_codes()
def launch(
    job: JobFile,
    on: On,
    nodes: Machines,
    dry_run: DryRun = False,
    name: Name = "",
    output: Output = None,
    devices_per_node: Devices = 0,
    token_file: Token = "",
    port: Port = 0,
    domain: MachineDomain = "",
    interface: NetworkInterface = "",
    partition: Partition = "",
    time: Time = "",
    image: Image = "",
    namespace: Namespace = "",
    volume: Volume = "",
    cpus: Cpus = "",
    memory: Memory = "",
    hosts: HostsFile = "",
    settings: Settings = None,
) -> None:
    """Has Slurm, Kubernetes, Ray or ssh start a job on their machines.

    Writes a short file as a person would write it, in which each machine runs `planaria run`, and
    submits it. It is started again by its exit code (docs/CLUSTER.md).
    """
    given = SchedulerOptions(partition, time, image, namespace, volume, cpus, memory, hosts)
    _check_options(on, given)
    low, high = _bounds(nodes)
    request = LaunchRequest(
        job=str(job),
        name=_job_name(name, job),
        min_nodes=low,
        max_nodes=high,
        devices_per_node=devices_per_node,
        token_file=token_file,
        port=port,
        domain=domain,
        interface=interface,
        settings=tuple(settings or ()),
    )
    _check_texts(request)
    # In Kubernetes the volume has the job, and this machine may not.
    if on is not Scheduler.KUBERNETES or job.exists():
        with redirect_stdout(sys.stderr):  # What a script prints is no part of the file.
            config = named_job(job, list(settings or ())).config
        request = replace(request, notice_s=config.cluster.notice_s)
    submission = _submission(on, request, given)
    path = output or Path(submission.file)
    text = _file_text(on, request, given, file=path.name)
    if dry_run:
        typer.echo(text, nl=False)
        return
    _submit(submission, request, given, path, text)


# -- what is asked for ----------------------------------------------------------------------------


def _check_options(on: Scheduler, given: SchedulerOptions) -> None:
    for option, text in given._asdict().items():
        if text and option not in _OWN_OPTIONS[on]:
            remedy = f"--on {on.value} has no use for it; leave it out"
            raise ConfigError(f"--{option}", text, remedy)
        if text and not _PLAIN.fullmatch(text):
            raise ConfigError(f"--{option}", text, "write it without spaces and quotes")
    if given.cpus and not _CPUS.fullmatch(given.cpus):
        raise ConfigError("--cpus", given.cpus, "must be an integer of at least 1")
    if given.memory and not _MEMORY.fullmatch(given.memory):
        raise ConfigError("--memory", given.memory, "must be a number with its unit, such as 64Gi")
    if on is Scheduler.KUBERNETES and not given.image:
        raise ConfigError("--image", "", "name an image in which planaria is installed")
    if on is Scheduler.SSH and not given.hosts:
        raise ConfigError("--hosts", "", "name a file with a machine in each line: HOST [DOMAIN]")


def _check_texts(request: LaunchRequest) -> None:
    """Refuses what would be no part of a word in the files of all schedulers."""
    texts = [("JOB", request.job), ("--domain", request.domain)]
    texts += [("--interface", request.interface), ("--token-file", request.token_file)]
    for option, text in (*texts, *(("--set", setting) for setting in request.settings)):
        if not text.isprintable():
            raise ConfigError(option, text, "write it without line ends and what is no character")
    if _NO_DOMAIN.search(request.domain):
        remedy = "write it without quotes, backslashes and commands; $NAME is a variable"
        raise ConfigError("--domain", request.domain, remedy)


def _bounds(nodes: str) -> tuple[int, int]:
    bounds = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", nodes)
    low, high = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError("--nodes", nodes, "must be N, or MIN:MAX with 1 <= MIN <= MAX")
    return low, high


def _job_name(name: str, job: Path) -> str:
    """The name of the job for schedulers, of which that of Kubernetes allows the fewest letters."""
    text = name or re.sub(r"[^a-z0-9]+", "-", job.stem.lower()).strip("-")
    if not _NAME.fullmatch(text):
        remedy = "must be a lower-case letter and at most 47 more letters, digits and hyphens"
        raise ConfigError("--name", text, remedy)
    return text


def _submission(on: Scheduler, request: LaunchRequest, given: SchedulerOptions) -> Submission:
    name = request.name
    namespace = ("-n", given.namespace) if given.namespace else ()
    match on:
        case Scheduler.SLURM:
            return Submission(f"{name}.sbatch", "sbatch", ("sbatch",))
        case Scheduler.KUBERNETES:
            words = ("kubectl", *namespace, "apply", "-f")
            return Submission(f"{name}.yaml", "kubectl", words)
        case Scheduler.RAY:
            # The program is started where the cluster's head is, in the directory of the job.
            entry = ("env", f"--chdir={Path.cwd()}", "python")
            words = ("ray", "job", "submit", "--no-wait", "--", *entry)
            return Submission(f"{name.replace('-', '_')}_ray.py", "ray", words)
        case Scheduler.SSH:
            return Submission(f"{name}-ssh.sh", "ssh", ("bash",))


def _file_text(on: Scheduler, request: LaunchRequest, given: SchedulerOptions, *, file: str) -> str:
    match on:
        case Scheduler.SLURM:
            return slurm_script(request, partition=given.partition, time=given.time)
        case Scheduler.KUBERNETES:
            return kubernetes_manifest(
                request,
                image=given.image,
                namespace=given.namespace,
                volume=given.volume,
                cpus=given.cpus,
                memory=given.memory,
            )
        case Scheduler.RAY:
            return ray_program(request, file=file)
        case Scheduler.SSH:
            try:
                hosts = Path(given.hosts).read_text(encoding="utf-8")
            except (OSError, UnicodeError) as error:
                raise ConfigError("--hosts", given.hosts, f"cannot be read: {error}") from error
            check_hosts(hosts, request, hosts_file=given.hosts)
            return ssh_script(request, hosts_file=given.hosts, file=file)


# -- submission -----------------------------------------------------------------------------------


def _submit(
    submission: Submission,
    request: LaunchRequest,
    given: SchedulerOptions,
    path: Path,
    text: str,
) -> NoReturn:
    """Writes the file, and becomes the program that submits it.

    Raises:
        ConfigError: the program or the secret is not there, or the file is, with other contents.
    """
    words = (*submission.words, str(path))
    if shutil.which(submission.tool) is None:
        by_hand = " ".join(words)
        remedy = (
            f"this machine has no {submission.tool}; print the file with --dry-run, and run "
            f"`{by_hand}` on a machine that has it"
        )
        raise ConfigError("", "", remedy)
    if submission.tool == "kubectl":
        _check_secret(request, given)
    check_writable("--output", path)
    if path.exists() and path.read_bytes() != text.encode():
        remedy = "is there already and differs; submit it yourself, remove it, or name another file"
        raise ConfigError("--output", str(path), remedy)
    if submission.tool == "kubectl":
        _remove_finished(request, given)
    write("--output", path, text.encode())
    typer.echo(f"wrote {path}; running {' '.join(words)}")
    os.execvpe(words[0], words, _environment_of_user())


def _environment_of_user() -> dict[str, str]:
    """The variables of this process, without those that Slurm has set.

    Where this runs in a job of Slurm they describe that job, and the next one would inherit them.
    """
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(_USERS_OWN) or not name.startswith(("SLURM", "SRUN"))
    }


def _check_secret(request: LaunchRequest, given: SchedulerOptions) -> None:
    answer = _ask_kubectl(given, "get", "secret", f"{request.name}-token")
    if answer.returncode:
        token = request.token_file or "TOKEN_FILE"
        namespace = ["-n", given.namespace] if given.namespace else []
        make = ["kubectl", *namespace, "create", "secret", "generic", f"{request.name}-token"]
        remedy = f"make the secret: {' '.join(make)} --from-file=token={token}"
        raise ConfigError("", "", f"{answer.stderr.strip()}; {remedy}")


def _remove_finished(request: LaunchRequest, given: SchedulerOptions) -> None:
    """Deletes a Job of the same name that is over: Kubernetes would start it no more."""
    form = "--output=jsonpath={.items[*].status.conditions[?(@.status=='True')].type}"
    own = ("--selector=app.kubernetes.io/managed-by=planaria",)
    named = f"--field-selector=metadata.name={request.name}"
    answer = _ask_kubectl(given, "get", "jobs", *own, named, form)
    if not answer.returncode and {"Complete", "Failed"} & {*answer.stdout.split()}:
        typer.echo(
            f"the Job {request.name} is over; deleting it, with its pods and logs, to start anew"
        )
        deleted = _ask_kubectl(given, "delete", "job", request.name)
        if deleted.returncode:
            raise ConfigError("", "", f"it cannot be deleted: {deleted.stderr.strip()}")


def _ask_kubectl(given: SchedulerOptions, *words: str) -> "subprocess.CompletedProcess[str]":
    namespace = ("-n", given.namespace) if given.namespace else ()
    command = ("kubectl", *namespace, *words)
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TOOL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError("", "", f"`{' '.join(command)}` does not answer") from None
