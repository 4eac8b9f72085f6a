"""Records of measurements: a CSV file whose first lines, marked with #, tell where and from what they come."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_results(name: str, rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write rows, which may have different columns, to a file named by program, device and torch; return its path.

    Args:
        environment: of `training.provenance`, as it was when the measurement began.
    """
    where = environment["processor"] if environment["device"] == "cpu" else environment["device"]
    slug = re.sub(r"[^A-Za-z0-9]+", "-", where).strip("-")
    file = folder / f"{name}_{slug}_torch-{environment['versions']['torch'].split('+')[0]}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with file.open("w", newline="") as f:
        for key, value in {"date": date.today().isoformat(), **environment}.items():
            f.write(f"# {key}: {json.dumps(value) if isinstance(value, dict) else value}\n")
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)
    print(f"recorded in {file}")
    return file


def read_results(file: Path) -> list[dict[str, str]]:
    """Return the rows of a record."""
    with file.open(newline="") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def measured(what: str, unit: str, values: float | Sequence[float]) -> dict[str, Any]:
    """Return the row of one quantity that was measured once or several times."""
    values = [values] if isinstance(values, int | float) else list(values)
    return {"what": what, "unit": unit, "median": median(values), "least": min(values), "most": max(values), "n": len(values)}


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
