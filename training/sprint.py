"""Convert weights of SPRINT's public code to the names and layouts of `models.DiT`. [SPRINT]

Shapes: D channels of a token, C channels of the latent, p = PATCH_SIZE.
"""

import re
from pathlib import Path

from torch import Tensor

# Dense blocks before and after the sparse middle, and the patch size. A file does not record them, but every
# published network has these values.
NUM_DENSE, PATCH_SIZE = 2, 2
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
    """Rename and convert the tensors of a SPRINT file; return tensors of other files unchanged.

    Raises:
        ValueError: the number of dense blocks or a shape is not SPRINT's, or two tensors have the same name.
    """
    if "renoise_linear.weight" not in tensors:  # SPRINT's fusion layer: only its files have it
        return tensors
    blocks = {match.groups() for match in map(BLOCK.match, tensors) if match}
    num_encoder, num_middle, num_decoder = (sum(name == stack for name, _ in blocks) for stack in STACKS)
    if (num_encoder, num_decoder) != (NUM_DENSE, NUM_DENSE):
        counts = f"has {num_encoder} encoder_blocks and {num_decoder} decoder_blocks"
        raise ValueError(f"{file} {counts}, must have {NUM_DENSE} each, like SPRINT's published networks")
    first = {"encoder": 0, "middle": NUM_DENSE, "decoder": NUM_DENSE + num_middle}
    converted = {}
    for name, tensor in tensors.items():
        new_name = BLOCK.sub(lambda match: f"blocks.{first[match[1]] + int(match[2])}.", name)
        for public, renamed in RENAMED.items():
            new_name = re.sub(rf"^{public}\b", renamed, new_name)
        if new_name in converted:
            raise ValueError(f"{file} has two tensors for {new_name}, one of them {name}")
        try:
            converted[new_name] = CONVERTED.get(new_name, Tensor.detach)(tensor)
        except (IndexError, RuntimeError) as error:
            shape = tuple(tensor.shape)
            raise ValueError(f"{file}: {name} is {shape}, which does not fit SPRINT's networks") from error
    return converted
