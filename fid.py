"""Score images by the ADM suite: FID, sFID, inception score, precision and recall; or make a reference to
score against.

    accelerate launch fid.py samples=FILE.npz reference=REFERENCE.npz
    accelerate launch fid.py run=runs/NAME num_samples=50000 reference=REFERENCE.npz
    accelerate launch fid.py mode=reference images=FOLDER resolution=256 out=REFERENCE.npz
    accelerate launch fid.py suite=digits samples=FILE.npz reference=latents/digits      or glyphs

What was scored, against what and how is kept with the scores as JSON.
"""

import zipfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig

from builders import config as configuration
from builders.sampling import check_sampling, open_source
from builders.schemas import SamplingConfig, ScoreConfig
from data import (
    encoder_for,
    open_images,
    open_latents,
    read_manifest,
    real_images,
)
from data.images import ZIP_ERRORS
from evaluation import (
    AdmSuite,
    DigitsEvaluator,
    GlyphsEvaluator,
    InceptionDetector,
    make_reference,
    open_reference,
)
from evaluation.adm import Scores
from evaluation.files import fingerprint
from evaluation.inception import check_weights_file
from runtime.arrays import read_member
from runtime.config import run_main, user_mistakes
from runtime.errors import check_choice, check_positive
from runtime.files import read_json, sha256, write_json
from runtime.launch import Launch
from runtime.machine import start_process
from runtime.output import check_free, claimed, place_of
from runtime.provenance import environment

NUM_SAMPLES = 50_000  # of a run, unless told
SAMPLING_KEYS = {field.name for field in fields(SamplingConfig)} - {"num_samples"}
DETECTOR_KEYS = {"weights", "allow_unpublished_weights", "detector_batch_size"}
SUITE_KEYS = {"precision_recall", "exact_distances", "kid"}
# What can be asked, and the keys that then mean something; `mode` and `suite` choose, `out` and `overwrite`
# always do.
SCORE_FILES = {"reference", "samples", "num_samples"} | DETECTOR_KEYS | SUITE_KEYS
SCORE_RUN = {"reference", "run", "num_samples"} | SAMPLING_KEYS | DETECTOR_KEYS | SUITE_KEYS
FITTED_SUITES = {"digits": DigitsEvaluator, "glyphs": GlyphsEvaluator}
SCORE_FITTED = {"reference", "samples"}
MAKE_REFERENCE = {"images", "resolution"} | DETECTOR_KEYS
NEEDED = ("reference", "samples", "images")

configuration.register()


@hydra.main(version_base="1.3", config_path="configs", config_name="fid")
def main(cfg: DictConfig) -> None:
    """Check what is asked, and do it."""
    with user_mistakes():
        request = configuration.resolve(cfg)
        check_request(request)
        check_files(request)
        if request["run"] is not None:
            check_sampling(drawn(request))
        launch = start_process()
        if request["mode"] == "reference":
            write_reference(request, launch)
        elif request["suite"] == "adm":
            score(request, launch)
        elif launch.is_main:  # these scores take seconds; one process computes them
            score_fitted(request)


def check_request(request: dict[str, Any]) -> None:
    """Check that the keys that are given belong together.

    Raises:
        ValueError: with the key and the rule.
    """
    check_choice("mode", request["mode"], ("score", "reference"))
    check_choice("suite", request["suite"], ("adm", *FITTED_SUITES))
    check_positive("detector_batch_size", request["detector_batch_size"])
    if request["mode"] == "reference":
        what, keys = "mode=reference", MAKE_REFERENCE
    elif request["suite"] in FITTED_SUITES:
        what, keys = f"suite={request['suite']}", SCORE_FITTED | {"suite"}
    elif request["run"] is not None:
        what, keys = "scoring a run", SCORE_RUN
    else:
        what, keys = "scoring samples in files", SCORE_FILES
    for field in fields(ScoreConfig):
        if field.name not in {*keys, "mode", "out", "overwrite"} and request[field.name] != field.default:
            raise ValueError(f"{field.name}={request[field.name]} has no meaning for {what}")
    for key in NEEDED:
        if key in keys and request[key] is None:
            hint = " (an .npz, a folder or a zip; or run=NAME to draw from a run)" if key == "samples" else ""
            raise ValueError(f"{key} must be given for {what}{hint}")
    for key in ("resolution", "num_samples"):
        if request[key] is not None:
            check_positive(key, request[key])
    check_out(request)
    if request["samples"] and Path(request["samples"]).is_dir() and request["num_samples"] is None:
        raise ValueError(
            f"samples={request['samples']} is a folder, which may hold images of an earlier time: "
            "say with num_samples=N how many there must be"
        )


def check_files(request: dict[str, Any]) -> None:
    """Check that what is read is there.

    Raises:
        FileNotFoundError: with the key and the value.
    """
    download = (
        ": `python -m evaluation.fetch` lists what can be downloaded" if request["suite"] == "adm" else ""
    )
    for key, hint in (("samples", ": sample.py writes one"), ("reference", download), ("images", "")):
        if request[key] is not None and not Path(request[key]).exists():
            raise FileNotFoundError(f"{key}={request[key]} not found{hint}")
    if request["suite"] == "adm":
        check_weights_file(Path(request["weights"]))


def drawn(request: dict[str, Any]) -> dict[str, Any]:
    """Return what is asked of a run."""
    return {
        **request,
        "num_samples": NUM_SAMPLES if request["num_samples"] is None else request["num_samples"],
    }


def check_out(request: dict[str, Any]) -> None:
    """Check where the result goes."""
    suffix = ".npz" if request["mode"] == "reference" else ".json"
    if request["mode"] == "reference" and request["out"] is None:
        raise ValueError("out must be given for mode=reference")
    if request["out"] is None:
        return
    out = Path(request["out"])
    if out.suffix != suffix:
        raise ValueError(f"out={out} must end in {suffix}")
    check_free("out", out, [out.with_suffix(".json")], request["overwrite"])


def score(request: dict[str, Any], launch: Launch) -> None:
    """Score samples by the ADM suite."""
    samples = KeptSamples(request, launch) if request["run"] is None else DrawnSamples(request, launch)
    reference = Path(request["reference"])
    suite = AdmSuite(
        InceptionDetector(request["weights"], launch.device, request["allow_unpublished_weights"]),
        *open_reference(reference, open_images),
        launch=launch,
        batch_size=request["detector_batch_size"],
        **{key: request[key] for key in SUITE_KEYS},
    )
    suite.check(samples.count, samples.shape, samples.name)
    out = samples.out
    with launch.claimed_by_main("out", out, (), request["overwrite"]):
        record = {
            "protocol": suite.protocol,
            "num_processes": launch.world_size,
            "environment": environment(launch.device),
        }
        if launch.is_main:
            record["samples"] = samples.record()
            record["reference"] = {"path": str(reference), "sha256": fingerprint(reference)}
        scores = suite.score(samples.batches, samples.count, samples.shape)
        if launch.is_main:
            tell(scores)
            keep({**asdict(scores), **record}, out)


def tell(scores: Scores) -> None:
    """Print scores, what was left out, and what is to be known of them."""
    for metric, value in scores.values.items():
        print(f"{metric:14} {value:10.5g}")
    for metric, reason in scores.left_out.items():
        print(f"{metric:14}   left out: {reason}")
    for warning in scores.warnings:
        print(f"note: {warning}")


class KeptSamples:
    """Samples in files: their number, shape and batches, where their scores go, and a record of them."""

    def __init__(self, request: dict[str, Any], launch: Launch):
        self.path, self.name = Path(request["samples"]), f"samples={request['samples']}"
        if not self.path.exists():
            raise FileNotFoundError(f"samples={self.path} not found: sample.py writes one")
        images = open_images(self.path)
        if request["num_samples"] not in (None, images.count):
            raise ValueError(
                f"samples={self.path} holds {images.count} images, num_samples={request['num_samples']} must "
                "agree"
            )
        self.count, self.shape = images.count, images.shape
        name = self.path.stem if self.path.suffix == ".npz" else self.path.resolve().name
        self.out = Path(request["out"] or self.path.parent / f"{name}.scores.json")
        self.batches = images.batches(request["detector_batch_size"], launch)

    def record(self) -> dict[str, Any]:
        """Return what the samples are, with what `sample.py` says of them."""
        record = {
            "path": str(self.path),
            "sha256": fingerprint(self.path),
            "num_samples": self.count,
            "shape": self.shape,
        }
        beside = self.path.with_suffix(".json")
        drawn = read_json(beside) if self.path.suffix == ".npz" and beside.is_file() else None
        if not isinstance(drawn, dict) or "samples_sha256" not in drawn:
            return record
        if drawn["samples_sha256"] != record["sha256"]:
            raise ValueError(
                f"samples={self.path} is not what {beside} tells about: draw it again, or remove "
                f"{beside.name}"
            )
        return {**record, "drawn": drawn}


class DrawnSamples:
    """Samples drawn from a run while they are scored: the same as of samples in files."""

    def __init__(self, request: dict[str, Any], launch: Launch):
        request = drawn(request)
        self.name = f"run={request['run']}"
        source, name, self._drawn = open_source(request, launch)
        self.count, self.shape = request["num_samples"], source.image_shape
        self.batches = source.batches(self.count)
        self.out = place_of("out", request["out"], Path(request["run"]), f"scores/{name}.json")

    def record(self) -> dict[str, Any]:
        """Return what the samples are."""
        return {"num_samples": self.count, "shape": self.shape, "drawn": self._drawn}


def write_reference(request: dict[str, Any], launch: Launch) -> None:
    """Write a reference from images, with a record beside it."""
    source, file = Path(request["images"]), Path(request["out"])
    images = open_images(source, request["resolution"])
    if images.count < 2 or images.shape[-1] != 3:
        raise ValueError(
            f"images={source} holds {images.count} of {images.shape}: at least 2 of (H, W, 3) are needed"
        )
    beside = file.with_suffix(".json")
    with launch.claimed_by_main("out", file, [beside], request["overwrite"]):
        detector = InceptionDetector(request["weights"], launch.device, request["allow_unpublished_weights"])
        found = make_reference(detector, images, file, request["detector_batch_size"], launch)
        if launch.is_main:
            origin = {"path": str(source), "sha256": fingerprint(source), "resolution": request["resolution"]}
            record = {**found, "sha256": sha256(file), "images": origin, "weights": detector.record}
            record |= {"num_processes": launch.world_size, "environment": environment(launch.device)}
            print(f"reference {file}")
            keep(record, beside)


def score_fitted(request: dict[str, Any]) -> None:
    """Score digits or glyphs, with real held-out images and the means of the classes for comparison."""
    file = Path(request["samples"])
    samples, labels = read_labelled(file)
    manifest = read_manifest(request["reference"])
    dataset = open_latents(
        request["reference"], manifest.input_size, manifest.in_channels, manifest.num_classes
    )
    encoder = encoder_for(manifest, torch.device("cpu"))
    reference, reference_labels = real_images(dataset, dataset.train_ids, encoder)
    if reference_labels is None:
        raise ValueError(f"reference={request['reference']} must have labels")
    if samples.shape[1:] != reference.shape[1:]:
        raise ValueError(f"samples={file} are {samples.shape[1:]}, the reference is {reference.shape[1:]}")
    evaluator = FITTED_SUITES[request["suite"]]((reference, reference_labels))
    held_out = real_images(dataset, dataset.held_out_ids, encoder) if len(dataset.held_out_ids) > 1 else None
    out = Path(request["out"] or file.with_suffix(".scores.json"))
    with claimed("out", out, (), request["overwrite"]):
        keep_fitted(request, evaluator.compare(samples, labels, held_out), dataset.describe(), out)


def keep_fitted(
    request: dict[str, Any], scores: dict[str, dict[str, float]], data: dict[str, Any], out: Path
) -> None:
    """Print scores, and keep them with what was scored against what."""
    print(table(scores))
    print("A distance also depends on n: it grows as n falls.")
    result = {
        "scores": scores,
        "samples": {"path": request["samples"], "sha256": sha256(Path(request["samples"]))},
        "reference": request["reference"],
        "data": data,
        "environment": environment(torch.device("cpu")),
    }
    keep(result, out)


def read_labelled(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images (N, H, W, C) uint8 and labels (N,) from an .npz in the layout of [ADM]."""
    if not file.is_file():
        raise FileNotFoundError(f"samples={file} not found: sample.py writes one")
    images = open_images(file)
    try:
        with zipfile.ZipFile(file) as archive:
            labels = read_member(archive, "arr_1") if "arr_1.npy" in archive.namelist() else None
    except ZIP_ERRORS as error:
        raise ValueError(f"samples={file}: arr_1 cannot be read: {error}") from error
    if images.count < 2 or labels is None or labels.shape != (images.count,):
        raise ValueError(f"samples={file} must hold 2 or more images (arr_0) and a label for each (arr_1)")
    return np.concatenate([batch for _, batch in images.batches(images.count)]), labels


def keep(result: dict[str, Any], file: Path) -> None:
    """Write a result as JSON and say where."""
    write_json(file, result)
    print(f"record {file}")


def table(scores: dict[str, dict[str, float]]) -> str:
    """Lay scores out in columns."""
    keys = list(next(iter(scores.values())))
    lines = [f"{'':16}" + "".join(f"{key:>16}" for key in keys)]
    for name, row in scores.items():
        lines.append(
            f"{name:16}" + "".join(f"{v:>16}" if isinstance(v, int) else f"{v:>16.3f}" for v in row.values())
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
