"""Autoguidance: away from a worse model of the same task. [AG]"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from diffusion.guidance.cfg import check_null_class, on_null_class
from diffusion.guidance.guidance import Branch, Guidance
from diffusion.objective import Precond
from runtime.errors import as_value_error


@dataclass(eq=False)
class AutoGuidance(Guidance):
    """Guidance by a weaker network: an earlier checkpoint, or a smaller or less trained run.

    Args:
        weak_run: run folder of the weak network; None: the strong network, weakened by `null_class` or by a
            subclass. In `sample.py` and `fid.py`, weak_checkpoint without weak_run is of the sampled run.
        weak_checkpoint: a step, a name or a path; None: the newest.
        null_class: also give the weak branch the null class, as in classifier-free guidance.
        The other arguments are documented in `Guidance`.
    """

    weak_run: str | None = None
    weak_checkpoint: str | None = None
    null_class: bool = False
    _weak: Precond | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weak_checkpoint is not None and self.weak_run is None:
            raise ValueError(f"guidance.weak_checkpoint={self.weak_checkpoint} needs guidance.weak_run")

    def load(self, open_precond: Callable[[str, str | None], Precond]) -> None:
        if self.weak_run is not None:
            with as_value_error(f"guidance.weak_run={self.weak_run}", FileNotFoundError, ValueError):
                self._weak = open_precond(self.weak_run, self.weak_checkpoint)

    def check(self, precond: Precond) -> None:
        if self._weak is None and not self.null_class:
            raise ValueError(
                "guidance=auto needs guidance.weak_run, guidance.weak_checkpoint (with run=NAME) or "
                "guidance.null_class=true"
            )
        self.check_weak(precond)

    def check_weak(self, precond: Precond) -> None:
        """Raise a ValueError unless both networks have the same latents, classes and path."""
        if self.null_class:
            check_null_class((self._weak or precond).net, "guidance.null_class=true is not supported")
        if self._weak is None:
            return
        both = (self._weak, precond)
        weak, strong = ((p.path, p.net.latent_shape, p.net.text or p.net.num_classes) for p in both)
        if weak != strong:
            rule = f"its path, latent shape and condition {weak} must equal the sampled network's {strong}"
            raise ValueError(f"guidance.weak_run={self.weak_run}: {rule}")

    def weak(self, strong: Branch) -> Branch:
        weak = strong if self._weak is None else replace(strong, precond=self._weak)
        return on_null_class(weak) if self.null_class else weak
