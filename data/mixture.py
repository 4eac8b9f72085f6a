"""Latents of a Gaussian mixture, whose best denoiser is known: how far a network is from it can be measured.

Each class has a few components, smooth random fields of one covariance, which is diagonal in the cosine
basis: low frequencies are strong, as in images.

Shapes: N samples, C channels, H = W, K components of a class, P = C H W cosine coefficients.
"""

from typing import Any

import numpy as np
import torch
from scipy.fft import dct

from data.latents import LatentDataset
from data.manifest import LatentManifest

STD, SHARE_OF_MEANS = 0.5, 0.5  # of all latents, which is EDM's sigma_data; of the variance
DECAY = 2.0  # of the variance with the frequency, as a power


class MixtureDataset(LatentDataset):
    """Latents drawn once from the mixture, and their posterior mean under Gaussian noise.

    Args:
        means: coefficients (num_classes, K, P) of the components.
        variances: (P,) of the coefficients of a component.
        latents: stored latents, labels and manifest.
    """

    def __init__(self, means: np.ndarray, variances: np.ndarray, *latents: Any):
        super().__init__(*latents)
        self.means, self.variances = torch.from_numpy(means), torch.from_numpy(variances)

    def posterior_mean(
        self, x_t: torch.Tensor, alpha: torch.Tensor, sigma: torch.Tensor, class_labels: torch.Tensor
    ) -> torch.Tensor:
        """E[x | x_t, class] (N, C, H, W) in fp64, of x_t = alpha x + sigma eps, both (N, 1, 1, 1)."""
        basis = torch.from_numpy(_cosines(x_t.shape[-1])).to(x_t.device)
        y = (basis @ x_t.double() @ basis.T).flatten(1).unsqueeze(1)  # (N, 1, P)
        alpha, sigma = (value.double().view(-1, 1, 1) for value in (alpha, sigma))
        means = self.means.to(x_t.device)[class_labels]  # (N, K, P)
        variances = self.variances.to(x_t.device)
        # x_t of component k is Gaussian: mean alpha mu_k, variance alpha^2 lambda + sigma^2.
        residual, noisy = y - alpha * means, alpha**2 * variances + sigma**2
        chances = (-0.5 * residual.square() / noisy).sum(dim=-1, keepdim=True).softmax(dim=1)  # (N, K, 1)
        # E[x | x_t, k] = mu_k + alpha lambda / (alpha^2 lambda + sigma^2) (x_t - alpha mu_k)
        posterior = (chances * (means + alpha * variances / noisy * residual)).sum(dim=1)  # (N, P)
        return basis.T @ posterior.view(x_t.shape) @ basis


def mixture(
    input_size: int,
    in_channels: int,
    num_classes: int,
    num_components: int,
    num_entries: int,
    num_held_out: int,
    seed: int,
) -> MixtureDataset:
    """Draw the mixture from a seed, and latents from it, in memory.

    Args:
        num_components: of each class, K; all are as likely.
        num_entries: the held-out ones included.
    """
    rng, shape = np.random.default_rng(seed), (in_channels, input_size, input_size)
    frequency = np.add.outer(*2 * [np.arange(input_size) ** 2]) ** 0.5
    spectrum = np.broadcast_to((1 + frequency) ** -DECAY, shape).ravel()  # (P,)
    spectrum = spectrum * (STD**2 * spectrum.size / spectrum.sum())
    variances = (1 - SHARE_OF_MEANS) * spectrum
    spread = np.sqrt(SHARE_OF_MEANS * spectrum)
    means = spread * rng.standard_normal((num_classes, num_components, spectrum.size))
    labels, component = (rng.integers(n, size=num_entries) for n in (num_classes, num_components))
    drawn = means[labels, component] + np.sqrt(variances) * rng.standard_normal((num_entries, spectrum.size))
    basis = _cosines(input_size)
    stored = (basis.T @ drawn.reshape(-1, *shape) @ basis).astype(np.float32)
    manifest = LatentManifest(
        count=num_entries,
        shape=shape,
        dtype="float32",
        kind="samples",
        num_classes=num_classes,
        encoder="identity",
        std=STD,
        num_held_out=num_held_out,
    )
    return MixtureDataset(means, variances, stored, labels, manifest)


def _cosines(size: int) -> np.ndarray:
    """Orthonormal cosine transform (size, size): coefficients = basis @ signal."""
    return dct(np.eye(size), axis=0, norm="ortho")
