"""Score images with a suite of metrics: ADM (FID, sFID, inception score, precision and recall), digits,
glyphs or your own; or make a reference. The scores are saved in JSON with a record of the samples.

    python fid.py samples=FILE.npz reference=REFERENCE.npz
    python fid.py run=runs/NAME num_samples=50000 reference=REFERENCE.npz
    python fid.py mode=reference images=FOLDER resolution=256 out=REFERENCE.npz
    python fid.py suite=digits samples=FILE.npz reference=latents/digits
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from builders import config as configuration
from builders.experiment import Experiment
from builders.references import write_reference
from builders.scoring import (
    FileSamples,
    NetworkSamples,
    ScoreConfig,
    check_request,
    comparisons,
    open_suite,
    show,
)
from builders.sweep import summarise
from runtime.config import as_job, is_sweep, run_main, user_mistakes
from runtime.files import read_json, write_json
from runtime.launch import Launch
from runtime.machine import PATIENCE, start_process
from runtime.nodes import Node
from runtime.parts import as_json
from runtime.provenance import environment

configuration.register("fid", ScoreConfig)


@hydra.main(version_base="1.3", config_path="configs", config_name="fid")
@as_job
def main(cfg: DictConfig) -> None:
    """Check the request, then score or write a reference."""
    with user_mistakes():
        request = configuration.resolve(cfg, ScoreConfig)
        request, suite, experiment = check_request(request)
        launch = start_process(timeout=PATIENCE)
        if request.mode == "reference":
            write_reference(request, suite.arguments, launch)
        else:
            out = score(request, suite, experiment, launch)
            if is_sweep() and experiment:
                table = launch.broadcast_from_main(lambda: summarise(out))
                launch.print(f"sweep {table}" if table else "sweep: one record")


def score(request: ScoreConfig, node: Node, experiment: Experiment | None, launch: Launch) -> Path:
    """Score samples, print the scores and save them with a record; a sweep skips existing records."""
    samples = NetworkSamples(request, experiment, launch) if experiment else FileSamples(request)
    suite = open_suite(node, request, samples.out, launch)
    suite.check(samples.count, samples.shape, samples.name)
    cache = samples.cache(suite)
    described = {"suite": request.suite, "protocol": suite.describe(), "intervals": request.intervals}
    skips_existing = is_sweep() and not request.overwrite
    if skips_existing and launch.broadcast_from_main(lambda: is_scored(samples, described)):
        launch.print(f"{samples.out} already exists")
        return samples.out
    labels = None
    if any(metric.needs_labels for metric in suite.metrics):
        labels = samples.labels()
        suite.check_labels(labels, samples.name)
    with launch.exclusive_output(samples.out, (), request.overwrite):
        samples_record = launch.broadcast_from_main(samples.record)
        scores = suite.score(samples.images, labels, cache, request.intervals)
        others = comparisons(suite, samples.count)
        if launch.is_main:
            show(scores, others)
            record = {"num_processes": launch.world_size, "environment": environment(launch.device)}
            record |= {**described, "samples": samples_record}
            compared = {name: {"n": row.num_images, **row.values} for name, row in others.items()}
            write_json(samples.out, {**asdict(scores), **record, "comparisons": compared})
            print(f"record {samples.out}")
    return samples.out


def is_scored(samples: FileSamples | NetworkSamples, described: dict[str, Any]) -> bool:
    """True if a record of the same samples and settings exists."""
    if not samples.out.is_file() or not isinstance(saved := read_json(samples.out), dict):
        return False
    record = as_json({**described, "samples": samples.record()})
    return {key: saved.get(key) for key in record} == record


if __name__ == "__main__":
    run_main(main)
