"""The network predicts the clean latents; the loss is that of the velocity. [JiT]"""

import torch

from diffusion.flow import FlowLoss
from diffusion.objective import Precond
from diffusion.path import FlowPath
from runtime.errors import check_positive


class X0Precond(Precond):
    """The network predicts x_0 on the path of flow matching, and its condition is the time."""

    path = FlowPath()

    def inputs(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, t

    def clean(self, F_x: torch.Tensor, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F_x


class X0Loss(FlowLoss):
    """Squared error of the velocity of a prediction of x_0.

    Args:
        t_min: earlier times count as this one, because the velocity divides by t.
        The others are those of FlowLoss.
    """

    def __init__(
        self,
        distribution: str = "logit_normal",
        P_mean: float = 0.8,
        P_std: float = 0.8,
        shift: float = 1.0,
        t_min: float = 0.05,
        contrastive_weight: float = 0.0,
    ):
        super().__init__(distribution, P_mean, P_std, shift, contrastive_weight)
        check_positive("diffusion.loss.t_min", t_min)
        self.t_min = t_min

    def error(
        self,
        precond: Precond,
        F_x: torch.Tensor,
        x_t: torch.Tensor,
        t: torch.Tensor,
        x: torch.Tensor,
        eps: torch.Tensor,
    ) -> torch.Tensor:
        # |(x_t - D) / t - (x_t - x_0) / t|^2
        return ((precond.denoised(F_x, x_t, t) - x) / t.clamp(min=self.t_min)) ** 2
