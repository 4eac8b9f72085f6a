"""A small self-supervised encoder, trained on the images of a latent folder, as the target of alignment.

No weights of published encoders are available for the study. This network learns on the study's own images,
without labels, that two distorted views of an image belong together [SimCLR]. It is not DINOv2: its features
are learned from this data set alone. `write_features` stores them in the folder, and their linear probe,
the accuracy of a linear classifier of held-out images, in its manifest.
"""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from data import LatentDataset, open_latents
from data.manifest import FILES, read_manifest
from data.writer import hash_blocks
from runtime.files import write_json

NAME, WIDTH, NUM_FEATURES, GRID = "self-supervised (study/encoder.py)", 64, 32, 16
STEPS, BATCH_SIZE, LR, TEMPERATURE = 500, 128, 2e-3, 0.1
MAX_SHIFT, NOISE = 0.1, 0.2  # of a view: in sides, and in units of the latents' standard deviation
AT_ONCE = 512


class GridEncoder(nn.Module):
    """A convolutional network from grey images (N, 1, H, W) to a grid of features (N, F, 16, 16)."""

    def __init__(self, side: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, WIDTH, 3, stride=side // GRID, padding=1)]
        for dilation in (1, 2, 4):
            layers += [nn.BatchNorm2d(WIDTH), nn.ReLU()]
            layers.append(nn.Conv2d(WIDTH, WIDTH, 3, padding=dilation, dilation=dilation))
        layers += [nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, NUM_FEATURES, 1)]
        self.grid = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embedding (N, D) of images (N, 1, H, W), of length 1."""
        return F.normalize(self.head(self.grid(x).mean(dim=(2, 3))), dim=1)


def view(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift images (N, 1, H, W), scale their contrast, and add noise."""
    most = round(MAX_SHIFT * x.shape[-1])
    shift = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
    contrast = 0.7 + 0.6 * torch.rand(len(x), 1, 1, 1, generator=generator)
    noise = NOISE * torch.randn(x.shape, generator=generator)
    return contrast * x.roll(shift, dims=(2, 3)) + noise * x.std()


def contrastive_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of matching the two views of each image, for their embeddings (N, D)."""
    logits = a @ b.T / TEMPERATURE  # (N, N)
    partners = torch.arange(len(a))
    return (F.cross_entropy(logits, partners) + F.cross_entropy(logits.T, partners)) / 2


def train_encoder(x: torch.Tensor, steps: int) -> GridEncoder:
    """Train an encoder on images (N, 1, H, W) whose side is a multiple of 16."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        encoder = GridEncoder(x.shape[-1])
    optimizer = torch.optim.AdamW(encoder.parameters(), LR)
    for _ in tqdm(range(steps), desc="train the encoder", unit="step"):
        batch = x[torch.randint(len(x), (min(BATCH_SIZE, len(x)),), generator=generator)]
        optimizer.zero_grad()
        contrastive_loss(encoder(view(batch, generator)), encoder(view(batch, generator))).backward()
        optimizer.step()
    return encoder.eval()


@torch.no_grad()
def features_of(encoder: GridEncoder, x: torch.Tensor) -> np.ndarray:
    """Return features (N, 256, F) float16 of images (N, 1, H, W)."""
    parts = [encoder.grid(part).flatten(2).transpose(1, 2).half() for part in x.split(AT_ONCE)]
    return torch.cat(parts).numpy()


def linear_probe(features: np.ndarray, dataset: LatentDataset) -> float:
    """Return the held-out accuracy of a linear classifier of mean features, fitted on the training images."""
    from sklearn.linear_model import LogisticRegression

    means, labels = features.astype(np.float32).mean(axis=1), dataset.labels
    if labels is None:
        raise ValueError("the data have no classes")
    train, held_out = dataset.train_ids, dataset.held_out_ids
    scale = means[train].std(axis=0)
    classifier = LogisticRegression(max_iter=300).fit(means[train] / scale, labels[train])
    return float(classifier.score(means[held_out] / scale, labels[held_out]))


def write_features(path: Path, steps: int = STEPS) -> None:
    """Train an encoder on a folder's training images, and store the features of all; once per folder."""
    manifest = read_manifest(path)
    if manifest.features:
        return
    dataset = open_latents(path)
    x = manifest.to_means(torch.from_numpy(np.array(dataset.stored)))
    encoder = train_encoder(x[dataset.train_ids], steps)
    features = features_of(encoder, x)
    details = {"encoder": NAME, "steps": steps, "linear_probe": linear_probe(features, dataset)}
    print(f"{path}: features with a linear probe of {details['linear_probe']:.3f}", flush=True)
    file = path / FILES["features"]
    np.save(file, features)
    checksums = {**(manifest.checksums or {}), file.name: hash_blocks(file, manifest.block_bytes)}
    changed = replace(manifest, features={"shape": [GRID**2, NUM_FEATURES], **details}, checksums=checksums)
    write_json(path / FILES["manifest"], asdict(changed))
