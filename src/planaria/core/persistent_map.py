"""Facts about thousands of nodes, kept without a pass over all nodes for each new fact.

`PersistentMap` is an immutable mapping from which a mapping with one more entry is made in constant
time. `has_all` and `is_among` answer the questions that are asked of it and of lists of members.
"""

from bisect import bisect_left
from collections.abc import (
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    ValuesView,
)
from itertools import islice
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class PersistentMap(Mapping[Key, Value]):
    """An immutable mapping for facts that arrive one by one.

    Mappings that are made from one another share one dict. Each of them sees only as many entries
    as it has, in the order in which they arrived. The newest mapping adds to that dict; an older
    mapping, or a new value for an existing key, makes a copy. So n facts that arrive one after the
    other cost O(n) time, where a dict that is copied for each costs O(n^2).
    """

    __slots__ = ("_num", "_numbers", "_values")

    def __init__(self, entries: Mapping[Key, Value] | None = None) -> None:
        self._values = dict(entries or {})
        self._numbers: dict[Key, int] = {}  # Place of each entry that was added later.
        self._num = len(self._values)

    def plus(self, key: Key, value: Value) -> "PersistentMap[Key, Value]":
        """A mapping that also has this entry, in place of any entry of the same key."""
        entries = self
        if key in self._values or len(self._values) > self._num:
            if key in self and self[key] == value:
                return self
            entries = PersistentMap({**self, key: value})
        else:
            entries = PersistentMap()
            entries._values, entries._numbers = self._values, self._numbers
            entries._values[key] = value
            entries._numbers[key] = self._num
            entries._num = self._num + 1
        return entries

    def has_all(self, keys: Iterable[Key]) -> bool:
        """Whether each of these keys has an entry."""
        known = self._values if len(self._values) == self._num else self
        return all(map(known.__contains__, keys))

    def __getitem__(self, key: Key) -> Value:
        if len(self._values) != self._num and key not in self:
            raise KeyError(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        if len(self._values) == self._num:
            return key in self._values
        return key in self._values and self._numbers.get(key, -1) < self._num

    def __iter__(self) -> Iterator[Key]:
        return islice(self._values, self._num)

    def values(self) -> ValuesView[Value]:
        """The values, in the order of their entries."""
        return _Values(self)

    def items(self) -> ItemsView[Key, Value]:
        """The entries, in order."""
        return _Items(self)

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)!r})"


class _Values(ValuesView[Value]):
    """The values of a persistent map; faster than a look-up for each."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Value]:
        of: PersistentMap[object, Value] = self._mapping  # type: ignore[attr-defined]
        return islice(of._values.values(), len(of))


class _Items(ItemsView[Key, Value]):
    """The entries of a persistent map; faster than a look-up for each."""

    __slots__ = ()

    def __iter__(self) -> Iterator[tuple[Key, Value]]:
        of: PersistentMap[Key, Value] = self._mapping  # type: ignore[attr-defined]
        return islice(of._values.items(), len(of))


def has_all(facts: Mapping[int, object], wanted: Collection[int]) -> bool:
    """Whether each wanted number has an entry; sizes are compared first, as mostly some are
    missing."""
    if len(facts) < len(wanted):
        return False
    if isinstance(facts, PersistentMap):
        return facts.has_all(wanted)
    return all(map(facts.__contains__, wanted))


def is_among(number: int, ascending: Sequence[int]) -> bool:
    """Whether the number is one of the sorted numbers. O(log n)."""
    index = bisect_left(ascending, number)
    return index < len(ascending) and ascending[index] == number
