"""What planaria finds out of a job before it starts, without a process for it."""

import os
from pathlib import Path

import msgspec

from planaria.core.job import JobConfig
from planaria.core.plan import ModelProfile
from planaria.core.specs import Prepared, PrepareRequest
from planaria.engine.prepare import main


def preparation(
    job: JobConfig,
    directory: Path,
    *,
    profile: ModelProfile | None = None,
    keeps_tokenizer: bool = False,
) -> Prepared:
    """The facts on a job.

    Args:
        directory: directory of the cache.
        profile: profile that the job names.
        keeps_tokenizer: see PrepareRequest.
    """
    request = PrepareRequest(
        job=job,
        cache_directory=str(directory),
        profile=profile,
        keeps_tokenizer=keeps_tokenizer,
    )
    read, write = os.pipe()
    main(msgspec.json.encode(request), write)
    with os.fdopen(read, "rb") as file:
        return msgspec.json.decode(file.read(), type=Prepared)
