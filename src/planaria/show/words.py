"""Numbers as text for people: ranges, counts, seconds and bytes."""

from collections.abc import Iterable
from math import floor, log10

from planaria.core.plan import Stage


def ranges_text(numbers: Iterable[int]) -> str:
    """The numbers in their given order, with runs as ranges: 0, 1, 2, 5 as "0-2, 5"."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ", ".join(range_text(first, last) for first, last in ranges)


def range_text(first: int, last: int) -> str:
    """A range that includes both ends: 0 and 4 as "0-4", 4 and 4 as "4"."""
    return str(first) if first == last else f"{first}-{last}"


def layers_text(stage: Stage) -> str:
    """The layers of a stage, such as "layers 0-4" or "layer 4"."""
    noun = "layer" if stage.end_layer - stage.first_layer == 1 else "layers"
    return f"{noun} {range_text(stage.first_layer, stage.end_layer - 1)}"


def count_text(count: int, noun: str) -> str:
    """The count with its noun in singular or plural: "1 node", "2 batches", "2 copies"."""
    if count == 1:
        return f"{count} {noun}"
    if noun.endswith("py"):
        return f"{count} {noun.removesuffix('y')}ies"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def printable(text: str) -> str:
    """The text with a space for each unprintable letter: newlines, and control characters, which a
    terminal would obey and XML forbids."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def share_text(share: float) -> str:
    """A share of 0 to 1 in percent: 0.123 as "12.3%"."""
    return f"{100 * share:.1f}%"


def seconds_text(seconds: float) -> str:
    """A time in s, ms or us, in the largest unit that gives a number of 1 or more."""
    if not seconds:
        return "0 s"
    unit, unit_s = seconds_unit(seconds)
    return f"{seconds / unit_s:,.{2 if unit == 's' else 1}f} {unit}"


def seconds_range_text(least_s: float, most_s: float) -> str:
    """A range of times in one unit, such as "60-140 ms" or "1.2-3.0 s"."""
    unit, unit_s = seconds_unit(most_s)
    digits = 1 if most_s < 10 * unit_s else 0
    return f"{least_s / unit_s:,.{digits}f}-{most_s / unit_s:,.{digits}f} {unit}"


def duration_text(seconds: float) -> str:
    """A rough duration, such as "40 s", "30 min" or "7 h"."""
    for unit, unit_s, seconds_max in (("s", 1.0, 120.0), ("min", 60.0, 7200.0)):
        if seconds < seconds_max:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 3600.0:,.0f} h"


def seconds_unit(seconds: float) -> tuple[str, float]:
    """The largest unit in which a time is 1 or more (at least us), and its length in seconds."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    return next((unit for unit in units if seconds >= unit[1]), units[-1])


def bytes_text(num_bytes: int) -> str:
    """A number of bytes in the largest unit that gives a number of 1 or more."""
    unit, unit_bytes = bytes_unit(num_bytes)
    return f"{num_bytes / unit_bytes:,.{0 if unit == 'B' else 1}f} {unit}"


def bytes_unit(num_bytes: int) -> tuple[str, int]:
    """The largest unit in which a number of bytes is 1 or more (at most TiB), and its bytes."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(0, num_bytes.bit_length() - 1) // 10, len(units) - 1)
    return units[power], 1024**power


def nice_step(span: float, num_steps_max: int) -> float:
    """The smallest round step (1, 2 or 5 times a power of ten) that divides a span into at most
    `num_steps_max` steps; 1 for an empty span."""
    if span <= 0:
        return 1.0
    power = 10.0 ** floor(log10(span / num_steps_max))
    return next(power * times for times in (1, 2, 5, 10) if span / (power * times) <= num_steps_max)
