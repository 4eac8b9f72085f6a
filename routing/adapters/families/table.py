"""The table of adapters, one row per transformer class of diffusers: image, video, then audio.

`ACCEPTED` and `SHARED` in __init__.py hold for every class. `accepts` and `shared` of a row add names for its
class alone.
"""

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families import counts
from routing.adapters.families.parts import (
    Gather,
    along,
    entry,
    if_many,
    if_ndim,
    joint,
    joint_table,
    leading,
    length,
    mask,
    mask_before_text,
    num_reference_tokens,
    of_all,
    part,
    refuse,
    rope,
    rotary,
    table,
    tokens,
    tuple_of,
    unbatched,
)

# Names of arguments and of lists of blocks in most classes.
TEXT, TEXT_MASK = "encoder_hidden_states", "encoder_attention_mask"
BLOCKS, SINGLE = "transformer_blocks", "single_transformer_blocks"
# FLUX: attention may take a mask.
FLUX_MASKED = rope(rotary) | {"joint_attention_kwargs": entry("attention_mask", mask)}
RESIDUALS = ("controlnet_block_samples",)
FLUX_RESIDUALS = (*RESIDUALS, "controlnet_single_block_samples")
CHROMA = rope(rotary) | {"attention_mask": joint}  # (N, P + T)
ROTARY = BlockList(BLOCKS, output=0, by_token=rope(rotary))
# CogView: the mask (N, P) covers the text alone.
COGVIEW = BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=("attention_mask",))
# HiDream: (N, T + text, 1, d / 2, 2, 2), (N, T + S).
HIDREAM = rope(lambda x, kept: kept.gather_between(x)) | {"hidden_states_masks": tokens}
# Wan: (1, T, 1, d) each, and (N, T, 6, D) where each token has its own timestep, else (N, 6, D).
WAN = BlockList("blocks", by_token={"rotary_emb": tuple_of(tokens), "temb": if_ndim(4, tokens)})
LTX_ROTARY = tuple_of(lambda x, kept: kept.gather(x, x.ndim - 2))  # (N, T, D), or (N, heads, T, d)


def both(output: int, by_token: dict[str, Gather]) -> list[BlockList]:
    """Return double and single blocks that take the same arguments."""
    return [BlockList(name, output=output, by_token=by_token) for name in (BLOCKS, SINGLE)]


def then_joint(by_token: dict[str, Gather]) -> list[BlockList]:
    """Return double blocks, and single blocks where the text comes before the image."""
    return [BlockList(BLOCKS, output=1, by_token=by_token), BlockList(SINGLE, joint=True, by_token=by_token)]


# HunyuanVideo: double and single blocks. Attention puts the text last. Tokens of given frames come before the
# image. Only blocks for token replacement use `args`.
HUNYUAN = [
    BlockList(name, joint=True, output=0, by_token={key: rotary, "attention_mask": mask_before_text})
    for name, key in ((BLOCKS, "freqs_cis"), (SINGLE, "image_rotary_emb"))
]


ROWS = {
    # Joint blocks, then single blocks, where registers and text come before the image.
    "AuraFlowTransformer2DModel": Adapter(
        [BlockList("joint_transformer_blocks", output=1), BlockList("single_transformer_blocks", joint=True)],
        num_prefix_tokens=lambda model, args: model.register_tokens.shape[1] + args[TEXT].shape[1],
    ),
    "BriaTransformer2DModel": Adapter(both(1, rope(rotary)), num_prefix_tokens=length(TEXT)),
    # Each block has its own text.
    "BriaFiboTransformer2DModel": Adapter(
        then_joint(FLUX_MASKED), num_prefix_tokens=length(TEXT), num_suffix_tokens=num_reference_tokens(0)
    ),
    # One sequence: gist tokens (a summary of the text), the image, and images to edit.
    "BriaFibo2Transformer2DModel": Adapter(
        BlockList(
            "layers",
            tokens="x",
            joint=True,
            # (N, P + T + S), (1, P + T + S, d), (N, P + T + S)
            by_token={"attn_mask": mask, "freqs_cis": joint, "noise_mask": joint},
        ),
        num_prefix_tokens=counts.fibo_2_prefix,
        num_suffix_tokens=counts.fibo_2_suffix,
    ),
    "ChromaTransformer2DModel": Adapter(
        then_joint(CHROMA), accepts=("attention_mask",), num_prefix_tokens=length(TEXT)
    ),
    # Positions are added before the blocks; CogView 4 has rotary positions.
    "CogView3PlusTransformer2DModel": Adapter(BlockList(BLOCKS, output=0)),
    "CogView4Transformer2DModel": Adapter(COGVIEW, accepts=("attention_mask",)),
    "GlmImageTransformer2DModel": Adapter(COGVIEW, accepts=("attention_mask",)),
    "DiTTransformer2DModel": Adapter(BlockList(BLOCKS), accepts=("class_labels",)),
    # Part of U-Nets: attention to the image, then to the text, without positions.
    "DreamLiteTransformer2DModel": Adapter(BlockList(BLOCKS)),
    "Transformer2DModel": Adapter(
        BlockList(BLOCKS),
        check=refuse("an input of patches or codes", lambda model, args: not model.is_input_continuous),
    ),
    # One sequence: the image, then the text. Blocks take samples in the second dimension: (N, T + S, 1, d),
    # six (T + S, N, D) that are equal for all tokens of a sample, (N, 1, 1, T + S).
    "ErnieImageTransformer2DModel": Adapter(
        BlockList(
            "layers",
            tokens="x",
            sequence_first=True,
            by_token={"rotary_pos_emb": tokens, "temb": tuple_of(leading), "attention_mask": mask},
        ),
        num_suffix_tokens=length("text_bth"),
    ),
    "FluxTransformer2DModel": Adapter(
        both(1, FLUX_MASKED),
        accepts=("controlnet_blocks_repeat",),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(0),
        residuals=FLUX_RESIDUALS,
    ),
    # All blocks share the modulation.
    "Flux2Transformer2DModel": Adapter(
        then_joint(rope(rotary)), num_prefix_tokens=length(TEXT), num_suffix_tokens=num_reference_tokens(0)
    ),
    # Blocks for the image alone, then for text, image and reference images; temb_mod is (N, T + S, 3 D).
    "Flux3Transformer2DModel": Adapter(
        [
            BlockList("mode_blocks.image", by_token={"temb_mod": tokens, **rope(tuple_of(table))}),
            BlockList(
                SINGLE,
                output=1,
                by_token={"temb_mod": tokens, **rope(rotary)},
                num_suffix_tokens=length("image_cond_hidden_states"),
            ),
        ],
        num_prefix_tokens=length(TEXT),
    ),
    # After the image come two texts, and a third one for each block. The model cuts off the text of a block,
    # and at the end all text, at positions that it computed for all tokens.
    "HiDreamImageTransformer2DModel": Adapter(
        [
            BlockList(
                "double_stream_blocks", output=0, by_token=HIDREAM, num_suffix_tokens=counts.hidream_padding
            ),
            BlockList("single_stream_blocks", by_token=HIDREAM, num_suffix_tokens=counts.hidream_others),
        ],
        accepts=("encoder_hidden_states_t5",),
        whole_between_blocks=True,
    ),
    # Attention puts the text after the image.
    "HunyuanImageTransformer2DModel": Adapter(both(0, rope(rotary) | {"attention_mask": mask_before_text})),
    # One sequence: padding and text, then the image. Each token has its role and position, and may have its
    # own timestep: (N, P + T, d) each, (N, 1, P + T, P + T), (N, P + T or 1, D).
    "Ideogram4Transformer2DModel": Adapter(
        BlockList(
            "layers",
            joint=True,
            by_token=rope(tuple_of(joint)) | {"attention_mask": mask, "adaln_input": if_many(joint)},
        ),
        num_prefix_tokens=counts.ideogram_prefix,
    ),
    "JoyImageEditTransformer3DModel": Adapter(
        BlockList("double_blocks", output=0, by_token=rope(part(0, rotary))),
        check=refuse("a row of reference items", lambda model, args: args["hidden_states"].ndim != 5),
    ),
    "JoyImageEditPlusTransformer3DModel": Adapter(
        BlockList(
            "double_blocks", output=0, by_token=rope(tuple_of(tokens)) | {"attention_mask": mask_before_text}
        ),
        num_suffix_tokens=counts.joyimage_references,
    ),
    # A mask (N, 1, 1, P + T).
    "Krea2Transformer2DModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token=rope(rotary) | {"attention_mask": mask}),
        num_prefix_tokens=length(TEXT),
    ),
    # The text is in plane 0, the image in plane 1, references are in plane 2.
    "LongCatImageTransformer2DModel": Adapter(
        both(1, rope(rotary)), num_prefix_tokens=length(TEXT), num_suffix_tokens=num_reference_tokens(1)
    ),
    # base_sequence_length of cross_attention_kwargs is not accepted: attention would depend on the length.
    # A mask (N, T), a table (1, T, d).
    "LuminaNextDiT2DModel": Adapter(
        BlockList("layers", by_token={"attention_mask": mask, **rope(tokens)}), accepts=("image_rotary_emb",)
    ),
    "Lumina2Transformer2DModel": Adapter(
        BlockList("layers", joint=True, by_token=rope(joint)),  # (N, P + T, d),
        num_prefix_tokens=counts.lumina_2_prefix,
    ),
    # The image attends to itself and the text together, with a mask (N, T + P). Experts choose among the
    # tokens of the window.
    "NucleusMoEImageTransformer2DModel": Adapter(
        BlockList(
            BLOCKS,
            by_token=rope(part(0, table)) | {"attention_kwargs": entry("attention_mask", mask_before_text)},
        ),
    ),
    # One sequence: text with reference images, the timestep, the image.
    "OmniGenTransformer2DModel": Adapter(
        BlockList("layers", joint=True, by_token={"attention_mask": mask, **rope(rotary)}),
        accepts=("attention_mask",),
        num_prefix_tokens=lambda model, args: args["input_ids"].shape[1] + 1,
    ),
    "OvisImageTransformer2DModel": Adapter(both(1, rope(rotary)), num_prefix_tokens=length(TEXT)),
    "PixArtTransformer2DModel": Adapter(
        BlockList(BLOCKS, by_token={"attention_mask": mask}), accepts=("added_cond_kwargs", "attention_mask")
    ),
    # Image tokens attend to image and text. The mask covers the text, which passes through no block.
    "PRXTransformer2DModel": Adapter(
        BlockList("blocks", by_token=rope(along(2)), shared=("attention_mask",)),  # (1, 1, T, ...)
        accepts=("attention_mask",),
    ),
    # Two tables of complex numbers, for the image and for the text; modulate_index (N, T + S).
    "QwenImageTransformer2DModel": Adapter(
        BlockList(BLOCKS, output=1, by_token=rope(part(0, table)) | {"modulate_index": tokens}),
        num_suffix_tokens=counts.qwen_references,
        residuals=RESIDUALS,
    ),
    # One sequence: text and reference images with block-causal attention, then the image. key_valid is
    # (N, P + T), target_token_mask (P + T,) marks the image tokens, segments describe the prefix. Flex
    # attention is not supported: its block mask covers all tokens at fixed positions.
    "QwenImage21Transformer2DModel": Adapter(
        BlockList(
            BLOCKS,
            joint=True,
            by_token={"rotary_emb": joint_table, "key_valid": joint, "target_token_mask": leading},
        ),
        num_prefix_tokens=counts.qwen_21_prefix,
    ),
    "SD3Transformer2DModel": Adapter(
        BlockList(BLOCKS, output=1), residuals=("block_controlnet_hidden_states",)
    ),
    # One sequence: the image, its padding, the text. The refiners before it are not routed.
    # A table (N, T + S, d), a mask (N, T + S).
    "ZImageTransformer2DModel": Adapter(
        BlockList("layers", tokens="x", by_token={"freqs_cis": tokens, "attn_mask": mask}),
        num_suffix_tokens=counts.z_image_suffix,
        residuals=RESIDUALS,
    ),
    # Blocks look up the coordinates of the tokens, three (1, T), in tables.
    "AllegroTransformer3DModel": Adapter(
        BlockList(BLOCKS, by_token=rope(part(1, tuple_of(tokens)))), accepts=("image_rotary_emb",)
    ),
    "AnyFlowTransformer3DModel": Adapter(
        BlockList(
            "blocks",
            by_token={
                # (1, 1, T, d) each
                "rotary_emb": lambda tables, kept: {k: along(2)(x, kept) for k, x in tables.items()},
                "temb": tokens,  # (N, T, 6, D)
            },
        )
    ),
    "ChronoEditTransformer3DModel": Adapter(WAN),
    # Joint blocks. Positions are rotary, or added before the blocks.
    "CogVideoXTransformer3DModel": Adapter(ROTARY, accepts=("image_rotary_emb",)),
    "ConsisIDTransformer3DModel": Adapter(ROTARY, accepts=("image_rotary_emb",)),
    # Each block adds learned positions. temb is (N, T, D) if each frame has its own timestep.
    "CosmosTransformer3DModel": Adapter(
        BlockList(
            BLOCKS,
            by_token={
                **rope(rotary),
                "extra_pos_emb": tokens,
                "controlnet_residual": tokens,
                "embedded_timestep": if_ndim(3, tokens),
                "temb": if_ndim(3, tokens),
            },
            shared=("attention_mask",),
        ),
        accepts=("attention_mask", "block_controlnet_hidden_states"),
    ),
    "EasyAnimateTransformer3DModel": Adapter(ROTARY),
    # The tokens of earlier frames come first. Each token has its own timestep.
    "HeliosTransformer3DModel": Adapter(
        BlockList(
            "blocks",
            joint=True,
            by_token={
                "rotary_emb": joint,  # (N, P + T, d)
                "temb": joint,  # (N, P + T, 6, D)
                "original_context_length": lambda length, kept: kept.ids.shape[1],
            },
        ),
        num_prefix_tokens=counts.history(("history_short", "history_mid", "history_long")),
    ),
    # Token replacement: the first frame is given.
    "HunyuanVideoTransformer3DModel": Adapter(HUNYUAN, num_prefix_tokens=counts.hunyuan_first_frame),
    # No single blocks. The mask covers the text alone.
    "HunyuanVideo15Transformer3DModel": Adapter(
        BlockList(BLOCKS, output=0, by_token={"freqs_cis": rotary}, shared=("attention_mask",)),
    ),
    # FramePack: the tokens of earlier frames come before the generated ones.
    "HunyuanVideoFramepackTransformer3DModel": Adapter(
        HUNYUAN, num_prefix_tokens=counts.history(("clean", "history_2x", "history_4x"), patch_size=(1, 2, 2))
    ),
    # Rotary positions (N, T, 1, d, 2, 2), one matrix per pair of channels.
    "Kandinsky5Transformer3DModel": Adapter(
        BlockList("visual_transformer_blocks", tokens="visual_embed", by_token={"rope": tokens}),
    ),
    # Audio tokens are never routed.
    "Kandinsky6Transformer3DModel": Adapter(
        BlockList(
            "visual_transformer_blocks",
            tokens="vis",
            output=0,
            by_token={"vis_rope": unbatched},  # (T, 1, d, 2, 2)
            shared=("attn_mask",),
        ),
    ),
    # LTX: temb is (N, T, D) if each token has its own timestep, else (N, 1, D).
    "LTXVideoTransformer3DModel": Adapter(
        BlockList(BLOCKS, by_token=rope(tuple_of(tokens)) | {"temb": if_many(tokens)})
    ),
    # Audio tokens are never routed.
    "LTX2VideoTransformer3DModel": Adapter(
        BlockList(
            BLOCKS,
            output=0,
            by_token={
                **dict.fromkeys(("video_rotary_emb", "ca_video_rotary_emb"), LTX_ROTARY),
                **dict.fromkeys(("temb", "temb_ca_scale_shift", "temb_ca_gate"), if_many(tokens)),
                "self_attention_mask": mask,  # (N, T + S, T + S)
            },
        ),
        num_suffix_tokens=counts.ltx_2_references,
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Adapter(
        BlockList(BLOCKS, by_token={"video_rotary_emb": LTX_ROTARY, "temb": if_many(tokens)}),
    ),
    # One sequence: text, audio, references, the video. All samples share tables (P + T, d), indices (P + T,).
    "MiniMaxH3Transformer3DModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token={"rotary_emb": tuple_of(of_all), "adaln_indices": of_all}),
        num_prefix_tokens=counts.minimax_h3_prefix,
        one_subset=True,
    ),
    # Learned rotary positions for each head, (T, heads, d / 2) each.
    "MochiTransformer3DModel": Adapter(BlockList(BLOCKS, output=0, by_token=rope(tuple_of(unbatched)))),
    # Double blocks, then single ones. Attention puts the text last; cross-attention sees it again.
    "MotifVideoTransformer3DModel": Adapter(
        both(0, rope(rotary) | {"attention_mask": mask_before_text}),
        check=refuse("num_decoder_layers={}", lambda model, args: model.num_decoder_layers),
    ),
    "SkyReelsV2Transformer3DModel": Adapter(
        BlockList(
            "blocks",
            by_token={
                "rotary_emb": tuple_of(tokens),
                "temb": if_ndim(4, along(2)),  # (N, 6, T, D) if each frame has its own timestep
                "attention_mask": mask,
            },
        ),
    ),
    "WanTransformer3DModel": Adapter(WAN),
    # Every second block attends within a window of positions, given by a mask.
    "AceStepTransformer1DModel": Adapter(
        BlockList("layers", by_token={"position_embeddings": rotary, "attention_mask": mask}),
        check=refuse("the attention backend {}", counts.ace_step_backend),
    ),
    "LongCatAudioDiTTransformer": Adapter(
        BlockList("blocks", by_token={"rope": rotary, "mask": mask}), accepts=("attention_mask",)
    ),
    # The timestep is a token before the latents.
    "MiniMaxMusic3Transformer1DModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token={"rotary_emb": rotary}),
        num_prefix_tokens=lambda model, args: 1,
    ),
    # Global states come before the latents.
    "StableAudioDiTModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token={"rotary_embedding": rotary, "attention_mask": mask}),
        accepts=("attention_mask",),
        num_prefix_tokens=length("global_hidden_states"),
    ),
    # Memory tokens come before the latents. Each block adds local_seq (inpainting) to the latents.
    "StableAudio3DiTModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token={"rope": joint_table, "local_seq": tokens}),
        num_prefix_tokens=lambda model, args: model.config.num_memory_tokens,
    ),
    # Spectrograms: attention to frames, then to encodings, whose mask (N, 1, T, L) has a row for each query.
    "T5FilmDecoder": Adapter(BlockList("decoders", output=0, by_token={TEXT_MASK: along(-2)})),
}
