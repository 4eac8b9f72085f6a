"""Records of measurements: a CSV file whose first lines, marked with #, tell where and from what they come."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from training.provenance import environment

RESULTS = Path(__file__).parent / "results"


def write_results(name: str, rows: Sequence[Mapping[str, Any]], device: torch.device, folder: Path = RESULTS) -> Path:
    """Write rows, which may have different columns, to a file named by program, device and torch; return its path."""
    found = environment(device)
    where = found["processor"] if device.type == "cpu" else found["device"]
    slug = re.sub(r"[^A-Za-z0-9]+", "-", where).strip("-")
    file = folder / f"{name}_{slug}_torch-{found['versions']['torch']}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with file.open("w", newline="") as f:
        for key, value in {"date": date.today().isoformat(), **found}.items():
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
