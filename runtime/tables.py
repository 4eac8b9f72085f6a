"""Tables as CSV, and aligned Markdown tables."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as CSV; their columns may differ."""
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Format a head and rows as an aligned Markdown table."""
    head, *body = ("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
    return aligned("\n".join([head, "|" + "---|" * len(lines[0]), *body]))


def aligned(text: str) -> str:
    """Align the columns of each Markdown table in a text: the first to the left, the others to the right."""
    return re.sub(r"(^\|.*\n?)+", lambda table: _aligned(table[0]), text, flags=re.MULTILINE)


def _aligned(table: str) -> str:
    rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table.splitlines()]
    head, _, *body = rows
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]

    def line(row: list[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "| " + " | ".join([first.lstrip().ljust(widths[0]), *others]) + " |"

    rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    lines = [line(head), f"|{'|'.join(rule)}|", *map(line, body)]
    return "\n".join(lines) + ("\n" if table.endswith("\n") else "")
