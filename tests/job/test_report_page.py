"""The page that documents the report."""

from pathlib import Path

from planaria.job.report_page import report_page

ROOT = Path(__file__).parents[2]


def test_the_page_in_the_docs_is_current() -> None:
    """`make docs` writes it; a field without a meaning would raise here."""
    assert (ROOT / "docs" / "REPORT.md").read_text() == report_page()
