"""Weights of SPRINT's public code, by the names and in the layouts of `models.DiT`. [SPRINT]

Shapes: D channels of a token, C channels of the latent, p = PATCH_SIZE.
"""

import re
from pathlib import Path

from torch import Tensor

# In every published network; a file says neither, and C * p * p alone.
NUM_DENSE, PATCH_SIZE = 2, 2  # blocks before the sparse middle, and after it
STACKS = ("encoder", "middle", "decoder")
BLOCK = re.compile(r"^(encoder|middle|decoder)_blocks\.(\d+)\.")


def _channels_last(output: Tensor) -> Tensor:
    return output.unflatten(0, (-1, PATCH_SIZE**2)).transpose(0, 1).flatten(0, 1)  # (C * p * p, ...)


RENAMED = {"renoise_linear": "rejoins.0.proj", "mask_token": "rejoins.0.mask_token"}
CONVERTED = {
    "x_embedder.proj.weight": lambda w: w.unflatten(1, (-1, PATCH_SIZE, PATCH_SIZE)),
    "final_layer.linear.weight": _channels_last,
    "final_layer.linear.bias": _channels_last,
    "rejoins.0.proj.weight": lambda w: w.roll(w.shape[1] // 2, dims=1),  # dense first
    "rejoins.0.mask_token": Tensor.flatten,
}


def from_sprint(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Rename and convert the tensors of a SPRINT file; those of other files are returned as they are.

    Raises:
        ValueError: other numbers of dense blocks, shapes of another network, or two names for one tensor.
    """
    if "renoise_linear.weight" not in tensors:  # the fusion, which no other code has
        return tensors
    blocks = {match.groups() for match in map(BLOCK.match, tensors) if match}
    num_encoder, num_middle, num_decoder = (sum(name == stack for name, _ in blocks) for stack in STACKS)
    if (num_encoder, num_decoder) != (NUM_DENSE, NUM_DENSE):
        rule = f"has {num_encoder} encoder_blocks and {num_decoder} decoder_blocks"
        raise ValueError(f"{file} {rule}, must be {NUM_DENSE} each, as in every published network of SPRINT")
    first = {"encoder": 0, "middle": NUM_DENSE, "decoder": NUM_DENSE + num_middle}
    own = {}
    for name, tensor in tensors.items():
        own_name = BLOCK.sub(lambda match: f"blocks.{first[match[1]] + int(match[2])}.", name)
        for public, renamed in RENAMED.items():
            own_name = re.sub(rf"^{public}\b", renamed, own_name)
        if own_name in own:
            raise ValueError(f"{file} has two tensors for {own_name}, {name} among them")
        try:
            own[own_name] = CONVERTED.get(own_name, Tensor.detach)(tensor)
        except (IndexError, RuntimeError) as error:
            shape = tuple(tensor.shape)
            raise ValueError(f"{file}: {name} is {shape}, not as in SPRINT's networks") from error
    return own
