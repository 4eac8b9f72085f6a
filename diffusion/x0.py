"""Prediction of the clean latents, trained by the error of the velocity. [JiT]"""

from torch import Tensor

from diffusion.flow import FlowLoss
from diffusion.objective import Precond
from diffusion.path import FlowPath
from runtime.errors import check_positive


class X0Precond(Precond):
    """Data prediction on the path of flow matching: F_x is x_0, and the network is conditioned on t."""

    path = FlowPath()

    def inputs(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return x, t

    def clean(self, F_x: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return F_x


class X0Loss(FlowLoss):
    """Squared error of the velocity that a predicted x_0 implies.

    Args:
        t_min: lower bound of t where the velocity divides by t.
        The other arguments are documented in `FlowLoss`.
    """

    def __init__(
        self,
        distribution: str = "logit_normal",
        P_mean: float = 0.8,
        P_std: float = 0.8,
        shift: float = 1.0,
        t_min: float = 0.05,
        contrastive_weight: float = 0.0,
        inner_weight: float = 0.5,
    ):
        super().__init__(distribution, P_mean, P_std, shift, contrastive_weight, inner_weight=inner_weight)
        check_positive("diffusion.loss.t_min", t_min)
        self.t_min = t_min

    def error(self, precond: Precond, F_x: Tensor, x_t: Tensor, t: Tensor, x: Tensor, eps: Tensor) -> Tensor:
        # |(x_t - D) / t - (x_t - x_0) / t|^2
        return ((precond.denoised(F_x, x_t, t) - x) / t.clamp(min=self.t_min)) ** 2
