"""Score images by a suite of metrics: that of ADM (FID, sFID, inception score, precision and recall), of
digits, of glyphs, or your own; or make a reference to score against.

    python fid.py samples=FILE.npz reference=REFERENCE.npz
    python fid.py run=runs/NAME num_samples=50000 reference=REFERENCE.npz
    python fid.py mode=reference images=FOLDER resolution=256 out=REFERENCE.npz
    python fid.py suite=digits samples=FILE.npz reference=latents/digits      or glyphs

What was scored, against what and how is saved with the scores as JSON.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from builders import config as configuration
from builders.scoring import (
    DrawnSamples,
    FileSamples,
    ScoreConfig,
    check_files,
    check_request,
    comparisons,
    draws,
    features_folder,
    open_samples,
    open_suite,
    show,
    suite_config,
)
from builders.sweep import summarise
from data import open_images
from data.images import ORIENTATION
from evaluation import InceptionDetector, make_reference
from evaluation.files import fingerprint
from evaluation.suite import code_of, digest_of
from runtime.config import as_job, is_sweep, run_main, user_mistakes
from runtime.files import finite, read_json, sha256, write_json
from runtime.launch import Launch
from runtime.machine import PATIENCE, start_process
from runtime.parts import PartFolder
from runtime.provenance import environment

configuration.register("fid", ScoreConfig)


@hydra.main(version_base="1.3", config_path="configs", config_name="fid")
@as_job
def main(cfg: DictConfig) -> None:
    """Check what is asked, and do it."""
    with user_mistakes():
        request = configuration.resolve(cfg)
        check_request(request)
        check_files(request)
        launch = start_process(timeout=PATIENCE)
        if request["mode"] == "reference":
            write_reference(request, launch)
        else:
            out = score(request, launch)
            if is_sweep() and draws(request):
                table = launch.broadcast_from_main(lambda: summarise(out))
                launch.print(f"sweep {table}, {table.with_suffix('.png')}" if table else "sweep: one record")


def score(request: dict[str, Any], launch: Launch) -> Path:
    """Score samples, print the scores and save them with a record; a sweep passes over what has one."""
    samples = open_samples(request, launch)
    suite = open_suite(request, samples.count, samples.out, launch)
    suite.check(samples.count, samples.shape, samples.name)
    kept = samples.settle(suite)
    described = {"suite": request["suite"], "protocol": suite.describe()}
    again = request["overwrite"] or not is_sweep()
    if not again and launch.broadcast_from_main(lambda: is_scored(samples, described)):
        launch.print(f"{samples.out} is there already")
        return samples.out
    labels = samples.labels() if any(metric.needs_labels for metric in suite.metrics) else None
    if labels is not None:
        suite.check_labels(labels, samples.name)
    with launch.claimed_by_main("out", samples.out, (), request["overwrite"]):
        record = {"num_processes": launch.world_size, "environment": environment(launch.device)}
        drawn = launch.broadcast_from_main(samples.record)
        if launch.is_main:
            record |= {**described, "samples": drawn}
        scores = suite.score(samples.images, labels, kept)
        others = comparisons(suite, samples.count)
        if launch.is_main:
            show(scores, others)
            compared = {name: {"n": row.num_images, **row.values} for name, row in others.items()}
            save({**asdict(scores), **record, "comparisons": compared}, samples.out)
    return samples.out


def is_scored(samples: FileSamples | DrawnSamples, described: dict[str, Any]) -> bool:
    """Return whether the same samples have the same scores on disk."""
    if not samples.out.is_file() or not isinstance(there := read_json(samples.out), dict):
        return False
    wanted = json.loads(json.dumps(finite({**described, "samples": samples.record()})))
    return {key: there.get(key) for key in wanted} == wanted


def write_reference(request: dict[str, Any], launch: Launch) -> None:
    """Write a reference from images, with a record beside it."""
    source, file = Path(request["images"]), Path(request["out"])
    suite = suite_config(request)["evaluation"]
    images = open_images(source, request["resolution"])
    if images.count < 2 or images.shape[-1] != 3:
        rule = "at least 2 of (H, W, 3) are needed"
        raise ValueError(f"images={source} holds {images.count} of {images.shape}: {rule}")
    beside = file.with_suffix(".json")
    with launch.claimed_by_main("out", file, [beside], request["overwrite"]):
        detector = InceptionDetector(suite["weights"], launch.device, suite["allow_unpublished_weights"])
        about = {"images": fingerprint(source), "resolution": request["resolution"], **code_of(detector)}
        about |= {"batch_size": suite["batch_size"]}
        path = features_folder(request, file) / f"reference-{digest_of(about)}"
        kept = PartFolder(path, about, -(-images.count // suite["batch_size"]))
        found = make_reference(detector, images, file, suite["batch_size"], launch, kept)
        if launch.is_main:
            origin = {"path": str(source), "sha256": fingerprint(source), "resolution": request["resolution"]}
            origin |= {"orientation": None if source.suffix == ".npz" else ORIENTATION}
            record = {**found, "sha256": sha256(file), "images": origin, "weights": detector.record}
            record |= {"num_processes": launch.world_size, "environment": environment(launch.device)}
            print(f"reference {file}")
            save(record, beside)
            kept.remove()  # the reference has what they add up to


def save(record: dict[str, Any], file: Path) -> None:
    """Write a record as JSON and print where."""
    write_json(file, record)
    print(f"record {file}")


if __name__ == "__main__":
    run_main(main)
