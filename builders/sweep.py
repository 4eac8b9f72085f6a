"""What a sweep of guidance has found: one table and one picture of the records of a run's scores.

Records are compared that have the newest one's protocol, checkpoint, seeds and number of samples: their
samples are drawn from the same noise.
"""

import math
from pathlib import Path
from typing import Any

from runtime.files import atomic_write, read_json
from runtime.provenance import flatten

SCALE = "guidance.guidance_scale"
TABLE, PICTURE = "sweep.md", "sweep.png"
FIXED = (  # what the compared samples share
    "weights_sha256",
    "objective",
    "num_samples",
    "first_seed",
    "labels",
    "class_label",
    "mixed_precision",
    "decoding",
)
MAY_DIFFER = ("sampler", "guidance")  # of what is drawn


def summarise(newest: Path) -> Path | None:
    """Write table and picture beside a record of scores; None where there is nothing to compare it with."""
    first = read_json(newest)
    records = [read_json(file) for file in sorted(newest.parent.glob("*.json"))]
    records = [record for record in records if fixed(record) == fixed(first)]
    if len(records) < 2:
        return None
    rows = _rows([_chosen(record) for record in records])
    table = newest.with_name(TABLE)
    with atomic_write(table) as partial:
        partial.write_text(_heading(first) + _markdown(rows, records))
    _draw(rows, records, newest.with_name(PICTURE))
    return table


def fixed(record: Any) -> dict[str, Any] | None:
    """The settings that records share to be compared; None for other JSON files."""
    drawn = record
    for key in ("samples", "drawn"):
        drawn = drawn.get(key) if isinstance(drawn, dict) else None
    if not isinstance(drawn, dict) or not isinstance(record.get("values"), dict):
        return None
    shared = {key: drawn.get(key) for key in FIXED}
    return {"suite": record.get("suite"), "protocol": record.get("protocol"), **shared}


def _chosen(record: dict[str, Any]) -> dict[str, str]:
    flat = flatten(record["samples"]["drawn"])
    chosen = {key: "" if value is None else str(value) for key, value in flat.items()}
    for group in MAY_DIFFER:
        chosen[group] = chosen.get(f"{group}._target_", "").rpartition(".")[2]
    return {key: value for key, value in chosen.items() if key.partition(".")[0] in MAY_DIFFER}


def _rows(settings: list[dict[str, str]]) -> list[dict[str, str]]:
    """The settings of each record that differ from others of its kind, and its kind."""
    kinds: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for chosen in settings:
        kinds.setdefault(tuple(chosen[group] for group in MAY_DIFFER), []).append(chosen)
    shown = [group for i, group in enumerate(MAY_DIFFER) if len({kind[i] for kind in kinds}) > 1]
    for alike in kinds.values():
        shown += [key for key in alike[0] if len({chosen.get(key) for chosen in alike}) > 1]
    return [{key: chosen.get(key, "") for key in dict.fromkeys(shown)} for chosen in settings]


def _value(record: dict[str, Any], key: str) -> float:
    value = record["values"].get(key)
    return math.nan if value is None else value


def _best(records: list[dict[str, Any]], key: str) -> int | None:
    values = [_value(record, key) for record in records]
    sign = -1 if key in records[0]["higher_is_better"] else 1
    there = [i for i, value in enumerate(values) if not math.isnan(value)]
    return min(there, key=lambda i: sign * values[i], default=None)


def _heading(record: dict[str, Any]) -> str:
    drawn = record["samples"]["drawn"]
    shared = {key: drawn.get(key) for key in ("checkpoint", "num_samples", "first_seed")}
    return f"suite={record.get('suite')}, " + ", ".join(f"{k}={v}" for k, v in shared.items()) + "\n\n"


def _markdown(rows: list[dict[str, Any]], records: list[dict[str, Any]]) -> str:
    """One line for each record, scores to four digits, the best of each in bold."""
    keys = list(records[0]["values"])
    best = {key: _best(records, key) for key in keys}
    lines = [[*rows[0], *keys, "GFLOPs per image"], ["---"] * (len(rows[0]) + len(keys) + 1)]
    for i, (row, record) in enumerate(zip(rows, records, strict=True)):
        scores = [f"{_value(record, key):.4g}" for key in keys]
        scores = [f"**{s}**" if best[key] == i else s for key, s in zip(keys, scores, strict=True)]
        cost = record.get("cost_per_image")
        lines.append([*row.values(), *scores, f"{cost['flops'] / 1e9:.4g}" if cost else ""])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _draw(rows: list[dict[str, Any]], records: list[dict[str, Any]], file: Path) -> None:
    """Draw each score against the scale of guidance, a line for each other setting, the best marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    keys = list(records[0]["values"])
    lines: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        others = {key.rpartition(".")[2]: value for key, value in row.items() if key != SCALE and value}
        name = ", ".join(value if key in MAY_DIFFER else f"{key}={value}" for key, value in others.items())
        lines.setdefault(name, []).append(i)
    figure, panels = plt.subplots(
        1, len(keys), figsize=(4 * len(keys), 3.6), squeeze=False, layout="constrained"
    )
    for key, axes in zip(keys, panels[0], strict=True):
        for name, members in lines.items():
            points = sorted((_scale(records[i]), _value(records[i], key)) for i in members)
            axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=name)
        if (i := _best(records, key)) is not None:
            axes.plot(_scale(records[i]), _value(records[i], key), "*", color="black", markersize=13)
        axes.set(xlabel="guidance_scale", title=key)
        axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        handles, names = panels[0][0].get_legend_handles_labels()
        names = [name or "all else" for name in names]
        figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    with atomic_write(file) as partial:
        figure.savefig(partial, dpi=130, format="png")
    plt.close(figure)


def _scale(record: dict[str, Any]) -> float:
    return record["samples"]["drawn"]["guidance"].get("guidance_scale", 1.0)
