"""Probability flow ODE, solved with adaptive steps."""

from collections.abc import Callable

import torch
from torch import Tensor

from diffusion.path import EDM_PATH, FLOW_PATH, Denoise, Path, solve_on
from diffusion.samplers.ode import velocity
from runtime.errors import check_positive


def adaptive_sampler(
    denoise: Denoise,
    noise: Tensor,
    path: Path = EDM_PATH,
    *,
    rtol: float = 1e-3,
    atol: float = 1e-6,
    t_min: float = 1e-3,
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """Solve the probability flow with dopri5, on the path of flow matching, with the tolerances of [SiT].

    The steps are chosen for the whole batch. Within the tolerances, a sample depends on its batch.

    Args:
        t_min: time on that path at which the solver stops and returns the denoiser's output. DEVIATION:
            [SiT] integrates to 0, where eps cannot be computed from D_x.
        The other arguments are documented in `ode_sampler`.
    """
    from torchdiffeq import odeint

    for key, value in (("rtol", rtol), ("atol", atol), ("t_min", t_min)):
        check_positive(f"sampler.{key}", value)
    denoise, path = solve_on(denoise, path, FLOW_PATH)
    ends = torch.tensor([path.t_max, t_min], dtype=torch.float64)

    def slope(t: Tensor, x: Tensor) -> Tensor:
        t = t.cpu()  # SYNC: the size of the next step depends on this one's error anyway.
        return velocity(path, denoise(x, t).to(torch.float64), x, t)

    x = noise.to(torch.float64) * path.sigma(ends[0])
    ends_ = ends.to(x.device)
    # Without step_t the solver steps past the end, where no noise is left, and interpolates.
    options = {"step_t": ends_[1:]}
    x = torch.as_tensor(odeint(slope, x, ends_, rtol=rtol, atol=atol, method="dopri5", options=options))[-1]
    return denoise(x, ends[1]).to(torch.float64)
