"""Transformers of video and of sound, one a row. Layers are counted through all lists of blocks of a row."""

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.counts import ace_step_backend, history, motif_decoder
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
    if_many,
    if_ndim,
    joint,
    joint_mask,
    joint_rotary,
    joint_table,
    length,
    mask,
    mask_before_text,
    mask_between_text,
    of_all,
    part,
    rope,
    rotary,
    tokens,
)

# Wan: (1, T, 1, d) each, and (N, T, 6, D) where each token has its own timestep, else (N, 6, D).
WAN = BlockList("blocks", by_token={"rotary_emb": each(tokens), "temb": if_ndim(4, tokens)}, shared=(TEXT,))
# HunyuanVideo: blocks take what others do with the first frame as `args`, and leave it alone.
HUNYUAN = {"output": 0, "shared": (*TEMB, "args")}
# FramePack and Helios: earlier frames at three resolutions.
FRAMEPACK_HISTORY = ("clean", "history_2x", "history_4x")
HELIOS_HISTORY = ("history_short", "history_mid", "history_long")
GRID = ("num_frames", "height", "width")
LTX_ROTARY = each(lambda x, kept: kept.gather(x, x.ndim - 2))  # (N, T, D), or (N, heads, T, d)


def latents(names: tuple[str, ...]) -> list[str]:
    """Name the arguments with earlier frames, and with their positions."""
    return [f"{kind}latents_{name}" for name in names for kind in ("", "indices_")]


VIDEOS = {
    # The coordinates of tokens, three (1, T), are looked up in tables.
    "AllegroTransformer3DModel": Adapter(
        [BlockList(BLOCKS, by_token=rope(part(1, each(tokens))), shared=(*TEMB, TEXT_MASK))],
        accepts=(*INPUTS, TEXT_MASK, "image_rotary_emb"),
    ),
    "AnyFlowTransformer3DModel": Adapter(
        [
            BlockList(
                "blocks",
                by_token={
                    # (1, 1, T, d) each
                    "rotary_emb": lambda tables, kept: {k: along(2)(x, kept) for k, x in tables.items()},
                    "temb": tokens,  # (N, T, 6, D)
                },
                shared=(TEXT,),
            )
        ],
        accepts=(*INPUTS, "r_timestep"),
    ),
    "ChronoEditTransformer3DModel": Adapter([WAN], (*INPUTS, KWARGS)),
    # Joint blocks, with rotary positions or positions that are added before.
    "CogVideoXTransformer3DModel": Adapter(
        [BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=(*TEMB, KWARGS))],
        accepts=(*INPUTS, "image_rotary_emb", KWARGS),
    ),
    "ConsisIDTransformer3DModel": Adapter(
        [BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=TEMB)],
        accepts=(*INPUTS, "image_rotary_emb", KWARGS, "id_cond", "id_vit_hidden"),
    ),
    # Learned positions are added in each block; (N, T, D) where frames have timesteps of their own.
    "CosmosTransformer3DModel": Adapter(
        [
            BlockList(
                BLOCKS,
                by_token={
                    **rope(rotary),
                    "extra_pos_emb": tokens,
                    "embedded_timestep": if_ndim(3, tokens),
                    "temb": if_ndim(3, tokens),
                },
                shared=(TEXT, "attention_mask"),
            )
        ],
        accepts=(*INPUTS, "attention_mask", "condition_mask", "padding_mask", "fps"),
    ),
    "EasyAnimateTransformer3DModel": Adapter(
        [BlockList(BLOCKS, output=0, by_token=rope(rotary), shared=TEMB)],
        accepts=INPUTS,
    ),
    # The tokens of earlier frames come first, and a timestep for each token.
    "HeliosTransformer3DModel": Adapter(
        [
            BlockList(
                "blocks",
                joint=True,
                by_token={
                    "rotary_emb": joint,  # (N, P + T, d)
                    "temb": joint,  # (N, P + T, 6, D)
                    "original_context_length": lambda length, kept: kept.ids.shape[1],
                },
                shared=(TEXT,),
            )
        ],
        accepts=(*INPUTS, "indices_hidden_states", KWARGS, *latents(HELIOS_HISTORY)),
        num_prefix_tokens=history(HELIOS_HISTORY),
    ),
    # Double blocks, then single ones; in attention the text comes last.
    "HunyuanVideoTransformer3DModel": Adapter(
        [
            BlockList(name, by_token={key: rotary, "attention_mask": mask_before_text}, **HUNYUAN)
            for name, key in ((BLOCKS, "freqs_cis"), (SINGLE, "image_rotary_emb"))
        ],
        accepts=(*INPUTS, TEXT_MASK, "pooled_projections", "guidance", KWARGS),
    ),
    # No single blocks; the mask is of the text alone.
    "HunyuanVideo15Transformer3DModel": Adapter(
        [BlockList(BLOCKS, output=0, by_token={"freqs_cis": rotary}, shared=(*TEMB, "attention_mask"))],
        accepts=(
            *(*INPUTS, TEXT_MASK, "encoder_hidden_states_2", "encoder_attention_mask_2"),
            *("image_embeds", KWARGS),
        ),
    ),
    # FramePack: the tokens of earlier frames come before those that are generated.
    "HunyuanVideoFramepackTransformer3DModel": Adapter(
        [
            BlockList(
                name, joint=True, by_token={key: joint_rotary, "attention_mask": mask_between_text}, **HUNYUAN
            )
            for name, key in ((BLOCKS, "freqs_cis"), (SINGLE, "image_rotary_emb"))
        ],
        accepts=(
            *(*INPUTS, TEXT_MASK, "pooled_projections", "guidance", KWARGS),
            *("image_embeds", "indices_latents", *latents(FRAMEPACK_HISTORY)),
        ),
        num_prefix_tokens=history(FRAMEPACK_HISTORY, patch_size=(1, 2, 2)),
    ),
    # Rotary positions, one matrix for each pair.
    "Kandinsky5Transformer3DModel": Adapter(
        [
            BlockList(
                "visual_transformer_blocks",
                tokens="visual_embed",
                by_token={"rope": tokens},  # (N, T, 1, d, 2, 2)
                shared=("text_embed", "time_embed"),
            )
        ],
        accepts=(*INPUTS, "pooled_projections", "visual_rope_pos", "text_rope_pos"),
    ),
    # Without sound, whose queries attend to the video: the proof does not see them.
    "Kandinsky6Transformer3DModel": Adapter(
        [
            BlockList(
                "visual_transformer_blocks",
                tokens="vis",
                output=0,
                by_token={"vis_rope": of_all},  # (T, 1, d, 2, 2)
                shared=("text_v", "text_a", "time_embed", "attn_mask"),
            )
        ],
        accepts=(*INPUTS, "pooled_projections", TEXT_MASK),
    ),
    # LTX: temb (N, T, D) where each token has its own timestep, else (N, 1, D).
    "LTXVideoTransformer3DModel": Adapter(
        [
            BlockList(
                BLOCKS, by_token=rope(each(tokens)) | {"temb": if_many(tokens)}, shared=(TEXT, TEXT_MASK)
            )
        ],
        accepts=(*INPUTS, TEXT_MASK, *GRID, KWARGS),
    ),
    # The tokens of sound are never routed.
    "LTX2VideoTransformer3DModel": Adapter(
        [
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
            )
        ],
        accepts=(
            *(*INPUTS, TEXT_MASK, *GRID, KWARGS),
            *("audio_hidden_states", "audio_encoder_hidden_states", "audio_encoder_attention_mask"),
            *("audio_timestep", "audio_num_frames", "isolate_modalities"),
        ),
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Adapter(
        [
            BlockList(
                BLOCKS,
                by_token={"video_rotary_emb": LTX_ROTARY, "temb": if_many(tokens)},
                shared=(TEXT, TEXT_MASK),
            )
        ],
        accepts=(*INPUTS, TEXT_MASK, "video_rotary_emb", KWARGS),
    ),
    # Learned rotary positions of each head, (T, heads, d / 2) each.
    "MochiTransformer3DModel": Adapter(
        [BlockList(BLOCKS, output=0, by_token=rope(each(of_all)), shared=(*TEMB, TEXT_MASK))],
        accepts=(*INPUTS, TEXT_MASK),
    ),
    # Double blocks, then single ones; in attention the text comes last, and is seen once more.
    "MotifVideoTransformer3DModel": Adapter(
        [
            BlockList(
                name,
                output=0,
                by_token={**rope(rotary), "attention_mask": mask_before_text},
                shared=(*TEMB, "image_embed_seq_len"),
            )
            for name in (BLOCKS, SINGLE)
        ],
        accepts=(*INPUTS, TEXT_MASK, "image_embeds", KWARGS),
        check=motif_decoder,
    ),
    "SkyReelsV2Transformer3DModel": Adapter(
        [
            BlockList(
                "blocks",
                by_token={
                    "rotary_emb": each(tokens),
                    "temb": if_ndim(4, along(2)),  # (N, 6, T, D) where each frame has its own timestep
                    "attention_mask": mask,
                },
                shared=(TEXT,),
            )
        ],
        accepts=(*INPUTS, KWARGS, "enable_diffusion_forcing"),
    ),
    "WanTransformer3DModel": Adapter(
        [WAN],
        accepts=(*INPUTS, KWARGS, "encoder_hidden_states_image"),
    ),
    # Every second block attends within a window of positions, by a mask.
    "AceStepTransformer1DModel": Adapter(
        [
            BlockList(
                "layers",
                by_token={"position_embeddings": joint_rotary, "attention_mask": mask},
                shared=("temb", TEXT),
            )
        ],
        accepts=(*INPUTS, "context_latents", "timestep_r", KWARGS),
        check=ace_step_backend,
    ),
    "LongCatAudioDiTTransformer": Adapter(
        [
            BlockList(
                "blocks",
                by_token={"rope": joint_rotary, "mask": mask},
                shared=("timestep_embed", "cond", "cond_mask", "cond_rope", "adaln_global_out"),
            )
        ],
        accepts=(*INPUTS, TEXT_MASK, "attention_mask", "latent_cond"),
    ),
    # The timestep is a token before the latents.
    "MiniMaxMusic3Transformer1DModel": Adapter(
        [BlockList(BLOCKS, joint=True, by_token={"rotary_emb": joint_rotary})],
        accepts=INPUTS,
        num_prefix_tokens=lambda model, given: 1,
    ),
    # Global states come before the latents.
    "StableAudioDiTModel": Adapter(
        [
            BlockList(
                BLOCKS,
                joint=True,
                by_token={"rotary_embedding": joint_rotary, "attention_mask": joint_mask},
                shared=(TEXT, TEXT_MASK),
            )
        ],
        accepts=(*INPUTS, "global_hidden_states", "rotary_embedding", "attention_mask", TEXT_MASK),
        num_prefix_tokens=length("global_hidden_states"),
    ),
    # Memory tokens come before the latents; what is painted in, each block adds to the latents.
    "StableAudio3DiTModel": Adapter(
        [
            BlockList(
                BLOCKS,
                joint=True,
                by_token={"rope": joint_table, "local_seq": tokens},
                shared=("context", "global_modulation", "num_memory_tokens"),
            )
        ],
        accepts=(*INPUTS, TEXT_MASK, "global_hidden_states", "local_add_cond"),
        num_prefix_tokens=lambda model, given: model.config.num_memory_tokens,
    ),
    # Spectrograms: attention to frames, then to encodings, with a row of keys (N, 1, T, L) for each query.
    "T5FilmDecoder": Adapter(
        [BlockList("decoders", output=0, by_token={TEXT_MASK: along(-2)}, shared=("conditioning_emb", TEXT))],
        accepts=("encodings_and_masks", "decoder_input_tokens", "decoder_noise_time"),
    ),
}
