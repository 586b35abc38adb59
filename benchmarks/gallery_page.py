"""The page of the gallery, and its pictures: what is said of the cells that are finished.

Every number on the page is computed from the file of results; the page has the same bytes for the
same file. What planaria loses comes first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gallery_cells import (
    DEFAULT_POLICY,
    PLANARIA,
    PLANARIAS,
    SEED_BLOCKS,
    Case,
    Line,
    Runs,
    rows_by_experiment,
    runs_by_case,
)
from planaria.papers.experiments import EXPERIMENTS
from planaria.papers.rows import How, PublishedRow
from planaria.show.pictures.figures import draw_heading
from planaria.show.pictures.page import (
    FAINT_INK,
    GRID_COLOUR,
    GROUND_COLOUR,
    LABEL,
    LEFT_PT,
    PLOT_LEFT_PT,
    PLOT_RIGHT_PT,
    SMALL,
    TITLE,
    Page,
    Rectangle,
)
from planaria.show.pictures.reproduction_figure import reproduction_figure
from planaria.show.reproductions import row_texts
from planaria.show.words import count_text
from planaria.simulator.economics.compare import Interval, interval

PICTURES: Final = "results"  # Folder beside the page.
_SEEDS: Final = SEED_BLOCKS[-1]


@dataclass(frozen=True, slots=True)
class Duel:
    """Planaria beside another system in a case, paired by seed.

    Attributes:
        ours: name of planaria with its policy.
        difference: goodput of planaria less the other's, in percent of the rate of the plan with
            which a job begins.
        num_seeds: number of seeds that both have.
    """

    case: Case
    ours: str
    other: str
    difference: Interval
    num_seeds: int

    @property
    def is_lost(self) -> bool:
        """Whether the other is ahead on average."""
        return self.difference.mean < 0.0

    @property
    def is_sure(self) -> bool:
        """Whether the 95% interval leaves 0 out."""
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and (low > 0.0 or high < 0.0)


Gallery = Mapping[Case, Mapping[str, Runs]]


def write_page(path: Path, lines: Sequence[Line]) -> None:
    """Writes the page, and its pictures into a folder beside it."""
    folder = path.parent / PICTURES
    folder.mkdir(exist_ok=True)
    for name, content in pictures(lines):
        (folder / name).write_bytes(content)
    path.write_text(page(lines), "utf-8")


def page(lines: Sequence[Line]) -> str:
    """The text of the page."""
    gallery, experiments = runs_by_case(lines), rows_by_experiment(lines)
    duels = [duel for case in gallery for duel in duels_of(case, gallery[case])]
    parts = [
        "# Results",
        _introduction(lines, gallery),
        *_losses(duels),
        *_overview(gallery),
        *_case_tables(gallery, duels),
        *_experiments(experiments),
    ]
    return "\n\n".join(parts) + "\n"


def duels_of(case: Case, systems: Mapping[str, Runs]) -> Iterator[Duel]:
    """Planaria with each of its policies beside each other system."""
    for ours in PLANARIAS:
        for other in systems:
            if ours in systems and other not in PLANARIAS:
                known = systems[ours].samples_per_s.keys() & systems[other].samples_per_s.keys()
                seeds = sorted(known)
                if seeds:
                    difference = _difference(systems[ours], systems[other], seeds)
                    yield Duel(case, ours, other, difference, len(seeds))


def _introduction(lines: Sequence[Line], gallery: Gallery) -> str:
    commits = dict.fromkeys(line["commit"] for line in lines if line["commit"])
    named = ", ".join(f"`{commit}`" for commit in commits)
    counts = [len(runs.samples_per_s) for systems in gallery.values() for runs in systems.values()]
    num_full = sum(count >= _SEEDS for count in counts)
    took_h = sum(line["processor_s"] for line in lines) / 3600.0
    whole_h = sum(_SEEDS * each_s for each_s in _seed_s(lines).values()) / 3600.0
    return (
        "`make results` writes this page from `benchmarks/results/gallery.jsonl`, and goes on "
        "where it ended. Each number is computed from that file; nothing is typed by hand.\n\n"
        f"It has {count_text(len(gallery), 'case')}: a job on a cluster, and how its nodes fail, "
        "which is a recorded trace or a published rate ([FAILURES.md](FAILURES.md)). Each system "
        "goes through the same failures ([SIMULATE.md](SIMULATE.md) says how each answers them). "
        f"In all these are {count_text(sum(counts), 'run')}: {num_full} of "
        f"{count_text(len(counts), 'pair')} of a system and a case have {_SEEDS} seeds, the others "
        f"fewer (the least has {min(counts, default=0)}); every table says how many. They ran at "
        f"{count_text(len(commits), 'commit')} ({named}) and took {took_h:.2f} hours of a "
        f"processor; with {_SEEDS} seeds each, these pairs would take {whole_h:.1f}. Where the "
        "code has changed since its commit, a run stays here until `make results` repeats it.\n\n"
        "Goodput is in percent of what the job's first plan, on all nodes, trains without a "
        "failure, by the estimator. That plan has whole backwards, as all plans of the other "
        "systems but ReCycle. With split ones, whose gradients of weights fill bubbles, an "
        "iteration may be shorter, so a system can have more than 100: the policy "
        f"{DEFAULT_POLICY} looks for such a plan while nothing fails, which is most of its lead "
        "over the others where failures are rare. A difference is in points of that, seed by "
        "seed, with its 95% interval by Student's t. Each interval holds for itself: of 100 "
        f"differences that are none, about five leave 0 out by chance. `{PLANARIAS[0]}` has the "
        f"default policy, {DEFAULT_POLICY}; `{PLANARIAS[1]}` has the policy that "
        "answers as Oobleck does, with whole backwards."
    )


def _seed_s(lines: Sequence[Line]) -> dict[str, float]:
    """The seconds of a processor that a seed takes, for each pair of a system and a case."""
    sums: dict[str, tuple[float, int]] = {}
    for line in lines:
        if "case" in line:
            pair = f"{line['case']} {line['system']}"
            took_s, number = sums.get(pair, (0.0, 0))
            sums[pair] = (took_s + line["processor_s"], number + len(line["losses"]))
    return {pair: took_s / number for pair, (took_s, number) in sums.items()}


# -- what is lost ----------------------------------------------------------------------------------


def _losses(duels: Sequence[Duel]) -> Iterator[str]:
    """The cases in which another system is ahead, the worst first."""
    yield "## What planaria loses"
    for ours in PLANARIAS:
        some = [duel for duel in duels if duel.ours == ours]
        if not some:
            yield f"`{ours}` has not run yet."
            continue
        counts = [duel.num_seeds for duel in some]
        lost = sorted((d for d in some if d.is_lost), key=lambda d: d.difference.mean)
        sure = [duel for duel in lost if duel.is_sure]
        yield (
            f"`{ours}` is behind in {len(sure)} of {count_text(len(some), 'comparison')}, and in "
            f"{len(lost) - len(sure)} more by less than can be told from chance. "
            f"A comparison has {_seeds_text(min(counts), max(counts))}."
        )
        for texts in (sure, [duel for duel in lost if not duel.is_sure]):
            if texts:
                yield _table(
                    ("difference", "other system", "case", "seeds"),
                    [
                        (
                            _interval_text(duel.difference, sign="+"),
                            duel.other,
                            str(duel.case),
                            str(duel.num_seeds),
                        )
                        for duel in texts
                    ],
                )


def _seeds_text(fewest: int, most: int) -> str:
    return count_text(most, "seed") if fewest == most else f"{fewest} to {most} seeds"


def _overview(gallery: Gallery) -> Iterator[str]:
    """A table for each policy of planaria with a row for each case: the best other system."""
    yield "## Every trace and rate"
    yield f"![Goodput of all systems in each case]({PICTURES}/goodput.svg)"
    yield (
        "A row has the seeds that all its systems have. Losses are the mean number of times that "
        "nodes were lost in a run of planaria."
    )
    for ours in PLANARIAS:
        rows = []
        for case, systems in gallery.items():
            seeds = _common_seeds(systems, ours)
            if seeds:
                means = _means(systems, ours, seeds)
                best = max((name for name in means if name != ours), key=means.__getitem__)
                difference = _difference(systems[ours], systems[best], seeds)
                losses = sum(systems[ours].losses[seed] for seed in seeds) / len(seeds)
                rows.append(
                    (
                        str(case),
                        f"{losses:.1f}",
                        f"{means[ours]:.1f}",
                        f"{best} {means[best]:.1f}",
                        _interval_text(difference, sign="+"),
                        str(len(seeds)),
                    )
                )
        if rows:
            yield _table(("case", "losses", ours, "best other", "difference", "seeds"), rows)


def _common_seeds(systems: Mapping[str, Runs], ours: str) -> list[int]:
    """The seeds that planaria with a policy and all other systems have; none if one is missing."""
    rivals = [runs for name, runs in systems.items() if name not in PLANARIAS]
    if ours not in systems or not rivals:
        return []
    seeds = set(systems[ours].samples_per_s)
    return sorted(seeds.intersection(*(runs.samples_per_s for runs in rivals)))


def _means(systems: Mapping[str, Runs], ours: str, seeds: Sequence[int]) -> dict[str, float]:
    """The mean goodput of planaria with a policy and of the other systems over some seeds."""
    return {
        name: _goodput(runs, seeds).mean
        for name, runs in systems.items()
        if name == ours or name not in PLANARIAS
    }


def _case_tables(gallery: Gallery, duels: Sequence[Duel]) -> Iterator[str]:
    """A table for each case with all systems, the fastest first."""
    for case, systems in gallery.items():
        yield f"### {case}"
        ahead = {(duel.ours, duel.other): duel for duel in duels if duel.case == case}
        shown = [name for name in PLANARIAS if name in systems]
        rows = [
            (
                name,
                _interval_text(_goodput(runs, list(runs.samples_per_s))),
                *(
                    _interval_text(ahead[ours, name].difference, sign="+")
                    if (ours, name) in ahead
                    else ""
                    for ours in shown
                ),
                str(len(runs.samples_per_s)),
            )
            for name, runs in systems.items()
        ]
        rows.sort(key=lambda row: -float(row[1].partition(" ")[0]))
        yield _table(("system", "goodput", *(f"{ours} has" for ours in shown), "seeds"), rows)


def _goodput(runs: Runs, seeds: Sequence[int]) -> Interval:
    """The goodput over some seeds, in percent of the rate of the first plan."""
    rates = [runs.samples_per_s[seed] for seed in seeds]
    return interval([100.0 * rate / runs.first_samples_per_s for rate in rates])


def _difference(ours: Runs, other: Runs, seeds: Sequence[int]) -> Interval:
    """The goodput of one less that of another, seed by seed, in percent of the first plan's."""
    return interval(
        [
            100.0
            * (ours.samples_per_s[seed] - other.samples_per_s[seed])
            / ours.first_samples_per_s
            for seed in seeds
        ]
    )


# -- the papers ------------------------------------------------------------------------------------


def _experiments(experiments: Mapping[str, Sequence[PublishedRow]]) -> Iterator[str]:
    """The published tables and figures, row by row."""
    if not experiments:
        return
    rows = [row for some in experiments.values() for row in some]
    num_printed = sum(row.is_comparable for row in rows)
    num_back = sum(row.has_come_back for row in rows)
    num_own_back = sum(row.is_own and row.has_come_back for row in rows)
    yield "## The papers' tables and figures"
    yield (
        f"{len(rows)} rows of {count_text(len(experiments), 'table')} and figures; {num_printed} "
        f"have a printed number that could come back, and {num_back} come back. "
        f"Not each is a result of its own: some follow from other printed numbers by arithmetic, "
        "some stand in two tables, and a constant was chosen to match some; their notes say so. Of "
        f"the {sum(row.is_own for row in rows)} others {num_own_back} come back. "
        "[PAPERS.md](PAPERS.md) says what the ways mean and what was found. What does not come "
        "back is first in each table."
    )
    for name, some in experiments.items():
        experiment = EXPERIMENTS[name]
        yield f"### {name}: {experiment.title}"
        yield f"{experiment.source}; {experiment.unit}. {experiment.note}".rstrip()
        notes: dict[str, int] = {}
        table = [
            (*row_texts(row), _mark(notes, row.full_note))
            for row in sorted(some, key=_has_come_back)
        ]
        head = ", ".join(dict.fromkeys(key for row in some for key in row.keys))
        titles = (head, "published", "ours", "ratio", "how", "note")
        yield _folded(len(table), _table(titles, table))
        if notes:
            yield "\n".join(f"{number}. {note}" for note, number in notes.items())
        if _is_drawn(some):
            yield f"![{experiment.title}: published numbers and ours]({PICTURES}/{name}.svg)"


def _is_drawn(rows: Sequence[PublishedRow]) -> bool:
    """Whether a picture of them shows published numbers beside ours."""
    return any(row.published is not None and row.ours is not None for row in rows)


def _has_come_back(row: PublishedRow) -> bool:
    """Whether nothing is wrong with a row: it came back, or could not."""
    return row.has_come_back or not (row.is_comparable or row.how is How.NOT)


def _mark(notes: dict[str, int], note: str) -> str:
    return str(notes.setdefault(note, len(notes) + 1)) if note else ""


def _folded(num_rows: int, table: str) -> str:
    """A table that is shown when the reader asks for it."""
    summary = f"<summary>{count_text(num_rows, 'row')}</summary>"
    return f"<details>{summary}\n\n{table}\n\n</details>"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _interval_text(of: Interval, *, sign: str = "") -> str:
    """A mean and half the width of its interval, such as "93.12 +-0.40"."""
    if of.high is None:
        return f"{of.mean:{sign}.2f}"
    return f"{of.mean:{sign}.2f} +-{of.high - of.mean:.2f}"


# -- pictures --------------------------------------------------------------------------------------

_OUR_COLOUR: Final = "#0072b2"
_BEST_COLOUR: Final = "#d55e00"
_ROW_PT: Final = 15.0
_MARK_PT: Final = 3.0


def pictures(lines: Sequence[Line]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the pictures that the page shows."""
    gallery = runs_by_case(lines)
    if any(_common_seeds(systems, name) for systems in gallery.values() for name in PLANARIAS):
        yield "goodput.svg", _goodput_figure(gallery)
    for name, rows in rows_by_experiment(lines).items():
        if _is_drawn(rows):
            yield f"{name}.svg", reproduction_figure(EXPERIMENTS[name], rows, picture="svg")


def _goodput_figure(gallery: Gallery) -> bytes:
    """A line for each case with a mark for each system, over the seeds that all of them have."""
    drawing = Page()
    drawing.text((LEFT_PT, 42), "Goodput in each case", TITLE)
    legend = (
        (_OUR_COLOUR, PLANARIA),
        (_BEST_COLOUR, "the best other system"),
        (FAINT_INK, "the others"),
    )
    note = "percent of what the first plan trains without failures"
    draw_heading(drawing, 66, heading="Systems", note=note, legend=legend)
    goodputs: dict[Case, dict[str, float]] = {}
    for case, systems in gallery.items():
        ours = next((name for name in PLANARIAS if _common_seeds(systems, name)), "")
        if ours:
            goodputs[case] = _means(systems, ours, _common_seeds(systems, ours))
    most = max(100.0, *(value for means in goodputs.values() for value in means.values()))
    left, right = PLOT_LEFT_PT + 100.0, PLOT_RIGHT_PT
    top = 84.0
    bottom = top + _ROW_PT * len(goodputs)
    for percent in range(0, int(most) + 1, 20):
        x = left + (right - left) * percent / most
        drawing.line((x, top), (x, bottom), colour=GRID_COLOUR)
        drawing.text((x, bottom + 12), f"{percent}", SMALL, align="center")
    for case, means in goodputs.items():
        drawing.text((left - 8, top + 10), str(case), LABEL, align="right")
        drawing.ground(GROUND_COLOUR, Rectangle(left, top + 7, right - left, 1))
        others = sorted((n for n in means if n not in PLANARIAS), key=means.__getitem__)
        ours = next(name for name in means if name in PLANARIAS)
        marks = [(name, FAINT_INK) for name in others[:-1]]
        marks += [(others[-1], _BEST_COLOUR), (ours, _OUR_COLOUR)]
        for name, colour in marks:
            x = left + (right - left) * means[name] / most
            drawing.line((x, top + 3), (x, top + 12), colour=colour, width_pt=_MARK_PT)
        top += _ROW_PT
    return drawing.content(bottom + 28, "svg")
