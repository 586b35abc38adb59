"""The script that runs a job on machines that ssh reaches."""

import shlex
from typing import Final

from planaria.cli.launch.request import (
    IS_FORGOTTEN,
    AtTemplate,
    LaunchRequest,
    shell_command,
)
from planaria.cli.run_role import FIRST_PORT, NUM_PORTS
from planaria.errors import ConfigError

_SCRIPT: Final = AtTemplate("""\
#!/bin/bash
# @{job} on @{nodes} machines over ssh. `planaria launch --on ssh` wrote this.
#
#   bash @{file}      Ctrl-C stops the job, after a save.
#
# Start it in the directory of the job, which all machines share. If this script dies, the machines
# go on without it, and nobody starts one again.

# A machine in each line, as HOST or HOST DOMAIN; the head is on the first one.
hosts_file=@{hosts}
restarts_max=20
hosts=$(tr -d '\\r' < "$hosts_file" | grep -vE '^[[:space:]]*(#|$)' | head -n @{max_nodes})
mapfile -t hosts <<< "$hosts"
read -r first _ <<< "${hosts[0]}"
# How the machines reach the first one: ~/.ssh/config may say more of it than they know.
head=$(ssh -G "$first" 2> /dev/null | sed -n 's/^hostname //p')
head=${head:-${first#*@@}}
case $head in *:*) head="[$head]" ;; esac  # An address of IPv6.
# Jobs of other directories or names are others; the port of the head follows from this, too.
key=$(printf %s "$PWD/@{name}" | cksum | cut -d " " -f 1)
printf -v directory %q "$PWD"
printf -v path %q "$PATH"  # A shell that ssh starts may not find planaria by itself.

# What a machine runs, with $rank, $head, $domain and $key. Where it runs still, because the
# connection was lost, it is waited for, and its exit code is told.
IFS= read -r -d '' command << 'END'
files=~/.planaria-@{name}-$key-$rank
exec 9> $files.lock
if ! flock -n 9; then
    echo "planaria runs this job here still; waiting for it"
    flock 9
    exit "$(cat $files.code)"
fi
echo 75 > $files.code  # Start me again, if this shell is killed.
@{command} &
echo $! > $files.pid
wait $!
code=$?
echo $code > $files.code
exit $code
END

reach() {  # HOST WORD...: runs a command there.
    ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 "$@@"
}

run() {  # RANK: runs it on a machine, again and again if need be; the exit code is the last one.
    read -r host domain _ <<< "${hosts[$1]}"
    printf -v words '%q ' "rank=$1" "head=$head" "domain=$domain" "key=$key"
    was_tried=
    # A lost connection (255) is no restart: the machine runs it still, or is waited for.
    for ((num_restarts = 0; num_restarts < restarts_max || $1 > 0; num_restarts += code != 255)); do
        reach "$host" "cd $directory || exit 126; $words PATH=$path:\\$PATH bash -s" <<< "$command"
        code=$?
        case $code in
            0 | 1 | 2 | 130) break ;;   # It is done, or starting it again changes nothing.
            3 | 75 | 255) ;;            # Unfinished; no head; ssh has failed.
            129 | 1[3-9]?) ;;           # It was killed.
            126 | 127)                  # A machine that boots may not have mounted all yet.
                echo "$host: planaria could not be started there (exit code $code)" >&2
                [ "$was_tried" ] || break ;;
            *) break ;;
        esac
        was_tried=yes
        sleep "${restart_s:-10}"
        [ "$1" = 0 ] || kill -0 "$head_run" 2> /dev/null || break  # The job is over.
    done
    case $code in
        0 | 3 | 75 | 126 | 127 | 130 | 255) ;;  # What was printed says why.
        *) echo "$host: ended with exit code $code" >&2 ;;
    esac
    exit "$code"
}

stop() {  # RANK: has a machine stop; the head saves the job.
    read -r host _ <<< "${hosts[$1]}"
    reach -n "$host" "kill -TERM \\$(cat ~/.planaria-@{name}-$key-$1.pid)" 2> /dev/null
}

# Nothing begins without the first machine; a connection that is lost later is waited for.
if ! reach -n "$first" true; then
    echo "the first machine, $first, cannot be reached, and the head is to run there:" \\
        "mend that, or put another machine first in $hosts_file" >&2
    exit 75
fi
run 0 &
head_run=$!
for ((rank = 1; rank < ${#hosts[@@]}; rank++)); do run "$rank" & done
@{is_forgotten}
trap 'is_told=yes; stop 0 || echo "the first machine cannot be told now; try again"' INT TERM HUP
while is_told=; wait "$head_run"; code=$?; [ "$is_told" ]; do
    # It was told to end; what follows must not take it to run.
    ! is_forgotten "$head_run" || { disown "$head_run"; code=130; break; }
done

# The others end by themselves, but for those that have found no head.
for ((second = 0; second < 20; second++)); do
    [ "$(jobs -rp)" ] || exit "$code"
    sleep 1
done
for ((rank = 1; rank < ${#hosts[@@]}; rank++)); do stop "$rank"; done
wait
exit "$code"
""")


def ssh_script(request: LaunchRequest, *, hosts_file: str, file: str) -> str:
    """The text of the script.

    Args:
        hosts_file: path of the file with the machines.
        file: name of the file that will hold the script.
    """
    low, high = request.min_nodes, request.max_nodes
    port = request.port or f"$(({FIRST_PORT} + key % {NUM_PORTS}))"
    domain = "" if request.domain else '${domain:+--domain "$domain"}'
    command = shell_command(
        request, f'--node-rank "$rank" --rdzv-endpoint "$head:{port}"', domain, indent=0
    )
    return _SCRIPT.substitute(
        job=request.job,
        name=request.name,
        is_forgotten=IS_FORGOTTEN,
        file=file,
        nodes=f"{low} to {high}" if low < high else high,
        hosts=shlex.quote(hosts_file),
        max_nodes=high,
        command=command,
    )


def check_hosts(text: str, request: LaunchRequest, *, hosts_file: str) -> None:
    """Refuses a file of too few machines.

    Args:
        text: contents of the file.

    Raises:
        ConfigError: it names fewer machines than the job needs, or a machine twice.
    """
    lines = [line.split() for line in text.splitlines()]
    hosts = [words[0] for words in lines if words and not words[0].startswith("#")]
    if len(hosts) < request.min_nodes:
        remedy = f"it names {len(hosts)} machines; --nodes asks for {request.min_nodes} at least"
        raise ConfigError("--hosts", hosts_file, remedy)
    if len(set(hosts)) < len(hosts):
        raise ConfigError("--hosts", hosts_file, "it names a machine twice; name each once")
