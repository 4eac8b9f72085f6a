"""Suites of metrics, and the requests of `fid.py`: samples, references and the table of scores."""

import zipfile
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from builders.drawing import Drawing, cache_key, start_drawing
from builders.experiment import Experiment, as_node
from builders.references import latent_reference
from builders.sampling import SamplingConfig, open_model, read_request
from data import open_images
from evaluation import ArrayImages, Reference, Suite, open_reference
from evaluation.files import fingerprint
from evaluation.suite import Scores
from runtime.arrays import ZIP_ERRORS, read_member
from runtime.config import compose_group, is_sweep
from runtime.errors import as_value_error, check_choice, check_positive
from runtime.files import read_json
from runtime.launch import Launch
from runtime.nodes import Node, read_nodes
from runtime.output import output_path
from runtime.parts import PartCache, digest_of
from runtime.tables import text_table


@dataclass
class ScoreConfig(SamplingConfig):
    """The keys of `fid.py`."""

    mode: str = "score"  # score, or reference: make a reference from images
    suite: str = "adm"  # the name of a file in configs/evaluation/
    samples: str | None = None  # an .npz, a folder or a zip
    reference: str | None = None
    images: str | None = None
    resolution: int | None = None
    out: str | None = None  # None: next to the samples, or in the run
    weights: str | None = None  # None, here and below: the value in the file of the suite
    allow_unpublished_weights: bool | None = None
    precision_recall: bool | None = None
    exact_distances: bool | None = None
    kid: bool | None = None
    encoder_weights: str | None = None
    intervals: int = 0  # number of random halves of the samples for standard errors; 0: none
    detector_batch_size: int | None = None
    features: str | None = None  # a folder for finished parts of features; None: next to the scores
    overwrite: bool = False

    def features_folder(self, out: Path) -> Path:
        """Return the folder of finished parts of features."""
        folder = Path(self.features or out.parent / "features")
        for key, source in (("samples", self.samples), ("images", self.images)):
            if source and folder.resolve().is_relative_to(Path(source).resolve()):
                raise ValueError(f"features={folder} must not be inside {key}={source}")
        if folder.is_symlink() and not self.features:
            raise ValueError(f"{folder} is a link, must be a folder: give features=FOLDER")
        return folder


SAMPLING_KEYS = {field.name for field in fields(SamplingConfig)} - {"num_samples"}
KEYS = {  # request -> the keys that apply, besides the keys of a suite, and the keys that must be given
    "scoring samples in files": ({"suite", "num_samples", "intervals"}, ("reference", "samples")),
    "scoring a network": ({"suite", "num_samples", "intervals", *SAMPLING_KEYS}, ("reference",)),
    "mode=reference": ({"resolution"}, ("images", "out")),
}
# Name in the file of a suite -> key on the command line.
SAME_KEYS = ("weights", "allow_unpublished_weights", "precision_recall", "exact_distances", "kid")
SAME_KEYS += ("encoder_weights",)
SUITE_KEYS = {key: key for key in SAME_KEYS} | {"batch_size": "detector_batch_size"}


def build_suite(node: Node, reference: Reference, launch: Launch, features: Path | None = None) -> Suite:
    """Build a suite with its detector and metrics, if it has any."""
    parts = {}
    if "detector" in node.arguments:
        parts["detector"] = as_node(node.arguments["detector"], "evaluation.detector").bind()()
    if "metrics" in node.arguments:
        if not isinstance(metrics := node.arguments["metrics"], dict):
            raise ValueError(f"evaluation.metrics={metrics} must name metrics, or be {{}}")
        parts["metrics"] = {k: as_node(m, f"evaluation.metrics.{k}").bind()() for k, m in metrics.items()}
    suite = node.bind()(reference=reference, launch=launch, features=features, **parts)
    suite.detector_config = node.written.get("detector")
    return suite


def suite_node(request: ScoreConfig) -> Node:
    """Compose the requested suite with the keys of the command line."""
    node = compose_group("evaluation", request.suite, "suite")
    if "_target_" not in node:
        raise ValueError(f"suite={request.suite} must name a _target_")
    given = {name: getattr(request, key) for name, key in SUITE_KEYS.items() if name in node}
    node |= {name: value for name, value in given.items() if value is not None}
    if node.get("reference") is not None:
        node["reference"] = request.reference
    return read_nodes(node, "evaluation")


def check_request(request: ScoreConfig) -> tuple[ScoreConfig, Node, Experiment | None]:
    """Check that the given keys belong together.

    Returns:
        The completed request, its suite, and the experiment that draws samples; None for samples in files.
    """
    check_choice("mode", request.mode, ("score", "reference"))
    suite = suite_node(request)
    draws = request.run is not None or request.checkpoint is not None
    what = "scoring a network" if draws else "scoring samples in files"
    what = "mode=reference" if request.mode == "reference" else what
    keys, needed = KEYS[what]
    for field in fields(ScoreConfig):
        key, value = field.name, getattr(request, field.name)
        if value in (field.default, {}):  # {}: no option of a group is chosen
            continue
        if key in SUITE_KEYS.values():
            if not any(key == SUITE_KEYS[name] for name in suite.arguments.keys() & SUITE_KEYS.keys()):
                raise ValueError(f"{key}={value} does not apply to suite={request.suite}")
        elif key not in {*keys, *needed, "mode", "out", "features", "overwrite"}:
            raise ValueError(f"{key}={value} does not apply to {what}")
    for key in needed:
        if getattr(request, key) is None:
            raise ValueError(f"{key} must be given for {what}")
    if request.intervals != 0 and request.intervals < 2:
        raise ValueError(f"intervals={request.intervals} must be 0 or at least 2")
    for key in ("resolution", "num_samples", "detector_batch_size"):
        check_positive(key, getattr(request, key))
    suffix = ".npz" if request.mode == "reference" else ".json"
    if request.out is not None and Path(request.out).suffix != suffix:
        raise ValueError(f"out={Path(request.out)} must end in {suffix}")
    samples = request.samples
    if samples and Path(samples).is_dir() and request.num_samples is None:
        rule = "is a folder, which may contain older images: give their number as num_samples=N"
        raise ValueError(f"samples={samples} {rule}")
    if not draws:
        return request, suite, None
    num_samples = request.num_samples or suite.arguments["num_samples"]
    request, experiment = read_request(replace(request, num_samples=num_samples))
    return request, suite, experiment


SUITES: dict[str, Suite] = {}  # the newest suite of a sweep, with its fitted detector and reference features


def open_suite(node: Node, request: ScoreConfig, out: Path, launch: Launch) -> Suite:
    """Build the requested suite with its reference: a file, or latents for other suites.

    Jobs of a sweep that differ in their samples share the suite.
    """
    path, has_file = str(request.reference), node.arguments.get("reference") is not None
    folder = request.features_folder(out)
    key = digest_of({"suite": node.written, "reference": path, "features": str(folder)})
    if is_sweep() and key in SUITES:
        return SUITES[key]
    reference = open_reference(Path(path), open_images) if has_file else latent_reference(path)
    suite = build_suite(node, reference, launch, folder)
    SUITES.clear()
    SUITES[key] = suite
    return suite


class FileSamples:
    """Samples in files: images, labels, the file of their scores, and a record."""

    def __init__(self, request: ScoreConfig):
        self.path, self.name = Path(str(request.samples)), f"samples={request.samples}"
        self.images = open_images(self.path)
        self.count, self.shape = self.images.count, self.images.shape
        if request.num_samples not in (None, self.count):
            rule = f"num_samples={request.num_samples} must agree"
            raise ValueError(f"{self.name} holds {self.count} images, {rule}")
        name = self.path.stem if self.path.suffix == ".npz" else self.path.resolve().name
        self.out = Path(request.out or self.path.parent / f"{name}.scores.json")

    @cached_property
    def sha256(self) -> str:
        return fingerprint(self.path)

    def labels(self) -> np.ndarray:
        """Return the class of each image (N,)."""
        labels = read_labels(self.path) if self.path.suffix == ".npz" else None
        if labels is None or labels.shape != (self.count,):
            raise ValueError(f"{self.name} must be an .npz with a label (arr_1) for each image (arr_0)")
        return labels

    def cache(self, suite: Suite) -> PartCache | None:
        """Return the cache of their features; None: in memory."""
        return suite.cache("samples", {"samples": self.sha256}, self.images)

    def record(self) -> dict[str, Any]:
        """Describe the samples, with the record of `sample.py` if it exists."""
        record = {"path": str(self.path), "sha256": self.sha256}
        record |= {"num_samples": self.count, "shape": self.shape}
        file = self.path.with_suffix(".json")
        drawn = read_json(file) if self.path.suffix == ".npz" and file.is_file() else None
        if not isinstance(drawn, dict) or "samples_sha256" not in drawn:
            return record
        if drawn["samples_sha256"] != record["sha256"]:
            raise ValueError(f"{self.name} does not match {file}: draw it again, or remove {file.name}")
        return {**record, "drawn": drawn}


class NetworkSamples:
    """Samples that are drawn while they are scored, with the interface of FileSamples."""

    images: Drawing  # set by `cache`

    def __init__(self, request: ScoreConfig, experiment: Experiment, launch: Launch):
        self.count, self.name = int(request.num_samples or 0), request.name
        self._model, name, self._record = open_model(request, experiment, launch)
        self._launch, self.shape = launch, self._model.image_shape
        self.out = output_path(request.out, request.folder, f"scores/{name}.json")
        self._features = request.features_folder(self.out)

    def labels(self) -> np.ndarray:
        """Return the class of each image (N,)."""
        labels = self.images.labels()
        if labels is None:
            raise ValueError(f"{self.name} is unconditional: its samples have no labels")
        return labels

    def cache(self, suite: Suite) -> PartCache:
        """Resolve the options; return the cache of features, or of images if the suite takes all at once."""
        key = cache_key(self._record, self._launch.device)
        key["detector"] = None if suite.batch_size is None else suite.detector_key()
        path = self._features / f"drawn-{digest_of(key)}"
        self.images, cache = start_drawing(self._model, self._record, path, key, self._launch)
        return cache

    def record(self) -> dict[str, Any]:
        """Describe the samples and their network."""
        return {"num_samples": self.count, "shape": self.shape, "drawn": self._record}


def read_labels(file: Path) -> np.ndarray | None:
    """Read the labels (N,) of an .npz in the layout of [ADM]; None if it has none."""
    what = f"samples={file}: arr_1 cannot be read"
    with as_value_error(what, *ZIP_ERRORS), zipfile.ZipFile(file) as archive:
        return read_member(archive, "arr_1") if "arr_1.npy" in archive.namelist() else None


def comparisons(suite: Suite, num_samples: int) -> dict[str, Scores]:
    """Score the mean images of the classes and the held-out images, if the reference has them."""
    reference = suite.reference
    if any(metric.needs_captions for metric in suite.metrics):
        if reference.held_out is None or reference.held_out_captions is None:
            return {}
        return {"real held-out": suite.score(ArrayImages(reference.held_out[0]), reference.held_out_captions)}
    if reference.labels is None:
        return {}
    assert isinstance(reference.images, ArrayImages)  # only references of latents have labels
    images, labels = reference.images.array, np.unique(reference.labels)  # some classes may have no images
    means = [images[reference.labels == label].mean(axis=0).round() for label in labels]
    turns = np.arange(num_samples) % len(labels)
    rows: dict[str, Any] = {"class means": (np.stack(means).astype(np.uint8)[turns], labels[turns])}
    if reference.held_out is not None:
        rows["real held-out"] = reference.held_out
    return {name: suite.score(ArrayImages(pixels), labels) for name, (pixels, labels) in rows.items()}


def show(scores: Scores, others: dict[str, Scores]) -> None:
    """Print the scores with their 95 % intervals and directions, the scores for comparison, and warnings."""
    rows = {"samples": scores, **others}
    lines = [["score", *rows, "better"], ["n", *(str(row.num_images) for row in rows.values()), ""]]
    for metric in scores.values:
        values = [f"{row.values[metric]:.5g}" if metric in row.values else "" for row in rows.values()]
        if (error := scores.standard_errors.get(metric)) is not None:
            values[0] += f" ± {1.96 * error:.2g}"
        better = "higher" if metric in scores.higher_is_better else "lower"
        lines.append([metric, *values, "" if "_std" in metric else better])
    print(text_table(lines))
    for note in scores.notes():
        print(note)
