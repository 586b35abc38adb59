"""Runs every system on every trace, computes the papers' tables, and writes docs/RESULTS.md.

`make results` runs it. Each finished cell is a line of the file that `--results` names; when the
script starts again, it runs what is missing, and what ran with other code (gallery_cells.py).
First come the papers' tables and figures, then a few seeds of every case and system, then more of
them, until `--seeds` are done or no cell fits into `--minutes` any more. On two processors 100
seeds take about two hours. `--page FILE` writes the page of what is in the file, with its pictures
in the folder `results` beside it; `--minutes 0` does nothing else.

`--only TEXT` runs the cells whose names hold the text; repeatable. The default is a quick look.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from gallery_cells import (
    AnyCell,
    Line,
    append_line,
    cells,
    line_of,
    missing_cells,
    read_lines,
    write_lines,
)
from gallery_page import write_page


def main() -> int:
    """Runs what is missing and writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        results = options.results or Path(directory) / "gallery.jsonl"
        known = read_lines(results)
        wanted = [
            cell
            for cell in cells(options.seeds)
            if not options.only or any(text in cell.name for text in options.only)
        ]
        missing = missing_cells(wanted, known) if options.minutes else []
        end_s = time.monotonic() + 60.0 * options.minutes
        num_done = 0
        for line in done_lines(missing, end_s=end_s, num_processes=options.processes):
            known.pop(line["key"], None)  # The newest line of a cell comes last.
            known[line["key"]] = line
            append_line(results, line)
            num_done += 1
            print(f"{num_done} of {len(missing)}, {line['processor_s']:.1f} s", flush=True)
        if num_done < len(missing):
            print(f"{len(missing) - num_done} cells are missing; run it again to go on")
        if options.page:
            write_lines(results, known.values())
            write_page(options.page, list(known.values()))
    return 0


def done_lines(missing: Sequence[AnyCell], *, end_s: float, num_processes: int) -> Iterator[Line]:
    """Runs cells in their order, a process for each, until all are done or the time is over.

    Args:
        end_s: time of the monotonic clock at which no further cell begins.
    """
    waiting = iter(missing)
    under_way: set[Future[Line]] = set()
    with ProcessPoolExecutor(num_processes, mp_context=get_context("fork")) as pool:
        while True:
            while len(under_way) < num_processes and time.monotonic() < end_s:
                cell = next(waiting, None)
                if cell is None:
                    break
                under_way.add(pool.submit(line_of, cell))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


if __name__ == "__main__":
    sys.exit(main())
