"""Published scores compared with measured ones: `python -m study.published [FOLDER ...] [--write]`.

A row is an `expected:` line in the header of a file in configs/experiment/. It lists metrics and, after
`with`, the keys that training and sampling add to the file; UNKNOWN is a value that was not published. A
paper's dense score with another loss or sampler belongs to the row with these keys, not to the twin.

Measured scores are the records of `fid.py run=...` in the folders (default: runs) that match the row's
training, steps, sampling and reference. `--write` also puts the table into study/RESULTS.md.
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
from training.run_folder import FREE_KEYS, RunFolder, is_in

EXPERIMENTS = PROJECT / "configs" / "experiment"
PAGE = PROJECT / "study" / "RESULTS.md"
TABLE = re.compile(r"(<!-- study\.published -->\n).*?(<!-- end -->)", re.DOTALL)
COLUMNS = ("experiment", "with", "metric", "expected", "measured", "difference", "commit")
HEADER = re.compile(r"^# (\w+): *(.*(?:\n#  .*)*)", re.MULTILINE)
UNKNOWN = "UNKNOWN"
# Keys that may differ between runs of a row: names, paths, seeds, and settings of a machine.
FREE = {*FREE_KEYS, "seed", "data.path", "train.init_from", "train.micro_batch_size"}
FREE = (FREE | {"train.mixed_precision", "train.compile"}) - {"train.total_steps"}


@dataclass(frozen=True)
class Row:
    """A published row.

    Args:
        keys: KEY=VALUE in addition to the experiment's.
        values: metric -> value as printed; UNKNOWN: a twin whose score is not published.
        starts_from: experiment and keys of the run that `train.init_from` must name; None: random weights.
    """

    experiment: str
    keys: tuple[str, ...]
    values: dict[str, str]
    starts_from: str | None

    @cached_property
    def unknown(self) -> set[str]:
        """Keys whose values were not published."""
        return {key.partition("=")[0] for key in self.keys if key.endswith(f"={UNKNOWN}")}

    @cached_property
    def experiment_config(self) -> dict[str, Any]:
        """Configuration of the experiment without the row's keys."""
        return expected(self.experiment).written

    @cached_property
    def config(self) -> dict[str, Any]:
        """Configuration of the row."""
        return expected(self.experiment, *(key for key in self.keys if not key.endswith(UNKNOWN))).written


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it with `--write`."""
    parser = program_parser("study.published", __doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", default=[Path("runs")])
    parser.add_argument("--write", action="store_true", help="also put the table into study/RESULTS.md")
    request = parser.parse_args(arguments)
    for folder in request.folders:
        if not folder.is_dir() and folder != Path("runs"):
            parser.error(f"{folder} is not a folder")
    rows = table(read_rows(), [record for folder in request.folders for record in read_records(folder)])
    print(aligned(rows))
    if request.write:
        write_text(PAGE, TABLE.sub(lambda match: f"{match[1]}{rows}\n{match[2]}", PAGE.read_text()))


def read_header(experiment: str) -> dict[str, list[str]]:
    """Read the lines of an experiment's header, by first word."""
    header = {}
    for word, text in HEADER.findall((EXPERIMENTS / f"{experiment}.yaml").read_text()):
        header.setdefault(word, []).append(re.sub(r"\s*\n# +", " ", text))
    return header


def read_rows() -> list[Row]:
    """Read the rows of all experiments on ImageNet."""
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
    """Compose an experiment with these keys and placeholder paths."""
    overrides = [f"experiment={experiment}", "data.path=FOLDER", "train.init_from=null", *keys]
    return Experiment.compose(overrides)


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's ADM scores, with the run's configuration as `config`."""
    for file in sorted(folder.rglob("*.json")):
        try:
            record = read_json(file)
            if not isinstance(record, dict) or record.get("suite") != "adm":
                continue
            run = record["samples"].get("drawn", {}).get("run")
            if run is not None:
                yield {**record, "config": Experiment.of_run(RunFolder(run)).written}
        except (OSError, ValueError, KeyError) as error:
            print(f"{file} is skipped: {error}", file=sys.stderr)


def table(rows: Sequence[Row], records: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each record of each row, and an empty line for a row without records."""
    lines = []
    for row in rows:
        matches = [record for record in records if fits(record, row)]
        lines += [_line(row, record) for record in matches] or [_line(row, None)]
    return markdown(lines, dict.fromkeys(COLUMNS, "{}"), everything=True)


def _line(row: Row, record: dict[str, Any] | None) -> dict[str, str]:
    drawn = flatten(record["samples"]["drawn"]) if record else {}
    overrides = {key: f"{key}={drawn.get(key, '?')}" for key in row.unknown}
    keys = [overrides.get(key.partition("=")[0], key) for key in row.keys]
    line = {"experiment": f"`{row.experiment}`", "with": f"`{' '.join(keys)}`" if keys else ""}
    line |= {"metric": " ".join(row.values), "expected": " ".join(row.values.values()).replace(UNKNOWN, "?")}
    if record:
        environment, values = record["environment"], record["values"]
        pairs = [_compared(values.get(metric, math.nan), text) for metric, text in row.values.items()]
        line["measured"], line["difference"] = (" ".join(texts) for texts in zip(*pairs, strict=True))
        line["commit"] = str(environment["commit"])[:7] + " changed" * environment["uncommitted_changes"]
    return line


def _compared(value: float, expected: str) -> tuple[str, str]:
    # with as many decimals as the published value
    if expected == UNKNOWN:
        return f"{value:.2f}", "?"
    decimals = len(expected.partition(".")[2])
    return f"{value:.{decimals}f}", f"{value - float(expected):+.{decimals}f}"


def fits(record: dict[str, Any], row: Row) -> bool:
    """True if a record has the training, sampling and metrics of a row."""
    if not row.values.keys() & record["values"].keys():  # names contain the number of samples
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
    # An unpublished value differs from the experiment's default.
    values, defaults = flatten(finite(drawn)), flatten(finite(row.experiment_config))
    changed = all(values.get(key) != defaults[key] for key in row.unknown & defaults.keys())
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
    start_config = expected(*row.starts_from.split()).written
    return all(_alike(first, start_config, key, FREE) for key in start_config)


def _alike(config: dict[str, Any], other: dict[str, Any], key: str, free: set[str]) -> bool:
    """True if two configurations agree on a key and the keys below it, except the free ones."""
    one, other = (flatten(finite(values.get(key)), key) for values in (config, other))
    changed = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return all(is_in(name, free) for name in changed)


if __name__ == "__main__":
    main()
