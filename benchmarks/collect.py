"""Put records of `benchmarks.gpu` into the project, and their figures into the tables of README.md and
RESULTS.md.

A table stands between `<!-- benchmarks.gpu NAME -->` and `<!-- end -->` and is written here
alone; without a record it is empty.
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
DENSE, ROUTED = ({"setting": "XL/2", "step": step} for step in ("dense", "routed"))
BASE_ROUTED, CHECKPOINTED = {**ROUTED, "setting": "256 tokens"}, {**DENSE, "setting": "XL/2, checkpointing"}
GUIDED = {"setting": "bf16, eager, batch 4", "evaluation": "guided"}
SHARE, MEMORY = ("share_of_predicted", "{:.0%}"), ("peak_memory_gib", "{:.0f} GiB")
TARGETS = [  # what, the target, stage, which rows, (key, format)
    (
        "B/2 and XL/2, batch 256: share of the predicted speed-up",
        "95 %",
        "step",
        [BASE_ROUTED, ROUTED],
        SHARE,
    ),
    (
        "XL/2, batch 256: utilisation, dense and routed",
        "50 %, 45 %",
        "step",
        [DENSE, ROUTED],
        ("utilisation", "{:.0%}"),
    ),
    (
        "the same: outside of forward and backward",
        "6 %",
        "step",
        [DENSE, ROUTED],
        ("share_outside", "{:.1%}"),
    ),
    (
        "XL/2, dense: memory, without and with checkpointing",
        "fits, half",
        "step",
        [DENSE, CHECKPOINTED],
        MEMORY,
    ),
    (
        "XL/2, batch 4, bf16: guided, one forward against two",
        "1.5x",
        "sample",
        [GUIDED],
        ("speedup_over_two", "{:.2f}x"),
    ),
]


def collect(out: Path, columns: Mapping[str, Mapping[str, str]], project: Path, tiny: bool) -> None:
    """Copy the records of a folder, and fill the tables anew from all that the project has.

    Args:
        columns: of each stage's table, key -> format.
        tiny: whether the records are of a rehearsal, which only a copy of the project is given.

    Raises:
        ValueError: there are none, or they are of a rehearsal and `tiny` is false, or the other way round.
    """
    files = sorted(out.glob("gpu_*.csv"))
    if not files:
        raise ValueError(f"{out} holds no record: python -m benchmarks.gpu {out} writes them")
    for file in files:
        found = read_environment(file)
        if found["tiny"] != str(tiny):
            raise ValueError(
                f"{file} is {'no' if tiny else 'a'} rehearsal: --tiny must {'not ' if tiny else ''}be given"
            )
    results = project / "benchmarks" / "results"
    results.mkdir(parents=True, exist_ok=True)
    here = environment(torch.device("cpu"))
    for file in files:
        text = file.read_text()
        # A copy of the code without its history cannot name its commit.
        if (
            here["commit"]
            and not here["uncommitted_changes"]
            and f"# source_sha256: {here['source_sha256']}\n" in text
        ):
            text = text.replace("# commit: None\n", f"# commit: {here['commit']}\n", 1)
        write_text(results / file.name, text)
        print(f"recorded in {results / file.name}")
    for page in PAGES:
        write_text(project / page, filled((project / page).read_text(), results, columns))


def filled(text: str, results: Path, columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return a page with its tables written anew."""
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
    """Return the table of each record of a stage, and what it is a record of; an empty one where there is
    none.
    """
    files = sorted(results.glob(f"gpu_{stage}_*.csv"))
    tables = [
        f"{markdown([row for row in read_results(file) if chosen(row)], columns)}\n\n{caption(file, stage)}"
        for file in files
    ]
    wanted = {key: form for key, form in columns.items() if key != "failed"}
    return (
        "\n\n".join(tables)
        or f"{markdown([{}], wanted, everything=True)}\n\nNot measured: `make gpu OUT=FOLDER`."
    )


def caption(file: Path, stage: str) -> str:
    """Return from what a record comes."""
    found = read_environment(file)
    device = found["processor"] if found["device"] == "cpu" else found["device"]
    version = re.search(r'"torch": "([^"]+)"', found["versions"])[1]
    code = (
        f"commit {found['commit'][:7]}"
        if found["commit"] != "None"
        else f"sha256 {found['source_sha256'][:12]} of the code"
    )
    changed = " with uncommitted changes" if found["uncommitted_changes"] == "True" else ""
    rehearsal = " (a rehearsal)" if found["tiny"] == "True" else ""
    return (
        f"`python -m benchmarks.gpu OUT {stage}` at {code}{changed}{rehearsal}, {found['date']}, {device}, "
        f"torch {version} "
        f"([record](benchmarks/results/{file.name}))."
    )


def targets(results: Path) -> str:
    """Return what was aimed at, beside what the records of CUDA devices say."""
    files = {stage: sorted(results.glob(f"gpu_{stage}_NVIDIA*.csv")) for stage in ("step", "sample")}
    rows = {stage: [row for file in found for row in read_results(file)] for stage, found in files.items()}
    cells = []
    for what, target, stage, settings, (key, form) in TARGETS:
        found = [
            [
                form.format(float(row[key]))
                for row in rows[stage]
                if wanted.items() <= row.items() and row.get(key)
            ]
            for wanted in settings
        ]
        measured = ", ".join(" and ".join(values) or "-" for values in found) if any(found) else ""
        cells.append({"on a GPU": what, "target": target, "measured": measured})
    return markdown(cells, dict.fromkeys(("on a GPU", "target", "measured"), "{}"), everything=True)
