"""A mapping that grows is a dict that is copied for every entry, only faster."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from helpers.cpu_time import quickest
from planaria.core.persistent_map import PersistentMap, has_all

ENTRY = st.tuples(st.integers(0, 4), st.integers(0, 2))


@given(st.lists(st.tuples(st.integers(0, 30), ENTRY), max_size=30))
def test_every_mapping_that_grew_out_of_another_stays_as_it_is(
    steps: list[tuple[int, tuple[int, int]]],
) -> None:
    """Against dicts; each step adds an entry to any of those before it, so that they branch."""
    grown: list[PersistentMap[int, int]] = [PersistentMap({7: 7})]
    copied: list[dict[int, int]] = [{7: 7}]
    for index, (key, value) in steps:
        index %= len(grown)
        grown.append(grown[index].plus(key, value))
        copied.append({**copied[index], key: value})

        for mapping, plain in zip(grown, copied, strict=True):
            check_same(mapping, plain)


def check_same(mapping: PersistentMap[int, int], plain: Mapping[int, int]) -> None:
    assert list(mapping.items()) == list(plain.items())
    assert list(mapping.values()) == list(plain.values())
    assert list(mapping) == list(plain)
    assert len(mapping) == len(plain)
    assert mapping == plain
    for key in range(9):
        assert (key in mapping) == (key in plain)
        assert mapping.get(key) == plain.get(key)
    assert has_all(mapping, (7,))
    assert has_all(mapping, range(5)) == set(range(5)).issubset(plain)


def test_an_entry_costs_the_same_whatever_there_is() -> None:
    """Four times as many within eight times the time; copies would take sixteen."""

    def grow(num: int) -> None:
        grown: PersistentMap[int, int] = PersistentMap()
        for key in range(num):
            grown = grown.plus(key, key)

    _, few_s = quickest(lambda: grow(10_000))
    limit_s = 8.0 * few_s
    assert quickest(lambda: grow(40_000), limit_s=limit_s)[1] < limit_s
