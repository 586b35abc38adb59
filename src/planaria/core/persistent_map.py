"""Facts about thousands of nodes, kept without a pass over all nodes for each new fact.

`PersistentMap` is an immutable mapping from which a mapping with one more entry is made in constant
time. `has_all` and `is_among` answer the questions that are asked of it and of lists of members.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
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

    __slots__ = ("_num", "_shared")

    def __init__(self, entries: Mapping[Key, Value] | None = None) -> None:
        items = (entries or {}).items()
        self._shared = {key: (number, value) for number, (key, value) in enumerate(items)}
        self._num = len(self._shared)

    def plus(self, key: Key, value: Value) -> "PersistentMap[Key, Value]":
        """A mapping that also has this entry, in place of any entry of the same key."""
        entries = self
        if key in self._shared or len(self._shared) > self._num:
            if key in self and self[key] == value:
                return self
            entries = PersistentMap({**self, key: value})
        else:
            entries = PersistentMap()
            entries._shared = self._shared
            entries._shared[key] = (self._num, value)
            entries._num = self._num + 1
        return entries

    def __getitem__(self, key: Key) -> Value:
        number, value = self._shared[key]
        if number >= self._num:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[Key]:
        for number, key in enumerate(self._shared):
            if number >= self._num:
                return
            yield key

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)!r})"


def has_all(facts: Mapping[int, object], wanted: Collection[int]) -> bool:
    """Whether each wanted number has an entry; sizes are compared first, as mostly some are
    missing."""
    return len(facts) >= len(wanted) and all(number in facts for number in wanted)


def is_among(number: int, ascending: Sequence[int]) -> bool:
    """Whether the number is one of the sorted numbers. O(log n)."""
    index = bisect_left(ascending, number)
    return index < len(ascending) and ascending[index] == number
