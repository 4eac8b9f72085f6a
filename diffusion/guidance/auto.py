"""Autoguidance: away from a worse model of the same task. [AG]"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diffusion.guidance.cfg import check_null_class, on_null_class
from diffusion.guidance.guidance import Branch, Guidance
from diffusion.objective import Precond


class AutoGuidance(Guidance):
    """The weak branch is another network: an earlier checkpoint, a smaller or less trained run.

    Args:
        weak_run: the run of the weak network; None for siblings that have another weakness. `sample.py` and
            `fid.py` put the run that is sampled in its place where weak_checkpoint is given.
        weak_checkpoint: a step, a name or a path; None: the newest.
        null_class: give the weak branch no class, too, as classifier-free guidance does.
        The others are those of Guidance.
    """

    def __init__(
        self,
        guidance_scale: float = 1.0,
        guidance_interval: list[float] | None = None,
        schedule: str = "constant",
        weak_run: str | None = None,
        weak_checkpoint: str | None = None,
        null_class: bool = False,
    ):
        super().__init__(guidance_scale, guidance_interval, schedule)
        if weak_checkpoint is not None and weak_run is None:
            raise ValueError(f"guidance.weak_checkpoint={weak_checkpoint} needs guidance.weak_run")
        self.weak_run, self.weak_checkpoint, self.null_class = weak_run, weak_checkpoint, null_class
        self._weak: Precond | None = None

    def load(self, open_precond: Callable[[str, str | None], Precond]) -> None:
        """Load the weak network."""
        if self.weak_run is not None:
            try:
                self._weak = open_precond(self.weak_run, self.weak_checkpoint)
            except (FileNotFoundError, ValueError) as error:
                raise ValueError(f"guidance.weak_run={self.weak_run}: {error}") from error

    def check(self, precond: Precond) -> None:
        """Raise a ValueError where there is nothing weaker, or the weak network cannot be compared."""
        if self._weak is None and not self.null_class:
            raise ValueError("guidance.weak_run or, to sample a run, guidance.weak_checkpoint must be given")
        self.check_weak(precond)

    def check_weak(self, precond: Precond) -> None:
        """Raise a ValueError where the weak network is for other latents, other classes or another path."""
        if self.null_class:
            check_null_class((self._weak or precond).net, "guidance.null_class=true has no meaning")
        if self._weak is not None:
            weak, strong = (_kind(each) for each in (self._weak, precond))
            for name, value in weak.items():
                if value != strong[name]:
                    raise ValueError(
                        f"guidance.weak_run={self.weak_run}: its {name} is {value}, that of the run is "
                        f"{strong[name]}"
                    )

    def weak(self, strong: Branch) -> Branch:
        """Return the branch of the weak network."""
        weak = strong if self._weak is None else replace(strong, precond=self._weak)
        return on_null_class(weak) if self.null_class else weak


def _kind(precond: Precond) -> dict[str, Any]:
    """Return what the networks of both branches share."""
    net = precond.net
    return {"path": precond.path, "latent_shape": net.latent_shape, "num_classes": net.num_classes}
