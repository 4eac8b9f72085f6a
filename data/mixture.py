"""Latents of a Gaussian mixture. The optimal denoiser is known, so that networks can be compared with it.

Each class has a few components, which are smooth random fields. Their common covariance is diagonal in the
cosine basis, and low frequencies are strong, as in images.

Shapes: N samples, C channels, H = W, K components of a class, P = C H W cosine coefficients.
"""

import math
from typing import Any

import numpy as np
import torch
from scipy.fft import dct

from data.latents import LatentDataset
from data.manifest import drawn_manifest

STD = 0.5  # of all latents: EDM's sigma_data
SHARE_OF_MEANS = 0.5  # fraction of the variance that the components' means contribute
DECAY = 2.0  # variances are proportional to (1 + frequency)^-DECAY


class MixtureDataset(LatentDataset):
    """Latents drawn once from the mixture, and their posterior mean under Gaussian noise.

    Args:
        means: coefficients (num_classes, K, P) of the components' means.
        variances: (P,), variances of a component's coefficients.
        latents: arguments of LatentDataset: stored latents, labels and manifest.
    """

    def __init__(self, means: np.ndarray, variances: np.ndarray, *latents: Any):
        super().__init__(*latents)
        self.means, self.variances = torch.from_numpy(means), torch.from_numpy(variances)

    def posterior_mean(
        self, x_t: torch.Tensor, alpha: torch.Tensor, sigma: torch.Tensor, class_labels: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute E[x | x_t, class] (N, C, H, W) fp64 for x_t = alpha x + sigma eps.

        Args:
            alpha, sigma: (N, 1, 1, 1).
            class_labels: (N,); None: E[x | x_t], over all classes, which are equally likely.
        """
        basis = torch.from_numpy(_cosines(x_t.shape[-1])).to(x_t.device)
        y = _coefficients(x_t).unsqueeze(1)  # (N, 1, P)
        alpha, sigma = (value.double().view(-1, 1, 1) for value in (alpha, sigma))
        means = self.means.to(x_t.device)
        # (N, K, P), or the components of all classes, (1, num_classes K, P)
        means = means.flatten(0, 1)[None] if class_labels is None else means[class_labels]
        variances = self.variances.to(x_t.device)
        # x_t of component k is Gaussian: mean alpha mu_k, variance alpha^2 lambda + sigma^2.
        residual, noisy = y - alpha * means, alpha**2 * variances + sigma**2
        weights = (-0.5 * residual.square() / noisy).sum(dim=-1, keepdim=True).softmax(dim=1)  # (N, K, 1)
        # E[x | x_t, k] = mu_k + alpha lambda / (alpha^2 lambda + sigma^2) (x_t - alpha mu_k)
        posterior = (weights * (means + alpha * variances / noisy * residual)).sum(dim=1)  # (N, P)
        return basis.T @ posterior.view(x_t.shape) @ basis

    def log_density(self, x: torch.Tensor) -> torch.Tensor:
        """Compute log p(x | class) (N, num_classes) fp64 of latents (N, C, H, W), for each class."""
        y, means, variances = _coefficients(x), self.means.to(x.device), self.variances.to(x.device)
        # log N(y; mu_k, lambda) of each component, (N, num_classes, K)
        distances = (y[:, None, None] - means).square() / variances
        log_densities = -0.5 * (distances + (2 * torch.pi * variances).log()).sum(dim=-1)
        return log_densities.logsumexp(dim=-1) - math.log(means.shape[1])


def mixture(
    input_size: int,
    in_channels: int,
    num_classes: int,
    num_components: int,
    num_entries: int,
    num_held_out: int,
    seed: int,
) -> MixtureDataset:
    """Draw a mixture, and latents from it, in memory.

    Args:
        num_components: K, the number of equally likely components of each class.
        num_entries: number of latents, including the held-out ones.
    """
    rng, shape = np.random.default_rng(seed), (in_channels, input_size, input_size)
    frequency = np.add.outer(*2 * [np.arange(input_size) ** 2]) ** 0.5
    spectrum = np.broadcast_to((1 + frequency) ** -DECAY, shape).ravel()  # (P,)
    spectrum = spectrum * (STD**2 * spectrum.size / spectrum.sum())
    variances = (1 - SHARE_OF_MEANS) * spectrum
    spread = np.sqrt(SHARE_OF_MEANS * spectrum)
    means = spread * rng.standard_normal((num_classes, num_components, spectrum.size))
    labels, component = (rng.integers(n, size=num_entries) for n in (num_classes, num_components))
    coeffs = means[labels, component] + np.sqrt(variances) * rng.standard_normal((num_entries, spectrum.size))
    basis = _cosines(input_size)
    stored = (basis.T @ coeffs.reshape(-1, *shape) @ basis).astype(np.float32)
    manifest = drawn_manifest(stored, num_classes, num_held_out, STD)
    return MixtureDataset(means, variances, stored, labels, manifest)


def _coefficients(x: torch.Tensor) -> torch.Tensor:
    """Return the cosine coefficients (N, P) fp64 of latents (N, C, H, W)."""
    basis = torch.from_numpy(_cosines(x.shape[-1])).to(x.device)
    return (basis @ x.double() @ basis.T).flatten(1)


def _cosines(size: int) -> np.ndarray:
    """Return the orthonormal cosine basis (size, size): coefficients = basis @ signal."""
    return dct(np.eye(size), axis=0, norm="ortho")
