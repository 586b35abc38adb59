"""cluster on 2 to 4 machines of Ray. `planaria launch --on ray` wrote this.

    ray job submit --no-wait -- env --chdir="$PWD" python cluster_ray.py

Submit it in the directory of the job, which all machines share.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

MIN_MACHINES = 2
MAX_MACHINES = 4
BUNDLE = {"CPU": 1}  # What each machine gives to the job.
PORT = 0  # 0: it follows from the number of the job.
COMMAND = [
    *("planaria", "run"),
    *("--nnodes", "2:4"),
    "--resume-if-saved",
]
# When an actor ends, Ray kills its children, but not theirs. The command, a child of this shell, is
# told so: it saves the job, or its node leaves.
TELL_CHILD = 'setpriv --pdeathsig TERM "$@" & wait $!'
SHELL = ["setpriv", "--pdeathsig", "KILL", "bash", "-c", TELL_CHILD, "bash"]
DIRECTORY = os.getcwd()
RESTARTS_MAX = 20
PAUSE_S = 10.0
PAUSE_S_MAX = 300.0  # Of a machine that is unfit each time that it is asked.
POLL_S = 5.0  # Between two looks whether Ray drains the machine.
AGAIN = 75  # The exit code that says: start this again.


class Machine:
    """One machine of the job."""

    def __init__(self) -> None:
        self._is_unknown = False  # Whether Ray has not said what it drains.
        self._pause_s = 0.0
        self._was_told = False  # Whether the command was told that the machine is drained.

    def address(self) -> str:
        """The address at which other machines reach this one, as in HOST:PORT."""
        address = str(ray.util.get_node_ip_address())
        return f"[{address}]" if ":" in address else address

    def run(self, rank: int, head: str) -> int:
        """Runs `planaria run` until it ends; returns its exit code.

        Once Ray drains the machine, the node leaves in peace. Ray starts the actor again elsewhere
        when the machine is gone.
        """
        while self.seconds_left() is not None:
            time.sleep(PAUSE_S)
        words = [*COMMAND, "--node-rank", str(rank), "--rdzv-endpoint", f"{head}:{head_port()}"]
        start_s = time.monotonic()
        try:
            code = self._run(words)
        except OSError as error:
            print(f"no process can be started here: {error}", flush=True)
            code = AGAIN
        if code == 0 and rank and self._was_told:
            return AGAIN
        is_unfit = code == AGAIN and time.monotonic() - start_s < PAUSE_S_MAX
        self._pause_s = min(2 * self._pause_s + PAUSE_S, PAUSE_S_MAX) if is_unfit else 0.0
        time.sleep(self._pause_s)
        return 128 - code if code < 0 else code

    def _run(self, words: list[str]) -> int:
        """The exit code of the command, which is told once Ray drains the machine."""
        notice = os.path.join(tempfile.mkdtemp(), "notice")
        words = [*words, "--notice", notice, "examples/cluster.toml"]
        self._was_told = False
        process = subprocess.Popen([*SHELL, *words], cwd=DIRECTORY)
        while (code := process.poll()) is None:
            if not self._was_told and (left := self.seconds_left()) is not None:
                with contextlib.suppress(OSError):  # It is tried again, as where a disk is full.
                    with open(f"{notice}.new", "w") as file:
                        file.write(left)
                    os.replace(f"{notice}.new", notice)
                    self._was_told = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=POLL_S)
        return code

    def seconds_left(self) -> str | None:
        """The seconds until the machine is gone, "" if Ray does not say; None: it is not drained.

        Ray has no public call for this; its own trainer uses this one.
        """
        try:
            ends_ms = ray._private.state.state.get_draining_nodes()
        except Exception as error:
            if not self._is_unknown:
                print(f"Ray does not say whether it drains this machine: {error!r}", flush=True)
            self._is_unknown = True
            return None
        end_ms = ends_ms.get(ray.get_runtime_context().get_node_id())
        if not end_ms:
            return None if end_ms is None else ""
        return f"{max(0.0, end_ms / 1000.0 - time.time()):.0f}"


def head_port() -> int:
    """The port of the head. Jobs of one Ray have different ones."""
    number = int.from_bytes(bytes.fromhex(ray.get_runtime_context().get_job_id()), "little")
    return PORT or 20000 + number % 10000


def start_machine(group: PlacementGroup, index: int) -> "ray.actor.ActorHandle":
    """Starts an actor in a bundle of a placement group; Ray replaces it if its machine is lost."""
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    actor = ray.remote(max_restarts=-1, num_cpus=1, scheduling_strategy=place)(Machine)
    return actor.remote()


def address_of(machine: "ray.actor.ActorHandle") -> str:
    """The address of an actor's machine, once it has one: Ray may be replacing a lost one."""
    while True:
        try:
            return str(ray.get(machine.address.remote()))
        except ray.exceptions.RayError:
            time.sleep(PAUSE_S)


def code_of(run: "ray.ObjectRef") -> int | None:
    """The exit code of a run that has ended; None: its actor was lost."""
    try:
        return int(ray.get(run))
    except ray.exceptions.RayError as error:
        print(f"Ray has lost an actor: {error}", flush=True)
        return None


def is_again(code: int | None) -> bool:
    """Whether a machine whose run ended with that code is to run again.

    0: done. 1, 2, 130: starting it again changes nothing. Else it was lost or killed, ended
    unfinished (3), or found no head (75).
    """
    return code not in (0, 1, 2, 130)


def main() -> int:
    """Runs the job; returns the exit code of the machine with the head, the first one."""
    ray.init()
    group = placement_group([BUNDLE] * MIN_MACHINES, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    machines = [start_machine(group, index) for index in range(MIN_MACHINES)]
    num_more = MAX_MACHINES - MIN_MACHINES  # Each of these comes when Ray has it.
    machines += [start_machine(placement_group([BUNDLE]), 0) for _ in range(num_more)]
    head = address_of(machines[0])
    running = {machine.run.remote(rank, head): rank for rank, machine in enumerate(machines)}
    num_restarts = 0
    while True:
        [first], _ = ray.wait(list(running))
        if is_again(code_of(first)):
            # If the job ended unfinished, all others end now. One pause is for all of them: nobody
            # waits for the head as long as a pause for each takes.
            time.sleep(PAUSE_S)
        ended, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
        # The head is started first.
        for rank, code in sorted((running.pop(run), code_of(run)) for run in ended):
            if rank == 0:
                if not is_again(code) or num_restarts == RESTARTS_MAX:
                    return 3 if code is None else code
                num_restarts += 1
                head = address_of(machines[0])
            if is_again(code):
                running[machines[rank].run.remote(rank, head)] = rank


if __name__ == "__main__":
    sys.exit(main())
