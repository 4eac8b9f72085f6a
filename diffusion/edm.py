"""Preconditioning and training loss of [EDM], in the paper's symbols."""

import torch
import torch.nn as nn


class EDMPrecond(nn.Module):
    """Turn a raw network F_x into a denoiser D_x whose input, output and target have unit variance.

    Args:
        net: called as net(x, c_noise, class_labels, and the keywords of `forward`) -> F_x.
        sigma_data: standard deviation of the latents, the same number that the loss is given.
    """

    def __init__(self, net: nn.Module, sigma_data: float = 0.5):
        super().__init__()
        self.net = net
        self.sigma_data = sigma_data

    def forward(
        self,
        x: torch.Tensor,
        sigma: torch.Tensor,
        class_labels: torch.Tensor | None,
        *,
        selection_ratio: float | tuple[float, ...] | None = None,
        force_keep: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        return_kept: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return D_x (N, C, H, W) in fp32 for x (N, C, H, W) at noise level sigma, (N,) or 0-d.

        The keywords go to the network as they are; with `return_kept` its pixels (N, 1, H, W) bool come
        second.
        """
        x = x.float()
        sigma = sigma.to(x).expand(x.shape[0])  # (N,)
        c_skip, c_out, c_in, c_noise = self.coefficients(sigma.view(-1, 1, 1, 1))
        routing = {"selection_ratio": selection_ratio, "force_keep": force_keep}
        routing |= {"return_kept": True} if return_kept else {}
        output = self.net(c_in * x, c_noise.flatten(), class_labels, **routing, generator=generator)
        F_x, *kept = output if return_kept else (output,)  # (N, C, H, W)
        # D(x; sigma) = c_skip(sigma) x + c_out(sigma) F(c_in(sigma) x; c_noise(sigma)), [EDM] eq. 7.
        D_x = c_skip * x + c_out * F_x.float()
        return (D_x, *kept) if return_kept else D_x

    def coefficients(
        self, sigma: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return c_skip, c_out, c_in, c_noise, each in the shape of sigma."""
        variance = sigma**2 + self.sigma_data**2
        # Preconditioning, [EDM] Table 1.
        c_skip = self.sigma_data**2 / variance
        c_out = sigma * self.sigma_data / variance.sqrt()
        c_in = 1 / variance.sqrt()
        c_noise = sigma.log() / 4
        return c_skip, c_out, c_in, c_noise


class EDMLoss:
    """Weighted denoising error at log-normal noise levels, [EDM] section 5.

    Args:
        P_mean, P_std: mean and standard deviation of ln(sigma).
        sigma_data: standard deviation of the latents, the same number that the preconditioning is given.
        kept_tokens_only: leave the pixels of tokens that bypassed a window out of the mean, as the first
            version of TREAD did (an ablation).

    Raises:
        ValueError: all noise levels are the same.
    """

    def __init__(
        self,
        P_mean: float = -1.2,
        P_std: float = 1.2,
        sigma_data: float = 0.5,
        kept_tokens_only: bool = False,
    ):
        if not P_std > 0:
            raise ValueError(f"diffusion.loss.P_std={P_std} must be greater than 0")
        self.P_mean, self.P_std, self.sigma_data = P_mean, P_std, sigma_data
        self.kept_tokens_only = kept_tokens_only

    def __call__(
        self,
        precond: nn.Module,
        x: torch.Tensor,
        class_labels: torch.Tensor | None,
        *,
        generator: torch.Generator | None = None,
        selection_ratio: float | tuple[float, ...] | None = None,
        force_keep: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss (N,) of clean latents x (N, C, H, W), in fp32, as a mean over C, H, W.

        Args:
            generator: draws the noise level, then the noise, then whatever the network draws.
            selection_ratio, force_keep: of the network's routes.
            loss_mask: (N, H, W) weight of each position. The mean stays one over all positions, so that a
                position counts the same in every sample; a sample whose mask is empty has loss 0.
        """
        x = x.float()
        shape = (x.shape[0], 1, 1, 1)
        # ln(sigma) ~ N(P_mean, P_std^2), [EDM] Table 1.
        sigma = (torch.randn(shape, generator=generator, device=x.device) * self.P_std + self.P_mean).exp()
        # lambda(sigma) = 1 / c_out^2, [EDM] Table 1.
        weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
        noise = sigma * torch.randn(x.shape, generator=generator, device=x.device)
        routing = {"selection_ratio": selection_ratio, "force_keep": force_keep}
        routing |= {"return_kept": True} if self.kept_tokens_only else {}
        output = precond(x + noise, sigma.flatten(), class_labels, **routing, generator=generator)
        D_x, *kept = output if self.kept_tokens_only else (output,)
        error = weight * (D_x.float() - x) ** 2  # (N, C, H, W)
        if loss_mask is not None:
            error = error * loss_mask.unsqueeze(1)
        if self.kept_tokens_only:
            (kept,) = kept  # (N, 1, H, W)
            num_kept = kept.sum(dim=(1, 2, 3)).clamp(min=1)  # several routes may keep no token in common
            return (error * kept).mean(dim=1).sum(dim=(1, 2)) / num_kept  # (N,)
        return error.mean(dim=(1, 2, 3))  # (N,)
