"""Flow matching on the straight path between data and noise. [SiT] [SD3]"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from diffusion.objective import Loss, Precond
from diffusion.path import FlowPath
from runtime.errors import check_choice, check_not_negative, check_positive

# DEVIATION: lower bound of the norms in the cosine. A network starts at v = 0, where the cosine's gradient is
# unbounded, and the optimizer's averages would keep it for many steps.
MIN_NORM = 0.1
DISTRIBUTIONS = ("logit_normal", "uniform")


class FlowPrecond(Precond):
    """Velocity prediction: F_x is dx/dt = eps - x_0, and the network is conditioned on t.

    Args:
        from_noise: True: the network's time runs from noise to data and it predicts x_0 - eps, as in the
            public checkpoints of [SiT].
    """

    path = FlowPath()

    def __init__(self, net: nn.Module, from_noise: bool = False):
        super().__init__(net)
        self.from_noise = from_noise

    def inputs(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return x, 1 - t if self.from_noise else t

    def clean(self, F_x: Tensor, x: Tensor, t: Tensor) -> Tensor:
        # x_t = x_0 + t (eps - x_0)
        return x - t * self.velocity(F_x)

    def velocity(self, F_x: Tensor) -> Tensor:
        """Return dx/dt for the network's output."""
        return -F_x if self.from_noise else F_x


class FlowLoss(Loss[FlowPrecond]):
    """Squared error of the velocity.

    Args:
        distribution: how t is drawn: `uniform`, or `logit_normal`: t = sigmoid(n), n ~ N(P_mean, P_std^2).
        shift: s > 1 moves the times towards noise, t -> s t / (1 + (s - 1) t). s = sqrt(m) suits latents with
            m times as many values. [SD3]
        contrastive_weight, inner_weight: see `diffusion.objective.Loss`.
        cosine_weight: weight of the additional term 1 - cos(v, eps - x_0), taken over the channels at each
            position. [LightningDiT]
    """

    def __init__(
        self,
        distribution: str = "logit_normal",
        P_mean: float = 0.0,
        P_std: float = 1.0,
        shift: float = 1.0,
        contrastive_weight: float = 0.0,
        cosine_weight: float = 0.0,
        inner_weight: float = 0.5,
    ):
        super().__init__(contrastive_weight, inner_weight)
        check_not_negative("diffusion.loss.cosine_weight", cosine_weight)
        check_choice("diffusion.loss.distribution", distribution, DISTRIBUTIONS)
        check_positive("diffusion.loss.P_std", P_std)
        check_positive("diffusion.loss.shift", shift)
        self.distribution, self.P_mean, self.P_std = distribution, P_mean, P_std
        self.shift, self.cosine_weight = shift, cosine_weight

    def draw_t(self, num_samples: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        if self.distribution == "uniform":
            t = torch.rand(num_samples, generator=generator, device=device)
        else:
            n = torch.randn(num_samples, generator=generator, device=device)
            t = (n * self.P_std + self.P_mean).sigmoid()
        # t' = s t / (1 + (s - 1) t) [SD3]
        return self.shift * t / (1 + (self.shift - 1) * t)

    def error(
        self, precond: FlowPrecond, F_x: Tensor, x_t: Tensor, t: Tensor, x: Tensor, eps: Tensor
    ) -> Tensor:
        # |v - (eps - x_0)|^2 from v itself: through D_x, digits would cancel near t = 0.
        v, u = precond.velocity(precond.predicted(F_x, x)), eps - x
        error = (v - u) ** 2
        if self.cosine_weight:
            cosine = F.cosine_similarity(v, u, dim=1, eps=MIN_NORM)  # (N, H, W)
            error = error + self.cosine_weight * (1 - cosine).unsqueeze(1)
        return error
