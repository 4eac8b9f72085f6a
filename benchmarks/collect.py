"""Merge records of `benchmarks.gpu` into the project, and write the tables of RESULTS.md.

A table stands between `<!-- benchmarks.gpu NAME -->` and `<!-- end -->`. Do not edit it by hand. It is empty
without a record. Records of twins belong to study/results/; `python -m study.claims` writes their page.
"""

import re
from collections.abc import Mapping
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
    short_commit,
    write_record,
)
from runtime.files import write_text
from runtime.provenance import environment

PAGE = "benchmarks/RESULTS.md"
TABLE = re.compile(r"(<!-- benchmarks\.gpu (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Columns = Mapping[str, Mapping[str, str]]  # stage -> the columns of its table: key -> format


def collect(out: Path, columns: Columns, project: Path, tiny: bool) -> None:
    """Merge the records of a folder into the project's, and write the tables from the result.

    Args:
        out: a folder with records of `benchmarks.gpu`.
        project: the root of the project, or of a copy. Collect a rehearsal (`tiny`) into a copy.
    """
    paths = sorted([*out.glob("gpu_*.csv"), *out.glob("twins_*.csv")])
    files = {file: read_environment(file) for file in paths}
    if not files:
        raise ValueError(f"{out} has no record: run python -m benchmarks.gpu {out}")
    for file, header in files.items():
        if header["tiny"] != str(tiny):
            raise ValueError(f"{file} is {'not a rehearsal: omit' if tiny else 'a rehearsal: add'} --tiny")
    here = environment(torch.device("cpu"))
    for file, header in files.items():
        room = "study" if file.name.startswith("twins_") else "benchmarks"
        target = project / room / "results" / file.name
        rows = read_results(file)
        for row in rows:
            # A copy of the code without its history records a hash in place of the commit.
            if row["commit"] == code_of(here) and here["commit"] and not here["uncommitted_changes"]:
                row["commit"] = here["commit"]
        if target.exists():
            rows = merge_rows(read_results(target), rows)
        write_record(target, rows, header)
        print(f"recorded in {target}")
    page, results = project / PAGE, project / "benchmarks" / "results"
    write_text(page, fill_tables(page.read_text(), results, columns))


def merge_rows(earlier: Rows, rows: Rows) -> Rows:
    """Merge rows by setting. New rows replace earlier ones, but a failure does not replace a result."""
    finished = {row["setting"] for row in rows if row.get("failed") != NOT_ENDED}
    new = finished - (done_in(earlier) - done_in(rows))
    return [row for row in earlier if row["setting"] not in new] + [r for r in rows if r["setting"] in new]


def fill_tables(text: str, results: Path, columns: Columns) -> str:
    """Return the text of a page with new tables."""
    tables = {name: stage_table(results, name, form) for name, form in columns.items()}
    return TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", text)


def stage_table(results: Path, stage: str, columns: Mapping[str, str]) -> str:
    """Return a table and its caption for each record of a stage; an empty table without records."""
    tables = []
    for file in sorted(results.glob(f"gpu_{stage}_*.csv")):
        tables += [markdown(read_results(file), columns), caption(file, stage)]
    if not tables:
        empty = {key: form for key, form in columns.items() if key != "failed"}
        tables = [markdown([{}], empty, everything=True), "Not measured: `make gpu OUT=FOLDER`."]
    return "\n\n".join(tables)


def caption(file: Path, stage: str) -> str:
    """Return the command, commits, date, device and torch version of a record."""
    header = read_environment(file)
    device = header["processor"] if header["device"] == "cpu" else header["device"]
    version = re.search(r'"torch": "([^"]+)"', header["versions"])[1]
    commits = dict.fromkeys(short_commit(row["commit"]) for row in read_results(file))
    code = f"commit {', '.join(commits)}" + (" (a rehearsal)" if header["tiny"] == "True" else "")
    source = f"`python -m benchmarks.gpu OUT {stage}` at {code}, {header['date']}, {device}, torch {version}"
    return f"{source} ([record](results/{file.name}))."
