"""Transformers of images, one a row. Layers are counted through all lists of blocks of a row."""

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families import counts
from routing.adapters.families.parts import (
    BLOCKS,
    INPUTS,
    KWARGS,
    SINGLE,
    TEMB,
    TEXT,
    TEXT_MASK,
    along,
    each,
    entry,
    if_many,
    joint,
    joint_mask,
    joint_rotary,
    joint_table,
    leading,
    length,
    mask,
    mask_before_text,
    num_reference_tokens,
    part,
    rope,
    rotary,
    table,
    tokens,
)

TEXT_TOKENS = "encoder_hidden_states_mask"  # Qwen-Image and others name the mask of the text after its states
JOINT_KWARGS, CROSS_KWARGS = "joint_attention_kwargs", "cross_attention_kwargs"
IDS = ("img_ids", "txt_ids")
# FLUX: both lists take the same arguments, attention may have a mask.
FLUX = {"output": 1, "by_token": rope(joint_rotary)}
FLUX_MASKED = rope(joint_rotary) | {JOINT_KWARGS: entry("attention_mask", joint_mask)}
FLUX_RESIDUALS = ("controlnet_block_samples", "controlnet_single_block_samples")
CHROMA = rope(joint_rotary) | {"attention_mask": joint}  # (N, P + T)
# CogView: the mask (N, P) is of the text alone.
RESOLUTION = ("target_size", "crop_coords")
COGVIEW = BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=(*TEMB, "attention_mask", KWARGS))
# HiDream: (N, T + text, 1, d / 2, 2, 2), (N, T + S).
HIDREAM = rope(lambda x, kept: kept.gather_leading(x)) | {"hidden_states_masks": tokens}
U_NET = BlockList(BLOCKS, shared=(TEXT, TEXT_MASK))
U_NET_INPUTS = ("hidden_states", TEXT, TEXT_MASK, "return_dict")

IMAGES = {
    # Joint blocks, then single ones whose tokens have registers and text in front.
    "AuraFlowTransformer2DModel": Adapter(
        [
            BlockList("joint_transformer_blocks", output=1, shared=(*TEMB, KWARGS)),
            BlockList("single_transformer_blocks", joint=True, shared=("temb", KWARGS)),
        ],
        accepts=(*INPUTS, KWARGS),
        num_prefix_tokens=lambda model, given: model.register_tokens.shape[1] + given[TEXT].shape[1],
    ),
    "BriaTransformer2DModel": Adapter(
        [BlockList(name, shared=(*TEMB, KWARGS), **FLUX) for name in (BLOCKS, SINGLE)],
        accepts=(*INPUTS, *IDS, KWARGS),
        num_prefix_tokens=length(TEXT),
    ),
    # A text of its own for each block.
    "BriaFiboTransformer2DModel": Adapter(
        [
            BlockList(BLOCKS, output=1, by_token=FLUX_MASKED, shared=TEMB),
            BlockList(SINGLE, joint=True, by_token=FLUX_MASKED, shared=("temb",)),
        ],
        accepts=(*INPUTS, "text_encoder_layers", *IDS, "guidance", JOINT_KWARGS),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(0),
    ),
    # One sequence: tokens that sum up the text, the image, and those of images to edit.
    "BriaFibo2Transformer2DModel": Adapter(
        [
            BlockList(
                "layers",
                tokens="x",
                joint=True,
                # (N, P + T + S), (1, P + T + S, d), (N, P + T + S)
                by_token={"attn_mask": joint_mask, "freqs_cis": joint, "noise_mask": joint},
                shared=("adaln_input", "adaln_noisy", "adaln_clean", TEXT, TEXT_MASK),
            )
        ],
        accepts=(*INPUTS, TEXT_MASK, "context_latents"),
        num_prefix_tokens=counts.fibo_2_prefix,
        num_suffix_tokens=counts.fibo_2_suffix,
    ),
    "ChromaTransformer2DModel": Adapter(
        [
            BlockList(BLOCKS, output=1, by_token=CHROMA, shared=(*TEMB, JOINT_KWARGS)),
            BlockList(SINGLE, joint=True, by_token=CHROMA, shared=("temb", JOINT_KWARGS)),
        ],
        accepts=(*INPUTS, *IDS, "attention_mask", JOINT_KWARGS),
        num_prefix_tokens=length(TEXT),
    ),
    # Positions are added before; they are rotary since CogView 4.
    "CogView3PlusTransformer2DModel": Adapter(
        [BlockList(BLOCKS, output=0, shared=(TEXT, "emb"))],
        accepts=(*INPUTS, "original_size", *RESOLUTION),
    ),
    "CogView4Transformer2DModel": Adapter(
        [COGVIEW],
        accepts=(*INPUTS, "original_size", *RESOLUTION, "attention_mask", KWARGS),
    ),
    "GlmImageTransformer2DModel": Adapter(
        [COGVIEW],
        accepts=(*INPUTS, "prior_token_id", "prior_token_drop", *RESOLUTION, "attention_mask"),
    ),
    "DiTTransformer2DModel": Adapter(
        [BlockList(BLOCKS, shared=("timestep", "class_labels"))],
        accepts=("hidden_states", "timestep", "class_labels", "return_dict"),
    ),
    # Within U-Nets: attention to the image, then to the text, no positions.
    "DreamLiteTransformer2DModel": Adapter([U_NET], U_NET_INPUTS),
    "Transformer2DModel": Adapter([U_NET], U_NET_INPUTS, check=counts.continuous_inputs),
    # One sequence of the image and the text behind it, samples second: (N, T + S, 1, d), six (T + S, N, D)
    # that are the same for all tokens of a sample, (N, 1, 1, T + S).
    "ErnieImageTransformer2DModel": Adapter(
        [
            BlockList(
                "layers",
                tokens="x",
                sequence_first=True,
                by_token={"rotary_pos_emb": tokens, "temb": each(leading), "attention_mask": mask},
            )
        ],
        accepts=("hidden_states", "timestep", "text_bth", "text_lens", "return_dict"),
        num_suffix_tokens=length("text_bth"),
    ),
    "FluxTransformer2DModel": Adapter(
        [BlockList(name, output=1, by_token=FLUX_MASKED, shared=TEMB) for name in (BLOCKS, SINGLE)],
        accepts=(
            *(*INPUTS, "pooled_projections", *IDS, "guidance", JOINT_KWARGS),
            *(*FLUX_RESIDUALS, "controlnet_blocks_repeat"),
        ),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(0),
        residuals=FLUX_RESIDUALS,
    ),
    # Modulations that all blocks share.
    "Flux2Transformer2DModel": Adapter(
        [
            BlockList(BLOCKS, shared=(TEXT, "temb_mod_img", "temb_mod_txt", JOINT_KWARGS), **FLUX),
            BlockList(SINGLE, joint=True, by_token=rope(joint_rotary), shared=("temb_mod",)),
        ],
        accepts=(*INPUTS, *IDS, "guidance"),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(0),
    ),
    # Blocks of the image alone, then of text, image and reference images; temb_mod is (N, T + S, 3 D).
    "Flux3Transformer2DModel": Adapter(
        [
            BlockList("mode_blocks.image", by_token={"temb_mod": tokens, **rope(rotary)}),
            BlockList(
                SINGLE,
                output=1,
                by_token={"temb_mod": tokens, **rope(joint_rotary)},
                shared=(TEXT, "temb_mod_context"),
                num_suffix_tokens=counts.flux_3_references,
            ),
        ],
        accepts=(*(*INPUTS, *IDS, "image_cond_hidden_states", "image_cond_ids", "target_timestep"), KWARGS),
        num_prefix_tokens=length(TEXT),
    ),
    # Behind the image come two texts, and a third for each block. The model cuts off the text of a block, and
    # at last all text, at places that it counted with all tokens.
    "HiDreamImageTransformer2DModel": Adapter(
        [
            BlockList(
                "double_stream_blocks",
                output=0,
                by_token=HIDREAM,
                shared=TEMB,
                num_suffix_tokens=counts.hidream_padding,
            ),
            BlockList(
                "single_stream_blocks", by_token=HIDREAM, shared=TEMB, num_suffix_tokens=counts.hidream_others
            ),
        ],
        accepts=(
            *("hidden_states", "timesteps", "encoder_hidden_states_t5", "encoder_hidden_states_llama3"),
            *("pooled_embeds", "return_dict", KWARGS),
        ),
        whole_between_blocks=True,
    ),
    # In attention the text comes after the image. The second processor is that of the text before the blocks.
    "HunyuanImageTransformer2DModel": Adapter(
        [
            BlockList(
                name, output=0, by_token=rope(rotary) | {"attention_mask": mask_before_text}, shared=TEMB
            )
            for name in (BLOCKS, SINGLE)
        ],
        accepts=(*INPUTS, TEXT_MASK, KWARGS),
    ),
    # One sequence, padding and text in front of the image; each token has its own role and place, and may
    # have its own timestep: (N, P + T, d) each, (N, 1, P + T, P + T), (N, P + T or 1, D).
    "Ideogram4Transformer2DModel": Adapter(
        [
            BlockList(
                "layers",
                joint=True,
                by_token=rope(each(joint)) | {"attention_mask": joint_mask, "adaln_input": if_many(joint)},
            )
        ],
        accepts=(*INPUTS, "position_ids", "segment_ids", "indicator", KWARGS),
        num_prefix_tokens=counts.ideogram_prefix,
    ),
    "JoyImageEditTransformer3DModel": Adapter(
        [BlockList("double_blocks", output=0, by_token=rope(part(0, rotary)), shared=TEMB)],
        accepts=INPUTS,
        check=counts.joyimage_items,
    ),
    "JoyImageEditPlusTransformer3DModel": Adapter(
        [
            BlockList(
                "double_blocks",
                output=0,
                by_token=rope(each(tokens)) | {"attention_mask": mask_before_text},
                shared=TEMB,
            )
        ],
        accepts=(*INPUTS, TEXT_TOKENS, "shape_list"),
        num_suffix_tokens=counts.joyimage_references,
    ),
    "Krea2Transformer2DModel": Adapter(
        [
            BlockList(
                BLOCKS,
                joint=True,
                by_token=rope(joint_rotary) | {"attention_mask": joint_mask},  # (N, 1, 1, P + T)
                shared=("temb",),
            )
        ],
        accepts=(*INPUTS, "position_ids", TEXT_MASK, KWARGS),
        num_prefix_tokens=length(TEXT),
    ),
    # Text is in plane 0, references are in plane 2.
    "LongCatImageTransformer2DModel": Adapter(
        [BlockList(name, shared=TEMB, **FLUX) for name in (BLOCKS, SINGLE)],
        accepts=(*INPUTS, *IDS),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(1),
    ),
    # base_sequence_length, a key of its cross_attention_kwargs, would change how sharply a window attends.
    "LuminaNextDiT2DModel": Adapter(
        [
            BlockList(
                "layers",
                by_token={"attention_mask": mask, **rope(tokens)},  # (N, T), (1, T, d)
                shared=(*TEMB, "encoder_mask", CROSS_KWARGS),
            )
        ],
        accepts=(*INPUTS, "encoder_mask", "image_rotary_emb", CROSS_KWARGS),
    ),
    "Lumina2Transformer2DModel": Adapter(
        [BlockList("layers", joint=True, by_token=rope(joint), shared=("temb",))],  # (N, P + T, d)
        accepts=(*INPUTS, TEXT_MASK, KWARGS),
        num_prefix_tokens=counts.lumina_2_prefix,
    ),
    # The image attends to itself and the text at once, with a mask (N, T + P); experts choose among the
    # tokens of a window.
    "NucleusMoEImageTransformer2DModel": Adapter(
        [
            BlockList(
                BLOCKS,
                by_token=rope(part(0, table)) | {KWARGS: entry("attention_mask", mask_before_text)},
                shared=TEMB,
            )
        ],
        accepts=(*INPUTS, TEXT_TOKENS, "img_shapes", KWARGS),
    ),
    # Text with reference images, the timestep, and the image in one sequence.
    "OmniGenTransformer2DModel": Adapter(
        [BlockList("layers", joint=True, by_token={"attention_mask": joint_mask, **rope(joint_rotary)})],
        accepts=(
            *("hidden_states", "timestep", "input_ids", "input_img_latents", "input_image_sizes"),
            *("attention_mask", "position_ids", "return_dict"),
        ),
        num_prefix_tokens=lambda model, given: given["input_ids"].shape[1] + 1,
    ),
    "OvisImageTransformer2DModel": Adapter(
        [BlockList(name, shared=(*TEMB, JOINT_KWARGS), **FLUX) for name in (BLOCKS, SINGLE)],
        accepts=(*INPUTS, *IDS, JOINT_KWARGS),
        num_prefix_tokens=length(TEXT),
    ),
    "PixArtTransformer2DModel": Adapter(
        [
            BlockList(
                BLOCKS, by_token={"attention_mask": mask}, shared=(TEXT, TEXT_MASK, "timestep", CROSS_KWARGS)
            )
        ],
        accepts=(*INPUTS, "added_cond_kwargs", CROSS_KWARGS, "attention_mask", TEXT_MASK),
    ),
    # Image tokens attend to image and text; the text, of which the mask is, passes through no block.
    "PRXTransformer2DModel": Adapter(
        [BlockList("blocks", by_token=rope(along(2)), shared=(*TEMB, "attention_mask"))],  # (1, 1, T, ...)
        accepts=(*INPUTS, "attention_mask"),
    ),
    # Two tables of complex numbers: of the image, of the text.
    "QwenImageTransformer2DModel": Adapter(
        [
            BlockList(
                BLOCKS,
                output=1,
                by_token=rope(part(0, table)) | {"modulate_index": tokens},  # (N, T + S)
                shared=(*TEMB, TEXT_TOKENS, JOINT_KWARGS),
            )
        ],
        accepts=(*INPUTS, TEXT_TOKENS, "img_shapes", "additional_t_cond", KWARGS),
        num_suffix_tokens=counts.qwen_references,
    ),
    # One sequence: text and reference images, which do not see what comes after them, then the image.
    # key_valid (N, P + T); target_token_mask (P + T,): which tokens are those of the image; segments are of
    # the prefix. The processor for flex attention takes a block mask over all tokens at their places.
    "QwenImage21Transformer2DModel": Adapter(
        [
            BlockList(
                BLOCKS,
                joint=True,
                by_token={"rotary_emb": joint_table, "key_valid": joint, "target_token_mask": leading},
                shared=("modulation", "segments"),
            )
        ],
        accepts=(*INPUTS, TEXT_TOKENS, "img_shapes", "img_mask", KWARGS),
        num_prefix_tokens=counts.qwen_21_prefix,
    ),
    "SD3Transformer2DModel": Adapter(
        [BlockList(BLOCKS, output=1, shared=(*TEMB, JOINT_KWARGS))],
        accepts=(*INPUTS, "pooled_projections", JOINT_KWARGS, "block_controlnet_hidden_states"),
        residuals=("block_controlnet_hidden_states",),
    ),
    # One sequence of the image, its padding, and the text; the refiners before it are not routed.
    "ZImageTransformer2DModel": Adapter(
        [
            BlockList(
                "layers",
                tokens="x",
                by_token={"freqs_cis": tokens, "attn_mask": mask},  # (N, T + S, d), (N, T + S)
                shared=("adaln_input",),
            )
        ],
        accepts=("x", "t", "cap_feats", "return_dict", JOINT_KWARGS),
        num_suffix_tokens=counts.z_image_suffix,
    ),
}
