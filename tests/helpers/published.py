"""The rows of published tables and figures, computed once in a process."""

from functools import cache

from planaria.papers.experiments import EXPERIMENTS
from planaria.papers.rows import PublishedRow


@cache
def rows_of(name: str) -> tuple[PublishedRow, ...]:
    """The rows of an experiment."""
    return EXPERIMENTS[name].rows()
