"""AnyFlow: rotary positions over frames, rows and columns; a timestep for each token."""

import torch

from routing.adapters.adapter import Adapter, BlockList, TokenSelection
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by


def _rotary(tables: dict[str, torch.Tensor], kept: TokenSelection) -> dict[str, torch.Tensor]:
    return {name: kept.gather(table, 2) for name, table in tables.items()}  # (1, 1, T, d)


BLOCK = {
    "by_token": {"rotary_emb": _rotary, "temb": lambda temb, kept: kept.gather(temb)},  # (N, T, 6, D)
    "shared": ("encoder_hidden_states",),
}


def anyflow(sizes: Sizes) -> Built:
    """4 frames of half the side, each with its own timesteps."""
    from diffusers import AnyFlowTransformer3DModel

    options = {"num_layers": sizes.depth, "text_dim": TEXT_DIM, "ffn_dim": 4 * sizes.width}
    timestep = torch.randint(1000, (sizes.batch, 4))
    return AnyFlowTransformer3DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(16, patch_size=1, frames=4).transpose(1, 2),
        "encoder_hidden_states": sizes.text,
        "timestep": timestep,
        "r_timestep": timestep // 2,
    }


FAMILIES = {
    "AnyFlowTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("blocks", **BLOCK),),
            accepts=(*INPUTS, "r_timestep"),
            check=checked_by(("AnyFlowAttnProcessor", "AnyFlowCrossAttnProcessor")),
        ),
        anyflow,
    ),
    "AnyFlowFARTransformer3DModel": Family(
        refused="its attention takes a block mask over chunks of frames at their places"
    ),
}
