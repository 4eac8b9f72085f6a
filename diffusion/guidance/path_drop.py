"""Path-drop guidance: away from the prediction without windows and without a class. [SPRINT]"""

from dataclasses import replace

from diffusion.guidance.cfg import check_null_class, on_null_class
from diffusion.guidance.guidance import Branch, Guidance
from diffusion.objective import Precond
from routing import Routing


class PathDropGuidance(Guidance):
    """Guidance by the same network without the windows of its routes, at the cost of the other blocks.

    It is meant for networks whose windows are dropped at random in training (`model/rejoin=fuse`). The
    arguments are documented in `Guidance`.
    """

    def check(self, precond: Precond) -> None:
        if not precond.net.routes:
            raise ValueError("guidance=path_drop needs a network with routes (model=sprint)")
        if precond.net.null_labels(1) is not None and self.guidance_scale != 1:
            check_null_class(precond.net, "guidance=path_drop is not supported")

    def weak(self, strong: Branch) -> Branch:
        return on_null_class(replace(strong, routing=Routing(1)))
