"""Merge records of `benchmarks.gpu` into the project, and fill the tables of README.md and RESULTS.md.

A table stands between `<!-- benchmarks.gpu NAME -->` and `<!-- end -->` and is written here alone; without a
record it is empty.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.results import (
    NOT_ENDED,
    Rows,
    code_of,
    done_in,
    markdown,
    read_environment,
    read_results,
    write_record,
)
from runtime.files import write_text
from runtime.provenance import environment

PAGES = ("README.md", "RESULTS.md")
TABLE = re.compile(r"(<!-- benchmarks\.gpu (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SPEED = ("setting", "images_per_sec", "utilisation", "speedup_over_dense", "share_of_predicted")
Columns = Mapping[str, Mapping[str, str]]  # of each stage's table, key -> format


def collect(out: Path, columns: Columns, project: Path, tiny: bool) -> None:
    """Merge the records of a folder into those of the project, and fill the tables from all of these.

    Args:
        tiny: the records are of a rehearsal, for a copy of the project.
    """
    files = {file: read_environment(file) for file in sorted(out.glob("gpu_*.csv"))}
    if not files:
        raise ValueError(f"{out} has no record: python -m benchmarks.gpu {out} writes them")
    for file, about in files.items():
        if about["tiny"] != str(tiny):
            raise ValueError(f"{file} is {'not ' if tiny else ''}of a rehearsal (--tiny)")
    here = environment(torch.device("cpu"))
    for file, about in files.items():
        target = project / "benchmarks" / "results" / file.name
        rows = read_results(file)
        for row in rows:
            # A copy of the code without its newest history cannot name its commit.
            if row["commit"] == code_of(here) and here["commit"] and not here["uncommitted_changes"]:
                row["commit"] = here["commit"]
        if target.exists():
            rows = merged(read_results(target), rows)
        write_record(target, rows, about)
        print(f"recorded in {target}")
    for page in PAGES:
        results = project / "benchmarks" / "results"
        write_text(project / page, filled((project / page).read_text(), results, columns))


def merged(earlier: Rows, rows: Rows) -> Rows:
    """Rows with each setting once: newer ones replace earlier ones unless they failed where those did not."""
    ended = {row["setting"] for row in rows if row.get("failed") != NOT_ENDED}
    new = ended - (done_in(earlier) - done_in(rows))
    return [row for row in earlier if row["setting"] not in new] + [r for r in rows if r["setting"] in new]


def filled(text: str, results: Path, columns: Columns) -> str:
    """A page with its tables written again."""
    tables = {name: of_stage(results, name, form) for name, form in columns.items()}
    speed = {key: columns["step"][key] for key in SPEED}
    tables["speed"] = of_stage(results, "step", speed, lambda row: row.get("step") == "routed")
    return TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", text)


def of_stage(
    results: Path,
    stage: str,
    columns: Mapping[str, str],
    chosen: Callable[[Mapping[str, str]], bool] = lambda row: True,
) -> str:
    """The table of each record of a stage, and where it is from; an empty one without records."""
    tables = []
    for file in sorted(results.glob(f"gpu_{stage}_*.csv")):
        rows = [row for row in read_results(file) if chosen(row)]
        tables += [markdown(rows, columns), caption(file, stage)]
    if not tables:
        empty = {key: form for key, form in columns.items() if key != "failed"}
        tables = [markdown([{}], empty, everything=True), "Not measured: `make gpu OUT=FOLDER`."]
    return "\n\n".join(tables)


def caption(file: Path, stage: str) -> str:
    """Where a record comes from."""
    found = read_environment(file)
    device = found["processor"] if found["device"] == "cpu" else found["device"]
    version = re.search(r'"torch": "([^"]+)"', found["versions"])[1]
    commits = dict.fromkeys(
        re.sub(r"^([0-9a-f]{7})[0-9a-f]+", r"\1", row["commit"]) for row in read_results(file)
    )
    code = f"commit {', '.join(commits)}" + (" (a rehearsal)" if found["tiny"] == "True" else "")
    what = f"`python -m benchmarks.gpu OUT {stage}` at {code}, {found['date']}, {device}, torch {version}"
    return f"{what} ([record](benchmarks/results/{file.name}))."
