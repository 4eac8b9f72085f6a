"""Noise prediction over 1,000 steps of a linear schedule [DDPM], with the learned variance of [IDDPM], [DiT].

Time counts noising steps; t = 0 is data. The network is conditioned on the rounded step index t - 1. Between
steps the logarithm of the signal-to-noise ratio is interpolated, so that any solver can run.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from diffusion.objective import Loss, Precond
from diffusion.path import Path

NUM_STEPS = 1000
BETA_MIN, BETA_MAX = 1e-4, 0.02


@dataclass(frozen=True)  # so that all instances compare equal
class DDPMPath:
    """alpha(t)^2 = prod_{i <= t} (1 - beta_i), sigma^2 = 1 - alpha^2, beta_i linear in i, 0 <= t <= 1000."""

    t_max = float(NUM_STEPS)

    def log_snr(self, t: Tensor) -> Tensor:
        """Return ln(alpha^2 / sigma^2) in float64. Before the first step sigma / alpha is linear in t."""
        table, t = _table(t.device), t.double().clamp(max=NUM_STEPS)
        low = t.floor().clamp(1, NUM_STEPS - 1).long()
        between = torch.lerp(table.take(low - 1), table.take(low), t - low)
        return torch.where(t < 1, table[0] - 2 * t.log(), between)

    def alpha(self, t: Tensor) -> Tensor:
        return self.log_snr(t).sigmoid().sqrt().to(t.dtype)

    def sigma(self, t: Tensor) -> Tensor:
        return (-self.log_snr(t)).sigmoid().sqrt().to(t.dtype)

    def alpha_dot(self, t: Tensor) -> Tensor:
        # alpha = sqrt(sigmoid(l)), so alpha' = alpha sigma^2 l' / 2.
        return self.alpha(t) * self.sigma(t) ** 2 * self._slope(t) / 2

    def sigma_dot(self, t: Tensor) -> Tensor:
        return -self.sigma(t) * self.alpha(t) ** 2 * self._slope(t) / 2

    def _slope(self, t: Tensor) -> Tensor:
        # The derivative of `log_snr` over the step that ends at or after t.
        table = _table(t.device)
        high = t.double().ceil().clamp(2, NUM_STEPS).long()
        return torch.where(t <= 1, -2 / t.double(), table.take(high - 1) - table.take(high - 2)).to(t.dtype)

    def time_at(self, noise_to_signal: Tensor) -> Tensor:
        table, log_snr = _table(noise_to_signal.device), -2 * noise_to_signal.double().log()
        # The table descends: find the first entry at or below log_snr.
        high = torch.searchsorted(-table, -log_snr).clamp(1, NUM_STEPS - 1)
        above, below = table.take(high - 1), table.take(high)
        fraction = (above - log_snr) / (above - below)
        t = torch.where(log_snr > table[0], ((table[0] - log_snr) / 2).exp(), high + fraction)
        return t.clamp(max=NUM_STEPS).to(noise_to_signal.dtype)


@cache
def _table(device: torch.device) -> Tensor:
    """Return ln(alpha^2 / sigma^2) after 1, 2, ... steps. Cached, because a copy waits for the device."""
    betas = torch.linspace(BETA_MIN, BETA_MAX, NUM_STEPS, dtype=torch.float64)
    log_alpha2 = torch.log1p(-betas).cumsum(0)
    return (log_alpha2 - torch.log(-torch.expm1(log_alpha2))).to(device)


class DDPMPrecond(Precond):
    """Noise prediction: F_x is eps, followed by the variance if the network has 2C output channels."""

    path = DDPMPath()

    def inputs(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return x, (t.round() - 1).clamp(0, NUM_STEPS - 1)

    def clean(self, F_x: Tensor, x: Tensor, t: Tensor) -> Tensor:
        # x_0 = (x_t - sigma eps) / alpha
        return (x - self.path.sigma(t) * F_x) / self.path.alpha(t)

    def learned_variance(self, F_x: Tensor, x: Tensor) -> Tensor:
        if F_x.shape[1] != 2 * x.shape[1]:
            raise ValueError(
                "sampler.variance=learned needs model.learn_sigma=true: use sampler.variance=small or large"
            )
        return F_x[:, x.shape[1] :].to(self.dtype)


class DDPMLoss(Loss[DDPMPrecond]):
    """Squared error of eps; a predicted variance is trained by the variational bound."""

    def __init__(self, inner_weight: float = 0.5):
        super().__init__(0.0, inner_weight)  # a contrastive bound would be unbounded

    def draw_t(self, num_samples: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        return torch.randint(1, NUM_STEPS + 1, (num_samples,), generator=generator, device=device).float()

    def error(
        self, precond: DDPMPrecond, F_x: Tensor, x_t: Tensor, t: Tensor, x: Tensor, eps: Tensor
    ) -> Tensor:
        error = (precond.predicted(F_x, x) - eps) ** 2
        if F_x.shape[1] == x.shape[1]:
            return error
        v = precond.learned_variance(F_x, x)
        # L_hybrid = L_simple + 0.001 L_vlb, [IDDPM]. L_vlb is a sum over 1,000 steps, which one random step
        # estimates as 1,000 times its term. The term is in bits and gives no gradient to the mean.
        D_x = precond.denoised(F_x.detach(), x_t, t)
        return error + variational_bound(precond.path, D_x, v, x_t, t, x)


def variational_bound(path: Path, D_x: Tensor, v: Tensor, x_t: Tensor, t: Tensor, x: Tensor) -> Tensor:
    """Return the term of step t (N, 1, 1, 1) in the bound on -ln p(x_0): (N, C, H, W) in bits. [IDDPM]

    The term is KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t)). For the first step it is -ln p(x_0 | x_1) of a
    Gaussian over bins of width 1 / 127.5, the bytes of an image.
    """
    s = t - 1
    mean, true_mean = (posterior_mean(path, clean, x_t, t, s) for clean in (D_x, x))
    # PARITY: the posterior of the first step has no variance; the second step's is used.
    low, high = posterior_log_variance(path, t.clamp(min=2), s.clamp(min=1)).to(v), log_beta(path, t, s).to(v)
    log_var = log_variance(v, low, high)
    kl = 0.5 * (log_var - low - 1 + (low - log_var).exp() + (mean - true_mean) ** 2 * (-log_var).exp())
    return torch.where(t == 1, -_log_bin(x, mean, (0.5 * log_var).exp()), kl) / math.log(2)


def posterior_mean(path: Path, clean: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Return the mean of q(x_s | x_t, x_0 = clean), s < t, if alpha^2 + sigma^2 = 1. [DDPM] eq. 7"""
    t, s, beta = t.double(), s.double(), log_beta(path, t, s).exp()
    clean_weight = path.alpha(s) * beta / path.sigma(t) ** 2
    x_t_weight = path.alpha(t) / path.alpha(s) * (path.sigma(s) / path.sigma(t)) ** 2
    return clean_weight.to(x_t) * clean + x_t_weight.to(x_t) * x_t


def log_beta(path: Path, t: Tensor, s: Tensor) -> Tensor:
    """Return ln(1 - alpha(t)^2 / alpha(s)^2) in float64: the variance added between s and t."""
    return (-torch.expm1(2 * (path.alpha(t.double()) / path.alpha(s.double())).log())).log()


def posterior_log_variance(path: Path, t: Tensor, s: Tensor) -> Tensor:
    """Return the log variance of q(x_s | x_t, x_0) in float64, 0 < s < t. [DDPM] eq. 7"""
    return log_beta(path, t, s) + 2 * (path.sigma(s.double()) / path.sigma(t.double())).log()


def log_variance(v: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Interpolate the log variance from `low`, the posterior's, at v = -1 to `high`, ln beta, at v = 1."""
    # Sigma = exp(f ln beta + (1 - f) ln beta~), [IDDPM] eq. 15, with f = (v + 1) / 2.
    return low + (v + 1) / 2 * (high - low)


def _log_bin(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return ln of the mass of N(mean, std^2) in the bin of width 2 / 255 around x; outer bins are open.

    DEVIATION: the CDF is exact. [DiT] approximates it by a tanh and also clamps the outer bins at 1e-12. The
    loss of this step differs by 0.3 % for a network that predicts eps = 0, less for a better one.
    """
    above, below = ((x - mean + half) / std for half in (1 / 255, -1 / 255))
    inner = (torch.special.ndtr(above) - torch.special.ndtr(below)).clamp(min=1e-12).log()
    inner = torch.where(x > 0.999, torch.special.log_ndtr(-below), inner)
    return torch.where(x < -0.999, torch.special.log_ndtr(above), inner)
