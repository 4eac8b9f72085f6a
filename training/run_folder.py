"""The folder of a run: configuration, manifest, lock, and the check that a resume gives the same results."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import did_you_mean
from runtime.files import finite, read_bounded, read_json, write_json, write_text
from runtime.launch import ALONE, Launch
from runtime.lock import Busy, Lock
from runtime.provenance import flatten

START = ("command", "commit", "source_sha256", "num_processes", "changes")  # recorded at every start of a run
LOCK_WITHIN_SEC = 5.0  # workers of a killed run keep its lock for a few seconds
MAX_CONFIG_BYTES, MAX_CONFIG_DEPTH = 2**16, 20

# Keys that a resumed run may change: they do not affect the weights.
FREE_KEYS = ("run_name", "output_dir", "wait", "decoding", "data.encoder", "model.gradient_checkpointing")
FREE_KEYS += ("sweep_metric", "evaluation", "guidance", "sampler", "tracker")
FREE_OF_TRAIN = ("log_every", "save_every", "eval_every", "sample_every", "keep_last", "milestone_every")
FREE_OF_TRAIN += ("total_steps", "max_time_sec", "max_skipped_steps", "num_workers", "keep_freed_memory")
FREE_OF_TRAIN += ("check_resources", "parallel", "reduce_dtype")
FREE_KEYS += tuple(f"train.{key}" for key in FREE_OF_TRAIN)
# Keys that a resumed run may not change if it scores samples: its scores must stay comparable.
SCORING_KEYS = ("decoding", "evaluation", "guidance", "sampler")
EFFECTS = {  # of a change on the numbers of a resumed run
    "num_processes": "sums are rounded differently",
    "parallel": "sums are rounded differently",
    "micro_batch_size": "noise, dropped labels and tokens differ from this step on",
    "code": "results may differ",
}


class Moved(OSError):
    """The run's folder was moved or removed."""


class RunFolder:
    """The folder of one run: `config.yaml`, `manifest.json`, `metrics.jsonl`, `checkpoints/`, `samples/`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_file, self.manifest_file = self.path / "config.yaml", self.path / "manifest.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.failure_file, self._lock = self.path / ".failure.json", None

    def manifest(self) -> dict[str, Any]:
        """Read the manifest; empty if the run has not started."""
        if not self.manifest_file.is_file():
            return {}
        manifest = read_json(self.manifest_file)
        if not isinstance(manifest, dict):
            raise ValueError(f"{self.manifest_file} is damaged: not a JSON object")
        return manifest

    def config(self) -> dict[str, Any]:
        """Read the configuration safely: the run may come from an untrusted source."""
        try:
            with self.config_file.open("rb") as opened:
                text = read_bounded(opened, MAX_CONFIG_BYTES).decode()
            _check_events(yaml.parse(text, yaml.CSafeLoader))
            config = yaml.load(text, yaml.CSafeLoader)  # pure Python takes minutes for many brackets
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.config_file} is damaged: {' '.join(str(error).split())}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{self.config_file} is damaged: not a configuration")
        return config

    def check_started(self) -> None:
        """Raise FileNotFoundError unless a run was started in this folder."""
        if file := self._missing_file():
            known = [manifest.parent.name for manifest in self.path.parent.glob("*/manifest.json")]
            hint = did_you_mean(str(self.path), known)
            raise FileNotFoundError(f"run={self.path} is not a run directory (no {file}){hint}")

    def has_results(self) -> bool:
        """True if the folder has saved steps or a record of them, which another run must not overwrite."""
        if any(self.path.glob("checkpoints/step_*")):
            return True
        manifest = self.manifest()
        return manifest.get("status") in ("finished", "stopped") and manifest.get("step", 0) > 0

    def is_finished(self, total_steps: int) -> bool:
        manifest = self.manifest()
        return manifest.get("status") == "finished" and manifest.get("step") == total_steps

    def newest(self, key: str) -> float:
        """Return the newest value of a metric; raise ValueError if it has none."""
        lines = [json.loads(line) for line in self.metrics_file.read_text().splitlines()]
        values = [line[key] for line in lines if line.get(key) is not None]
        if not values:
            known = {name for line in lines for name in line}
            raise ValueError(f"{self.metrics_file} has no value of {key}{did_you_mean(key, known)}")
        return values[-1]

    def check(self, config: dict[str, Any], data: dict[str, Any]) -> None:
        """Raise unless the configuration and data match the results in the folder.

        Raises:
            ValueError: a difference changes the results.
            FileNotFoundError: the results have no configuration or manifest.
        """
        if not self.has_results():
            return
        self.check_complete()
        old, new = flatten(self.config()), flatten(config)
        free_keys = set(FREE_KEYS)
        if depends_on_total_steps(config):
            free_keys.remove("train.total_steps")
        if config["evaluation"] and any(key.startswith("evaluation.") for key in old):
            free_keys.difference_update(SCORING_KEYS)
        elsewhere = "choose another folder with run_name=NAME"
        changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        changes = [f"{key}: {old.get(key)} -> {new.get(key)}" for key in changed if not is_in(key, free_keys)]
        if changes:
            what = f"a run with another configuration ({'; '.join(changes)})"
            raise ValueError(f"output_dir={self.path} has {what}: {elsewhere}")
        if self.manifest()["data"]["fingerprint"] != data["fingerprint"]:
            raise ValueError(f"output_dir={self.path} has a run with other data: {elsewhere}")

    def check_complete(self) -> None:
        """Raise FileNotFoundError if the configuration or manifest is missing."""
        if file := self._missing_file():
            rule = "restore it, or choose another folder with run_name=NAME"
            raise FileNotFoundError(f"output_dir={self.path} has a run without {file.name}: {rule}")

    def _missing_file(self) -> Path | None:
        return next((file for file in (self.config_file, self.manifest_file) if not file.is_file()), None)

    def lock(self, launch: Launch = ALONE, wait: bool = False) -> None:
        """Lock the folder until the first process of this launch exits or is killed.

        Args:
            wait: True to wait for the process that holds the lock.

        Raises:
            Busy: another process holds the lock.
            OSError: the folder is not writable.
        """
        announced = False
        while True:
            try:
                return launch.broadcast_from_main(self._acquire)
            except Busy as error:
                if not wait:
                    raise Busy(f"{error}, or wait for it with wait=true") from error
                if not announced:
                    launch.print(f"wait=true: {error}")
                announced = True

    def _acquire(self) -> None:
        self._lock = Lock(self.path / ".lock", f"output_dir={self.path}", LOCK_WITHIN_SEC).acquire()
        self.failure_file.unlink(missing_ok=True)

    def unlock(self) -> None:
        """Release the lock; remove the folder if locking created it and it is empty."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def check_not_moved(self) -> None:
        """Raise Moved if this process holds the lock and the folder was moved or removed."""
        if self._lock and not self._lock.is_in_place():
            hint = "to resume from its newest checkpoint, run the same command with output_dir=NEW_PATH"
            raise Moved(f"output_dir={self.path} or its .lock was moved or removed during training: {hint}")

    def fail(self, rank: int, reason: str, details: dict[str, Any]) -> dict[str, Any]:
        """Record why this rank failed, and return the first failure of the run.

        Another rank may have failed first and caused this one. The rank with the lock writes the manifest.
        """
        failure = {"process": rank, "reason": reason, **details}
        rank_file = self.path / f".failure_{rank}.partial"
        try:
            self.check_not_moved()
            rank_file.write_text(json.dumps(finite(failure)))
            try:
                os.link(rank_file, self.failure_file)  # atomic: only one rank succeeds
            except FileExistsError:
                failure = json.loads(self.failure_file.read_text())
            rank_file.unlink()
            if self._lock:
                self.update({"status": "failed", "failure": failure})
        except OSError as error:  # such as a full disk
            failure["reason"] += f" (not recorded in {self.manifest_file}: {error})"
        return failure

    def record_start(self, config: dict[str, Any], details: dict[str, Any], step: int) -> None:
        """Write the configuration and manifest of a run that starts or resumes at `step`."""
        self.check_not_moved()
        write_text(self.config_file, yaml.safe_dump(config, sort_keys=False))
        old = self.manifest() if step else {}
        if not step:  # an earlier start that saved nothing may have had another configuration
            for file in self.path.glob("samples/*.png"):
                file.unlink()
        start = {"step": step, **{key: details[key] for key in START}}
        starts = [*old.get("starts", []), start]
        now = {"status": "running", "reason": None, "failure": None, "starts": starts}
        write_json(self.manifest_file, {**old, **details, **now})

    def update(self, fields: dict[str, Any]) -> None:
        """Update fields of the manifest."""
        self.check_not_moved()
        write_json(self.manifest_file, {**self.manifest(), **fields})


def is_in(key: str, groups: Iterable[str]) -> bool:
    """True if a dotted key is one of `groups` or inside one of them."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)


def _check_events(events: Iterator[yaml.Event]) -> None:
    """Refuse YAML that no run writes: aliases (nested ones can fill the memory), tags, deep nesting."""
    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases")
        if (tag := getattr(event, "tag", None)) is not None:
            raise ValueError(f"it has the tag {tag}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_CONFIG_DEPTH:
            raise ValueError(f"nested more than {MAX_CONFIG_DEPTH} levels deep")


def depends_on_total_steps(config: dict[str, Any]) -> bool:
    """True if the routing or the learning rate of a step depends on train.total_steps."""
    schedules = {config[group].get("schedule", "constant") for group in ("routing", "optimizer")}
    return schedules != {"constant"} or bool(config["routing"]["off_last_steps"])


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describe the differences between the manifests of two starts of a run."""
    before, now = (
        {
            "num_processes": manifest["num_processes"],
            "parallel": manifest["parallel"],
            "micro_batch_size": manifest["resolved"]["micro_batch_size"],
            "code": manifest["source_sha256"][:8],
            **{key: manifest[key] for key in ("device", "processor", "threads")},
            **manifest["versions"],
        }
        for manifest in (old, new)
    )
    return [
        f"{key} {before.get(key)} -> {value}: {EFFECTS.get(key, 'results may differ by rounding')}"
        for key, value in now.items()
        if before.get(key) != value
    ]
