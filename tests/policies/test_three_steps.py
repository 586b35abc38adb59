"""Oobleck's three steps in numbers of nodes: drawn cases, then every loss of every small job."""

from collections.abc import Iterator
from itertools import product

import pytest

from planaria.planner.layout.instantiate import instantiations
from planaria.policies.reinstantiate import LocalAnswer, LocalStep, Part, local_answer


def reformed(
    before: tuple[int, ...],
    remaining: tuple[int, ...],
    sizes: tuple[int, ...],
    *,
    num_idle: int = 0,
    min_pipelines: int = 2,
) -> tuple[tuple[tuple[int, int], ...], LocalStep] | None:
    """The parts as (index, nodes)."""
    found = local_answer(before, remaining, sizes, num_idle=num_idle, min_pipelines=min_pipelines)
    if found is None:
        return None
    return tuple((part.index, part.num_nodes) for part in found.parts), found.step


@pytest.mark.parametrize(
    ("before", "remaining", "sizes", "expected", "step"),
    [
        # Oobleck, figure 8: a 3-node template for three nodes left; a node from the larger
        # pipeline; nobody has one to give.
        ((4, 2), (3, 2), (2, 3, 4), ((0, 3), (1, 2)), LocalStep.SIMPLE),
        ((3, 2), (3, 1), (2, 3), ((0, 2), (1, 2)), LocalStep.BORROW),
        ((2, 2), (2, 1), (2, 3), ((0, 3),), LocalStep.MERGE),
        # The largest lends, of equals the first; one that lost a node anyway before a whole one.
        ((3, 5, 5, 4), (2, 5, 5, 4), (3, 4, 5), ((0, 3), (1, 4), (2, 5), (3, 4)), LocalStep.BORROW),
        (
            (3, 5, 6, 4),
            (2, 5, 5, 4),
            (3, 4, 5, 6),
            ((0, 3), (1, 5), (2, 4), (3, 4)),
            LocalStep.BORROW,
        ),
        # Two lack a node, and one is lent: it goes to the one that it completes.
        ((4, 4, 5), (2, 3, 5), (4, 5, 6, 7), ((1, 6), (2, 4)), LocalStep.MERGE),
        # Three of three nodes: two of them merge, and then can lend to the third.
        ((4, 4, 4), (3, 3, 3), (4, 5, 6, 7), ((1, 5), (2, 4)), LocalStep.MERGE),
        # One alone lacks too much, two together can be helped.
        ((4, 4, 5, 5), (1, 1, 5, 5), (4, 5, 6, 7), ((1, 4), (2, 4), (3, 4)), LocalStep.MERGE),
        # Nothing is left of a pipeline: the others are enough, or have to give it nodes.
        ((2, 2, 2), (2, 0, 2), (2, 3), ((0, 2), (2, 2)), LocalStep.SIMPLE),
        ((2, 4), (0, 4), (2, 3, 4), ((0, 2), (1, 2)), LocalStep.BORROW),
        ((2, 3), (0, 3), (2, 3), ((1, 3),), LocalStep.SIMPLE),
        # The merged pipeline is too large for any template.
        ((4, 4), (4, 1), (2, 3, 4), ((0, 3), (1, 2)), LocalStep.BORROW),
        ((5, 3), (5, 1), (3, 5), ((0, 3), (-1, 3)), LocalStep.MERGE),
        # There is no template for what is left, though it is enough for two.
        ((7, 3), (6, 3), (3, 7), ((0, 3), (1, 3), (-1, 3)), LocalStep.MERGE),
        # What lost no node keeps its template, whether or not there is another like it.
        ((9, 2), (9, 2), (2, 3), ((0, 9), (1, 2)), LocalStep.SIMPLE),
    ],
)
def test_steps_of_drawn_cases(
    before: tuple[int, ...],
    remaining: tuple[int, ...],
    sizes: tuple[int, ...],
    expected: tuple[tuple[int, int], ...],
    step: LocalStep,
) -> None:
    """Each case is small enough to check on paper."""
    assert reformed(before, remaining, sizes) == (expected, step)


def test_nodes_without_work_lend_first() -> None:
    """They take nothing from anybody."""
    assert reformed((3, 2), (3, 1), (2, 3), num_idle=1) == (((0, 3), (1, 2)), LocalStep.BORROW)
    assert reformed((4, 3), (4, 1), (3, 4), num_idle=1) == (((0, 3), (1, 3)), LocalStep.BORROW)


def test_fewer_than_n0_nodes_make_no_pipeline() -> None:
    """Also if they come from several pipelines, and if there are none at all."""
    assert reformed((3, 3), (1, 1), (3, 4, 5)) is None
    assert reformed((3, 3), (0, 0), (3, 4, 5)) is None
    assert reformed((3, 3), (1, 2), (3, 4, 5)) == (((0, 3),), LocalStep.MERGE)


def losses(before: tuple[int, ...], num_lost: int) -> Iterator[tuple[int, ...]]:
    """Every way in which pipelines of these sizes lose that many nodes, by what is left."""
    if not before:
        yield from [()] if num_lost == 0 else []
        return
    for lost in range(min(before[0], num_lost) + 1):
        for rest in losses(before[1:], num_lost - lost):
            yield (before[0] - lost, *rest)


def test_every_loss_of_f_nodes_leaves_as_many_pipelines_as_promised() -> None:
    """All N <= 15, f <= 3, n0 <= 4, all first plans, all losses: f' + 1 pipelines, all at work.

    f' is what the survivors can have: f, or with fewer than (f + 1) * n0 nodes what still fits.
    """
    steps, num_cases = set(), 0
    for n0, f in product(range(1, 5), range(1, 4)):
        for num_nodes in range((f + 1) * n0, 16):
            sizes = range(n0, max(num_nodes - f * n0, 2 * n0 - 1) + 1)
            for before in instantiations(num_nodes, sizes, min_pipelines=f + 1):
                for num_lost in range(1, f + 1):
                    for remaining in losses(before, num_lost):
                        num_cases += 1
                        found = local_answer(
                            before, remaining, sizes, num_idle=0, min_pipelines=f + 1
                        )
                        steps.add(_checked(before, remaining, sizes, found, f, n0).step)
    assert steps == set(LocalStep)
    assert num_cases > 20_000


def _checked(
    before: tuple[int, ...],
    remaining: tuple[int, ...],
    sizes: range,
    found: LocalAnswer | None,
    f: int,
    n0: int,
) -> LocalAnswer:
    case = (before, remaining, f, n0, found)
    assert found is not None, case
    num_left = sum(remaining)
    assert sum(part.num_nodes for part in found.parts) == num_left, case
    assert all(part.num_nodes in sizes for part in found.parts), case
    assert len(found.parts) >= min(f + 1, num_left // n0), case
    if found.step is LocalStep.SIMPLE:
        expected = [Part(index, left) for index, left in enumerate(remaining) if left]
        assert list(found.parts) == expected, case
    if found.step is LocalStep.BORROW:
        assert all(part.num_nodes <= max(n0, remaining[part.index]) for part in found.parts), case
    return found


def test_losses_beyond_f_leave_as_many_pipelines_as_fit_or_as_f_needs() -> None:
    """While n0 nodes are left all that remains of up to 10 works, in enough pipelines."""
    for n0, f in product(range(1, 5), range(3)):
        for num_nodes in range((f + 1) * n0, 11):
            sizes = range(n0, max(num_nodes - f * n0, 2 * n0 - 1) + 1)
            for before in instantiations(num_nodes, sizes, min_pipelines=f + 1):
                for remaining in product(*(range(size + 1) for size in before)):
                    found = local_answer(before, remaining, sizes, num_idle=0, min_pipelines=f + 1)
                    if sum(remaining) >= n0:
                        _checked(before, remaining, sizes, found, f, n0)
                    else:
                        assert found is None
