"""The batch script that runs a job on machines of Slurm.

Source: sbatch(1), srun(1), scontrol(1).
"""

import shlex
from typing import Final

from planaria.cli.launch.request import (
    IS_FORGOTTEN,
    AtTemplate,
    LaunchRequest,
    shell_command,
)

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
#SBATCH --exclusive
#SBATCH --mem=0
@{more}
# The loss of a machine does not end the job, and the head asks for another one, by a job of one
# machine. If the first one is lost, on which the head and this script are, the next ones save what
# they hold and queue this job again.
#SBATCH --no-kill
#SBATCH --requeue
# This script gets SIGUSR1 so many seconds before the time of the job is over.
#SBATCH --signal=B:USR1@@@{signal_s}

@{spare}export code_file=$PWD/.@{name}-$SLURM_JOB_ID.code  # Exit code of the machine with the head.
export pid_file=${code_file%.code}.pid script=$$  # The process of its shell, and this one.
rm -f "$code_file" "$pid_file"
# This job. In an array the number of one task is that of the whole array, too.
export job=$SLURM_JOB_ID
[ -z "$SLURM_ARRAY_JOB_ID" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# Waits for some seconds, without a process that would be left behind.
pause() { read -rt "$1" <> <(:) || :; }

# The job is queued again at most 20 times.
may_queue_again() { [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; }

# Runs on the second to fourth machine: waits until Slurm has lost the first one.
watch_first() {
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    while pause "${watch_s:-30}"; do
        case $(sinfo --noheader --nodes="$first" --format=%T) in
            # One that was drained before is drained, never down; while it runs it is draining.
            # Another machine may have done so before: that this one fails then is nothing.
            down* | drained* | fail | 'fail*')
                if may_queue_again; then scontrol requeue "$job"
                else scancel "$job"; fi ;;
        esac
    done
}

# Whether the head has ended. It opens the file, whose size NFS may have remembered for a minute.
has_ended() { read -r _ < "$code_file"; } 2> /dev/null

@{is_forgotten}
# Waits for a process, also where signals come meanwhile; its exit code is then in `code`. One that
# is forgotten was told to end.
wait_for() {
    while is_told=; wait "$1"; code=$?; [ "$is_told" ]; do
        ! is_forgotten "$1" || { code=130; break; }
    done
}

# Takes a signal, which may come before the line that notes the process that it is for.
take() {
    is_told=yes
    if [ "$2" ]; then kill "-$1" "$2" 2> /dev/null; else is_early=yes; fi
}

# Runs on each machine.
machine() {
    # Slurm may send a signal to this shell alone, or to all processes of the machine.
    trap 'is_leaving=yes; take TERM "$child"' USR1 TERM
    case $SLURM_PROCID in
        0)
            : > "$code_file"  # It has begun.
            # The script sees this shell, unless it is on another machine or in another namespace.
            ! kill -0 "$script" 2> /dev/null || echo "$$" > "$pid_file" ;;
        [123]) watch_first & watch=$! ;;
    esac
    code=130
    for try in {1..20}; do
        [ -z "$is_leaving" ] || break
        child=
        @{command} &
        child=$!
        [ -z "$is_early" ] || kill -TERM "$child"
        wait_for "$child"
        [ "$is_leaving$code" != yes143 ] || code=130  # It was told before it could listen.
        # 75: there was no head, or no process could be started. 128 and more: it was killed.
        case $code in
            130) break ;;
            75 | 129 | 1[3-9]?)
                sleep "${restart_s:-10}" & child=$!
                [ -z "$is_leaving" ] || kill "$child"
                wait "$child" ;;
            *) break ;;
        esac
    done
    child=
    # The node of this machine may have left because the machine is drained, or have given up a lost
    # head sooner than Slurm does. The watch goes on, since there may be no other, and costs nobody
    # a machine: Slurm frees none before the whole job ends, also none that is drained.
    while [ -z "$is_leaving" ] && kill -0 "$watch" 2> /dev/null && ! has_ended; do pause 1; done
    [ -z "$watch" ] || kill "$watch" 2> /dev/null
    if [ "$SLURM_PROCID" = 0 ]; then echo "$code" > "$code_file"; fi
    exit "$code"
}
export -f pause may_queue_again watch_first has_ended is_forgotten wait_for take machine

trap 'was_told=yes; take USR1 "$srun"' USR1
srun --mem=0 --cpu-bind=none --no-kill -K0 --wait=0 --ntasks-per-node=1 --export=ALL \\
    bash -c machine &
srun=$!
[ -z "$is_early" ] || kill -USR1 "$srun"
# Once the head has ended, the other machines have a minute.
(
    until has_ended; do
        pause 5
        # Where memory runs out its shell may be killed, too, which then says no exit code.
        if [ -s "$pid_file" ] && ! kill -0 "$(< "$pid_file")" 2> /dev/null && ! has_ended; then
            echo lost > "$code_file"
        fi
    done
    pause 60
    kill -TERM "$srun"
) &
limit=$!
wait_for "$srun"
ended=$code
kill "$limit" 2> /dev/null

if [ ! -e "$code_file" ] && [ "$ended" != 0 ] && [ -z "$was_told" ]; then
    echo "srun ended with $ended before the head's machine began"
    exit "$ended"  # It would end so again.
fi
code=$(cat "$code_file" 2> /dev/null)
rm -f "$code_file" "$pid_file"
case ${code:=lost} in
    0) exit 0 ;;  # The job is done.
    # It ended unfinished, or was stopped after a save: the time is over, or others need machines.
    # 75, 129 and more: there was no time to start it again on its machine, or it did not help.
    # Slurm does not queue a job again that a user has cancelled.
    3 | 75 | 129 | 1[3-9]? | lost)
        echo "the head's machine ended with $code"
        may_queue_again && exec scontrol requeue "$job" ;;
esac
[ "$code" != lost ] || code=3
exit "$code"
""")
_SPARE: Final = """\
# The agents of machines that the head asks for have these, too.
export PLANARIA_AGENT_OPTIONS="""


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
    spare = shlex.join(("--interface", request.interface)) if request.interface else ""
    spare += f' --domain "{request.domain}"' if request.domain else ""
    # The port follows from the number of the job, unless one is given.
    head = f'--rdzv-endpoint "$(scontrol show hostnames | head -n 1):{request.port}"'
    parts = ("--notice slurm --operator slurm", *((head,) if request.port else ()))
    return _SCRIPT.substitute(
        job=request.job,
        name=request.name,
        is_forgotten=IS_FORGOTTEN,
        nodes=f"{low} to {high}" if low < high else high,
        slurm_nodes=f"{low}-{high}" if low < high else high,
        more="".join(f"{line}\n" for line in more),
        signal_s=signal_s,
        spare=f"{_SPARE}{shlex.quote(spare.strip())}\n" if spare else "",
        command=shell_command(request, *parts, indent=8),
    )
