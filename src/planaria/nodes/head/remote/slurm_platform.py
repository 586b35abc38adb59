"""Slurm, which is asked for one machine more, in a job of its own.

That job runs `planaria agent`, with the further options in $PLANARIA_AGENT_OPTIONS as the shell
there reads them.

Source: sbatch(1), scancel(1), scontrol(1); sinfo(1), "node state codes".
"""

import contextlib
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from planaria.errors import ConfigError
from planaria.nodes.head.remote.platforms import OPTION, LostMachine, program_output
from planaria.nodes.machine import EXIT_LEFT

_JOB: Final = "SLURM_JOB_ID"
_UNKNOWN_NODE: Final = "Invalid node name"
# What `scontrol show job` says: 'Features=a&b TresPerNode=gres/gpu:8,gres/nic:1', or gres:gpu:8.
_FEATURES: Final = re.compile(r"(?<!\S)Features=(?!\(null\))([^\s*]+)(?!\S)")
_TRES: Final = re.compile(r"(?<!\S)TresPerNode=(\S+)")
_GRES: Final = re.compile(r"(?:gres[:/])+(.+)")
# What Slurm calls a machine that is out of order; a * follows the state of one that is silent.
_BAD: Final = ("down", "drain", "fail", "inval", "unknown")
_TIME: Final = re.compile(r"(\d+-)?\d+(:\d+)*")
# Of the variables that Slurm gives to a job, those that its programs need to find Slurm.
_OWN: Final = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER"))
_SIGNAL_S: Final = 120  # Time before the end of a machine's job in which its node leaves.
# What a spare machine runs. Slurm may signal this shell alone, and do so before the line that notes
# the agent. An agent whose machine was drained has done as it was told: Slurm would call any other
# code than 0 a failure.
_SCRIPT: Final = (
    "agent= is_early=; "
    "trap 'is_told=yes; kill -TERM \"$agent\" 2> /dev/null || is_early=yes' USR1 TERM; "
    '{command} & agent=$!; [ -z "$is_early" ] || kill -TERM "$agent"; '
    'while is_told=; wait "$agent"; code=$?; [ "$is_told" ]; do :; done; '
    '[ "$code" != {left} ] || code=0; exit "$code"'
)


class SlurmPlatform:
    """Slurm, which is asked for one machine more, in a job of its own.

    That job ends with this one, and has its partition, account and quality of service, its features
    and devices, and the time that it has left.
    """

    def __init__(
        self, heads: Sequence[str], *, token_file: str, environment: Mapping[str, str]
    ) -> None:
        if not environment.get(_JOB):
            remedy = f"is of use only in a job of Slurm, where ${_JOB} names the job"
            raise ConfigError(OPTION, "slurm", remedy)
        if shutil.which("sbatch", path=environment.get("PATH")) is None:
            remedy = "there is no sbatch on this machine, which has the head; install it there"
            raise ConfigError(OPTION, "slurm", remedy)
        self._job = environment
        self._number = _job_number(environment)
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
            if name in _OWN or not name.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        self._asked: list[str] = []  # Numbers of the jobs.
        self._lost: dict[str, None] = {}  # Names of machines that are not to be given again.
        self._lock = threading.Lock()
        self._is_closed = False

    def ask_for_machine(self, lost: LostMachine) -> str:
        """See Platform."""
        number = self._submit_without(lost.name)
        with self._lock:
            self._asked.append(number)
            is_closed = self._is_closed
        if is_closed:  # The job has ended meanwhile.
            self.cancel_requests()
        return f"job {number} of Slurm is to bring one{self._state_text(lost.name)}"

    def verdict_on(self, name: str, host: str) -> str:
        """See Platform: that it is down, drained, failing, or does not answer Slurm."""
        del host
        text = self._state(name)
        state = text.partition(" ")[0]
        return f"Slurm calls it {text}" if state.startswith(_BAD) or "*" in state else ""

    def give_back(self, machine: LostMachine) -> str:
        """See Platform. The job of a spare machine ends with its agent."""
        del machine
        return ""

    def _submit_without(self, name: str) -> str:
        """Submits the job of one machine, which is to be none that was lost; returns its number.

        Slurm refuses a request that names a machine that it does not know, and does not say which:
        the newest, or one that it has forgotten since.
        """
        self._lost[name] = None
        for forget in (partial(self._lost.pop, name), self._lost.clear):
            try:
                return self._submit()
            except OSError as error:
                if _UNKNOWN_NODE not in str(error):
                    raise
            forget()
        return self._submit()

    def _submit(self) -> str:
        """Submits the job of one machine; returns its number."""
        script = _SCRIPT.format(command=self._command, left=EXIT_LEFT)
        words = ("sbatch", "--parsable", *self._options(), "--wrap", script)
        # The number of the job, and the name of the cluster if there are several.
        return program_output(words, self._environment, what="sbatch").partition(";")[0].strip()

    def _state_text(self, name: str) -> str:
        """What Slurm says of a machine, to follow a text; "": nothing."""
        with contextlib.suppress(OSError):
            if text := self._state(name):
                return f"; Slurm calls {name} {text}"
        return ""

    def _state(self, name: str) -> str:
        """The state of a machine, and its reason in brackets; "": Slurm does not know it."""
        words = ("sinfo", "--noheader", f"--nodes={name}", "--format=%T (%E)")
        return program_output(words, self._environment, what="sinfo").partition("\n")[0]

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
        if _TIME.fullmatch(left := self._time_left()):
            options.append(f"--time={left}")
        return options

    def _features_and_devices(self) -> tuple[str, str]:
        """The features and the generic resources of each machine of this job; "": none, or unknown.

        Left out are features of which the job wants several machines each.
        """
        words = ("scontrol", "--oneliner", "show", "job", self._number)
        with contextlib.suppress(OSError):
            record = program_output(words, self._environment, what="scontrol")
            features, tres = _FEATURES.search(record), _TRES.search(record)
            items = map(_GRES.fullmatch, tres[1].split(",") if tres else ())
            return features[1] if features else "", ",".join(item[1] for item in items if item)
        return "", ""

    def _time_left(self) -> str:
        """The time that this job may still take, as Slurm writes it; "": not known."""
        words = ("squeue", "--noheader", f"--jobs={self._number}", "--format=%L")
        with contextlib.suppress(OSError):
            return program_output(words, self._environment, what="squeue").strip()
        return ""

    def cancel_requests(self) -> None:
        """See Platform."""
        with self._lock:
            self._is_closed, asked = True, tuple(self._asked)
        if asked:
            program_output(
                ("scancel", "--state=PENDING", *asked), self._environment, what="scancel"
            )


def _job_number(environment: Mapping[str, str]) -> str:
    """The number of a job of Slurm, or of a task of an array, of which one has the array's own."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment[_JOB]
