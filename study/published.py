"""Published rows beside what was measured: `python -m study.published [FOLDER ...] [--write]`.

A row is an `expected:` line in the header of a file of configs/experiment/: metrics, and after `with` the
keys that training and sampling have beside the file's own; UNKNOWN is a value that was not published. A dense
score that a paper printed of another loss or sampler belongs to the row with these keys, not to the twin.
What was measured are the records of `fid.py run=...` in the folders (runs, without any) whose run, steps,
sampling and reference are the row's. `--write` puts the table into RESULTS.md, too.
"""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from benchmarks.processes import program_parser
from benchmarks.results import markdown
from builders.experiment import Experiment
from evaluation.files import PUBLISHED
from runtime.files import finite, read_json, write_text
from runtime.provenance import PROJECT, flatten
from runtime.tables import aligned
from training.run_folder import FREE_KEYS, RunFolder

EXPERIMENTS = PROJECT / "configs" / "experiment"
PAGE = PROJECT / "RESULTS.md"
TABLE = re.compile(r"(<!-- study\.published -->\n).*?(<!-- end -->)", re.DOTALL)
COLUMNS = ("experiment", "with", "metric", "expected", "measured", "difference", "commit")
HEADER = re.compile(r"^# (\w+): *(.*(?:\n#  .*)*)", re.MULTILINE)
UNKNOWN = "UNKNOWN"
# What may differ between runs of a row: names, paths and seeds, and what suits a machine.
FREE = {*FREE_KEYS, "seed", "data.path", "train.init_from", "train.micro_batch_size"}
FREE = (FREE | {"train.mixed_precision", "train.compile"}) - {"train.total_steps"}


@dataclass(frozen=True)
class Row:
    """A published row, with its values as they are printed; UNKNOWN: a twin whose score is not published.

    Args:
        keys: KEY=VALUE beside those of the experiment.
        starts_from: the experiment, and keys, of the run that `train.init_from` must name.
    """

    experiment: str
    keys: tuple[str, ...]
    values: dict[str, str]
    starts_from: str | None

    @cached_property
    def unknown(self) -> set[str]:
        """The keys whose values were not published."""
        return {key.partition("=")[0] for key in self.keys if key.endswith(f"={UNKNOWN}")}

    @cached_property
    def own(self) -> dict[str, Any]:
        """The configuration of the experiment alone."""
        return expected(self.experiment).written

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the row."""
        return expected(self.experiment, *(key for key in self.keys if not key.endswith(UNKNOWN))).written


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it if asked."""
    parser = program_parser("study.published", __doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", default=[Path("runs")])
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md, too")
    asked = parser.parse_args(arguments)
    for folder in asked.folders:
        if not folder.is_dir() and folder != Path("runs"):
            parser.error(f"{folder} is not a folder")
    found = table(read_rows(), [record for folder in asked.folders for record in read_records(folder)])
    print(aligned(found))
    if asked.write:
        write_text(PAGE, TABLE.sub(lambda match: f"{match[1]}{found}\n{match[2]}", PAGE.read_text()))


def read_header(experiment: str) -> dict[str, list[str]]:
    """The lines of an experiment's header by their first word."""
    found = {}
    for word, text in HEADER.findall((EXPERIMENTS / f"{experiment}.yaml").read_text()):
        found.setdefault(word, []).append(re.sub(r"\s*\n# +", " ", text))
    return found


def read_rows() -> list[Row]:
    """The rows of all experiments on ImageNet."""
    rows = []
    for file in sorted(EXPERIMENTS.glob("imagenet*.yaml")):
        header = read_header(file.stem)
        for line in header["expected"]:
            metrics, _, keys = re.sub(r"\(.*?\)", "", line).partition(" with ")
            values = dict(metric.split() for metric in metrics.split(",") if metric.strip())
            if values:
                rows.append(Row(file.stem, tuple(keys.split()), values, header.get("from", [None])[0]))
    return rows


def expected(experiment: str, *keys: str) -> Experiment:
    """An experiment with these keys, but for its paths."""
    overrides = [f"experiment={experiment}", "data.path=FOLDER", "train.init_from=null", *keys]
    return Experiment.compose(overrides)


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of ADM scores of runs, with the run's configuration as `config`."""
    for file in sorted(folder.rglob("*.json")):
        try:
            record = read_json(file)
            if not isinstance(record, dict) or record.get("suite") != "adm":
                continue
            run = record["samples"].get("drawn", {}).get("run")
            if run is not None:
                yield {**record, "config": Experiment.of_run(RunFolder(run)).written}
        except (OSError, ValueError, KeyError) as error:
            print(f"{file} is left out: {error}", file=sys.stderr)


def table(rows: Sequence[Row], records: Sequence[dict[str, Any]]) -> str:
    """A line for each record of each row; an empty one where there is none."""
    lines = []
    for row in rows:
        found = [record for record in records if fits(record, row)]
        lines += [_line(row, record) for record in found] or [_line(row, None)]
    return markdown(lines, dict.fromkeys(COLUMNS, "{}"), everything=True)


def _line(row: Row, record: dict[str, Any] | None) -> dict[str, str]:
    drawn = flatten(record["samples"]["drawn"]) if record else {}
    chosen = {key: f"{key}={drawn.get(key, '?')}" for key in row.unknown}
    keys = [chosen.get(key.partition("=")[0], key) for key in row.keys]
    line = {"experiment": f"`{row.experiment}`", "with": f"`{' '.join(keys)}`" if keys else ""}
    line |= {"metric": " ".join(row.values), "expected": " ".join(row.values.values()).replace(UNKNOWN, "?")}
    if record:
        about, values = record["environment"], record["values"]
        pairs = [_compared(values.get(metric, math.nan), text) for metric, text in row.values.items()]
        line["measured"], line["difference"] = (" ".join(each) for each in zip(*pairs, strict=True))
        line["commit"] = str(about["commit"])[:7] + (" changed" if about["uncommitted_changes"] else "")
    return line


def _compared(value: float, expected: str) -> tuple[str, str]:
    # with as many decimal places as were printed
    if expected == UNKNOWN:
        return f"{value:.2f}", "?"
    places = len(expected.partition(".")[2])
    return f"{value:.{places}f}", f"{value - float(expected):+.{places}f}"


def fits(record: dict[str, Any], row: Row) -> bool:
    """True if a record is of the training, the sampling and the scores that a row is about."""
    if not row.values.keys() & record["values"].keys():  # a name has the number of samples
        return False
    protocol, drawn, config = record["protocol"], record["samples"]["drawn"], record["config"]
    reference = PUBLISHED[row.experiment.partition("_")[0]].url
    same_scores = protocol["detector"]["checked"] == "sha256" and (
        PurePath(protocol["reference"]["path"]).name == PurePath(reference).name
    )
    last = f"step_{row.config['train']['total_steps']:08}"
    same_sampling = (
        PurePath(drawn["checkpoint"]).name == last
        and (drawn["labels"], drawn["class_label"]) == ("random", None)
        and all(_alike(drawn, row.config, key, row.unknown) for key in ("decoding", "sampler", "guidance"))
    )
    # What was not published differs from what the experiment has without it.
    flat, own = flatten(finite(drawn)), flatten(finite(row.own))
    changed = all(flat.get(key) != own[key] for key in row.unknown & own.keys())
    return same_scores and same_sampling and changed and _is_run_of(config, row)


def _is_run_of(config: dict[str, Any], row: Row) -> bool:
    if any(not _alike(config, row.config, key, FREE) for key in row.config):
        return False
    start = config["train"]["init_from"]
    if row.starts_from is None or start is None:
        return row.starts_from == start
    try:
        first = Experiment.of_run(RunFolder(start)).written
    except (OSError, ValueError):
        return False
    wanted = expected(*row.starts_from.split()).written
    return all(_alike(first, wanted, key, FREE) for key in wanted)


def _alike(found: dict[str, Any], wanted: dict[str, Any], key: str, free: set[str]) -> bool:
    """True if two configurations agree on a key and on those below it, but for the free ones."""
    one, other = (flatten(finite(config.get(key)), key) for config in (found, wanted))
    changed = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return all(any(f"{name}.".startswith(f"{prefix}.") for prefix in free) for name in changed)


if __name__ == "__main__":
    main()
