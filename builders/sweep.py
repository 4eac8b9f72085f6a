"""The table of a sweep over guidance or samplers, from the records of a run's scores.

The compared records have the same protocol, seeds and number of samples as the newest: their samples are
drawn from the same noise. They may be of several checkpoints.
"""

from pathlib import Path
from typing import Any

from runtime.files import read_json, write_text
from runtime.provenance import flatten

TABLE = "sweep.md"
# Settings that compared samples share.
FIXED = ("objective", "num_samples", "first_seed", "labels", "class_label", "mixed_precision", "decoding")
MAY_DIFFER = ("sampler", "guidance")


def summarise(newest: Path) -> Path | None:
    """Write a table next to a record of scores; return None without another record to compare."""
    first = read_json(newest)
    records = [read_json(file) for file in sorted(newest.parent.glob("*.json"))]
    records = [record for record in records if shared_settings(record) == shared_settings(first)]
    if len(records) < 2:
        return None
    rows = _rows([_varied_settings(record) for record in records])
    table = newest.with_name(TABLE)
    drawn = first["samples"]["drawn"]
    shared = ", ".join(f"{key}={drawn.get(key)}" for key in ("num_samples", "first_seed"))
    write_text(table, f"suite={first.get('suite')}, {shared}\n\n{_markdown(rows, records)}")
    return table


def shared_settings(record: Any) -> dict[str, Any] | None:
    """Return the settings that compared records share; None for other JSON files."""
    drawn = record
    for key in ("samples", "drawn"):
        drawn = drawn.get(key) if isinstance(drawn, dict) else None
    if not isinstance(drawn, dict) or not isinstance(record.get("values"), dict):
        return None
    shared = {key: drawn.get(key) for key in FIXED}
    return {"suite": record.get("suite"), "protocol": record.get("protocol"), **shared}


def _varied_settings(record: dict[str, Any]) -> dict[str, str]:
    flat = flatten(record["samples"]["drawn"])
    chosen = {key: "" if value is None else str(value) for key, value in flat.items()}
    for group in MAY_DIFFER:
        chosen[group] = chosen.get(f"{group}._target_", "").rpartition(".")[2]
    chosen["checkpoint"] = Path(chosen["checkpoint"]).name
    kept = (*MAY_DIFFER, "checkpoint")
    return {key: value for key, value in chosen.items() if key.partition(".")[0] in kept}


def _rows(settings: list[dict[str, str]]) -> list[dict[str, str]]:
    kinds: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for chosen in settings:
        kinds.setdefault(tuple(chosen[group] for group in MAY_DIFFER), []).append(chosen)
    shown = ["checkpoint"] if len({chosen["checkpoint"] for chosen in settings}) > 1 else []
    shown += [group for i, group in enumerate(MAY_DIFFER) if len({kind[i] for kind in kinds}) > 1]
    for alike in kinds.values():
        shown += [key for key in alike[0] if len({chosen.get(key) for chosen in alike}) > 1]
    return [{key: chosen.get(key, "") for key in dict.fromkeys(shown)} for chosen in settings]


def _markdown(rows: list[dict[str, Any]], records: list[dict[str, Any]]) -> str:
    columns: dict[str, list[str]] = {}
    for key in records[0]["values"]:
        values = [record["values"].get(key) for record in records]
        columns[key] = ["nan" if value is None else f"{value:.4g}" for value in values]
        if known := [value for value in values if value is not None]:
            best = values.index(max(known) if key in records[0]["higher_is_better"] else min(known))
            columns[key][best] = f"**{columns[key][best]}**"
    costs = [record.get("cost_per_image") for record in records]
    columns["GFLOPs per image"] = [f"{cost['flops'] / 1e9:.4g}" if cost else "" for cost in costs]
    lines = [[*rows[0], *columns], ["---"] * (len(rows[0]) + len(columns))]
    lines += [[*row.values(), *cells] for row, *cells in zip(rows, *columns.values(), strict=True)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
