"""Copy records of `benchmarks.gpu` into the project, and fill the tables of README.md and RESULTS.md.

A table stands between `<!-- benchmarks.gpu NAME -->` and `<!-- end -->` and is written here alone; without a
record it is empty.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.results import markdown, read_environment, read_results
from runtime.files import write_text
from runtime.provenance import environment

PAGES = ("README.md", "RESULTS.md")
TABLE = re.compile(r"(<!-- benchmarks\.gpu (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SPEED = ("setting", "images_per_sec", "utilisation", "speedup_over_dense", "share_of_predicted")
XL = [{"setting": "XL/2", "step": step} for step in ("dense", "routed")]
BASE_ROUTED = {"setting": "256 tokens", "step": "routed"}
CHECKPOINTED = {"setting": "XL/2, checkpointing", "step": "dense"}
GUIDED = {"setting": "bf16, eager, batch 4", "evaluation": "guided"}
# What, the target, stage, column, format.
TARGETS = [
    ("B/2, XL/2, batch 256: share of predicted speed-up", "95 %", "step", "share_of_predicted", "{:.0%}"),
    ("XL/2, batch 256: utilisation, dense and routed", "50 %, 45 %", "step", "utilisation", "{:.0%}"),
    ("the same: outside of forward and backward", "6 %", "step", "share_outside", "{:.1%}"),
    ("XL/2, dense: memory, then with checkpointing", "fits, half", "step", "peak_memory_gib", "{:.0f} GiB"),
    ("XL/2, batch 4, bf16: guided, one forward against two", "1.5x", "sample", "speedup_over_two", "{:.2f}x"),
    ("XL/2, 40 Heun steps as sample.py: share of the peak", "45 %", "sample", "share_of_peak", "{:.0%}"),
    ("the same against eager fp32", "4x", "sample", "speedup_over_eager", "{:.2f}x"),
    ("the same, guided: cost over unguided", "2.1x", "sample", "cost_over_unguided", "{:.2f}x"),
]
TARGET_ROWS = {
    "share_of_predicted": [BASE_ROUTED, XL[1]],
    "utilisation": XL,
    "share_outside": XL,
    "peak_memory_gib": [XL[0], CHECKPOINTED],
    "speedup_over_two": [GUIDED],
    "share_of_peak": [{"evaluation": "default"}],
    "speedup_over_eager": [{"evaluation": "default"}],
    "cost_over_unguided": [{"evaluation": "default, guided"}],
}
Columns = Mapping[str, Mapping[str, str]]  # of each stage's table, key -> format


def collect(out: Path, columns: Columns, project: Path, tiny: bool) -> None:
    """Copy the records of a folder, and fill the tables from all records of the project.

    Args:
        tiny: the records are of a rehearsal, for a copy of the project.
    """
    files = sorted(out.glob("gpu_*.csv"))
    if not files:
        raise ValueError(f"{out} has no record: python -m benchmarks.gpu {out} writes them")
    for file in files:
        if read_environment(file)["tiny"] != str(tiny):
            raise ValueError(f"{file} is {'not ' if tiny else ''}of a rehearsal (--tiny)")
    results = project / "benchmarks" / "results"
    results.mkdir(parents=True, exist_ok=True)
    here = environment(torch.device("cpu"))
    for file in files:
        text = file.read_text()
        # A copy of the code without its newest history cannot name its commit.
        same_code = f"# source_sha256: {here['source_sha256']}\n" in text
        if same_code and here["commit"] and not here["uncommitted_changes"]:
            text = re.sub("# commit: .*", f"# commit: {here['commit']}", text, count=1)
            text = re.sub("# uncommitted_changes: .*", "# uncommitted_changes: False", text, count=1)
        write_text(results / file.name, text)
        print(f"recorded in {results / file.name}")
    for page in PAGES:
        write_text(project / page, filled((project / page).read_text(), results, columns))


def filled(text: str, results: Path, columns: Columns) -> str:
    """Return a page with its tables written again."""
    tables = {name: of_stage(results, name, form) for name, form in columns.items()}
    speed = {key: columns["step"][key] for key in SPEED}
    tables["speed"] = of_stage(results, "step", speed, lambda row: row.get("step") == "routed")
    tables["targets"] = targets(results)
    return TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", text)


def of_stage(
    results: Path,
    stage: str,
    columns: Mapping[str, str],
    chosen: Callable[[Mapping[str, str]], bool] = lambda row: True,
) -> str:
    """Return the table of each record of a stage, and where it is from; an empty one without records."""
    tables = []
    for file in sorted(results.glob(f"gpu_{stage}_*.csv")):
        rows = [row for row in read_results(file) if chosen(row)]
        tables += [markdown(rows, columns), caption(file, stage)]
    if not tables:
        empty = {key: form for key, form in columns.items() if key != "failed"}
        tables = [markdown([{}], empty, everything=True), "Not measured: `make gpu OUT=FOLDER`."]
    return "\n\n".join(tables)


def caption(file: Path, stage: str) -> str:
    """Return where a record comes from."""
    found = read_environment(file)
    device = found["processor"] if found["device"] == "cpu" else found["device"]
    version = re.search(r'"torch": "([^"]+)"', found["versions"])[1]
    code = f"commit {found['commit'][:7]}"
    if found["commit"] == "None":
        code = f"sha256 {found['source_sha256'][:12]} of the code"
    code += " with uncommitted changes" if found["uncommitted_changes"] == "True" else ""
    code += " (a rehearsal)" if found["tiny"] == "True" else ""
    what = f"`python -m benchmarks.gpu OUT {stage}` at {code}, {found['date']}, {device}, torch {version}"
    return f"{what} ([record](benchmarks/results/{file.name}))."


def targets(results: Path) -> str:
    """Return what was aimed at, beside what the records of CUDA devices say."""
    cells = []
    for what, target, stage, key, form in TARGETS:
        files = sorted(results.glob(f"gpu_{stage}_NVIDIA*.csv"))
        rows = [row for file in files for row in read_results(file) if row.get(key)]
        found = [
            " and ".join(form.format(float(row[key])) for row in rows if wanted.items() <= row.items()) or "-"
            for wanted in TARGET_ROWS[key]
        ]
        measured = ", ".join(found) if set(found) != {"-"} else ""
        cells.append({"on a GPU": what, "target": target, "measured": measured})
    return markdown(cells, dict.fromkeys(cells[0], "{}"), everything=True)
