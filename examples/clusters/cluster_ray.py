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
from collections.abc import Iterable

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
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
AWAY_S_MAX = 60.0  # Of the head's machine, before another one gets the head.
POLL_S = 5.0  # Between two looks whether Ray drains the machine.
AGAIN = 75  # The exit code that says: start this again.
UNFIT = -AGAIN  # What the run of a machine returns that was unfit, after its pause.
UNFIT_RUNS = 2  # So many in a row, after which Ray is asked for another machine.


class Machine:
    """One machine of the job."""

    def __init__(self) -> None:
        self._is_unknown = False  # Whether Ray has not said what it drains.
        self._pause_s = 0.0
        self._was_told = False  # Whether the command was told that the machine is drained.
        self._number = -1  # Of the newest run.
        self._code = AGAIN

    def place(self, number: int) -> tuple[str, str, bool]:
        """Where this is; answers while a run goes on, in a concurrency group of its own.

        Returns:
            Ray's ID of the machine, its address as in HOST:PORT, and whether the run of that number
            has begun here.
        """
        address = str(ray.util.get_node_ip_address())
        address = f"[{address}]" if ":" in address else address
        return ray.get_runtime_context().get_node_id(), address, number == self._number

    def run(self, number: int, rank: int, head: str) -> int:
        """Runs `planaria run` until it ends; returns its exit code, or UNFIT.

        Ray makes one call after the other. A second one for the same run, because the answer of the
        first was lost, waits for its end and returns its exit code.
        """
        if number != self._number:
            self._number, self._code = number, AGAIN
            self._code = self._code_of_run(rank, head)
        return self._code

    def _code_of_run(self, rank: int, head: str) -> int:
        """The exit code of a run, after a pause if the machine is unfit.

        Once Ray drains the machine, the node leaves in peace. Ray starts the actor again elsewhere
        when the machine is gone.
        """
        while self.seconds_left() is not None:
            time.sleep(PAUSE_S)
        words = [*COMMAND, "--node-rank", str(rank), "--rdzv-endpoint", f"{head}:{head_port()}"]
        start_s = time.monotonic()
        try:
            code = self._wait_command(words)
        except OSError as error:
            print(f"no process can be started here: {error}", flush=True)
            code = AGAIN
        if code == 0 and rank and self._was_told:
            return AGAIN
        is_unfit = code == AGAIN and time.monotonic() - start_s < PAUSE_S_MAX
        self._pause_s = min(2 * self._pause_s + PAUSE_S, PAUSE_S_MAX) if is_unfit else 0.0
        time.sleep(self._pause_s)
        if is_unfit:
            return UNFIT
        return 128 - code if code < 0 else code

    def _wait_command(self, words: list[str]) -> int:
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


class Member:
    """A machine of the job, as this program knows it."""

    def __init__(self, group: PlacementGroup, index: int, *, avoids_unfit: bool = False) -> None:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        actor = ray.remote(
            max_restarts=-1,  # Ray replaces it if its machine is lost.
            num_cpus=1,
            concurrency_groups={"place": 1},
            scheduling_strategy=place,
        )(Machine)
        self.actor = actor.remote()
        self.group, self.index = group, index
        self.node_id = ""  # Of the machine in Ray; "": it is to be asked for before the next run.
        self.address = ""
        self.call: ray.ObjectRef | None = None  # Of `place` without a node_id, else of `run`.
        self.num_ended = 0  # Of its runs; the number of the next one.
        self.num_unfit = 0  # Of its newest runs, how many in a row found the machine unfit.
        self.is_running = False
        self.began_s = 0.0  # When its newest run began.
        self.is_done = False
        self.avoids_unfit = avoids_unfit  # Whether the group may be on no unfit machine.
        self.asked_s = time.monotonic()  # Since when it is without a machine, if it is.


def is_again(code: int) -> bool:
    """Whether a machine whose run ended with that code is to run again.

    0: done. 1, 2, 130: starting it again changes nothing. Else it was killed, ended unfinished (3),
    or found no head (75).
    """
    return code not in (0, 1, 2, 130)


def group_elsewhere(node_ids: Iterable[str]) -> PlacementGroup:
    """A group for one actor, for which Ray finds room when it can, on no machine of those IDs."""
    selector = {"ray.io/node-id": f"!in({','.join(sorted(node_ids))})"}
    return placement_group([BUNDLE], bundle_label_selector=[selector])


class Job:
    """The job on all its machines."""

    def __init__(self) -> None:
        self._group = placement_group([BUNDLE] * MIN_MACHINES, strategy="STRICT_SPREAD")
        ray.get(self._group.ready())
        self._members = [Member(self._group, index) for index in range(MIN_MACHINES)]
        node_ids = placement_group_table(self._group)["bundles_to_node_id"].values()
        for _ in range(MAX_MACHINES - MIN_MACHINES):
            self._members.append(Member(group_elsewhere(node_ids), 0))
        self._unfit: dict[str, float] = {}  # Since when machines are unfit, by their IDs.
        self._unused: list[int] = []  # Bundles of the group whose machine was unfit.
        self._num_starts = 0  # Of the head, which is on the first of the members.
        self._code = 3  # Of the head's newest run; 3: Ray has lost it.
        self._away_s = time.monotonic()  # Since then the first one is away, if it is.

    def run(self) -> int:
        """Runs the job; returns the exit code of the machine with the head."""
        while True:
            self._move_head()
            self._ask_unfit_again()
            self._start_calls()
            if self._members[0].is_done:
                return self._code
            is_idle = bool(self._waits_for_fit()) or not self._members[0].node_id
            if self._end_calls(timeout_s=PAUSE_S if is_idle else None):
                # If the job ended unfinished, all others end now. One pause is for all of them:
                # nobody waits for the head as long as a pause for each takes.
                time.sleep(PAUSE_S)
                self._end_calls(timeout_s=0.0)

    def _move_head(self) -> None:
        """Makes another machine the first one if Ray has had no room for that one for long.

        Nodes that find no head end; then one of their machines has it, if they are enough for the
        job.
        """
        head = self._members[0]
        there = [member for member in self._members if member.node_id and not member.is_done]
        idle = [member for member in there if not member.is_running]
        is_late = time.monotonic() - self._away_s >= AWAY_S_MAX
        if not head.node_id and is_late and len(there) >= MIN_MACHINES and idle:
            print(f"Ray has no room for the head; it moves to {idle[0].address}", flush=True)
            index = self._members.index(idle[0])
            self._members[0], self._members[index] = idle[0], head

    def _start_calls(self) -> None:
        """Asks where machines are, and starts runs on those that have said so, the head's first."""
        head = self._members[0]
        for rank, member in enumerate(self._members):
            if member.call is not None or member.is_done:
                continue
            if not member.node_id:
                place = member.actor.place.options(concurrency_group="place")
                member.call = place.remote(member.num_ended)
            elif head.node_id:
                if member is head and not member.is_running:
                    self._num_starts += 1
                    if self._num_starts > 1 + RESTARTS_MAX:
                        member.is_done = True
                        return
                member.is_running, member.began_s = True, time.monotonic()
                member.call = member.actor.run.remote(member.num_ended, rank, head.address)

    def _end_calls(self, *, timeout_s: float | None) -> bool:
        """Waits for the end of a call; whether a machine is to run again, after a pause."""
        members = {member.call: member for member in self._members if member.call is not None}
        if not members:
            return False
        ray.wait(list(members), timeout=timeout_s)
        ended, _ = ray.wait(list(members), num_returns=len(members), timeout=0)
        pauses = [self._on_end(members[call]) for call in ended]
        return any(pauses)

    def _on_end(self, member: Member) -> bool:
        """Notes what a call has returned; whether the machine is to run again, after a pause."""
        call, member.call = member.call, None
        try:
            result = ray.get(call)
        except ray.exceptions.RayError as error:
            # The actor may live all the same: `place` says whether its run goes on.
            if member.node_id or not isinstance(error, ray.exceptions.RayActorError):
                print(f"Ray has lost an actor: {error}", flush=True)
            code = None
        else:
            if not member.node_id:
                member.node_id, member.address, member.is_running = result
                self._keep_one_on(member.node_id)
                return False
            is_unfit = result == UNFIT
            code = AGAIN if is_unfit else int(result)
            member.num_unfit = member.num_unfit + 1 if is_unfit else 0
            member.num_ended += 1
            member.is_running = False
            member.is_done = not is_again(code)
            if member.num_unfit >= UNFIT_RUNS and self._has_others_at_work(member):
                self._ask_for_another(member)
                return False
        if member is self._members[0]:
            self._code = 3 if code is None else code
            self._away_s = time.monotonic() if member.node_id else self._away_s
        member.asked_s = time.monotonic() if member.node_id else member.asked_s
        member.node_id = ""
        return not member.is_done

    def _keep_one_on(self, node_id: str) -> None:
        """Has Ray start an actor elsewhere if it has started two on a machine.

        They would be two nodes of the job that are lost at once. Those of the first group are kept
        apart by Ray, and so are the others from machines that these had when they were asked for.
        """
        members = [member for member in self._members if member.node_id == node_id]
        others = [member for member in members if member.group is not self._group]
        if len(members) == 1 or not others:
            return
        self._put_elsewhere(min(others, key=lambda member: member.is_running))

    def _has_others_at_work(self, member: Member) -> bool:
        """Whether the trouble is that of one machine, and not, say, of the place of saves."""
        head, *others = (other for other in self._members if other is not member)
        # Who runs for longer than an unfit machine and its pause take has not found it unfit.
        late_s = time.monotonic() - 2 * PAUSE_S_MAX
        is_at_work = any(
            other.is_running and (not other.num_unfit or other.began_s <= late_s)
            for other in others
        )
        return head is self._members[0] and head.is_running and (is_at_work or not others)

    def _ask_for_another(self, member: Member) -> None:
        """Gives an unfit machine back to Ray, and asks for another one in its place."""
        print(f"the machine {member.address} is unfit; Ray is asked for another one", flush=True)
        self._unfit[member.node_id] = time.monotonic()
        member.node_id = ""
        self._put_elsewhere(member)

    def _waits_for_fit(self) -> list[Member]:
        """The members for which Ray has not found a machine yet, and may take no unfit one."""
        return [
            member
            for member in self._members
            if member.avoids_unfit and not member.node_id and not member.is_done
        ]

    def _ask_unfit_again(self) -> None:
        """Lets actors run on unfit machines, too, if Ray finds no other ones for long."""
        now_s = time.monotonic()
        for node_id, since_s in list(self._unfit.items()):
            if now_s - since_s >= PAUSE_S_MAX:
                del self._unfit[node_id]
        for member in self._waits_for_fit():
            if now_s - member.asked_s < PAUSE_S_MAX:
                continue
            if self._unused:  # Ray has kept the room of this one.
                self._end_actor(member)
                new = Member(self._group, self._unused.pop())
                self._members[self._members.index(member)] = new
            else:
                self._put_elsewhere(member)

    def _put_elsewhere(self, leaving: Member) -> None:
        """Ends an actor, and has Ray start one in its place where the job has none."""
        self._end_actor(leaving)
        if leaving is self._members[0]:
            self._away_s = time.monotonic()
        node_ids = {member.node_id for member in self._members if member.node_id}
        group = group_elsewhere(node_ids.union(self._unfit))
        member = Member(group, 0, avoids_unfit=bool(self._unfit))
        self._members[self._members.index(leaving)] = member

    def _end_actor(self, leaving: Member) -> None:
        """Ends an actor for good. Ray keeps room for all of the first group as long as that is."""
        ray.kill(leaving.actor)
        if leaving.group is self._group:
            self._unused.append(leaving.index)
        else:
            remove_placement_group(leaving.group)


def main() -> int:
    """Runs the job; returns the exit code of the machine with the head."""
    ray.init()
    return Job().run()


if __name__ == "__main__":
    sys.exit(main())
