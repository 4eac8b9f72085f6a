"""AuraFlow: joint blocks, then single ones whose tokens have registers and text in front."""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by

JOINT = {"output": 1, "shared": ("encoder_hidden_states", "temb", "attention_kwargs")}
PROCESSORS = ("AuraFlowAttnProcessor2_0", "FusedAuraFlowAttnProcessor2_0")


def _num_prefix_tokens(model: nn.Module, arguments: Arguments) -> int:
    return model.register_tokens.shape[1] + arguments["encoder_hidden_states"].shape[1]


def auraflow(sizes: Sizes) -> Built:
    """A sixth of joint blocks."""
    from diffusers import AuraFlowTransformer2DModel

    options = {"sample_size": 2 * sizes.side, "pos_embed_max_size": sizes.side**2}
    options |= {"num_mmdit_layers": sizes.depth // 6, "num_single_dit_layers": sizes.depth - sizes.depth // 6}
    options |= {"joint_attention_dim": TEXT_DIM, "caption_projection_dim": sizes.width}
    return AuraFlowTransformer2DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(4),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.rand(sizes.batch),
    }


FAMILIES = {
    "AuraFlowTransformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList("joint_transformer_blocks", **JOINT),
                BlockList("single_transformer_blocks", joint=True, shared=("temb", "attention_kwargs")),
            ),
            accepts=(*INPUTS, "attention_kwargs"),
            num_prefix_tokens=_num_prefix_tokens,
            check=checked_by(PROCESSORS, "attention_kwargs"),
        ),
        auraflow,
    ),
}
