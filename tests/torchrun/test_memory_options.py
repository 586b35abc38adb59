"""Numbers that a MemoryCheckpointer cannot do with are refused by name."""

from math import inf, nan
from typing import Any

import pytest

from planaria.core.copies import BUFFER_BYTES_MIN
from planaria.errors import ConfigError
from planaria.torchrun.arguments import check_least

FINE: dict[str, Any] = {
    "copies": 1,
    "buffer_bytes": BUFFER_BYTES_MIN,
    "profile_iterations": 0,
    "idle_s": inf,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("copies", 0), ("copies", 2.5)),
        *(("buffer_bytes", 0), ("buffer_bytes", BUFFER_BYTES_MIN - 1), ("buffer_bytes", 1e9)),
        *(("profile_iterations", -1), ("idle_s", 0), ("idle_s", -1.0), ("idle_s", nan)),
    ],
)
def test_numbers_that_will_not_do_are_refused(field: str, value: float) -> None:
    """Buffers of a few bytes would send a copy for minutes."""
    check_least(**FINE)

    with pytest.raises(ConfigError, match=r"a whole number of at least|above 0,") as caught:
        check_least(**{**FINE, field: value})
    assert caught.value.field == field
    assert caught.value.value is value
