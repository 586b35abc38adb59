"""Draws docs/architecture.svg: the folders of planaria on their levels, and what imports what.

    python docs/draw_architecture.py > docs/architecture.svg

The edges are the import statements under src/planaria. The levels, the wall and the folders that
may import torch are those that tests/test_tidy.py enforces, read from that file. An edge that
follows from others is left out: nodes > coordinator > core stands for nodes > core, too.

A folder's column is chosen by hand (COLUMNS); a line bends between two rows, where no box stands.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = "planaria"
# The package itself and `python -m planaria` are doors to the folders, and no part of the picture.
DOORS: Final = {PACKAGE, "__main__"}

# Where each box stands from left to right, as (centre, width), in columns.
COLUMNS: Final = {
    "cli": (6.2, 1),
    "job": (7.4, 1),
    "chaos": (8.6, 1),
    "show": (7.2, 1),
    "papers": (8.0, 1),
    "profiles": (9.4, 1),
    "engine": (1.4, 1),
    "torchrun": (2.9, 1),
    "nodes": (4.6, 1),
    "simulator": (6.0, 1),
    "data": (1.0, 1),
    "models": (2.2, 1),
    "checkpoint": (3.1, 1),
    "transport": (3.1, 1),
    "user_functions": (0.1, 1.2),
    "coordinator": (5.2, 1),
    "systems": (6.6, 1),
    "protocol": (6.4, 1),
    "store": (7.4, 1),
    "policies": (4.6, 1),
    "placement": (5.8, 1),
    "planner": (5.1, 1),
    "restorer": (4.0, 1),
    "estimator": (5.1, 1),
    "schedule": (5.1, 1),
    "observe": (8.4, 1),
    "core": (5.2, 9.2),
    "errors": (4.7, 10.4),
}

COLUMN, BOX_WIDTH, BOX_HEIGHT, GAP, MARGIN = 96.0, 88.0, 26.0, 32.0, 72.0
WALL_GAP = 58.0
INK, DECIDES, ACTS, TORCH, LINE = "#24292f", "#ddf4ff", "#fff8c5", "#ffd8b5", "#8c959f"


class Levels(NamedTuple):
    """What tests/test_tidy.py says of the folders."""

    levels: tuple[set[str], ...]
    wall: int
    know_torch: set[str]

    def of(self, part: str) -> int:
        for number, parts in enumerate(self.levels):
            if part in parts:
                return number
        sys.exit(f"{part} has no level; add it to LEVELS in tests/test_tidy.py")


class Box(NamedTuple):
    """A folder, or a module outside of folders, in points from the upper left corner."""

    name: str
    level: int
    x: float
    y: float
    width: float

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        return self.y + BOX_HEIGHT


Edge = tuple[str, str]
Point = tuple[float, float]


def main() -> None:
    """Prints the picture."""
    levels = enforced_levels((ROOT / "tests" / "test_tidy.py").read_text(encoding="utf-8"))
    modules = {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path.read_text("utf-8")
        for path in sorted((ROOT / "src" / PACKAGE).rglob("*.py"))
    }
    sys.stdout.write(picture(levels, edges_of(modules)))


def enforced_levels(source: str) -> Levels:
    """The constants of the test that checks imports."""
    names: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("LEVELS", "WALL", "KNOW_TORCH"):
                names[name] = ast.literal_eval(node.value)
    return Levels(names["LEVELS"], names["WALL"], names["KNOW_TORCH"])


def edges_of(modules: dict[str, str]) -> set[Edge]:
    """Which folder imports from which other one; modules that lie in no folder count as one."""
    found = set()
    for module, source in modules.items():
        for name in _imports(ast.parse(source)):
            edge = _part(module), _part(name)
            if name.startswith(f"{PACKAGE}.") and edge[0] != edge[1] and not DOORS & {*edge}:
                found.add(edge)
    return found


def _part(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else parts[0]


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            yield from (f"{PACKAGE}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def needed_edges(edges: set[Edge], levels: Levels) -> list[Edge]:
    """The edges between levels that do not follow from others."""
    below: dict[str, set[str]] = {}
    for source, target in sorted(edges):
        if levels.of(source) != levels.of(target):
            below.setdefault(source, set()).add(target)
    reached: dict[str, set[str]] = {}
    for source in sorted(below, key=levels.of):
        reached[source] = below[source].union(*(reached.get(t, ()) for t in below[source]))
    return [
        (source, target)
        for source in sorted(below, key=lambda part: (-levels.of(part), part))
        for target in sorted(below[source])
        if not any(target in reached.get(other, ()) for other in below[source])
    ]


# -- the picture -----------------------------------------------------------------------------------


def picture(levels: Levels, edges: set[Edge]) -> str:
    """The SVG text."""
    boxes = _boxes(levels, {part for edge in edges for part in edge})
    wall_y = _row_y(levels.wall, levels) + BOX_HEIGHT + WALL_GAP / 2
    width, height = MARGIN + 10.2 * COLUMN, _row_y(0, levels) + BOX_HEIGHT + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"',
        f'  width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"',
        f'  markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        *_legend(),
        *_wall(wall_y, width),
        *_lines(needed_edges(edges, levels), boxes),
        *_siblings(edges, boxes),
        *(_box(box, levels) for box in boxes.values()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _row_y(level: int, levels: Levels) -> float:
    rows_above = len(levels.levels) - 1 - level
    return 16 + rows_above * (BOX_HEIGHT + GAP) + (WALL_GAP - GAP if level < levels.wall else 0)


def _boxes(levels: Levels, parts: set[str]) -> dict[str, Box]:
    """A box for each part, from the top and from the left."""
    if unplaced := sorted(parts - COLUMNS.keys()):
        sys.exit(f"{unplaced} have no column; add them to COLUMNS in docs/draw_architecture.py")
    found = [
        Box(
            name=part,
            level=levels.of(part),
            x=MARGIN + COLUMNS[part][0] * COLUMN,
            y=_row_y(levels.of(part), levels),
            width=(COLUMNS[part][1] - 1) * COLUMN + BOX_WIDTH,
        )
        for part in parts
    ]
    return {box.name: box for box in sorted(found, key=lambda box: (-box.level, box.x))}


def _box(box: Box, levels: Levels) -> str:
    fill = ACTS if box.level >= levels.wall else DECIDES
    fill = TORCH if box.name in levels.know_torch else fill
    return (
        f'<rect x="{box.left:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{BOX_HEIGHT:g}" rx="4" fill="{fill}" stroke="{INK}"/>'
        f'<text x="{box.x:.1f}" y="{box.y + 17.5:.1f}" text-anchor="middle" '
        f'fill="{INK}">{box.name}</text>'
    )


def _wall(y: float, width: float) -> list[str]:
    return [
        f'<line x1="8" y1="{y:.1f}" x2="{width - 8:g}" y2="{y:.1f}"',
        '  stroke="#cf222e" stroke-width="5"/>',
        f'<text x="8" y="{y - 9:.1f}" fill="#cf222e" font-weight="bold">acts</text>',
        f'<text x="8" y="{y + 19:.1f}" fill="#cf222e" font-weight="bold">decides</text>',
        f'<text x="{width - 8:g}" y="{y - 9:.1f}" fill="#cf222e"',
        '  text-anchor="end" font-weight="bold">the wall</text>',
    ]


def _legend() -> list[str]:
    texts = [(ACTS, "acts"), (TORCH, "acts, and may import torch"), (DECIDES, "decides: pure code")]
    found = []
    for number, (fill, text) in enumerate(texts):
        y = 20 + 20 * number
        found.append(
            f'<rect x="8" y="{y}" width="22" height="12" rx="2" fill="{fill}" stroke="{INK}"/>'
            f'<text x="38" y="{y + 11}" fill="{INK}">{text}</text>'
        )
    found.append(
        f'<path d="M8 86H30" stroke="{LINE}" stroke-width="1.5" marker-end="url(#arrow)"/>'
        f'<text x="38" y="90" fill="{INK}">imports (what follows from other lines is left out)'
        "</text>"
    )
    return found


def _lines(edges: list[Edge], boxes: dict[str, Box]) -> Iterator[str]:
    """Each edge leaves its source at a place of its own, in the order of the targets."""
    for name, source in boxes.items():
        targets = [boxes[target] for edge_source, target in edges if edge_source == name]
        targets.sort(key=lambda box: (_entry(source.x, box), box.level))
        for number, target in enumerate(targets, start=1):
            x = source.left + source.width * number / (len(targets) + 1)
            path = _path((x, source.bottom), target, source, boxes)
            yield (
                f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.5" '
                f'marker-end="url(#arrow)"><title>{name} imports {target.name}</title></path>'
            )


def _entry(x: float, target: Box) -> float:
    """Where a line that comes from x enters: in the middle of a narrow box, anywhere in a wide."""
    if target.width <= 2 * BOX_WIDTH:
        return target.x
    return min(max(x, target.left + 12), target.right - 12)


def _path(start: Point, target: Box, source: Box, boxes: dict[str, Box]) -> str:
    """Straight down, one bend between two rows, straight down; past all boxes if that can be."""
    x, y = start
    end_x, end_y = _entry(x, target), target.y
    rows = sorted({(box.y, box.bottom) for box in boxes.values() if y < box.bottom <= end_y})
    tops, bottoms = [y, *(bottom for _, bottom in rows)], [*(top for top, _ in rows), end_y]
    between = [box for box in boxes.values() if source.level > box.level > target.level]

    def num_hit(gap: Point) -> int:
        def is_hit(box: Box) -> bool:
            at_x = x if box.y < gap[1] else end_x
            return box.left - 5 < at_x < box.right + 5

        return sum(map(is_hit, between))

    # Of equal ones the highest: lines to one target run together from there.
    top, bottom = min(zip(tops, bottoms, strict=True), key=num_hit)
    middle = (top + bottom) / 2
    return (
        f"M{x:.1f} {y:.1f}V{top:.1f}"
        f"C{x:.1f} {middle:.1f} {end_x:.1f} {middle:.1f} {end_x:.1f} {bottom:.1f}V{end_y:.1f}"
    )


def _siblings(edges: set[Edge], boxes: dict[str, Box]) -> Iterator[str]:
    """Lines within a level, which only the top one has: over the boxes' heads, or side by side."""
    done = set()
    for pair in sorted({(min(edge), max(edge)) for edge in edges}):
        one, other = sorted((boxes[part] for part in pair), key=lambda box: box.x)
        if one.level != other.level or pair in done:
            continue
        done.add(pair)
        is_next = not any(one.x < b.x < other.x and b.level == one.level for b in boxes.values())
        path = f"M{one.right:.1f} {one.y + 13:.1f}H{other.left:.1f}"
        if not is_next:
            path = f"M{one.x:.1f} {one.y:.1f}C{one.x:.1f} 0 {other.x:.1f} 0 {other.x:.1f} {one.y}"
        yield f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.5"/>'


if __name__ == "__main__":
    main()
