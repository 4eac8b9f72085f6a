"""Records of measurements: CSV files with a header of `# key: value` lines on their origin."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from runtime.files import write_text
from runtime.tables import csv_text

RESULTS = Path(__file__).parent / "results"
NOT_ENDED = "started and not ended"
ROW_KEYS = ("commit", "source_sha256", "uncommitted_changes")  # may differ between the rows of a record
Rows = list[dict[str, Any]]


class Record:
    """A record of a program, written after every setting. The same command continues it.

    The file name contains program, device and torch version, and each row names its commit. A rehearsal
    (`tiny`) and a measurement do not share a record.

    Args:
        environment: from `runtime.provenance`, taken before the measurement.
    """

    def __init__(self, name: str, folder: Path, environment: Mapping[str, Any]):
        machine = environment["processor"] if environment["device"] == "cpu" else environment["device"]
        slug = re.sub(r"[^A-Za-z0-9]+", "-", machine).strip("-")
        version = environment["versions"]["torch"].split("+")[0]
        self.file, self.rows = folder / f"{name}_{slug}_torch-{version}.csv", []
        self.commit = environment["commit"] or code_of(environment)
        self.commit += " with uncommitted changes" if environment["uncommitted_changes"] else ""
        shared = {key: value for key, value in environment.items() if key not in ROW_KEYS}
        self.environment = {"date": date.today().isoformat(), **shared}
        tiny = environment.get("tiny", False)
        if self.file.exists():
            earlier, self.rows = read_environment(self.file), read_results(self.file)
            for row in self.rows:  # old records name the commit in the header
                row.setdefault("commit", earlier.get("commit", ""))
            if earlier.get("tiny", "False") != str(tiny):
                raise ValueError(f"{self.file} has tiny={not tiny}, not {tiny}: use another folder")

    def add(self, setting: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of a setting, replacing its earlier rows."""
        kept = [row for row in self.rows if row["setting"] != setting]
        self.rows = [*kept, *({"setting": setting, **row, "commit": self.commit} for row in rows)]
        write_record(self.file, self.rows, self.environment)

    def started(self) -> set[str]:
        """Return the settings that have rows."""
        return {row["setting"] for row in self.rows}

    def done(self) -> set[str]:
        """Return the settings without a failed row."""
        return done_in(self.rows)


def done_in(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the settings without a failed row."""
    return {row["setting"] for row in rows} - {row["setting"] for row in rows if row.get("failed")}


def code_of(environment: Mapping[str, Any]) -> str:
    """Return the hash of the code of an environment, which replaces an unknown commit."""
    return f"sha256 {environment['source_sha256'][:12]}"


def short_commit(commit: str) -> str:
    """Shorten a hash; a note of uncommitted changes stays."""
    return re.sub(r"^(\w{7})\w+", r"\1", commit)


def write_record(file: Path, rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> None:
    """Write rows below a header with their environment."""
    lines = (f"# {k}: {json.dumps(v) if isinstance(v, dict) else v}\n" for k, v in environment.items())
    rows = [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(lines) + csv_text(rows))


def read_results(file: Path) -> list[dict[str, str]]:
    """Read the rows of a record."""
    with file.open(newline="") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def read_environment(file: Path) -> dict[str, str]:
    """Read the header of a record, as text by key."""
    lines = (line[2:].rstrip("\n") for line in file.open() if line.startswith("# "))
    return {key: value for key, _, value in (line.partition(": ") for line in lines)}


def markdown(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str] | None = None,
    everything: bool = False,
    text: bool = False,
) -> str:
    """Format rows, new or read from a record, as a Markdown table.

    Args:
        columns: key -> format; "{}" formats any value, other formats take a float. None: all keys as "{}".
        everything: True keeps empty columns.
        text: True aligns columns on the left.
    """
    columns = dict.fromkeys((key for row in rows for key in row), "{}") if columns is None else columns
    keys = [key for key in columns if everything or any(row.get(key) not in (None, "") for row in rows)]
    cells = [[_cell(row.get(key), columns[key]) for key in keys] for row in rows]
    lines = ["| " + " | ".join(line) + " |" for line in (keys, *cells)]
    return "\n".join([lines[0], "|---|" + ("---|" if text else "--:|") * (len(keys) - 1), *lines[1:]])


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median, least and most of some times in milliseconds, and their number."""
    ms = [1000 * sec for sec in seconds]
    return {"ms": median(ms), "ms_least": min(ms), "ms_most": max(ms), "n": len(ms)}


def _cell(value: Any, form: str) -> str:
    if value in (None, ""):
        return ""
    return form.format(value if form == "{}" else float(value))
