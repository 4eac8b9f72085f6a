"""Score images by the ADM suite: FID, sFID, inception score, precision and recall; or make a reference to score against.

    accelerate launch fid.py samples=FILE.npz reference=REFERENCE.npz
    accelerate launch fid.py run=runs/NAME num_samples=50000 reference=REFERENCE.npz
    accelerate launch fid.py mode=reference images=FOLDER resolution=256 out=REFERENCE.npz
    accelerate launch fid.py suite=digits samples=FILE.npz reference=latents/digits

What was scored, against what and how is kept with the scores as JSON.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object, reduce
from omegaconf import DictConfig

from data import image_decoder, manifest_from, open_images, open_latents, read_manifest, real_images
from diffusion import ImageSource
from evaluation import AdmSuite, DigitsEvaluator, InceptionDetector, Processes, make_reference, open_reference
from evaluation.files import sha256
from training import config as configuration
from training.machine import start_process
from training.provenance import environment
from training.rules import check_choice, check_positive
from training.sampling import open_run

NUM_SAMPLES = 50_000  # of a run, unless told

configuration.register()


@hydra.main(version_base="1.3", config_path="configs", config_name="fid")
def main(cfg: DictConfig) -> None:
    """Check what is asked, and do it."""
    with configuration.user_mistakes():
        request = configuration.resolve(cfg)
        check_request(request)
    state = start_process()
    if request["mode"] == "reference":
        write_reference(request, state)
    elif request["suite"] == "adm":
        score(request, state)
    elif state.is_main_process:  # these scores take a second; one process computes them
        score_digits(request)


def check_request(request: dict[str, Any]) -> None:
    """Check that the keys that are given belong together.

    Raises:
        ValueError: with the key and the rule.
    """
    check_choice("mode", request["mode"], ("score", "reference"))
    check_choice("suite", request["suite"], ("adm", "digits"))
    check_positive("detector_batch_size", request["detector_batch_size"])
    needed, idle = {
        "reference": (("images", "out"), ("samples", "run", "reference")),
        "score": (("reference",), ("images", "resolution")),
    }[request["mode"]]
    for key in needed:
        if request[key] is None:
            raise ValueError(f"{key} must be given for mode={request['mode']}")
    for key in idle:
        if request[key] is not None:
            raise ValueError(f"{key}={request[key]} has no meaning for mode={request['mode']}")
    if request["mode"] == "reference":
        if not request["out"].endswith(".npz"):
            raise ValueError(f"out={request['out']} must end in .npz")
        if request["resolution"] is not None:
            check_positive("resolution", request["resolution"])
        return
    if (request["samples"] is None) == (request["run"] is None):
        raise ValueError("one of samples (an .npz, a folder or a zip) and run (a run to draw from) must be given")
    if request["suite"] == "digits" and request["run"]:
        raise ValueError("suite=digits scores samples=FILE.npz; sample.py draws them from a run")
    if request["samples"]:
        for field in fields(configuration.SamplingConfig):
            if field.name != "num_samples" and request[field.name] != field.default:
                raise ValueError(f"{field.name}={request[field.name]} is about samples yet to be drawn: it needs run=NAME")
        if Path(request["samples"]).is_dir() and request["num_samples"] is None:
            raise ValueError(
                f"samples={request['samples']} is a folder, which may hold images of an earlier time: "
                "say with num_samples=N how many there must be"
            )


def score(request: dict[str, Any], state: PartialState) -> None:
    """Score samples by the ADM suite."""
    processes = share_work(state)
    with configuration.user_mistakes():
        samples, out, batches = (drawn_samples if request["run"] else kept_samples)(request, state)
        statistics, images = open_reference(Path(request["reference"]), open_images)
        options = {key: request[key] for key in ("precision_recall", "exact_distances", "kid")}
        suite = AdmSuite(
            InceptionDetector(request["weights"], state.device, request["allow_unpublished_weights"]),
            statistics,
            images,
            processes=processes,
            batch_size=request["detector_batch_size"],
            **options,
        )
        suite.check(samples["num_samples"], samples["shape"])
        out = Path(request["out"] or out)
        scores = suite.score(batches, samples["num_samples"])
    if not state.is_main_process:
        return
    for metric, value in scores.values.items():
        print(f"{metric:14} {value:10.4f}")
    for metric, reason in scores.left_out.items():
        print(f"{metric:14}   left out: {reason}")
    if images is not None and images.shape != samples["shape"]:
        scores.warnings.append(f"samples are {samples['shape']}, images of the reference {images.shape}: sizes move the scores")
    for warning in scores.warnings:
        print(f"note: {warning}")
    result = {
        **asdict(scores),
        "samples": samples,
        "reference": {"path": request["reference"], "sha256": fingerprint(Path(request["reference"]))},
        "detector": suite.detector.record,
        "protocol": suite.protocol,
        "num_processes": state.num_processes,
        "environment": environment(str(state.device)),
    }
    keep(result, out)


def kept_samples(request: dict[str, Any], state: PartialState) -> tuple[dict[str, Any], Path, Iterable]:
    """Return a record of samples in files, where their scores go, and this process's batches."""
    path = Path(request["samples"])
    if not path.exists():
        raise FileNotFoundError(f"samples={path} not found: sample.py writes one")
    images = open_images(path)
    if request["num_samples"] not in (None, images.count):
        raise ValueError(f"samples={path} holds {images.count} images, num_samples={request['num_samples']} must agree")
    record = {"path": str(path), "sha256": fingerprint(path), "num_samples": images.count, "shape": images.shape}
    drawn = path.with_suffix(".json")
    if path.suffix == ".npz" and drawn.is_file():
        record["drawn"] = json.loads(drawn.read_text())
        if record["drawn"].get("samples_sha256") != record["sha256"]:
            raise ValueError(f"samples={path} is not what {drawn} tells about: draw it again, or remove {drawn.name}")
    batches = images.batches(request["detector_batch_size"], state.process_index, state.num_processes)
    return record, path.with_suffix(".scores.json"), batches


def drawn_samples(request: dict[str, Any], state: PartialState) -> tuple[dict[str, Any], Path, Iterable]:
    """Return a record of samples to be drawn from a run, where their scores go, and this process's batches."""
    run = open_run({**request, "num_samples": NUM_SAMPLES if request["num_samples"] is None else request["num_samples"]}, state)
    source = ImageSource(
        run.precond,
        run.sampler,
        image_decoder(manifest_from(run.data["manifest"])),
        **run.drawing,
        device=state.device,
        process_index=state.process_index,
        num_processes=state.num_processes,
        gather=gather_object,
    )
    num_samples = run.protocol["num_samples"]
    drawn = {**run.protocol, "weights_sha256": sha256(run.weights)}
    record = {"num_samples": num_samples, "shape": source.image_shape, "drawn": drawn}
    return record, Path(request["run"]) / "scores" / f"{run.name}.json", source.batches(num_samples)


def write_reference(request: dict[str, Any], state: PartialState) -> None:
    """Write a reference from images, with a record beside it."""
    with configuration.user_mistakes():
        detector = InceptionDetector(request["weights"], state.device, request["allow_unpublished_weights"])
        images = open_images(request["images"], request["resolution"])
        if images.count < 2 or images.shape[-1] != 3:
            raise ValueError(
                f"images={request['images']} holds {images.count} of {images.shape}: at least 2 of (H, W, 3) are needed"
            )
        file = Path(request["out"])
        found = make_reference(detector, images, file, request["detector_batch_size"], share_work(state))
    if state.is_main_process:
        record = {**found, "images": request["images"], "resolution": request["resolution"], "detector": detector.record}
        keep({**record, "environment": environment(str(state.device))}, file.with_suffix(".json"))
        print(f"reference {file}")


def share_work(state: PartialState) -> Processes:
    """Tell the suite about the processes of the launch."""
    return Processes(state.process_index, state.num_processes, partial(reduce, reduction="sum"), gather_object)


def score_digits(request: dict[str, Any]) -> None:
    """Score digits in pixels, with real held-out digits and the means of the classes for comparison."""
    with configuration.user_mistakes():
        file = Path(request["samples"])
        samples, labels = read_labelled(file)
        manifest = read_manifest(request["reference"])
        dataset = open_latents(request["reference"], manifest.input_size, manifest.in_channels, manifest.num_classes)
        reference, reference_labels = real_images(dataset, dataset.train_ids)
        if reference_labels is None:
            raise ValueError(f"reference={request['reference']} must have labels")
        if samples.shape[1:] != reference.shape[1:]:
            raise ValueError(f"samples={file} are {samples.shape[1:]}, the reference is {reference.shape[1:]}")
        evaluator = DigitsEvaluator((reference, reference_labels), source=None, num_samples=len(samples))
    held_out = real_images(dataset, dataset.held_out_ids) if len(dataset.held_out_ids) > 1 else None
    scores = evaluator.compare(samples, labels, held_out)
    print(table(scores))
    print("A distance also depends on n: it grows as n falls.")
    result = {
        "scores": scores,
        "samples": {"path": str(file), "sha256": sha256(file)},
        "reference": request["reference"],
        "data": dataset.describe(),
        "environment": environment("cpu"),
    }
    keep(result, Path(request["out"] or file.with_suffix(".scores.json")))


def read_labelled(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images (N, H, W, C) uint8 and labels (N,) from an .npz in the layout of [ADM]."""
    if not file.is_file():
        raise FileNotFoundError(f"samples={file} not found: sample.py writes one")
    images = open_images(file)
    with np.load(file, allow_pickle=False) as arrays:
        labels = arrays.get("arr_1")
    if images.count < 2 or labels is None or labels.shape != (images.count,):
        raise ValueError(f"samples={file} must hold 2 or more images (arr_0) and a label for each (arr_1)")
    return np.concatenate([batch for _, batch in images.batches(images.count)]), labels


def fingerprint(path: Path) -> str:
    """Return the hash of a file, or of the names and sizes of the files in a folder."""
    if path.is_file():
        return sha256(path)
    listing = [f"{file.relative_to(path)} {file.stat().st_size}" for file in sorted(path.rglob("*")) if file.is_file()]
    return hashlib.sha256("\n".join(listing).encode()).hexdigest()


def keep(result: dict[str, Any], file: Path) -> None:
    """Write a result as JSON and say where."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(f"record {file}")


def table(scores: dict[str, dict[str, float]]) -> str:
    """Lay scores out in columns."""
    keys = list(next(iter(scores.values())))
    lines = [f"{'':16}" + "".join(f"{key:>16}" for key in keys)]
    for name, row in scores.items():
        lines.append(f"{name:16}" + "".join(f"{v:>16}" if isinstance(v, int) else f"{v:>16.3f}" for v in row.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    configuration.run(main)
