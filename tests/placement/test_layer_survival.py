"""How likely every layer of a plan survives, beside all losses looked at one by one."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cpu_time import quickest
from helpers.jobs import shaped_plan
from planaria.core.copies import LayerCopy
from planaria.core.plan import Plan
from planaria.placement import survival
from planaria.placement.layer_copies import layer_copies
from planaria.placement.layer_survival import LOST_MAX, layer_survival
from planaria.placement.placement import paper_placement

COUNTED_S_MAX = 10.0  # By the process's own clock; of most plans it is less than a tenth of that.


def mixed(plan: Plan, copies: int) -> tuple[LayerCopy, ...]:
    """Copies of layers that are alike."""
    placement = paper_placement(len(plan.nodes), copies, "mixed")
    layer_bytes = (1,) * plan.num_layers
    return layer_copies(plan, copies=copies, placement=placement, layer_bytes=layer_bytes)


def share(plan: Plan, copies: tuple[LayerCopy, ...], num_lost: int) -> float:
    """Of all losses of so many nodes, those after which each layer is at a rank that is left."""
    alive = 0
    for lost in combinations(plan.nodes, num_lost):
        kept = {
            n for rank, layers in plan.layers_by_rank.items() if rank not in lost for n in layers
        }
        kept |= {copy.layer for copy in copies for rank in copy.targets if rank not in lost}
        alive += kept == set(range(plan.num_layers))
    return alive / comb(len(plan.nodes), num_lost)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4))
def test_layers_survive_as_often_as_all_losses_say(shape: list[int], copies: int) -> None:
    """With copies and by live holders alone; without an error, as it is counted."""
    plan = shaped_plan(tuple(shape), 12)
    copies = min(copies, len(plan.nodes))
    placed = mixed(plan, copies)
    found = layer_survival(plan, placed, copies=copies, rng=np.random.default_rng(0))

    assert [row.num_lost for row in found] == list(range(1, min(len(plan.nodes), 2 * copies) + 1))
    for row in found:
        assert row.live.error == row.kept.error == 0.0
        assert row.live.probability == pytest.approx(share(plan, (), row.num_lost))
        assert row.kept.probability == pytest.approx(share(plan, placed, row.num_lost))


def test_copies_are_what_a_pipeline_without_peers_survives_by() -> None:
    """Each of six nodes holds layers that no other one does; pairs of them keep each other's."""
    plan = shaped_plan((6,), 6)
    found = layer_survival(plan, mixed(plan, 2), copies=2, rng=np.random.default_rng(0))

    assert [row.live.probability for row in found] == [0.0, 0.0, 0.0, 0.0]
    assert [row.kept.probability for row in found] == pytest.approx([1.0, 0.8, 0.4, 0.0])


def test_what_cannot_be_counted_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = shaped_plan((3, 4), 7)
    placed = mixed(plan, 2)
    exact = layer_survival(plan, placed, copies=2, rng=np.random.default_rng(0))
    monkeypatch.setattr(survival, "STATES_MAX", 1)

    drawn = layer_survival(plan, placed, copies=2, rng=np.random.default_rng(0))

    assert drawn[:1] == exact[:1]  # Two holders of a layer are never lost with one node.
    for row, expected in zip(drawn[1:], exact[1:], strict=True):
        assert 0.0 < row.live.error < 0.01
        assert abs(row.live.probability - expected.live.probability) < 5.0 * row.live.error


@pytest.mark.parametrize("shape", [(10,) * 100, (7, 9, 8, 10) * 30, (3, 4) * 140])
def test_a_thousand_nodes_are_told_in_seconds(shape: tuple[int, ...]) -> None:
    """Of the numbers of lost nodes only the first."""
    plan = shaped_plan(shape, sum(shape))
    placed = mixed(plan, 100)
    found, cpu_s = quickest(
        lambda: layer_survival(plan, placed, copies=100, rng=np.random.default_rng(0)),
        limit_s=COUNTED_S_MAX,
    )

    assert cpu_s < COUNTED_S_MAX
    assert len(found) == LOST_MAX
