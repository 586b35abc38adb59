"""Loads the job that a command is given: a job file, or a script that defines a job."""

import runpy
import sys
import traceback
from pathlib import Path

from planaria.checkpoint.disk.storage import absolute_path
from planaria.errors import ConfigError, TrainingError
from planaria.job.checks import name_refusals
from planaria.job.config import overridden_job
from planaria.job.training_job import Job
from planaria.user_functions import importing_for

# The name of a script's module in runpy. It is not __main__, whose guard is for running the script
# alone, and not the name under which workers import it.
SCRIPT_NAME = "__planaria__"


def named_job(path: Path, overrides: list[str]) -> Job:
    """The job in a job file or script, with overrides applied."""
    if path.suffix != ".py":
        return Job.from_file(path, overrides=overrides)
    directory = absolute_path(path).parent  # The script may change the current directory.
    job = _script_job(path)
    config = overridden_job(job.config, directory=directory, overrides=overrides)
    return Job(config, search_path=[*job.search_path, str(directory)])


def _script_job(path: Path) -> Job:
    """The job that a script defines as `job`.

    Raises:
        ConfigError: there is no script, or it defines no such job.
        TrainingError: the script raised.
    """
    with name_refusals("script", str(path)):
        if not path.is_file():
            raise ConfigError("script", str(path), "there is no such file")
    sys.path.insert(0, str(absolute_path(path).parent))
    try:
        with importing_for("script", str(path)):
            names = runpy.run_path(str(path), run_name=SCRIPT_NAME)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # The first frames, of planaria and runpy, are cut off.
        trace = traceback.TracebackException.from_exception(error)
        is_of_script = [frame.filename == str(path) for frame in trace.stack]
        del trace.stack[: is_of_script.index(True) if True in is_of_script else 0]
        raise TrainingError(-1, "".join(trace.format())) from error
    job = names.get("job")
    if not isinstance(job, Job):
        remedy = (
            "this script defines no job; write job = planaria.Job(planaria.JobConfig(...)) in it"
        )
        raise ConfigError("script", str(path), remedy)
    return job
