"""Transformers of diffusers by the names of their classes: whose tokens may be routed, and which cannot be.

Written against the signatures of diffusers, which is imported only where a text is counted. A row says what
`attach` must know of a class; tests/routing proves each row on a small model.
"""

from dataclasses import replace
from functools import partial

import torch.nn as nn

from routing.adapters.adapter import Adapter, plain_forward
from routing.adapters.families.parts import check
from routing.adapters.families.table import ROWS

# Arguments of a forward that go together with routing, in whichever classes take them. Of those with
# `attention_kwargs`, `check` accepts few keys.
ACCEPTED = """
additional_t_cond attention_kwargs audio_encoder_attention_mask audio_encoder_hidden_states
audio_num_frames audio_timestep cap_feats condition_mask context_latents crop_coords cross_attention_kwargs
decoder_input_tokens decoder_noise_time enable_diffusion_forcing encoder_attention_mask encoder_hidden_states
encoder_hidden_states_llama3 encoder_hidden_states_mask encoder_mask encodings_and_masks global_hidden_states
height hidden_states id_cond id_vit_hidden image_cond_hidden_states image_cond_ids image_embeds img_mask
img_shapes indicator indices_hidden_states indices_latents indices_latents_clean indices_latents_history_2x
indices_latents_history_4x indices_latents_history_long indices_latents_history_mid
indices_latents_history_short input_ids input_image_sizes input_img_latents isolate_modalities
joint_attention_kwargs latent_cond latents_clean latents_history_2x latents_history_4x latents_history_long
latents_history_mid latents_history_short local_add_cond num_frames original_size padding_mask pooled_embeds
position_ids prior_token_drop prior_token_id r_timestep return_dict rotary_embedding segment_ids shape_list t
target_size target_timestep text_bth text_encoder_layers text_lens text_rope_pos timestep timesteps txt_ids
video_rotary_emb width x
"""
# Arguments of blocks that do not depend on the token, in whichever classes take them, but for `by_token`.
SHARED = """
adaln_clean adaln_global_out adaln_input adaln_noisy all_perturbed args attention_kwargs
audio_encoder_attention_mask audio_encoder_hidden_states audio_hidden_states audio_rotary_emb
ca_audio_rotary_emb class_labels cond cond_mask cond_rope conditioning_emb context cross_attention_kwargs emb
encoder_attention_mask encoder_hidden_states encoder_hidden_states_mask encoder_mask global_modulation
image_embed_seq_len joint_attention_kwargs modulation num_memory_tokens segments temb temb_audio
temb_ca_audio_gate temb_ca_audio_scale_shift temb_mod temb_mod_context temb_mod_img temb_mod_txt text_a
text_embed text_v time_embed timestep timestep_embed use_a2v_cross_attention use_v2a_cross_attention
"""


def _family(row: Adapter) -> Adapter:
    lists = [replace(spec, shared=(*SHARED.split(), *spec.shared)) for spec in row.block_lists]
    accepts = (*ACCEPTED.split(), *row.accepts)
    return replace(row, block_lists=lists, accepts=accepts, check=partial(check, row))


FAMILIES = {name: _family(row) for name, row in ROWS.items()}
REFUSED = {
    "AnyFlowFARTransformer3DModel": "its attention takes a block mask over chunks of frames at their places",
    "Cosmos3OmniTransformer": "its tokens are packed in one row, without a dimension of samples",
    "HunyuanDiT2DModel": "skip connections join blocks of the first half to the second",
    "Kandinsky6SRTransformer3DModel": "its attention chooses among tiles of 8 x 8 tokens",
    "LatteTransformer3DModel": "its blocks attend within frames and along frames in turn, in a grid",
    "MiniMaxH3Transformer3DModel": "its blocks take positions and modulation that all samples share",
    "MiniMaxMusic3RVQDepthDecoder": "its tokens are the codebooks of one frame of audio",
    "PriorTransformer": "the image is a single token, the embedding that CLIP gives it",
    "RFD4ProteinaTransformer": "between blocks all residues update those of pairs, by which blocks attend",
    "SanaTransformer2DModel": "its blocks convolve over the grid of tokens",
    "SanaVideoTransformer3DModel": "its blocks convolve over the grid of tokens and its frames",
    "SanaWMTransformer3DModel": "its blocks convolve over the grid of tokens and its frames",
    "TransformerTemporalModel": "its tokens are frames at one place, the places of an image are samples",
    "WanAnimateTransformer3DModel": "between its blocks the tokens of a frame attend to the face in it",
    "WanAnimate2Transformer3DModel": "its attention lays tokens out by frame, and masks them by their places",
    "WanVACETransformer3DModel": "between its blocks it adds the hints that control blocks give all tokens",
}


def adapter_of(model: nn.Module) -> Adapter:
    """Find the adapter of a class: its own `routing_adapter`, or the row of a model of diffusers.

    Raises:
        ValueError: the class is not known, or cannot be routed.
    """
    if isinstance(adapter := getattr(type(model), "routing_adapter", None), Adapter):
        return adapter
    for kind in type(model).__mro__:
        name = kind.__name__
        known = kind.__module__.startswith("diffusers.") and name in FAMILIES | REFUSED
        if known and plain_forward(type(model)) is kind.forward:  # a class that shards it is derived from it
            if name in REFUSED:
                raise ValueError(f"{name} cannot be routed: {REFUSED[name]}")
            return FAMILIES[name]
    raise ValueError(
        f"routing knows no {type(model).__name__}: pass a class that `python -m routing.adapters.families` "
        "lists, not its wrapper (peft: get_base_model()), or an adapter with it: routing.propose_adapter "
        "writes one"
    )
