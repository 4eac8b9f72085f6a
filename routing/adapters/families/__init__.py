"""Adapters of the transformers in diffusers, by class name, and the classes that cannot be routed.

They follow the signatures of diffusers. Only `__main__.py` and, for one class, `counts.py` import it.
tests/routing proves each row of the table on a small model.
"""

from dataclasses import replace
from functools import partial

import torch.nn as nn

from routing.adapters.adapter import Adapter, plain_forward
from routing.adapters.families.parts import check
from routing.adapters.families.table import ROWS

# Arguments of a forward that are supported with routing in every class that takes them. Of the dictionaries
# `*attention_kwargs`, `check` accepts few keys.
ACCEPTED = """
additional_t_cond attention_kwargs audio_coords audio_encoder_attention_mask audio_encoder_hidden_states
audio_hidden_states audio_indices audio_num_frames audio_sigma audio_timestep cap_feats condition_mask
context_latents control_latents crop_coords cross_attention_kwargs decoder_input_tokens decoder_noise_time
enable_diffusion_forcing encoder_attention_mask encoder_attention_mask_2 encoder_hidden_states
encoder_hidden_states_2 encoder_hidden_states_image encoder_hidden_states_llama3 encoder_hidden_states_mask
encoder_mask encodings_and_masks fps global_hidden_states guidance height hidden_states hidden_states_masks
id_cond id_vit_hidden image_cond_hidden_states image_cond_ids image_embeds img_ids img_mask img_shapes
img_sizes indicator indices_hidden_states indices_latents indices_latents_clean indices_latents_history_2x
indices_latents_history_4x indices_latents_history_long indices_latents_history_mid
indices_latents_history_short inpaint_latents input_ids input_image_sizes input_img_latents isolate_modalities
joint_attention_kwargs latent_cond latents_clean latents_history_2x latents_history_4x latents_history_long
latents_history_mid latents_history_short local_add_cond num_frames ofs original_size padding_mask
pooled_embeds pooled_projections position_ids prior_token_drop prior_token_id r_timestep return_dict
rope_interpolation_scale rotary_embedding scale_factor segment_ids shape_list sigma t target_size
target_timestep text_bth text_encoder_layers text_indices text_lens text_rope_pos timestep timestep_indices
timestep_r timesteps token_tags txt_ids use_cross_timestep video_coords video_indices video_keyframes_mask
video_rotary_emb video_self_attention_mask visual_rope_pos visual_token_type_ids width x
"""
# Arguments of blocks that do not depend on the token, in every class that does not name them in `by_token`.
SHARED = """
adaln_clean adaln_global_out adaln_input adaln_noisy all_perturbed args attention_kwargs aud aud_rope
audio_encoder_attention_mask audio_encoder_hidden_states audio_hidden_states audio_rotary_emb
ca_audio_rotary_emb class_labels cond cond_mask cond_rope conditioning_emb context cross_attention_kwargs emb
encoder_attention_mask encoder_hidden_states encoder_hidden_states_mask encoder_mask global_modulation
image_embed_seq_len joint_attention_kwargs modulation num_memory_tokens num_tokens segments temb temb_audio
temb_ca_audio_gate temb_ca_audio_scale_shift temb_mod temb_mod_context temb_mod_img temb_mod_txt temb_prompt
temb_prompt_audio text_a text_embed text_v time_embed timestep timestep_embed token_replace_emb
use_a2v_cross_attention use_v2a_cross_attention
"""


def _family(row: Adapter) -> Adapter:
    lists = [replace(spec, shared=(*SHARED.split(), *spec.shared)) for spec in row.block_lists]
    accepts = (*ACCEPTED.split(), *row.accepts, *row.residuals)
    return replace(row, block_lists=lists, accepts=accepts, check=partial(check, row))


FAMILIES = {name: _family(row) for name, row in ROWS.items()}
REFUSED = {
    "AnyFlowFARTransformer3DModel": "its attention mask covers chunks of frames at fixed positions",
    "Cosmos3OmniTransformer": "its tokens are packed in one sequence, without a batch dimension",
    "HunyuanDiT2DModel": "skip connections lead from blocks of the first half to the second half",
    "Kandinsky6SRTransformer3DModel": "its attention selects tiles of 8 x 8 tokens",
    "LatteTransformer3DModel": "its blocks attend in turn within a frame and across frames of a token grid",
    "MiniMaxMusic3RVQDepthDecoder": "its tokens are the codebooks of one frame of audio",
    "PriorTransformer": "the image is a single token, its CLIP embedding",
    "RFD4ProteinaTransformer": "between blocks, all residues update the pair states that bias attention",
    "SanaTransformer2DModel": "its blocks convolve over the token grid",
    "SanaVideoTransformer3DModel": "its blocks convolve over the token grid and over frames",
    "SanaWMTransformer3DModel": "its blocks convolve over the token grid and over frames",
    "TransformerTemporalModel": "its tokens are the frames at one position, and positions are samples",
    "WanAnimateTransformer3DModel": "between blocks, the tokens of each frame attend to the face in it",
    "WanAnimate2Transformer3DModel": "its attention arranges tokens by frame and masks them by position",
    "WanVACETransformer3DModel": "between blocks, it adds the outputs of control blocks to all tokens",
}


def adapter_of(model: nn.Module) -> Adapter:
    """Return the adapter of a model: `routing_adapter` of its class, or the row of a diffusers class.

    Raises:
        ValueError: the class is unknown or cannot be routed.
    """
    if isinstance(adapter := getattr(type(model), "routing_adapter", None), Adapter):
        return adapter
    for kind in type(model).__mro__:
        name = kind.__name__
        is_known = kind.__module__.startswith("diffusers.") and name in FAMILIES | REFUSED
        if is_known and plain_forward(type(model)) is kind.forward:  # it may be derived (fully_shard)
            if name in REFUSED:
                raise ValueError(f"{name} cannot be routed: {REFUSED[name]}")
            return FAMILIES[name]
    raise ValueError(
        f"no adapter is known for {type(model).__name__}: pass a class of `python -m "
        "routing.adapters.families`, not its wrapper (peft: get_base_model()), or pass an adapter too "
        "(routing.propose_adapter writes one)"
    )
