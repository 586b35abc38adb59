"""A page that collects boxes, lines and text, and the fonts and colours of all pictures.

Coordinates are points (1/72 inch) from the upper left corner.

matplotlib measures text and draws the page. It is an optional dependency and its import takes a
third of a second, so only `Page` imports it. No global state of it stays changed: pyplot is not
used, and a call restores the user's settings before it returns. The same page gives the same bytes:
an SVG keeps text as text, ids are hashed with a constant, and no file contains its creation time.

Colours come from the palette of Okabe and Ito: people with red-green colour blindness can tell them
apart, and they also differ in lightness, so they survive a grey print.
"""

import importlib.util
import io
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from planaria.errors import ConfigError
from planaria.show.words import printable

if TYPE_CHECKING:
    from matplotlib.path import Path

Format = Literal["svg", "png", "pdf"]
_FORMATS: Final[dict[str, Format]] = {".svg": "svg", ".png": "png", ".pdf": "pdf"}

INK: Final = "#1f2933"
FAINT_INK: Final = "#66727f"

_DOTS_PER_INCH: Final = 192  # PNG only: twice the 96 at which browsers show an SVG.
_POINTS_PER_INCH: Final = 72
_MEASURED_PT: Final = 100.0
_BOXES_PER_PATH: Final = 500  # Agg refuses paths of some ten thousand corners.
# The first one comes with matplotlib; SVG viewers that lack it fall back to the next.
_FAMILIES: Final = ["DejaVu Sans", "Verdana", "Helvetica", "Arial"]
_SETTINGS: Final[dict[Any, Any]] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": _FAMILIES,
    "svg.fonttype": "none",
    "svg.hashsalt": "planaria",
    "pdf.fonttype": 42,
}
_METADATA: Final[dict[Format, dict[str, None]]] = {
    "svg": {"Creator": None, "Date": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


class Font(NamedTuple):
    """Size, colour and weight of text."""

    size_pt: float = 7.0
    colour: str = INK
    weight: Literal["normal", "bold"] = "normal"


PAGE_WIDTH_PT: Final = 900.0  # 1,200 pixels in a browser.
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
REDUCTION_COLOUR: Final = "#c583ad"
MEMORY_COLOUR: Final = "#4cb393"
GROUND_COLOUR: Final = "#eef1f4"
GRID_COLOUR: Final = "#d5dbe1"


class _Text(NamedTuple):
    """Text on a page.

    Attributes:
        x: position of the left end, centre or right end, as `align` says.
        y: position of the baseline.
    """

    x: float
    y: float
    text: str
    font: Font
    align: Literal["left", "center", "right"]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box on the page; y points down."""

    left: float
    top: float
    width: float
    height: float


def is_picture(name: str) -> bool:
    """Whether the suffix of a file name is that of a supported picture format."""
    return name[name.rfind(".") :].lower() in _FORMATS


def picture_format(option: str, name: str) -> Format:
    """The picture format that the suffix of a file name stands for.

    Args:
        option: name of the option for the error message.

    Raises:
        ConfigError: the suffix is not supported, or matplotlib is not installed.
    """
    picture = _FORMATS.get(name[name.rfind(".") :].lower())
    if picture is None:
        raise ConfigError(option, name, f"name a file that ends in {', '.join(_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            option,
            name,
            "matplotlib draws the picture, and it is not installed: pip install -e '.[plots]' in "
            "planaria's checkout",
        )
    return picture


class Page:
    """The elements of a page; drawn from bottom to top are the ground, boxes, lines and text."""

    def __init__(self) -> None:
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import text_to_path

        with _settings():
            self._measured_fonts = {
                weight: FontProperties(family=_FAMILIES[0], weight=weight, size=_MEASURED_PT)
                for weight in ("normal", "bold")
            }
        self._text_to_path = text_to_path
        self._ground: dict[str, list[Rectangle]] = {}
        self._boxes: dict[str, list[Rectangle]] = {}
        self._lines: dict[tuple[str, float], list[tuple[tuple[float, float], ...]]] = {}
        self._texts: list[_Text] = []
        self._widths_em: dict[tuple[str, str], float] = {}

    def ground(self, colour: str, rectangle: Rectangle) -> None:
        """Puts a box below everything else."""
        self._ground.setdefault(colour, []).append(rectangle)

    def box(self, colour: str, rectangle: Rectangle) -> None:
        """Puts a box on the page; boxes of different colours must not overlap."""
        self._boxes.setdefault(colour, []).append(rectangle)

    def line(
        self, *points: tuple[float, float], colour: str = FAINT_INK, width_pt: float = 0.6
    ) -> None:
        """Puts a line through these points on the page."""
        self._lines.setdefault((colour, width_pt), []).append(points)

    def text(
        self,
        place: tuple[float, float],
        text: str,
        font: Font,
        *,
        align: Literal["left", "center", "right"] = "left",
    ) -> None:
        """Puts text on the page.

        Args:
            place: x of the end or centre that `align` names, y of the baseline.
        """
        if text:
            self._texts.append(_Text(*place, printable(text), font, align))

    def text_width(self, text: str, font: Font) -> float:
        """The width of a text in points."""
        key = (printable(text), font.weight)
        if key not in self._widths_em:
            measured_font = self._measured_fonts[font.weight]
            width, _, _ = self._text_to_path.get_text_width_height_descent(
                key[0], measured_font, False
            )
            self._widths_em[key] = width / _MEASURED_PT
        return self._widths_em[key] * font.size_pt

    def all_fitting(
        self, forms: Sequence[Sequence[str]], widths: Sequence[float], font: Font
    ) -> list[str]:
        """The texts in the first form in which every text fits its width.

        If there is no such form: the texts of the last form, empty where one does not fit.

        Args:
            forms: alternative ways to write all texts, the preferred one first.
            widths: space for each text, points.
        """
        for form in forms:
            pairs = zip(form, widths, strict=True)
            fits = [self.text_width(text, font) <= width for text, width in pairs]
            if all(fits):
                break
        return [text if does_fit else "" for text, does_fit in zip(form, fits, strict=True)]

    def shortened_text(self, text: str, width: float, font: Font) -> str:
        """The text, with dots in place of its end if it is wider than `width` points."""
        if self.text_width(text, font) <= width:
            return text

        def without_end(end: int) -> str:
            return text[:end].rstrip(" ,") + " .."

        ends = range(len(text))
        most = bisect(ends, width, key=lambda end: self.text_width(without_end(end), font))
        return without_end(max(0, most - 1))

    def content(self, height_pt: float, picture: Format) -> bytes:
        """The content of a picture file with the page, cut off at a height."""
        with _settings():
            return self._content(height_pt, picture)

    def _content(self, height_pt: float, picture: Format) -> bytes:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import PathPatch

        size_inches = (PAGE_WIDTH_PT / _POINTS_PER_INCH, height_pt / _POINTS_PER_INCH)
        figure = Figure(figsize=size_inches, dpi=_DOTS_PER_INCH, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, PAGE_WIDTH_PT)
        axes.set_ylim(height_pt, 0)
        for colour, boxes in (*self._ground.items(), *self._boxes.items()):
            # Many boxes share a path: with a path per box, files are ten times larger.
            for first in range(0, len(boxes), _BOXES_PER_PATH):
                path = _path([_around(box) for box in boxes[first : first + _BOXES_PER_PATH]])
                patch = PathPatch(path, facecolor=colour, linewidth=0, snap=False, clip_on=False)
                axes.add_artist(patch)
        for (colour, width_pt), lines in self._lines.items():
            path = _path(lines)
            patch = PathPatch(path, edgecolor=colour, linewidth=width_pt, fill=False, snap=False)
            axes.add_artist(patch)
        for x, y, text, font, align in self._texts:
            axes.text(
                *_rounded_point(x, y),
                text,
                ha=align,
                va="baseline",
                size=font.size_pt,
                color=font.colour,
                weight=font.weight,
                parse_math=False,
            )
        file = io.BytesIO()
        figure.savefig(file, format=picture, dpi=_DOTS_PER_INCH, metadata=_METADATA[picture])
        return file.getvalue()


@contextmanager
def _settings() -> Iterator[None]:
    """Sets matplotlib to its defaults and ours; restores the user's settings at the end."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def _path(lines: Sequence[Sequence[tuple[float, float]]]) -> "Path":
    """All lines as one path; a line that ends at its first point becomes a closed polygon."""
    from matplotlib.path import Path

    points = [_rounded_point(*point) for line in lines for point in line]
    codes = [
        code
        for line in lines
        for code in (
            Path.MOVETO,
            *[Path.LINETO] * (len(line) - 2),
            Path.CLOSEPOLY if line[0] == line[-1] else Path.LINETO,
        )
    ]
    return Path(points, codes)


def _around(box: Rectangle) -> tuple[tuple[float, float], ...]:
    """The corners of a box; the first one is repeated at the end."""
    left, top, right, bottom = box.left, box.top, box.left + box.width, box.top + box.height
    return ((left, top), (right, top), (right, bottom), (left, bottom), (left, top))


def _rounded_point(x: float, y: float) -> tuple[float, float]:
    """The point, rounded to 0.01 points: more digits make files larger and no one sees them."""
    return round(x, 2), round(y, 2)
