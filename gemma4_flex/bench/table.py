"""A table of figures, for a terminal and for a Markdown page. Needs no torch."""
from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Table:
    """Rows of cells under headers, and the line that introduces them, if any."""
    headers: Seq[str]
    rows: Seq[Seq[str]]
    says: str = ""

    def text(self) -> str:
        """Columns of equal width, for a terminal."""
        return self._below(tabulate(self.rows, self.headers, disable_numparse=True))

    def markdown(self) -> str:
        """One line a row, as GitHub renders it."""
        def row(cells: Seq[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        return self._below("\n".join([row(self.headers), "|---" * len(self.headers) + "|", *map(row, self.rows)]))

    def _below(self, grid: str) -> str:
        return f"{self.says}\n\n{grid}" if self.says else grid


def spread(summary: dict, digits: int = 1) -> str:
    """A summary's median, with the least and the greatest in brackets."""
    return f"{summary['median']:,.{digits}f} ({summary['min']:,.{digits}f} to {summary['max']:,.{digits}f})"
