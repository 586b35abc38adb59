"""The batch script that runs a job on machines of Slurm.

Source: sbatch(1), srun(1), scontrol(1).
"""

from typing import Final

from planaria.cli.launch.request import AtTemplate, LaunchRequest, shell_command

_SCRIPT: Final = AtTemplate("""\
#!/bin/bash
# @{job} on @{nodes} machines of Slurm. `planaria launch --on slurm` wrote this.
#
#   sbatch @{name}.sbatch
#
# Submit it in the directory of the job, which all machines share.

#SBATCH --job-name=@{name}
#SBATCH --output=@{name}-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=@{slurm_nodes}
#SBATCH --ntasks-per-node=1
@{more}
# The loss of a machine does not end the job. That of the first one, on which the head is, does, and
# Slurm queues the job again.
#SBATCH --no-kill
#SBATCH --requeue
# This script gets SIGUSR1 so many seconds before the time of the job is over.
#SBATCH --signal=B:USR1@@@{signal_s}

requeues_max=20
export code_file=$PWD/.@{name}-$SLURM_JOB_ID.code  # Exit code of the machine with the head.
rm -f "$code_file"

# Runs on each machine.
machine() {
    # Slurm may send a signal to this shell alone, or to all processes of the machine.
    trap 'is_told=yes; kill -TERM "$child" 2> /dev/null' USR1 TERM
    for try in {1..20}; do
        @{command} &
        child=$!
        while is_told=; wait "$child"; code=$?; [ "$is_told" ]; do :; done
        # 75: there was no head, or no process could be started. 128 and more: it was killed.
        case $code in
            130) break ;;
            75 | 129 | 1[3-9]?) sleep "${restart_s:-10}" ;;
            *) break ;;
        esac
    done
    if [ "$SLURM_PROCID" = 0 ]; then echo "$code" > "$code_file"; fi
    exit "$code"
}
export -f machine

is_time_over=no
srun --no-kill -K0 --wait=0 --ntasks-per-node=1 bash -c machine &
srun=$!
trap 'is_time_over=yes; is_told=yes; kill -USR1 "$srun"' USR1
while is_told=; wait "$srun"; [ "$is_told" ]; do :; done

code=$(cat "$code_file" 2> /dev/null || echo lost)
rm -f "$code_file"
case $code in
    0) exit 0 ;;                    # The job is done.
    3 | lost) is_again=yes ;;       # It ended unfinished, or the machine of the head was lost.
    130) is_again=$is_time_over ;;  # It was stopped, after a save.
    *) is_again=no ;;               # 1, 2: starting it again changes nothing.
esac
echo "the head's machine ended with $code"
if [ $is_again = yes ] && [ "${SLURM_RESTART_COUNT:-0}" -lt $requeues_max ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
[ "$code" != lost ] || code=3
exit "$code"
""")


def slurm_script(
    request: LaunchRequest, *, partition: str = "", time: str = "", signal_s: int = 120
) -> str:
    """The text of the batch script.

    Args:
        partition: partition of Slurm; "": the default one.
        time: length of the job as Slurm writes it, such as 12:00:00; "": the partition's.
        signal_s: seconds before the end of that time in which the job is saved.
    """
    low, high = request.min_nodes, request.max_nodes
    more = [f"#SBATCH --partition={partition}"] if partition else []
    more += [f"#SBATCH --time={time}"] if time else []
    if request.devices_per_node:
        more.append(f"#SBATCH --gpus-per-node={request.devices_per_node}")
    # The port follows from the number of the job, unless one is given.
    head = f'--rdzv-endpoint "$(scontrol show hostnames | head -n 1):{request.port}"'
    return _SCRIPT.substitute(
        job=request.job,
        name=request.name,
        nodes=f"{low} to {high}" if low < high else high,
        slurm_nodes=f"{low}-{high}" if low < high else high,
        more="".join(f"{line}\n" for line in more),
        signal_s=signal_s,
        command=shell_command(request, head if request.port else "", indent=8),
    )
