"""What the parts of a picture of a plan share: places, fonts, colours and steps of scales.

Colours are of Okabe and Ito's palette, which people who confuse red and green can tell apart, and
which differ in lightness too, so that a grey print still shows them.
"""

from math import floor, log10
from typing import Final

from planaria.show.page import FAINT_INK, INK, Font

PAGE_WIDTH_PT: Final = 900.0  # 1,200 pixels of a browser.
LEFT_PT: Final = 32.0
RIGHT_PT: Final = PAGE_WIDTH_PT - LEFT_PT
PLOT_LEFT_PT: Final = 178.0
PLOT_RIGHT_PT: Final = 812.0
PLOT_WIDTH_PT: Final = PLOT_RIGHT_PT - PLOT_LEFT_PT

TITLE: Final = Font(16.0, INK, "bold")
SUBTITLE: Final = Font(9.0, FAINT_INK)
HEADING: Final = Font(11.0, INK, "bold")
NAME: Final = Font(8.5, INK, "bold")
LABEL: Final = Font(7.5, FAINT_INK)
SMALL: Final = Font(7.0, FAINT_INK)

FORWARD_COLOUR: Final = "#3d94c7"
BACKWARD_COLOUR: Final = "#eeb23c"
MEMORY_COLOUR: Final = "#4cb393"
GROUND_COLOUR: Final = "#eef1f4"
GRID_COLOUR: Final = "#d5dbe1"


def nice_step(span: float, num_steps_max: int) -> float:
    """The smallest of 1, 2 and 5 times a power of ten of which a span has no more steps."""
    if span <= 0:
        return 1.0
    power = 10.0 ** floor(log10(span / num_steps_max))
    return next(power * times for times in (1, 2, 5, 10) if span / (power * times) <= num_steps_max)
