"""Figures, tables, an HTML page and the tables of the documents, from records."""

from weightnorm.lab.report.documents import outdated, update_documents
from weightnorm.lab.report.page import ReportFiles, read, write_report
from weightnorm.lab.report.tables import epochs_comparison

__all__ = [
    "ReportFiles",
    "epochs_comparison",
    "outdated",
    "read",
    "update_documents",
    "write_report",
]
