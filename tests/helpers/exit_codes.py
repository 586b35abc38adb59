"""The exit codes of the page on clusters, and a planaria that ends with them."""

import re
from pathlib import Path
from typing import Final

import pytest

from helpers.fake_scheduler import FakeScheduler

ROOT: Final = Path(__file__).resolve().parents[2]
# The process of rank $rank: it ends with $HEAD or $OTHER first, then with 0. A head ends once the
# other one has been started so often.
FAKE_PLANARIA: Final = """\
echo "$*" >> "$FAKES/planaria.words"
rank=${SLURM_PROCID:-${JOB_COMPLETION_INDEX:-$(grep -oP -- '--node-rank \\K[0-9]+' <<< "$*")}}
echo start >> "$FAKES/starts.$rank"
[ "$(wc -l < "$FAKES/starts.$rank")" = 1 ] || exit 0
if [ "$rank" = 0 ]; then
    until [ "$(cat "$FAKES/starts.1" 2> /dev/null | wc -l)" -ge "${STARTS:-0}" ]; do :; done
    if [ "$HEAD" = told ]; then
        trap 'exit 130' TERM
        touch "$FAKES/ready"
        while :; do sleep 0.01; done
    fi
    exit "$HEAD"
fi
exit "$OTHER"
"""
# Time passes faster for the loops that look every second, or every five, whether the job is over.
SHORT_PAUSES: Final = """\
read() {
    case "$1 $2" in '-rt 1' | '-rt 5') set -- -rt 0.05 ;; esac
    builtin read "$@"
}
"""


def fake_scheduler(directory: Path, monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """Programs of schedulers and of planaria; the repository is the current directory."""
    monkeypatch.chdir(ROOT)
    made = FakeScheduler(directory)
    made.write("planaria", FAKE_PLANARIA)
    made.write("short_pauses", SHORT_PAUSES)
    made.environment["BASH_ENV"] = str(directory / "short_pauses")
    return made


def exit_code_table() -> list[tuple[int, str, str]]:
    """The codes of docs/CLUSTER.md, with their meanings on the head's machine and on another."""
    page = (ROOT / "docs" / "CLUSTER.md").read_text()
    section = page.partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([0-9]+)[^|]*\| ([^|]*) \| ([^|]*) \|$", section, re.MULTILINE)
    table = [(int(code), head, other) for code, head, other in rows]
    return [*table, (137, *table[-1][1:])]


TABLE: Final = exit_code_table()


def is_again(text: str) -> bool:
    """Whether a cell of the table says that the scheduler starts it again by itself."""
    return text.startswith("again")


def num_starts(fakes: FakeScheduler, rank: int) -> int:
    return len((fakes.directory / f"starts.{rank}").read_text().split())
