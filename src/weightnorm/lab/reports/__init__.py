"""Figures, tables, an HTML page and the tables of the documents, from records."""

from weightnorm.lab.errors import ReportError
from weightnorm.lab.reports.classify import epochs_comparison
from weightnorm.lab.reports.documents import outdated, update_documents
from weightnorm.lab.reports.report import SECTIONS, ReportFiles, read, report

__all__ = [
    "SECTIONS",
    "ReportError",
    "ReportFiles",
    "epochs_comparison",
    "outdated",
    "read",
    "report",
    "update_documents",
]
