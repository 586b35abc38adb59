"""Programs that stand for schedulers and for planaria, in a directory that goes on the PATH."""

import os
import sys
from pathlib import Path

from planaria.cli.launch.request import IS_FORGOTTEN

_SRUN = (
    IS_FORGOTTEN
    + """\
# Starts the command at the end as a task for each machine, and passes SIGUSR1 on to all of them.
command=("${@: -3}")
pass_on() { kill -USR1 "${tasks[@]}" 2> /dev/null; }
trap 'is_told=yes; was_told=yes; pass_on' USR1
for ((rank = 0; rank < NUM_MACHINES; rank++)); do
    SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NODELIST=127.0.0.1 \\
        SLURMD_NODENAME=n$rank SLURM_NODEID=$rank SLURM_PROCID=$rank "${command[@]}" &
    tasks+=($!)
done
echo "$*" > "$FAKES/srun.words"
[ -z "$was_told" ] || pass_on  # Some had not been started then.
for task in "${tasks[@]}"; do
    while is_told=; wait "$task"; code=$?; [ "$is_told" ]; do
        ! is_forgotten "$task" || break
    done
    [ "$code" -le "${worst:-0}" ] || worst=$code
done
exit "${worst:-0}"
"""
)
_SCONTROL = """\
case $1 in
    requeue) echo "$*" >> "$FAKES/scontrol.words" ;;
    --oneliner) echo "NodeName=$4 State=ALLOCATED" ;;
    *) echo 127.0.0.1 ;;
esac
"""
_SBATCH = 'echo "$*" >> "$FAKES/sbatch.words"; echo 8'
# Runs the command that ssh would run on a machine, here; it knows its options with values only.
_SSH = """\
while [[ $1 = -* ]]; do [ "$1" = -n ] && shift || shift 2; done
echo "$*" >> "$FAKES/ssh.words"
host=$1; shift
exec bash -c "$*"
"""


class FakeScheduler:
    """A directory of programs, and the environment in which they are found.

    Attributes:
        directory: the directory, in which the programs leave the words that they were given.
        environment: variables of processes that find them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for name, body in (
            ("srun", _SRUN),
            ("scontrol", _SCONTROL),
            ("sbatch", _SBATCH),
            ("ssh", _SSH),
        ):
            self.write(name, body)
        left_out = ("SLURM_", "PET_", "KUBERNETES_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        self.environment |= {
            "PATH": f"{directory}:{os.environ['PATH']}",
            "FAKES": str(directory),
            "HOME": str(directory),
            "SLURM_JOB_ID": "7",
            "restart_s": "0",
        }

    def write(self, name: str, body: str) -> None:
        """Makes a program of a bash script."""
        path = self.directory / name
        path.write_text(f"#!/bin/bash\n{body}")
        path.chmod(0o755)

    def use_planaria(self) -> None:
        """Makes `planaria` the one that is tested."""
        self.write("planaria", f'exec {sys.executable} -m planaria "$@"\n')

    def words(self, name: str) -> list[str]:
        """The command lines with which a program was started, without the program."""
        path = self.directory / f"{name}.words"
        return path.read_text().splitlines() if path.exists() else []
