"""Scores of baselines without a network, on the data of the twin study.

    python -m study.baselines OUT [TASK ...]      default: the tasks of the twins in OUT, or all

study/README.md lists them. Covariances are shrunk by Ledoit and Wolf's method, because some classes have 20
images.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.processes import program_parser, record_all
from benchmarks.results import Record, Rows
from benchmarks.runs import compose
from builders.evaluators import EVALUATION_BATCH
from builders.experiment import Experiment
from builders.references import reference_of
from builders.scoring import build_suite, comparisons
from data import LatentDataset, MixtureDataset, encoder_for, held_out_batches
from diffusion import OptimalPrecond
from evaluation import DenseLoss
from evaluation.features import ArrayImages
from runtime.launch import ALONE
from runtime.provenance import environment
from study.twins import LOSS, NUM_SAMPLES, STUDIES

MAX_DIMENSIONS = 4096  # of Gaussians, whose covariances take hours beyond
# Studies with the data of another study.
SAME_DATA = {"depth": "mixture", "width": "mixture", "backbones": "digits", "captions-16k": "captions-64"}
SAME_DATA |= {"glyphs-s2": "glyphs-50k", "glyphs-s2-32k": "glyphs-50k"}
TASKS = {"digits": ("data=digits",), "mixture": ("data=mixture",)}
TASKS |= {"glyphs": ("data=glyphs", "data.num_images=32768")}
TASKS |= {
    name: (f"data={study.data}", *(key for key in study.task if key.startswith(("data.", "diffusion"))))
    for name, study in STUDIES.items()
    if name not in SAME_DATA
}


class GaussianDenoiser:
    """The posterior mean of data with a Gaussian per class: a linear filter.

    Args:
        samples: (N, C, H, W).
    """

    def __init__(self, samples: np.ndarray, labels: np.ndarray):
        self.parts = {}
        for label, (mean, covariance) in gaussians(samples, labels).items():
            variances, basis = np.linalg.eigh(covariance)
            self.parts[label] = [torch.from_numpy(a) for a in (mean, variances, basis)]

    def __call__(
        self, x_t: torch.Tensor, alpha: torch.Tensor, sigma: torch.Tensor, class_labels: torch.Tensor
    ) -> torch.Tensor:
        """Return E[x | x_t, class] (N, C, H, W) fp64 for x_t = alpha x + sigma eps."""
        x, out = x_t.double().flatten(1), torch.empty(x_t.shape, dtype=torch.float64).flatten(1)
        alpha, sigma = (value.double().reshape(-1, 1).expand(len(x), 1) for value in (alpha, sigma))
        for label in class_labels.unique().tolist():
            ids, (mean, variances, basis) = class_labels == label, self.parts[label]
            # E[x | x_t] = mu + V alpha lambda / (alpha^2 lambda + sigma^2) V^T (x_t - alpha mu)
            gain = alpha[ids] * variances / (alpha[ids] ** 2 * variances + sigma[ids] ** 2)
            out[ids] = mean + (gain * ((x[ids] - alpha[ids] * mean) @ basis)) @ basis.T
        return out.view(x_t.shape)


def gaussians(samples: np.ndarray, labels: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return mean and shrunk covariance of each class, for samples (N, ...)."""
    from sklearn.covariance import ledoit_wolf

    flat = samples.reshape(len(samples), -1).astype(np.float64)
    classes = {int(label): flat[labels == label] for label in np.unique(labels)}
    return {label: (part.mean(axis=0), ledoit_wolf(part)[0]) for label, part in classes.items()}


def draw(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw images uint8 from a Gaussian per class, fitted on real ones (N, H, W, C), and their labels."""
    rng = np.random.default_rng(0)
    sample_labels = rng.choice(labels, NUM_SAMPLES)
    pixels = np.empty((NUM_SAMPLES, images[0].size))
    for label, (mean, covariance) in gaussians(images, labels).items():
        ids = sample_labels == label
        pixels[ids] = rng.multivariate_normal(mean, covariance, ids.sum(), method="eigh")
    return pixels.clip(0, 255).round().astype(np.uint8).reshape(-1, *images.shape[1:]), sample_labels


def losses(experiment: Experiment, dataset: LatentDataset) -> dict[str, dict[str, float]]:
    """Return the held-out loss of each baseline, computed as during a training."""
    latents, labels = dataset.read(dataset.train_ids)
    latents = dataset.manifest.to_latents(latents, torch.Generator().manual_seed(0)).numpy()
    batches = partial(held_out_batches, dataset, EVALUATION_BATCH, torch.device("cpu"), rank=0, world_size=1)
    sigma_data, loss = dataset.manifest.std or 0.5, experiment.loss(experiment.meta_net)
    classes = labels.numpy()
    class_means = [latents[classes == c].mean(axis=0, dtype=np.float64) for c in np.unique(classes)]
    means = torch.from_numpy(np.stack(class_means))
    filters: dict[str, Any] = {"class means": lambda x, alpha, sigma, labels: means[labels]}
    if latents[0].size <= MAX_DIMENSIONS:
        filters["class Gaussians"] = GaussianDenoiser(latents, classes)
    best = {"val_loss_optimal": dataset.posterior_mean} if isinstance(dataset, MixtureDataset) else {}
    path = experiment.precond(experiment.meta_net).path
    preconds = {key: OptimalPrecond(denoiser, sigma_data, path) for key, denoiser in (filters | best).items()}
    values = DenseLoss(preconds, loss, batches, ALONE.sum, torch.device("cpu"))(0)
    optimal = {key: value for key, value in values.items() if key in best}
    return {name: {LOSS: values[name], **optimal} for name in filters}


def scores(experiment: Experiment, dataset: LatentDataset) -> dict[str, dict[str, float]]:
    """Return the scores of images of each baseline, by the suite of the data."""
    reference = reference_of(dataset, encoder_for(dataset.manifest, torch.device("cpu")), "data")
    suite = build_suite(experiment.evaluation, reference, ALONE)
    images, labels = reference.images.array, reference.labels
    ids = np.random.default_rng(2).permutation(len(images))[:NUM_SAMPLES]
    samples = {"class Gaussians": draw(images, labels)} if images[0].size <= MAX_DIMENSIONS else {}
    samples["real training"] = images[ids], labels[ids]
    scores = {name: suite.score(ArrayImages(pixels), classes) for name, (pixels, classes) in samples.items()}
    return {name: score.values for name, score in (scores | comparisons(suite, NUM_SAMPLES)).items()}


def measure(name: str, out: Path) -> Rows:
    """Return a row for each baseline of a task."""
    keys = TASKS[name]
    if has_file := "data=mixture" not in keys:
        keys += (f"data.path={out.resolve() / name}", f"evaluation={keys[0].removeprefix('data=')}")
    experiment = compose(("model=dit", *keys))
    dataset = experiment.data()
    rows = losses(experiment, dataset)
    for baseline, values in scores(experiment, dataset).items() if has_file else ():
        rows[baseline] = {**rows.get(baseline, {}), **values}
    return [{"baseline": baseline, **values} for baseline, values in rows.items()]


def main() -> None:
    """Measure the baselines that are not recorded yet."""
    parser = program_parser("study.baselines", __doc__)
    parser.add_argument("out", type=Path, help="folder of the record")
    parser.add_argument("tasks", nargs="*", metavar="task", help=", ".join(TASKS))
    request = parser.parse_args()
    recorded = [name for name in TASKS if any(request.out.glob(f"twins_{name}_*.csv"))]
    tasks = request.tasks or recorded or list(TASKS)
    if unknown := set(tasks).difference(TASKS):
        parser.error(f"{', '.join(sorted(unknown))}: must be one of {', '.join(TASKS)}")
    record = Record("baselines", request.out, environment(torch.device("cpu")) | {"tiny": False})
    record_all({name: partial(measure, name, request.out) for name in tasks}, record, 1)
    sys.exit(not record.started() <= record.done())


if __name__ == "__main__":
    main()
