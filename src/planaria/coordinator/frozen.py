"""Makes a changed copy of a frozen record: of what the coordinator knows, or of a plan.

What the coordinator knows is in msgspec's records, because a loss, and the node that comes back,
change some 300 of them. A copy of one takes a tenth of the time that a dataclass takes.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # A type checker knows the fields that it replaces.
    replace = dataclasses.replace
else:

    def replace(record: Any, /, **changes: Any) -> Any:
        """A copy of a dataclass or of a msgspec record, in which some fields have other values."""
        is_struct = isinstance(record, msgspec.Struct)
        return (msgspec.structs.replace if is_struct else dataclasses.replace)(record, **changes)
