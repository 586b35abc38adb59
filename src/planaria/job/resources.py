"""Checks, before any node starts, that this machine has enough disk and memory for a job."""

import shutil
from functools import partial
from pathlib import Path

from planaria.checkpoint.disk.storage import is_url
from planaria.checkpoint.disk.time_limits import answer_in_time
from planaria.checkpoint.memory.room import available_bytes
from planaria.errors import ConfigError, LateError
from planaria.job.planning import Planned


def check_room(planned: Planned, *, is_here: bool = True) -> None:
    """Refuses a job for which this machine has too little room.

    Args:
        is_here: whether all nodes run on this machine and share its memory.

    Raises:
        ConfigError: the free disk or memory is too small.
    """
    if planned.config.model.kind == "paced":  # Its profile has the bytes of another model.
        return
    _check_disk(planned)
    if is_here:
        check_memory(planned, free_bytes=available_bytes())


def _check_disk(planned: Planned) -> None:
    """Refuses a disk without room for one save, which is all parameters and optimizer state."""
    config = planned.config
    if is_url(config.checkpoint.directory):  # The room in an object store is not known.
        return
    needed_bytes = sum(
        layer.parameter_bytes + layer.optimizer_bytes for layer in planned.problem.profile.layers
    )
    directory, timeout_s = config.checkpoint.directory, config.checkpoint.timeout_s
    try:
        free_bytes = answer_in_time(partial(_free, directory), where=directory, timeout_s=timeout_s)
    except LateError as error:
        remedy = f"{error} (checkpoint.timeout_s); check that disk"
        raise ConfigError("checkpoint.directory", directory, remedy) from error
    if free_bytes < needed_bytes:
        raise ConfigError(
            "checkpoint.directory",
            directory,
            f"one save takes {needed_bytes:_} bytes and {free_bytes:_} are free there; "
            "free some space, or name another directory",
        )


def _free(directory: str) -> int:
    """The free bytes on the file system of a directory, which need not exist yet."""
    path = Path(directory)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free


def check_memory(planned: Planned, *, free_bytes: int) -> None:
    """Refuses copies in memory for which there is no room.

    Args:
        free_bytes: free memory that the job may use.

    Raises:
        ConfigError: the copies need more; it says what they need and what is free.
    """
    checkpoint = planned.config.checkpoint
    needed_bytes = copies_bytes(planned)
    if free_bytes < needed_bytes:
        buffers_bytes = _buffers_bytes(planned)
        field, value, change = "checkpoint.copies", checkpoint.copies, "make fewer copies"
        if 2 * buffers_bytes > needed_bytes:
            field, value = "checkpoint.buffer_bytes", checkpoint.buffer_bytes
            change = f"the buffers take {buffers_bytes:_} of these, make them smaller"
        raise ConfigError(
            field,
            value,
            f"two versions of the copies take {needed_bytes:_} bytes of memory on all "
            f"nodes together, and {free_bytes:_} are free on this machine, which they "
            f"share; {change}",
        )


def copies_bytes(planned: Planned) -> int:
    """The largest memory that copies take on all nodes together.

    It is two versions of each rank's own layers and of all further copies, and the buffers in which
    copies are sent.
    """
    job, plan, profile = planned.config.checkpoint, planned.plan, planned.problem.profile
    if not job.copies:
        return 0
    state_bytes = [layer.parameter_bytes + layer.optimizer_bytes for layer in profile.layers]
    own_bytes = sum(state_bytes[n] for held in plan.held_by_rank.values() for n in held)
    num_further = min(job.copies, len(plan.nodes)) - 1
    return 2 * (own_bytes + num_further * sum(state_bytes)) + _buffers_bytes(planned)


def _buffers_bytes(planned: Planned) -> int:
    """The memory of the buffers in which copies are sent, on all nodes together."""
    config, plan = planned.config, planned.plan
    num_further = min(config.checkpoint.copies, len(plan.nodes)) - 1
    # Each buffer of a device has as much memory of the host beside it.
    rank_bytes = num_further * config.checkpoint.buffer_bytes + config.chunk_buffers_bytes
    return len(plan.all_ranks) * rank_bytes
