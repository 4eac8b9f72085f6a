"""Write the report page of one run, or of several runs side by side.

python -m reports "runs=[runs/NAME]"                 writes runs/NAME/report.html
python -m reports "runs=[runs/NAME]" refresh_sec=15  rewrites it every 15 s until the run has finished
python -m reports "runs=[runs/*]"                    writes runs/report.html and runs/runs.csv, prints a table
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from reports.page import comparison_notes, page
from reports.runs import Run, as_csv, as_text, changes, group_runs, printable, sections, table
from runtime.config import command, run_main
from runtime.errors import check_positive
from runtime.files import write_text
from training.run_folder import RunFolder

REPORT, TABLE = "report.html", "runs.csv"


@dataclass
class ReportsConfig:
    """The keys of `reports`."""

    runs: list[str]  # folders; the last part of a path may be a pattern
    out: str | None = None  # folder; None: the run, or the parent folder of several runs
    refresh_sec: float | None = None  # interval to rewrite the page, until all runs have finished; None: once


def write_reports(config: ReportsConfig) -> None:
    """Write the report page; for several runs, also write and print their table.

    Raises:
        ValueError: none of the runs can be read.
    """
    check_positive("refresh_sec", config.refresh_sec)
    while True:
        patterns = map(Path, config.runs)
        paths = [sorted(p.parent.glob(p.name)) if "*" in p.name else [p] for p in patterns]
        folders = [RunFolder(path) for path in chain(*paths)]
        if not folders:
            raise ValueError(f"runs={config.runs}: no folder matches")
        runs = [Run(folders[0])] if len(folders) == 1 else _read_several(folders)
        finished = all(run.manifest["status"] == "finished" for run in runs)
        first = folders[0].path
        output = Path(config.out) if config.out else first if len(folders) == 1 else first.parent
        output.mkdir(parents=True, exist_ok=True)
        write_text(output / REPORT, page(runs, None if finished else config.refresh_sec))
        if len(folders) > 1:
            write_text(output / TABLE, as_csv(group_runs(runs)))
            _print_tables(runs)
        print(output / REPORT, flush=True)
        if finished or config.refresh_sec is None:
            return
        time.sleep(config.refresh_sec)


def _read_several(folders: Sequence[RunFolder]) -> list[Run]:
    """Read runs; leave out folders that cannot be read or shown."""
    runs = []
    for folder in (folder for folder in folders if folder.path.is_dir()):  # runs/* also matches files
        try:
            page([run := Run(folder)])
            runs.append(run)
        except (ValueError, OSError) as error:
            print(f"left out: {error}")
    if not runs:
        raise ValueError("runs: none of the folders can be read as a run")
    return runs


def _print_tables(runs: Sequence[Run]) -> None:
    for data, arms in sections(group_runs(runs)).items():
        notes = "".join(f"{note}\n" for note in comparison_notes(arms))
        print(f"{printable(data)}\n{as_text(table(arms))}")
        if rows := changes(arms):
            print(f"\nDifferences from {printable(arms[0].name)}:\n{as_text(rows)}")
        print(printable(notes))


main = command("reports", ReportsConfig, __doc__)(write_reports)

if __name__ == "__main__":
    run_main(main)
