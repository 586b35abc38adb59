"""What a lost head's nodes have saved by themselves, as the next head finds it.

Source: docs/protocol.md, "Nodes without a head".
"""

import logging
from collections.abc import Callable

from planaria.checkpoint.disk.assembly import assemble, has_parts
from planaria.checkpoint.disk.parts import next_run, remove_runs
from planaria.checkpoint.disk.tiers import Tier, tier_of
from planaria.checkpoint.disk.time_limits import with_time_limit
from planaria.core.job import JobConfig
from planaria.errors import CheckpointError, ConfigError, LateError

logger = logging.getLogger(__name__)

_FIELD = "checkpoint.directory"


def assemble_parts(
    config: JobConfig, tier: Tier, *, resume: bool, note: Callable[[str], None]
) -> None:
    """Makes a save of what nodes of a lost head have saved by themselves, if that is newer.

    Args:
        resume: whether the job goes on from the newest save.
        note: shows the user what was made, or why nothing was.

    Raises:
        ConfigError: the job is to begin anew though there are such parts, or the place refuses.
        LateError: the disk or store does not answer.
    """
    place = config.checkpoint.directory
    try:
        if not resume and not has_parts(tier):
            return
        newest = tier.newest()
        if not resume:
            if newest is not None:  # Then the job is refused for that save.
                return
            remedy = (
                "nodes of a lost head have saved there what they held; go on from it with "
                "--resume, or name another directory"
            )
            raise ConfigError(_FIELD, place, remedy)
        assembly = assemble(tier, newer_than=-1 if newest is None else newest.iteration)
    except LateError:
        raise
    except CheckpointError as error:
        remedy = f"{error}; start again when it can be read"
        raise ConfigError(_FIELD, place, remedy) from error
    if assembly.text:
        note(assembly.text)


def next_parts(config: JobConfig, run: str) -> str:
    """The directory in which the nodes of a run that begins may save what they hold.

    Raises:
        ConfigError: the place of saves refuses.
    """
    checkpoint = config.checkpoint
    tier = with_time_limit(tier_of(checkpoint.directory), timeout_s=checkpoint.timeout_s)
    try:
        return next_run(tier.storage, run)
    except CheckpointError as error:
        raise ConfigError(_FIELD, checkpoint.directory, str(error)) from error


def remove_parts(tier: Tier) -> None:
    """Removes what nodes have saved by themselves, once the job has ended well.

    A failure is only logged.
    """
    try:
        remove_runs(tier.storage)
    except CheckpointError as error:
        logger.warning("%s", error)
