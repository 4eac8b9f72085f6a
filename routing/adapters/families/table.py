"""Transformers of diffusers, one a row: of images, of video, of sound.

`ACCEPTED` and `SHARED` in __init__.py name what goes together with routing in every class; `accepts` and
`shared` of a row are what does in this one.
"""

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families import counts
from routing.adapters.families.parts import (
    Gather,
    along,
    each,
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
)

# What most classes call their arguments, and their lists of blocks.
TEXT, TEXT_MASK = "encoder_hidden_states", "encoder_attention_mask"
BLOCKS, SINGLE = "transformer_blocks", "single_transformer_blocks"
# FLUX: attention may have a mask.
FLUX_MASKED = rope(rotary) | {"joint_attention_kwargs": entry("attention_mask", mask)}
FLUX_RESIDUALS = ("controlnet_block_samples", "controlnet_single_block_samples")
CHROMA = rope(rotary) | {"attention_mask": joint}  # (N, P + T)
# CogView: the mask (N, P) is of the text alone.
COGVIEW = BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=("attention_mask",))
# HiDream: (N, T + text, 1, d / 2, 2, 2), (N, T + S).
HIDREAM = rope(lambda x, kept: kept.gather_between(x)) | {"hidden_states_masks": tokens}
# Wan: (1, T, 1, d) each, and (N, T, 6, D) where each token has its own timestep, else (N, 6, D).
WAN = BlockList("blocks", by_token={"rotary_emb": each(tokens), "temb": if_ndim(4, tokens)})
LTX_ROTARY = each(lambda x, kept: kept.gather(x, x.ndim - 2))  # (N, T, D), or (N, heads, T, d)


def both(output: int, by_token: dict[str, Gather]) -> list[BlockList]:
    """Double and single blocks that take the same arguments."""
    return [BlockList(name, output=output, by_token=by_token) for name in (BLOCKS, SINGLE)]


def hunyuan(joint: bool) -> list[BlockList]:
    """Blocks that take as `args` what others do with the first frame, and leave it alone."""
    keys = {BLOCKS: "freqs_cis", SINGLE: "image_rotary_emb"}
    ways = {name: {key: rotary, "attention_mask": mask_before_text} for name, key in keys.items()}
    return [BlockList(x, joint=joint, output=0, by_token=ways[x]) for x in ways]


ROWS = {
    # Joint blocks, then single ones whose tokens have registers and text in front.
    "AuraFlowTransformer2DModel": Adapter(
        [BlockList("joint_transformer_blocks", output=1), BlockList("single_transformer_blocks", joint=True)],
        num_prefix_tokens=lambda model, given: model.register_tokens.shape[1] + given[TEXT].shape[1],
    ),
    "BriaTransformer2DModel": Adapter(
        both(1, rope(rotary)), accepts=("img_ids",), num_prefix_tokens=length(TEXT)
    ),
    # A text of its own for each block.
    "BriaFiboTransformer2DModel": Adapter(
        [
            BlockList(BLOCKS, output=1, by_token=FLUX_MASKED),
            BlockList(SINGLE, joint=True, by_token=FLUX_MASKED),
        ],
        accepts=("img_ids", "guidance"),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(0),
    ),
    # One sequence: tokens that sum up the text, the image, and those of images to edit.
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
        [BlockList(BLOCKS, output=1, by_token=CHROMA), BlockList(SINGLE, joint=True, by_token=CHROMA)],
        accepts=("img_ids", "attention_mask"),
        num_prefix_tokens=length(TEXT),
    ),
    # Positions are added before; they are rotary since CogView 4.
    "CogView3PlusTransformer2DModel": Adapter(BlockList(BLOCKS, output=0)),
    "CogView4Transformer2DModel": Adapter(COGVIEW, accepts=("attention_mask",)),
    "GlmImageTransformer2DModel": Adapter(COGVIEW, accepts=("attention_mask",)),
    "DiTTransformer2DModel": Adapter(BlockList(BLOCKS), accepts=("class_labels",)),
    # Within U-Nets: attention to the image, then to the text, no positions.
    "DreamLiteTransformer2DModel": Adapter(BlockList(BLOCKS)),
    "Transformer2DModel": Adapter(
        BlockList(BLOCKS),
        check=refuse("an input of patches or codes", lambda model, given: not model.is_input_continuous),
    ),
    # One sequence of the image and the text behind it, samples second: (N, T + S, 1, d), six (T + S, N, D)
    # that are the same for all tokens of a sample, (N, 1, 1, T + S).
    "ErnieImageTransformer2DModel": Adapter(
        BlockList(
            "layers",
            tokens="x",
            sequence_first=True,
            by_token={"rotary_pos_emb": tokens, "temb": each(leading), "attention_mask": mask},
        ),
        num_suffix_tokens=length("text_bth"),
    ),
    "FluxTransformer2DModel": Adapter(
        both(1, FLUX_MASKED),
        accepts=("pooled_projections", "img_ids", "guidance", *FLUX_RESIDUALS, "controlnet_blocks_repeat"),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(0),
        residuals=FLUX_RESIDUALS,
    ),
    # Modulations that all blocks share.
    "Flux2Transformer2DModel": Adapter(
        [
            BlockList(BLOCKS, output=1, by_token=rope(rotary)),
            BlockList(SINGLE, joint=True, by_token=rope(rotary)),
        ],
        accepts=("img_ids", "guidance"),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(0),
    ),
    # Blocks of the image alone, then of text, image and reference images; temb_mod is (N, T + S, 3 D).
    "Flux3Transformer2DModel": Adapter(
        [
            BlockList("mode_blocks.image", by_token={"temb_mod": tokens, **rope(each(table))}),
            BlockList(
                SINGLE,
                output=1,
                by_token={"temb_mod": tokens, **rope(rotary)},
                num_suffix_tokens=length("image_cond_hidden_states"),
            ),
        ],
        accepts=("img_ids",),
        num_prefix_tokens=length(TEXT),
    ),
    # Behind the image come two texts, and a third for each block. The model cuts off the text of a block, and
    # at last all text, at places that it counted with all tokens.
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
    # In attention the text comes after the image.
    "HunyuanImageTransformer2DModel": Adapter(both(0, rope(rotary) | {"attention_mask": mask_before_text})),
    # One sequence, padding and text in front of the image; each token has its own role and place, and may
    # have its own timestep: (N, P + T, d) each, (N, 1, P + T, P + T), (N, P + T or 1, D).
    "Ideogram4Transformer2DModel": Adapter(
        BlockList(
            "layers",
            joint=True,
            by_token=rope(each(joint)) | {"attention_mask": mask, "adaln_input": if_many(joint)},
        ),
        num_prefix_tokens=counts.ideogram_prefix,
    ),
    "JoyImageEditTransformer3DModel": Adapter(
        BlockList("double_blocks", output=0, by_token=rope(part(0, rotary))),
        check=refuse("a row of reference items", lambda model, given: given["hidden_states"].ndim != 5),
    ),
    "JoyImageEditPlusTransformer3DModel": Adapter(
        BlockList(
            "double_blocks", output=0, by_token=rope(each(tokens)) | {"attention_mask": mask_before_text}
        ),
        num_suffix_tokens=counts.joyimage_references,
    ),
    # A mask (N, 1, 1, P + T).
    "Krea2Transformer2DModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token=rope(rotary) | {"attention_mask": mask}),
        num_prefix_tokens=length(TEXT),
    ),
    # Text is in plane 0, references are in plane 2.
    "LongCatImageTransformer2DModel": Adapter(
        both(1, rope(rotary)),
        accepts=("img_ids",),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(1),
    ),
    # base_sequence_length, a key of its cross_attention_kwargs, would change how sharply a window attends.
    # A mask (N, T), a table (1, T, d).
    "LuminaNextDiT2DModel": Adapter(
        BlockList("layers", by_token={"attention_mask": mask, **rope(tokens)}),
        accepts=("image_rotary_emb",),
    ),
    "Lumina2Transformer2DModel": Adapter(
        BlockList("layers", joint=True, by_token=rope(joint)),  # (N, P + T, d),
        num_prefix_tokens=counts.lumina_2_prefix,
    ),
    # The image attends to itself and the text at once, with a mask (N, T + P); experts choose among the
    # tokens of a window.
    "NucleusMoEImageTransformer2DModel": Adapter(
        BlockList(
            BLOCKS,
            by_token=rope(part(0, table)) | {"attention_kwargs": entry("attention_mask", mask_before_text)},
        ),
    ),
    # Text with reference images, the timestep, and the image in one sequence.
    "OmniGenTransformer2DModel": Adapter(
        BlockList("layers", joint=True, by_token={"attention_mask": mask, **rope(rotary)}),
        accepts=("attention_mask",),
        num_prefix_tokens=lambda model, given: given["input_ids"].shape[1] + 1,
    ),
    "OvisImageTransformer2DModel": Adapter(
        both(1, rope(rotary)), accepts=("img_ids",), num_prefix_tokens=length(TEXT)
    ),
    "PixArtTransformer2DModel": Adapter(
        BlockList(BLOCKS, by_token={"attention_mask": mask}),
        accepts=("added_cond_kwargs", "attention_mask"),
    ),
    # Image tokens attend to image and text; the text, of which the mask is, passes through no block.
    "PRXTransformer2DModel": Adapter(
        BlockList("blocks", by_token=rope(along(2)), shared=("attention_mask",)),  # (1, 1, T, ...)
        accepts=("attention_mask",),
    ),
    # Two tables of complex numbers: of the image, of the text; modulate_index (N, T + S).
    "QwenImageTransformer2DModel": Adapter(
        BlockList(BLOCKS, output=1, by_token=rope(part(0, table)) | {"modulate_index": tokens}),
        num_suffix_tokens=counts.qwen_references,
    ),
    # One sequence: text and reference images, which do not see what comes after them, then the image.
    # key_valid (N, P + T); target_token_mask (P + T,): which tokens are those of the image; segments are of
    # the prefix. The processor for flex attention takes a block mask over all tokens at their places.
    "QwenImage21Transformer2DModel": Adapter(
        BlockList(
            BLOCKS,
            joint=True,
            by_token={"rotary_emb": joint_table, "key_valid": joint, "target_token_mask": leading},
        ),
        num_prefix_tokens=counts.qwen_21_prefix,
    ),
    "SD3Transformer2DModel": Adapter(
        BlockList(BLOCKS, output=1),
        accepts=("pooled_projections", "block_controlnet_hidden_states"),
        residuals=("block_controlnet_hidden_states",),
    ),
    # One sequence of the image, its padding, and the text; the refiners before it are not routed.
    # A table (N, T + S, d), a mask (N, T + S).
    "ZImageTransformer2DModel": Adapter(
        BlockList("layers", tokens="x", by_token={"freqs_cis": tokens, "attn_mask": mask}),
        num_suffix_tokens=counts.z_image_suffix,
    ),
    # The coordinates of tokens, three (1, T), are looked up in tables.
    "AllegroTransformer3DModel": Adapter(
        BlockList(BLOCKS, by_token=rope(part(1, each(tokens)))), accepts=("image_rotary_emb",)
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
    # Joint blocks, with rotary positions or positions that are added before.
    "CogVideoXTransformer3DModel": Adapter(
        BlockList(BLOCKS, output=0, by_token=rope(rotary)), accepts=("image_rotary_emb",)
    ),
    "ConsisIDTransformer3DModel": Adapter(
        BlockList(BLOCKS, output=0, by_token=rope(rotary)), accepts=("image_rotary_emb",)
    ),
    # Learned positions are added in each block; (N, T, D) where frames have timesteps of their own.
    "CosmosTransformer3DModel": Adapter(
        BlockList(
            BLOCKS,
            by_token={
                **rope(rotary),
                "extra_pos_emb": tokens,
                "embedded_timestep": if_ndim(3, tokens),
                "temb": if_ndim(3, tokens),
            },
            shared=("attention_mask",),
        ),
        accepts=("attention_mask", "fps"),
    ),
    "EasyAnimateTransformer3DModel": Adapter(BlockList(BLOCKS, output=0, by_token=rope(rotary))),
    # The tokens of earlier frames come first, and a timestep for each token.
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
    # Double blocks, then single ones; in attention the text comes last.
    "HunyuanVideoTransformer3DModel": Adapter(
        hunyuan(joint=False), accepts=("pooled_projections", "guidance")
    ),
    # No single blocks; the mask is of the text alone.
    "HunyuanVideo15Transformer3DModel": Adapter(
        BlockList(BLOCKS, output=0, by_token={"freqs_cis": rotary}, shared=("attention_mask",)),
        accepts=("encoder_hidden_states_2", "encoder_attention_mask_2"),
    ),
    # FramePack: the tokens of earlier frames come before those that are generated.
    "HunyuanVideoFramepackTransformer3DModel": Adapter(
        hunyuan(joint=True),
        accepts=("pooled_projections", "guidance"),
        num_prefix_tokens=counts.history(("clean", "history_2x", "history_4x"), patch_size=(1, 2, 2)),
    ),
    # Rotary positions (N, T, 1, d, 2, 2), one matrix for each pair.
    "Kandinsky5Transformer3DModel": Adapter(
        BlockList("visual_transformer_blocks", tokens="visual_embed", by_token={"rope": tokens}),
        accepts=("pooled_projections", "visual_rope_pos"),
    ),
    # Without sound, whose queries attend to the video: the proof does not see them.
    "Kandinsky6Transformer3DModel": Adapter(
        BlockList(
            "visual_transformer_blocks",
            tokens="vis",
            output=0,
            by_token={"vis_rope": of_all},  # (T, 1, d, 2, 2)
            shared=("attn_mask",),
        ),
        accepts=("pooled_projections",),
    ),
    # LTX: temb (N, T, D) where each token has its own timestep, else (N, 1, D).
    "LTXVideoTransformer3DModel": Adapter(
        BlockList(BLOCKS, by_token=rope(each(tokens)) | {"temb": if_many(tokens)})
    ),
    # The tokens of sound are never routed.
    "LTX2VideoTransformer3DModel": Adapter(
        BlockList(
            BLOCKS,
            output=0,
            by_token={
                **dict.fromkeys(("video_rotary_emb", "ca_video_rotary_emb"), LTX_ROTARY),
                **dict.fromkeys(("temb", "temb_ca_scale_shift", "temb_ca_gate"), if_many(tokens)),
            },
        ),
        accepts=("audio_hidden_states",),
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Adapter(
        BlockList(BLOCKS, by_token={"video_rotary_emb": LTX_ROTARY, "temb": if_many(tokens)}),
    ),
    # Learned rotary positions of each head, (T, heads, d / 2) each.
    "MochiTransformer3DModel": Adapter(BlockList(BLOCKS, output=0, by_token=rope(each(of_all)))),
    # Double blocks, then single ones; in attention the text comes last, and is seen once more.
    "MotifVideoTransformer3DModel": Adapter(
        both(0, rope(rotary) | {"attention_mask": mask_before_text}),
        check=refuse("num_decoder_layers={}", lambda model, given: model.num_decoder_layers),
    ),
    "SkyReelsV2Transformer3DModel": Adapter(
        BlockList(
            "blocks",
            by_token={
                "rotary_emb": each(tokens),
                "temb": if_ndim(4, along(2)),  # (N, 6, T, D) where each frame has its own timestep
                "attention_mask": mask,
            },
        ),
    ),
    "WanTransformer3DModel": Adapter(WAN, accepts=("encoder_hidden_states_image",)),
    # Every second block attends within a window of positions, by a mask.
    "AceStepTransformer1DModel": Adapter(
        BlockList("layers", by_token={"position_embeddings": rotary, "attention_mask": mask}),
        accepts=("timestep_r",),
        check=refuse("the attention backend {}", counts.ace_step_backend),
    ),
    "LongCatAudioDiTTransformer": Adapter(
        BlockList("blocks", by_token={"rope": rotary, "mask": mask}), accepts=("attention_mask",)
    ),
    # The timestep is a token before the latents.
    "MiniMaxMusic3Transformer1DModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token={"rotary_emb": rotary}),
        num_prefix_tokens=lambda model, given: 1,
    ),
    # Global states come before the latents.
    "StableAudioDiTModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token={"rotary_embedding": rotary, "attention_mask": mask}),
        accepts=("attention_mask",),
        num_prefix_tokens=length("global_hidden_states"),
    ),
    # Memory tokens come before the latents; what is painted in, each block adds to the latents.
    "StableAudio3DiTModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token={"rope": joint_table, "local_seq": tokens}),
        num_prefix_tokens=lambda model, given: model.config.num_memory_tokens,
    ),
    # Spectrograms: attention to frames, then to encodings, with a row of keys (N, 1, T, L) for each query.
    "T5FilmDecoder": Adapter(BlockList("decoders", output=0, by_token={TEXT_MASK: along(-2)})),
}
