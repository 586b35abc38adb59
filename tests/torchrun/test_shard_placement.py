"""Where copies of shards go, and what is said of their survival."""

import pytest
import torch.distributed as dist

from planaria.errors import ConfigError
from planaria.torchrun.shard_placement import (
    check_strategy,
    place_nodes,
    place_on_all,
    survival,
    whole_everywhere,
)


def test_groups_survive_more_than_a_ring() -> None:
    """Gemini, section 4: four nodes, two copies, two lost."""
    nodes = ["a", "b", "c", "d"]

    mixed = place_nodes(nodes, 2, strategy="mixed", domains=[""] * 4)
    ring = place_nodes(nodes, 2, strategy="ring", domains=[""] * 4)

    assert list(survival(mixed)[:3]) == pytest.approx([1.0, 1.0, 4 / 6])
    assert list(survival(ring)[:3]) == pytest.approx([1.0, 1.0, 2 / 6])
    assert survival(whole_everywhere(nodes)) == (1.0, 1.0, 1.0, 1.0, 0.0)


def test_optimised_copies_leave_the_domain_of_their_shard() -> None:
    """Ranks of a node count once, and nodes come in the order of their ranks."""
    nodes = ["a", "a", "b", "b", "c", "c", "d", "d"]
    domains = ["east", "east", "west", "west", "east", "east", "west", "west"]

    placement = place_nodes(nodes, 2, strategy="optimised", domains=domains)

    east, west = {0, 2}, {1, 3}
    for node, holders in enumerate(placement.holders):
        assert len(holders) == 2
        assert set(holders) & east, node
        assert set(holders) & west, node


def test_fewer_nodes_than_copies_keep_what_they_can() -> None:
    placement = place_nodes(["a", "b"], 5, strategy="mixed", domains=["", ""])

    assert placement.holders == ((0, 1), (1, 0))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_nodes_that_are_left_of_groups_keep_as_many_copies(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups of two would leave one out, and the next save ended the job or made one copy."""
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    nodes = ["a", "b", "c", "d"]
    groups = place_on_all(nodes, 2, strategy="group", domains=[""] * 4)
    assert groups.holders == ((0, 1), (1, 0), (2, 3), (3, 2))
    assert not caplog.records

    left = place_on_all(nodes[1:], 2, strategy="group", domains=[""] * 3)

    assert survival(left)[:2] == (1.0, 1.0)
    messages = ["3 nodes do not make groups of 2: copies are placed as with placement='mixed'"]
    assert [record.message for record in caplog.records] == ([] if rank else messages)


@pytest.mark.parametrize(
    ("strategy", "domain", "field"),
    [("nearest", "", "placement"), ("mixed", "rack 1", "domain")],
)
def test_a_placement_that_would_not_do_what_is_asked_is_refused(
    strategy: str, domain: str, field: str
) -> None:
    """Domains that nobody heeds would promise what does not hold."""
    check_strategy("optimised", "rack 1")

    with pytest.raises(ConfigError) as caught:
        check_strategy(strategy, domain)
    assert caught.value.field == field
