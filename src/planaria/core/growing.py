"""What is known of thousands of nodes, without a look at all of them for each that speaks.

`Growing` is a mapping that never changes, from which one with an entry more is made in constant
time; `has_all` and `is_among` are the questions that are asked of it and of lists of members.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Growing(Mapping[Key, Value]):
    """An immutable mapping for facts that come one by one.

    The mappings that grow out of one another share one dict, of which each sees as many entries as
    it has, in the order in which they came. The newest adds to that dict; an older one, or an
    entry with another value than before, makes a copy. So n facts that come one after the other
    cost O(n) time, where a dict that is copied for each costs O(n^2).
    """

    __slots__ = ("_num", "_shared")

    def __init__(self, entries: Mapping[Key, Value] | None = None) -> None:
        items = (entries or {}).items()
        self._shared = {key: (number, value) for number, (key, value) in enumerate(items)}
        self._num = len(self._shared)

    def plus(self, key: Key, value: Value) -> "Growing[Key, Value]":
        """This mapping with an entry more, or with another value for the key."""
        entries = self
        if key in self._shared or len(self._shared) > self._num:
            if key in self and self[key] == value:
                return self
            entries = Growing({**self, key: value})
        else:
            entries = Growing()
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
        return f"Growing({dict(self)!r})"


def has_all(facts: Mapping[int, object], wanted: Collection[int]) -> bool:
    """Whether all that are wanted have an entry; counted first, for mostly some are missing."""
    return len(facts) >= len(wanted) and all(one in facts for one in wanted)


def is_among(number: int, ascending: Sequence[int]) -> bool:
    """Whether it is one of these. O(log n)."""
    index = bisect_left(ascending, number)
    return index < len(ascending) and ascending[index] == number
