"""Transformers of diffusers, one a row: of images, of video, of sound."""

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
TEXT, TEXT_MASK, KWARGS = "encoder_hidden_states", "encoder_attention_mask", "attention_kwargs"
INPUTS = ("hidden_states", TEXT, "timestep", "return_dict")
TEMB = (TEXT, "temb")
BLOCKS, SINGLE = "transformer_blocks", "single_transformer_blocks"
TEXT_TOKENS = "encoder_hidden_states_mask"  # Qwen-Image and others name the mask of the text after its states
JOINT_KWARGS, CROSS_KWARGS = "joint_attention_kwargs", "cross_attention_kwargs"
IDS = ("img_ids", "txt_ids")
# FLUX: attention may have a mask.
FLUX_MASKED = rope(rotary) | {JOINT_KWARGS: entry("attention_mask", mask)}
FLUX_RESIDUALS = ("controlnet_block_samples", "controlnet_single_block_samples")
CHROMA = rope(rotary) | {"attention_mask": joint}  # (N, P + T)
# CogView: the mask (N, P) is of the text alone.
RESOLUTION = ("target_size", "crop_coords")
COGVIEW = BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=(*TEMB, "attention_mask", KWARGS))
# HiDream: (N, T + text, 1, d / 2, 2, 2), (N, T + S).
HIDREAM = rope(lambda x, kept: kept.gather_between(x)) | {"hidden_states_masks": tokens}
U_NET = BlockList(BLOCKS, shared=(TEXT, TEXT_MASK))
U_NET_INPUTS = ("hidden_states", TEXT, TEXT_MASK, "return_dict")
# Wan: (1, T, 1, d) each, and (N, T, 6, D) where each token has its own timestep, else (N, 6, D).
WAN = BlockList("blocks", by_token={"rotary_emb": each(tokens), "temb": if_ndim(4, tokens)}, shared=(TEXT,))
# FramePack and Helios: earlier frames at three resolutions.
FRAMEPACK_HISTORY = ("clean", "history_2x", "history_4x")
HELIOS_HISTORY = ("history_short", "history_mid", "history_long")
GRID = ("num_frames", "height", "width")
LTX_ROTARY = each(lambda x, kept: kept.gather(x, x.ndim - 2))  # (N, T, D), or (N, heads, T, d)


def both(output: int, by_token: dict[str, Gather], shared: tuple[str, ...]) -> list[BlockList]:
    """Double and single blocks that take the same arguments."""
    return [BlockList(name, output=output, by_token=by_token, shared=shared) for name in (BLOCKS, SINGLE)]


def hunyuan(joint: bool) -> list[BlockList]:
    """Blocks that take as `args` what others do with the first frame, and leave it alone."""
    keys = {BLOCKS: "freqs_cis", SINGLE: "image_rotary_emb"}
    ways = {name: {key: rotary, "attention_mask": mask_before_text} for name, key in keys.items()}
    return [BlockList(x, joint=joint, output=0, by_token=ways[x], shared=(*TEMB, "args")) for x in ways]


def latents(names: tuple[str, ...]) -> list[str]:
    """Name the arguments with earlier frames, and with their positions."""
    return [f"{kind}latents_{name}" for name in names for kind in ("", "indices_")]


ROWS = {
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
        both(1, rope(rotary), (*TEMB, KWARGS)),
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
        BlockList(
            "layers",
            tokens="x",
            joint=True,
            # (N, P + T + S), (1, P + T + S, d), (N, P + T + S)
            by_token={"attn_mask": mask, "freqs_cis": joint, "noise_mask": joint},
            shared=("adaln_input", "adaln_noisy", "adaln_clean", TEXT, TEXT_MASK),
        ),
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
        BlockList(BLOCKS, output=0, shared=(TEXT, "emb")), accepts=(*INPUTS, "original_size", *RESOLUTION)
    ),
    "CogView4Transformer2DModel": Adapter(
        COGVIEW, accepts=(*INPUTS, "original_size", *RESOLUTION, "attention_mask", KWARGS)
    ),
    "GlmImageTransformer2DModel": Adapter(
        COGVIEW, accepts=(*INPUTS, "prior_token_id", "prior_token_drop", *RESOLUTION, "attention_mask")
    ),
    "DiTTransformer2DModel": Adapter(
        BlockList(BLOCKS, shared=("timestep", "class_labels")),
        accepts=("hidden_states", "timestep", "class_labels", "return_dict"),
    ),
    # Within U-Nets: attention to the image, then to the text, no positions.
    "DreamLiteTransformer2DModel": Adapter(U_NET, U_NET_INPUTS),
    "Transformer2DModel": Adapter(
        U_NET,
        U_NET_INPUTS,
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
        accepts=("hidden_states", "timestep", "text_bth", "text_lens", "return_dict"),
        num_suffix_tokens=length("text_bth"),
    ),
    "FluxTransformer2DModel": Adapter(
        both(1, FLUX_MASKED, TEMB),
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
            BlockList(
                BLOCKS,
                output=1,
                by_token=rope(rotary),
                shared=(TEXT, "temb_mod_img", "temb_mod_txt", JOINT_KWARGS),
            ),
            BlockList(SINGLE, joint=True, by_token=rope(rotary), shared=("temb_mod",)),
        ],
        accepts=(*INPUTS, *IDS, "guidance"),
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
                shared=(TEXT, "temb_mod_context"),
                num_suffix_tokens=length("image_cond_hidden_states"),
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
    # In attention the text comes after the image.
    "HunyuanImageTransformer2DModel": Adapter(
        both(0, rope(rotary) | {"attention_mask": mask_before_text}, TEMB),
        accepts=(*INPUTS, TEXT_MASK, KWARGS),
    ),
    # One sequence, padding and text in front of the image; each token has its own role and place, and may
    # have its own timestep: (N, P + T, d) each, (N, 1, P + T, P + T), (N, P + T or 1, D).
    "Ideogram4Transformer2DModel": Adapter(
        BlockList(
            "layers",
            joint=True,
            by_token=rope(each(joint)) | {"attention_mask": mask, "adaln_input": if_many(joint)},
        ),
        accepts=(*INPUTS, "position_ids", "segment_ids", "indicator", KWARGS),
        num_prefix_tokens=counts.ideogram_prefix,
    ),
    "JoyImageEditTransformer3DModel": Adapter(
        BlockList("double_blocks", output=0, by_token=rope(part(0, rotary)), shared=TEMB),
        accepts=INPUTS,
        check=refuse("a row of reference items", lambda model, given: given["hidden_states"].ndim != 5),
    ),
    "JoyImageEditPlusTransformer3DModel": Adapter(
        BlockList(
            "double_blocks",
            output=0,
            by_token=rope(each(tokens)) | {"attention_mask": mask_before_text},
            shared=TEMB,
        ),
        accepts=(*INPUTS, TEXT_TOKENS, "shape_list"),
        num_suffix_tokens=counts.joyimage_references,
    ),
    "Krea2Transformer2DModel": Adapter(
        BlockList(
            BLOCKS,
            joint=True,
            by_token=rope(rotary) | {"attention_mask": mask},  # (N, 1, 1, P + T)
            shared=("temb",),
        ),
        accepts=(*INPUTS, "position_ids", TEXT_MASK, KWARGS),
        num_prefix_tokens=length(TEXT),
    ),
    # Text is in plane 0, references are in plane 2.
    "LongCatImageTransformer2DModel": Adapter(
        both(1, rope(rotary), TEMB),
        accepts=(*INPUTS, *IDS),
        num_prefix_tokens=length(TEXT),
        num_suffix_tokens=num_reference_tokens(1),
    ),
    # base_sequence_length, a key of its cross_attention_kwargs, would change how sharply a window attends.
    "LuminaNextDiT2DModel": Adapter(
        BlockList(
            "layers",
            by_token={"attention_mask": mask, **rope(tokens)},  # (N, T), (1, T, d)
            shared=(*TEMB, "encoder_mask", CROSS_KWARGS),
        ),
        accepts=(*INPUTS, "encoder_mask", "image_rotary_emb", CROSS_KWARGS),
    ),
    "Lumina2Transformer2DModel": Adapter(
        BlockList("layers", joint=True, by_token=rope(joint), shared=("temb",)),  # (N, P + T, d)
        accepts=(*INPUTS, TEXT_MASK, KWARGS),
        num_prefix_tokens=counts.lumina_2_prefix,
    ),
    # The image attends to itself and the text at once, with a mask (N, T + P); experts choose among the
    # tokens of a window.
    "NucleusMoEImageTransformer2DModel": Adapter(
        BlockList(
            BLOCKS,
            by_token=rope(part(0, table)) | {KWARGS: entry("attention_mask", mask_before_text)},
            shared=TEMB,
        ),
        accepts=(*INPUTS, TEXT_TOKENS, "img_shapes", KWARGS),
    ),
    # Text with reference images, the timestep, and the image in one sequence.
    "OmniGenTransformer2DModel": Adapter(
        BlockList("layers", joint=True, by_token={"attention_mask": mask, **rope(rotary)}),
        accepts=(
            *("hidden_states", "timestep", "input_ids", "input_img_latents", "input_image_sizes"),
            *("attention_mask", "position_ids", "return_dict"),
        ),
        num_prefix_tokens=lambda model, given: given["input_ids"].shape[1] + 1,
    ),
    "OvisImageTransformer2DModel": Adapter(
        both(1, rope(rotary), (*TEMB, JOINT_KWARGS)),
        accepts=(*INPUTS, *IDS, JOINT_KWARGS),
        num_prefix_tokens=length(TEXT),
    ),
    "PixArtTransformer2DModel": Adapter(
        BlockList(
            BLOCKS, by_token={"attention_mask": mask}, shared=(TEXT, TEXT_MASK, "timestep", CROSS_KWARGS)
        ),
        accepts=(*INPUTS, "added_cond_kwargs", CROSS_KWARGS, "attention_mask", TEXT_MASK),
    ),
    # Image tokens attend to image and text; the text, of which the mask is, passes through no block.
    "PRXTransformer2DModel": Adapter(
        BlockList("blocks", by_token=rope(along(2)), shared=(*TEMB, "attention_mask")),  # (1, 1, T, ...)
        accepts=(*INPUTS, "attention_mask"),
    ),
    # Two tables of complex numbers: of the image, of the text.
    "QwenImageTransformer2DModel": Adapter(
        BlockList(
            BLOCKS,
            output=1,
            by_token=rope(part(0, table)) | {"modulate_index": tokens},  # (N, T + S)
            shared=(*TEMB, TEXT_TOKENS, JOINT_KWARGS),
        ),
        accepts=(*INPUTS, TEXT_TOKENS, "img_shapes", "additional_t_cond", KWARGS),
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
            shared=("modulation", "segments"),
        ),
        accepts=(*INPUTS, TEXT_TOKENS, "img_shapes", "img_mask", KWARGS),
        num_prefix_tokens=counts.qwen_21_prefix,
    ),
    "SD3Transformer2DModel": Adapter(
        BlockList(BLOCKS, output=1, shared=(*TEMB, JOINT_KWARGS)),
        accepts=(*INPUTS, "pooled_projections", JOINT_KWARGS, "block_controlnet_hidden_states"),
        residuals=("block_controlnet_hidden_states",),
    ),
    # One sequence of the image, its padding, and the text; the refiners before it are not routed.
    "ZImageTransformer2DModel": Adapter(
        BlockList(
            "layers",
            tokens="x",
            by_token={"freqs_cis": tokens, "attn_mask": mask},  # (N, T + S, d), (N, T + S)
            shared=("adaln_input",),
        ),
        accepts=("x", "t", "cap_feats", "return_dict", JOINT_KWARGS),
        num_suffix_tokens=counts.z_image_suffix,
    ),
    # The coordinates of tokens, three (1, T), are looked up in tables.
    "AllegroTransformer3DModel": Adapter(
        BlockList(BLOCKS, by_token=rope(part(1, each(tokens))), shared=(*TEMB, TEXT_MASK)),
        accepts=(*INPUTS, TEXT_MASK, "image_rotary_emb"),
    ),
    "AnyFlowTransformer3DModel": Adapter(
        BlockList(
            "blocks",
            by_token={
                # (1, 1, T, d) each
                "rotary_emb": lambda tables, kept: {k: along(2)(x, kept) for k, x in tables.items()},
                "temb": tokens,  # (N, T, 6, D)
            },
            shared=(TEXT,),
        ),
        accepts=(*INPUTS, "r_timestep"),
    ),
    "ChronoEditTransformer3DModel": Adapter(WAN, (*INPUTS, KWARGS)),
    # Joint blocks, with rotary positions or positions that are added before.
    "CogVideoXTransformer3DModel": Adapter(
        BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=(*TEMB, KWARGS)),
        accepts=(*INPUTS, "image_rotary_emb", KWARGS),
    ),
    "ConsisIDTransformer3DModel": Adapter(
        BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=TEMB),
        accepts=(*INPUTS, "image_rotary_emb", KWARGS, "id_cond", "id_vit_hidden"),
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
            shared=(TEXT, "attention_mask"),
        ),
        accepts=(*INPUTS, "attention_mask", "condition_mask", "padding_mask", "fps"),
    ),
    "EasyAnimateTransformer3DModel": Adapter(
        BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=TEMB), accepts=INPUTS
    ),
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
            shared=(TEXT,),
        ),
        accepts=(*INPUTS, "indices_hidden_states", KWARGS, *latents(HELIOS_HISTORY)),
        num_prefix_tokens=counts.history(HELIOS_HISTORY),
    ),
    # Double blocks, then single ones; in attention the text comes last.
    "HunyuanVideoTransformer3DModel": Adapter(
        hunyuan(joint=False),
        accepts=(*INPUTS, TEXT_MASK, "pooled_projections", "guidance", KWARGS),
    ),
    # No single blocks; the mask is of the text alone.
    "HunyuanVideo15Transformer3DModel": Adapter(
        BlockList(BLOCKS, output=0, by_token={"freqs_cis": rotary}, shared=(*TEMB, "attention_mask")),
        accepts=(
            *(*INPUTS, TEXT_MASK, "encoder_hidden_states_2", "encoder_attention_mask_2"),
            *("image_embeds", KWARGS),
        ),
    ),
    # FramePack: the tokens of earlier frames come before those that are generated.
    "HunyuanVideoFramepackTransformer3DModel": Adapter(
        hunyuan(joint=True),
        accepts=(
            *(*INPUTS, TEXT_MASK, "pooled_projections", "guidance", KWARGS),
            *("image_embeds", "indices_latents", *latents(FRAMEPACK_HISTORY)),
        ),
        num_prefix_tokens=counts.history(FRAMEPACK_HISTORY, patch_size=(1, 2, 2)),
    ),
    # Rotary positions, one matrix for each pair.
    "Kandinsky5Transformer3DModel": Adapter(
        BlockList(
            "visual_transformer_blocks",
            tokens="visual_embed",
            by_token={"rope": tokens},  # (N, T, 1, d, 2, 2)
            shared=("text_embed", "time_embed"),
        ),
        accepts=(*INPUTS, "pooled_projections", "visual_rope_pos", "text_rope_pos"),
    ),
    # Without sound, whose queries attend to the video: the proof does not see them.
    "Kandinsky6Transformer3DModel": Adapter(
        BlockList(
            "visual_transformer_blocks",
            tokens="vis",
            output=0,
            by_token={"vis_rope": of_all},  # (T, 1, d, 2, 2)
            shared=("text_v", "text_a", "time_embed", "attn_mask"),
        ),
        accepts=(*INPUTS, "pooled_projections", TEXT_MASK),
    ),
    # LTX: temb (N, T, D) where each token has its own timestep, else (N, 1, D).
    "LTXVideoTransformer3DModel": Adapter(
        BlockList(BLOCKS, by_token=rope(each(tokens)) | {"temb": if_many(tokens)}, shared=(TEXT, TEXT_MASK)),
        accepts=(*INPUTS, TEXT_MASK, *GRID, KWARGS),
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
            shared=(
                *("audio_hidden_states", TEXT, "audio_encoder_hidden_states"),
                *(TEXT_MASK, "audio_encoder_attention_mask"),
                *("temb_audio", "temb_ca_audio_scale_shift", "temb_ca_audio_gate"),
                *("audio_rotary_emb", "ca_audio_rotary_emb"),
                *("use_a2v_cross_attention", "use_v2a_cross_attention", "all_perturbed"),
            ),
        ),
        accepts=(
            *(*INPUTS, TEXT_MASK, *GRID, KWARGS),
            *("audio_hidden_states", "audio_encoder_hidden_states", "audio_encoder_attention_mask"),
            *("audio_timestep", "audio_num_frames", "isolate_modalities"),
        ),
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Adapter(
        BlockList(
            BLOCKS,
            by_token={"video_rotary_emb": LTX_ROTARY, "temb": if_many(tokens)},
            shared=(TEXT, TEXT_MASK),
        ),
        accepts=(*INPUTS, TEXT_MASK, "video_rotary_emb", KWARGS),
    ),
    # Learned rotary positions of each head, (T, heads, d / 2) each.
    "MochiTransformer3DModel": Adapter(
        BlockList(BLOCKS, output=0, by_token=rope(each(of_all)), shared=(*TEMB, TEXT_MASK)),
        accepts=(*INPUTS, TEXT_MASK),
    ),
    # Double blocks, then single ones; in attention the text comes last, and is seen once more.
    "MotifVideoTransformer3DModel": Adapter(
        both(0, rope(rotary) | {"attention_mask": mask_before_text}, (*TEMB, "image_embed_seq_len")),
        accepts=(*INPUTS, TEXT_MASK, "image_embeds", KWARGS),
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
            shared=(TEXT,),
        ),
        accepts=(*INPUTS, KWARGS, "enable_diffusion_forcing"),
    ),
    "WanTransformer3DModel": Adapter(WAN, (*INPUTS, KWARGS, "encoder_hidden_states_image")),
    # Every second block attends within a window of positions, by a mask.
    "AceStepTransformer1DModel": Adapter(
        BlockList(
            "layers", by_token={"position_embeddings": rotary, "attention_mask": mask}, shared=("temb", TEXT)
        ),
        accepts=(*INPUTS, "context_latents", "timestep_r", KWARGS),
        check=refuse("the attention backend {}", counts.ace_step_backend),
    ),
    "LongCatAudioDiTTransformer": Adapter(
        BlockList(
            "blocks",
            by_token={"rope": rotary, "mask": mask},
            shared=("timestep_embed", "cond", "cond_mask", "cond_rope", "adaln_global_out"),
        ),
        accepts=(*INPUTS, TEXT_MASK, "attention_mask", "latent_cond"),
    ),
    # The timestep is a token before the latents.
    "MiniMaxMusic3Transformer1DModel": Adapter(
        BlockList(BLOCKS, joint=True, by_token={"rotary_emb": rotary}),
        accepts=INPUTS,
        num_prefix_tokens=lambda model, given: 1,
    ),
    # Global states come before the latents.
    "StableAudioDiTModel": Adapter(
        BlockList(
            BLOCKS,
            joint=True,
            by_token={"rotary_embedding": rotary, "attention_mask": mask},
            shared=(TEXT, TEXT_MASK),
        ),
        accepts=(*INPUTS, "global_hidden_states", "rotary_embedding", "attention_mask", TEXT_MASK),
        num_prefix_tokens=length("global_hidden_states"),
    ),
    # Memory tokens come before the latents; what is painted in, each block adds to the latents.
    "StableAudio3DiTModel": Adapter(
        BlockList(
            BLOCKS,
            joint=True,
            by_token={"rope": joint_table, "local_seq": tokens},
            shared=("context", "global_modulation", "num_memory_tokens"),
        ),
        accepts=(*INPUTS, TEXT_MASK, "global_hidden_states", "local_add_cond"),
        num_prefix_tokens=lambda model, given: model.config.num_memory_tokens,
    ),
    # Spectrograms: attention to frames, then to encodings, with a row of keys (N, 1, T, L) for each query.
    "T5FilmDecoder": Adapter(
        BlockList("decoders", output=0, by_token={TEXT_MASK: along(-2)}, shared=("conditioning_emb", TEXT)),
        accepts=("encodings_and_masks", "decoder_input_tokens", "decoder_noise_time"),
    ),
}
