"""The HTML report."""

from thalweg.evidence.report.write import Chapter, write_report

__all__ = ["Chapter", "write_report"]
