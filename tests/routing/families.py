"""Models of five classes of diffusers, and all variants of their inputs; see models.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

from tests.networks import seeded
from tests.routing.models import MODELS, SMALL

NUM_SAMPLES, NUM_TOKENS = 3, 16
SIZES = SMALL._replace(depth=5, batch=NUM_SAMPLES)


@dataclass(frozen=True)
class Family:
    """A class, its lists of blocks, options in addition to MODELS, and a function for variants of inputs."""

    kind: str
    block_lists: tuple[str, ...] = ("transformer_blocks",)
    options: dict[str, Any] = field(default_factory=dict)
    further: Callable[..., dict[str, Any]] = lambda inputs: {}

    def build(self):
        torch.manual_seed(0)
        model = getattr(diffusers, self.kind)(**MODELS[self.kind](SIZES)[0] | self.options)
        with torch.no_grad():  # parameters that start at 0 could hide a mistake
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model.train()

    def arguments(self, **variant):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            _, inputs = MODELS[self.kind](SIZES)
        return inputs | self.further(inputs, **variant)

    def layers(self, model):
        return [block for name in self.block_lists for block in getattr(model, name)]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def residuals(count, num_tokens=NUM_TOKENS, seed=4):
    """Return residuals of a ControlNet."""
    return [randn(NUM_SAMPLES, num_tokens, SIZES.width, seed=seed + i) for i in range(count)]


def for_flux(inputs, num_reference_tokens=0, controlnet=False, mask=False):
    L, num_text = NUM_TOKENS + num_reference_tokens, SIZES.num_text
    x, ids = inputs["hidden_states"], inputs["img_ids"]
    given = {
        "hidden_states": torch.cat([x, randn(NUM_SAMPLES, num_reference_tokens, x.shape[2])], dim=1),
        "img_ids": torch.cat([ids, ids[:num_reference_tokens] + torch.tensor([1.0, 0, 0])]),
        "guidance": torch.tensor([3.0, 3.5, 4.0]),
    }
    if controlnet:
        given["controlnet_block_samples"] = residuals(2, L)
        given["controlnet_single_block_samples"] = residuals(4, L, seed=6)
    if mask:
        seen = randn(NUM_SAMPLES, 1, num_text + L, num_text + L, seed=10) > -0.5
        seen |= torch.eye(num_text + L, dtype=torch.bool)
        given["joint_attention_kwargs"] = {"attention_mask": seen}
    return given


def for_sd3(inputs, controlnet=False):
    return {"block_controlnet_hidden_states": residuals(2)} if controlnet else {}


def for_pixart(inputs):
    return {"encoder_attention_mask": SIZES.text_mask}


BOTH = ("transformer_blocks", "single_transformer_blocks")
FLUX_OPTIONS = {"num_layers": 3, "num_single_layers": 4, "guidance_embeds": True}
SD3_OPTIONS = {"dual_attention_layers": (0, 2), "qk_norm": "rms_norm"}
AURAFLOW_OPTIONS = {"num_mmdit_layers": 2, "num_single_dit_layers": 4}
FAMILIES = {
    "flux": Family("FluxTransformer2DModel", BOTH, FLUX_OPTIONS, for_flux),
    "sd3": Family("SD3Transformer2DModel", options=SD3_OPTIONS, further=for_sd3),
    "pixart": Family("PixArtTransformer2DModel", further=for_pixart),
    "auraflow": Family("AuraFlowTransformer2DModel", ("joint_transformer_blocks", BOTH[1]), AURAFLOW_OPTIONS),
    "wan": Family("WanTransformer3DModel", ("blocks",)),
}
