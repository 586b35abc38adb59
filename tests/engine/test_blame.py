"""Whose fault an exception is, however it came about."""

import errno
from collections.abc import Callable

import pytest

from planaria.core.messages import Blame
from planaria.engine.blame import blame_of


def fails_to_read() -> None:
    raise OSError(errno.EIO, "Input/output error")


def raises_from() -> None:
    try:
        fails_to_read()
    except OSError as error:
        raise ValueError("bad sample") from error


def raises_while_it_handles() -> None:
    try:
        fails_to_read()
    except OSError:
        raise ValueError("bad sample")  # noqa: B904


def raises_from_none() -> None:
    try:
        fails_to_read()
    except OSError:
        raise ValueError("bad sample") from None


def raises_of_its_own() -> None:
    raise ValueError("bad sample")


def fills_memory() -> None:
    try:
        raise MemoryError
    except MemoryError:
        raise RuntimeError("no batch")  # noqa: B904


@pytest.mark.parametrize(
    ("act", "blame"),
    [
        (fails_to_read, "node"),
        (raises_from, "node"),
        (raises_while_it_handles, "node"),
        (raises_from_none, "job"),
        (raises_of_its_own, "job"),
        (fills_memory, "memory"),
    ],
)
def test_what_the_world_began_is_no_mistake_of_the_job(
    act: Callable[[], None], blame: Blame
) -> None:
    """A data set that says of a sample that cannot be read that it is bad ended the job, though one
    node alone could not read it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()

    assert blame_of(caught.value) == blame
