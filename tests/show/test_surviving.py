"""How likely state survives, as it is printed."""

import pytest

from planaria.placement.survival import Estimate
from planaria.show.copies_tables import probability_text


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(1.0), "100.00%"),
        (Estimate(0.999_97), "> 99.99%"),
        (Estimate(0.999_94), "99.99%"),
        (Estimate(0.8), "80.00%"),
        (Estimate(0.0), "0.00%"),
        (Estimate(0.5, 0.001), "50.00% +- 0.10%"),
    ],
)
def test_nothing_is_rounded_to_certainty(estimate: Estimate, text: str) -> None:
    """Of a thousand nodes few losses lose anything, but some do."""
    assert probability_text(estimate) == text
