"""Internal guidance: away from the prediction of an inner head, in one forward. [InternalGuidance]"""

from dataclasses import replace

from diffusion.guidance.guidance import Branch, Guidance
from diffusion.objective import Precond


class InternalGuidance(Guidance):
    """Guidance by the prediction after an inner block (`model.inner_head`). Both predictions use the class.

    The arguments are documented in `Guidance`.
    """

    def check(self, precond: Precond) -> None:
        if precond.net.inner_head is None:
            raise ValueError("guidance=internal needs a network trained with model.inner_head=BLOCK")

    def weak(self, strong: Branch) -> Branch:
        return replace(strong, inner=True)
