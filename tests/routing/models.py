"""A small model of every class of diffusers that can be routed, with random weights, and inputs for it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

TEXT_DIM, POOLED_DIM = 48, 24
FRAMES = 4  # of a video, each of half the side


class Sizes(NamedTuple):
    """Of a small model, and of its inputs; an image is of side x side tokens."""

    width: int = 32
    num_heads: int = 2
    depth: int = 6
    side: int = 4
    batch: int = 2
    num_text: int = 5

    @property
    def head_dim(self):
        return self.width // self.num_heads

    @property
    def heads(self):
        """What most models call the heads of attention."""
        return {"num_attention_heads": self.num_heads, "attention_head_dim": self.head_dim}

    @property
    def deep(self):
        return {"num_layers": self.depth, **self.heads}

    @property
    def double_single(self):
        """A third of double blocks."""
        num_double = self.depth // 3
        return {"num_layers": num_double, "num_single_layers": self.depth - num_double, **self.heads}

    @property
    def axes(self):
        """Channels of a head that rotate by each of three coordinates."""
        first = self.head_dim // 8 if self.head_dim * 7 % 32 == 0 else self.head_dim // 4
        return first, (self.head_dim - first) // 2, (self.head_dim - first) // 2

    @property
    def text(self):
        return torch.randn(self.batch, self.num_text, TEXT_DIM)

    @property
    def text_mask(self):
        """Which tokens of the text are no padding (N, P): half of them, one less in each sample."""
        half = self.num_text // 2
        return torch.arange(self.num_text) < (half - torch.arange(self.batch) % half).unsqueeze(1)

    def longer(self, length):
        """A mask (N, length) without the last two tokens of the first sample."""
        mask = torch.ones(self.batch, length, dtype=torch.bool)
        mask[0, -2:] = False
        return mask

    @property
    def joint_mask(self):
        """A mask (N, P + T) of text and image."""
        return torch.cat([self.text_mask, torch.ones(self.batch, self.side**2, dtype=torch.bool)], dim=1)

    def image(self, channels, patch_size=2):
        return torch.randn(self.batch, channels, *(patch_size * self.side,) * 2)

    def video(self, channels, frames=FRAMES):
        return torch.randn(self.batch, channels, frames, self.side, self.side)

    def tokens(self, channels):
        return torch.randn(self.batch, self.side**2, channels)

    @property
    def positions(self):
        """The coordinates (T, 3) of tokens: 0, row, column."""
        rows, columns = torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij")
        return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).float()

    @property
    def time(self):
        return torch.rand(self.batch)

    @property
    def steps(self):
        return torch.randint(1000, (self.batch,))

    @property
    def token_steps(self):
        """A timestep for each token."""
        return torch.randint(1000, (self.batch, self.side**2))

    @property
    def pooled(self):
        return torch.randn(self.batch, POOLED_DIM)

    @property
    def condition(self):
        """What most models take beside the image."""
        return {"encoder_hidden_states": self.text, "timestep": self.time}

    @property
    def masked(self):
        return {"encoder_hidden_states": self.text, "encoder_attention_mask": self.text_mask}

    def rotary(self, channels, length=None):
        angles = torch.randn(*(length or (self.side**2,)), channels // 2).repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()


def flux_ids(s, plane=0.0):
    return {
        "img_ids": s.positions + torch.tensor([plane, 0.0, 0.0]),
        "txt_ids": torch.zeros(s.num_text, 3),
    }


def flux_2_ids(s):
    text = torch.arange(float(s.num_text))[:, None]
    return {"img_ids": pad(s.positions, (0, 1)), "txt_ids": pad(text, (3, 0))}


def like_flux(s, timestep=1.0, plane=0.0):
    options = {**s.double_single, "axes_dims_rope": s.axes, "joint_attention_dim": TEXT_DIM}
    inputs = {"hidden_states": s.tokens(64), "encoder_hidden_states": s.text, **flux_ids(s, plane)}
    return options, {**inputs, "timestep": timestep * s.time}


def fibo(s):
    options, inputs = like_flux(s, 1000.0)
    layers = {"text_encoder_layers": [s.text for _ in range(s.depth)]}
    mask = {"joint_attention_kwargs": {"attention_mask": s.joint_mask[:, None, None]}}
    return {**options, "text_encoder_dim": TEXT_DIM}, {**inputs, **layers, **mask}


def fibo_2(s):
    """An image to edit, of two tokens; one block reads the text."""
    gist = {"min_num_gist_tokens": 3, "max_num_gist_tokens": 3, "gist_step": 1}
    return {
        **{"dim": s.width, "n_layers": s.depth, "n_heads": s.num_heads, "patch_size": 2, **gist},
        **{"injection_layer_ids": (s.depth // 2,), "axes_dims": s.axes, "axes_lens": (64, 64, 64)},
        "cap_feat_dim": TEXT_DIM,
    }, {
        "hidden_states": s.image(32),
        "encoder_hidden_states": torch.stack([s.text, s.text], dim=1),
        "encoder_attention_mask": s.text_mask,
        "timestep": s.time,
        "context_latents": [torch.randn(s.batch, 32, 2, 4)],
    }


def chroma(s):
    approximator = {"approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 2}
    options, inputs = like_flux(s)
    return {**options, **approximator}, {**inputs, "attention_mask": s.joint_mask}


def flux(s):
    options, inputs = like_flux(s)
    return {**options, "pooled_projection_dim": POOLED_DIM}, {**inputs, "pooled_projections": s.pooled}


def flux_2(s):
    options = {**s.double_single, "axes_dims_rope": (s.head_dim // 4,) * 4, "joint_attention_dim": TEXT_DIM}
    inputs = {"hidden_states": s.tokens(128), **s.condition, **flux_2_ids(s)}
    return options, {**inputs, "guidance": torch.full((s.batch,), 4.0)}


def flux_3(s):
    """A reference image of three tokens."""
    options, inputs = flux_2(s)
    del inputs["guidance"]
    reference = pad(s.positions[:3], (0, 1)) + torch.tensor([10.0, 0, 0, 0])
    states = torch.randn(s.batch, 3, 128)
    return options, {**inputs, "image_cond_hidden_states": states, "image_cond_ids": reference}


def cogview(s):
    dims = {"text_embed_dim": TEXT_DIM, "time_embed_dim": s.width, "condition_dim": 8}
    return {**dims, **s.deep}, {
        **{"hidden_states": s.image(16), "encoder_hidden_states": s.text, "timestep": s.steps},
        "target_size": torch.full((s.batch, 2), 16.0 * s.side),
        "crop_coords": torch.zeros(s.batch, 2),
    }


def cogview_3(s):
    """The model takes no mask of the text."""
    options, inputs = cogview(s)
    return {**options, "pos_embed_max_size": s.side}, {**inputs, "original_size": inputs["target_size"]}


def cogview_4(s):
    options, inputs = cogview(s)
    return options, {**inputs, "original_size": inputs["target_size"], "attention_mask": s.text_mask}


def glm(s):
    """A token of the prior for each of the image."""
    options, inputs = cogview(s)
    prior = torch.randint(32, (s.batch, s.side**2))
    inputs |= {"prior_token_id": prior, "prior_token_drop": torch.zeros_like(prior, dtype=torch.bool)}
    return {**options, "prior_vq_quantizer_codebook_size": 32}, {**inputs, "attention_mask": s.text_mask}


def transformer_2d(s):
    """As in a U-Net: of features, not of patches."""
    return {**s.deep, "in_channels": s.width, "cross_attention_dim": TEXT_DIM}, {
        "hidden_states": s.image(s.width, patch_size=1),
        "encoder_hidden_states": s.text,
        "encoder_attention_mask": s.longer(s.num_text).float(),
    }


def dreamlite(s):
    options, inputs = transformer_2d(s)
    return {**options, "qk_norm": "rms_norm", "num_kv_heads": s.num_heads // 2}, inputs


def ernie(s):
    return {
        **{"hidden_size": s.width, "num_attention_heads": s.num_heads, "num_layers": s.depth},
        **{"ffn_hidden_size": 4 * s.width, "rope_axes_dim": s.axes, "text_in_dim": TEXT_DIM},
    }, {
        **{"hidden_states": s.image(128, patch_size=1), "timestep": s.steps},
        **{"text_bth": s.text, "text_lens": s.text_mask.sum(dim=1)},
    }


def hidream(s):
    """A second text of three tokens."""
    return {
        **{**s.double_single, "patch_size": 2, "in_channels": 16},
        **{"caption_channels": [TEXT_DIM, TEXT_DIM], "text_emb_dim": POOLED_DIM},
        "axes_dims_rope": (s.head_dim // 2, s.head_dim // 4, s.head_dim // 4),
        **{"llama_layers": list(range(s.depth)), "max_resolution": (4 * s.side, 4 * s.side)},
    }, {
        **{"hidden_states": s.image(16), "timesteps": s.steps, "pooled_embeds": s.pooled},
        "encoder_hidden_states_t5": s.text,
        "encoder_hidden_states_llama3": torch.randn(s.depth, s.batch, 3, TEXT_DIM),
    }


def ideogram(s):
    """Every second text is shorter by a token, with padding before it."""
    text, image, rows = s.num_text, s.side**2, s.head_dim // 6
    positions = torch.cat([torch.arange(float(text))[:, None].expand(-1, 3), 65536 + s.positions])
    is_padding = torch.zeros(s.batch, text + image, dtype=torch.bool)
    is_padding[1::2, 0] = True
    return {
        **{**s.deep, "intermediate_size": 4 * s.width, "adaln_dim": s.width, "llm_features_dim": TEXT_DIM},
        "mrope_section": (s.head_dim // 2 - 2 * rows, rows, rows),
    }, {
        "hidden_states": torch.randn(s.batch, text + image, 128),
        "encoder_hidden_states": torch.randn(s.batch, text + image, TEXT_DIM),
        "timestep": s.time,
        "position_ids": positions.long().expand(s.batch, -1, -1),
        "segment_ids": torch.where(is_padding, -1, 1),
        "indicator": torch.where(is_padding, 0, torch.tensor([3] * text + [2] * image)),
    }


def joyimage(s):
    options = {"hidden_size": s.width, "num_attention_heads": s.num_heads, "text_dim": TEXT_DIM}
    options |= {"num_layers": s.depth, "rope_dim_list": list(s.axes)}
    latents = s.image(16).unsqueeze(2)
    return options, {"hidden_states": latents, "encoder_hidden_states": s.text, "timestep": 1000 * s.time}


def joyimage_plus(s):
    """A reference of one row, two for the last sample; the others are padded."""
    image, row = (1, s.side, s.side), (1, 1, s.side)
    options, inputs = joyimage(s)
    return options, {
        **inputs,
        "hidden_states": torch.randn(s.batch, s.side * (s.side + 2), 16, 1, 2, 2),
        "encoder_hidden_states_mask": s.longer(s.num_text).float(),
        "shape_list": [*[[image, row]] * (s.batch - 1), [image, row, row]],
    }


def krea(s):
    """Text of three layers, with padding."""
    return {
        **{**s.deep, "num_key_value_heads": s.num_heads, "intermediate_size": 4 * s.width},
        **{"axes_dims_rope": s.axes, "num_text_layers": 3, "text_hidden_dim": TEXT_DIM},
        **{"text_intermediate_size": 32, "text_num_attention_heads": 2, "text_num_key_value_heads": 2},
    }, {
        "hidden_states": s.tokens(64),
        "encoder_hidden_states": torch.stack([s.text for _ in range(3)], dim=2),
        "timestep": s.time,
        "position_ids": torch.cat([torch.zeros(s.num_text, 3), s.positions]),
        "encoder_attention_mask": s.text_mask,
    }


def lumina(s):
    options = {"hidden_size": s.width, "num_layers": s.depth, "multiple_of": 8}
    return {**options, "num_attention_heads": s.num_heads, "num_kv_heads": s.num_heads}


def lumina_next(s):
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return {**lumina(s), "cross_attention_dim": TEXT_DIM}, {
        **{"hidden_states": s.image(4), **s.condition, "encoder_mask": s.text_mask},
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(s.head_dim, s.side, s.side),
        "cross_attention_kwargs": {},  # the model needs it
    }


def lumina_2(s):
    """Texts of one length, with one token of padding."""
    mask = torch.arange(s.num_text).expand(s.batch, -1) < s.num_text - 1
    inputs = {"hidden_states": s.image(16), **s.condition, "encoder_attention_mask": mask}
    return {**lumina(s), "cap_feat_dim": TEXT_DIM, "axes_dim_rope": s.axes}, inputs


def nucleus(s):
    """The first three blocks and the last one have no experts; each expert takes all tokens."""
    return {
        **{**s.deep, "in_channels": 64, "joint_attention_dim": TEXT_DIM, "patch_size": 1},
        **{"num_experts": 8, "capacity_factors": 8.0, "moe_intermediate_dim": s.width},
        "mlp_ratio": max(4.0, 192 / s.width),  # the layers in between are of multiples of 128
        "axes_dims_rope": s.axes,
    }, {
        **{"hidden_states": s.tokens(64), **s.condition, "encoder_hidden_states_mask": s.text_mask},
        "img_shapes": [(1, s.side, s.side)] * s.batch,
    }


def omnigen(s):
    """Padding comes first; text sees what is before it, the rest all. The first has a reference image."""
    length, factors = s.num_text + 1 + s.side**2, [1.0] * (s.head_dim // 2)
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    sees[s.num_text :] = True
    is_token = pad(s.text_mask.flip(1), (0, 1 + s.side**2), value=True)
    return {
        **{"hidden_size": s.width, "num_layers": s.depth, "intermediate_size": 4 * s.width},
        **{"num_attention_heads": s.num_heads, "num_key_value_heads": s.num_heads},
        **{"rope_scaling": {"short_factor": factors, "long_factor": factors}, "vocab_size": 32},
        **{"pad_token_id": 0, "pos_embed_max_size": s.side},
    }, {
        **{"hidden_states": s.image(4), "timestep": s.time},
        "input_ids": torch.randint(1, 32, (s.batch, s.num_text)),
        "input_img_latents": [torch.randn(1, 4, 2, 2)],
        "input_image_sizes": {0: [[1, 2]]},
        "attention_mask": (sees & is_token.unsqueeze(1)).float(),
        "position_ids": torch.arange(length).expand(s.batch, -1),
    }


def pixart(s):
    options = {"sample_size": 2 * s.side, "cross_attention_dim": s.width, "caption_channels": TEXT_DIM}
    inputs = {"hidden_states": s.image(4), "encoder_hidden_states": s.text, "timestep": s.steps}
    no_sizes = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    return {**options, **s.deep, "use_additional_conditions": False}, {**inputs, **no_sizes}


def prx(s):
    options = {"context_in_dim": TEXT_DIM, "hidden_size": s.width, "num_heads": s.num_heads}
    axes = [s.head_dim // 2, s.head_dim // 2]
    inputs = {"hidden_states": s.image(16), **s.condition, "attention_mask": s.text_mask}
    return {**options, "depth": s.depth, "axes_dim": axes}, inputs


def qwen(s):
    return {**s.deep, "axes_dims_rope": s.axes, "joint_attention_dim": TEXT_DIM}, {
        **{"hidden_states": s.tokens(64), **s.condition, "encoder_hidden_states_mask": s.text_mask},
        "img_shapes": [[(1, s.side, s.side)]] * s.batch,
    }


def qwen_21(s):
    """A reference image of four tokens within a text with padding."""
    slots = torch.zeros(s.num_text + s.side**2 // 4, dtype=torch.bool)  # one for four tokens
    slots[1], slots[s.num_text :] = True, True
    return {**s.deep, "axes_dims_rope": s.axes, "context_in_dim": TEXT_DIM}, {
        **qwen(s)[1],
        "hidden_states": torch.cat([torch.randn(s.batch, 4, 64), s.tokens(64)], dim=1),
        "img_shapes": [[(1, 2, 2), (1, s.side, s.side)]] * s.batch,
        "img_mask": slots.expand(s.batch, -1),
    }


def sd3(s):
    options = {"sample_size": 2 * s.side, "pos_embed_max_size": s.side, "joint_attention_dim": TEXT_DIM}
    options |= {"caption_projection_dim": s.width, "pooled_projection_dim": POOLED_DIM}
    inputs = {"hidden_states": s.image(16), "encoder_hidden_states": s.text, "timestep": 1000 * s.time}
    return {**options, **s.deep}, {**inputs, "pooled_projections": s.pooled}


def z_image(s):
    """Every second text is longer by 32 tokens, and the others are padded."""
    lengths = [s.num_text + 32 * (i % 2) for i in range(s.batch)]
    return {
        **{"dim": s.width, "n_layers": s.depth, "cap_feat_dim": TEXT_DIM, "axes_dims": s.axes},
        **{"n_heads": s.num_heads, "n_kv_heads": s.num_heads},
    }, {
        **{"x": [*s.image(16).unsqueeze(2)], "t": s.time},
        "cap_feats": [torch.randn(length, TEXT_DIM) for length in lengths],
    }


def auraflow(s):
    """A sixth of joint blocks."""
    return {
        **{"sample_size": 2 * s.side, "pos_embed_max_size": s.side**2, "joint_attention_dim": TEXT_DIM},
        **{"num_mmdit_layers": s.depth // 6, "num_single_dit_layers": s.depth - s.depth // 6, **s.heads},
        "caption_projection_dim": s.width,
    }, {"hidden_states": s.image(4), **s.condition}


def allegro(s):
    """Tables for each axis, and the coordinates of tokens in them."""
    axes = [torch.arange(FRAMES), torch.arange(s.side // 2), torch.arange(s.side // 2)]
    coordinates = [grid.reshape(1, -1) for grid in torch.meshgrid(*axes, indexing="ij")]
    angles = [
        torch.randn(len(axis), len(channels) // 2).repeat(1, 2)
        for axis, channels in zip(axes, torch.ones(s.head_dim).chunk(3), strict=True)
    ]
    options = {"caption_channels": TEXT_DIM, "cross_attention_dim": s.width}
    return {**s.deep, **options, "sample_height": s.side, "sample_width": s.side}, {
        **{"hidden_states": s.video(4), **s.masked, "timestep": s.steps},
        "image_rotary_emb": ([(table.cos(), table.sin()) for table in angles], coordinates),
    }


def wan(s):
    inputs = {"hidden_states": s.video(16), "encoder_hidden_states": s.text, "timestep": s.steps}
    return {**s.deep, "text_dim": TEXT_DIM, "ffn_dim": 4 * s.width}, inputs


def anyflow(s):
    """Each frame with its own timesteps."""
    options, inputs = wan(s)
    timestep = torch.randint(1000, (s.batch, FRAMES))
    latents = inputs["hidden_states"].transpose(1, 2)
    return options, {**inputs, "hidden_states": latents, "timestep": timestep, "r_timestep": timestep // 2}


def skyreels(s):
    """Diffusion forcing: pairs of frames see those before, and each frame has its own timestep."""
    options, inputs = wan(s)
    timestep = torch.randint(1000, (s.batch, FRAMES))
    return options, {**inputs, "timestep": timestep, "enable_diffusion_forcing": True}


def helios(s):
    """After 1 + 2 + 4 frames at three resolutions."""
    options, inputs = wan(s)
    rows = s.head_dim // 3 // 2 * 2
    inputs["indices_hidden_states"] = torch.arange(7, 11).expand(s.batch, -1)
    for name, first, frames in (("long", 0, 4), ("mid", 4, 2), ("short", 6, 1)):
        inputs[f"latents_history_{name}"] = s.video(16, frames)
        indices = torch.arange(first, first + frames).expand(s.batch, -1)
        inputs[f"indices_latents_history_{name}"] = indices
    return {**options, "rope_dim": (s.head_dim - 2 * rows, rows, rows), "is_amplify_history": True}, inputs


def cogvideox(s):
    options = {"text_embed_dim": TEXT_DIM, "sample_frames": 13, "max_text_seq_length": s.num_text}
    options |= {"sample_width": s.side, "sample_height": s.side, "use_rotary_positional_embeddings": True}
    return {**s.deep, **options}, {
        **{"hidden_states": s.video(16).transpose(1, 2), "encoder_hidden_states": s.text},
        **{"timestep": s.steps, "image_rotary_emb": s.rotary(s.head_dim)},
    }


def consisid(s):
    """A face is attended to after every second block."""
    options, inputs = cogvideox(s)
    return {
        **{**options, "LFE_id_dim": POOLED_DIM, "LFE_vit_dim": POOLED_DIM, "LFE_depth": 5},
        **{"LFE_num_scale": 5, "LFE_output_dim": int(s.width / 3 * 2), "is_train_face": True},
        **{"cross_attn_num_heads": s.num_heads, "cross_attn_dim_head": s.head_dim},
    }, {
        **{**inputs, "id_cond": s.pooled},
        "id_vit_hidden": [torch.randn(s.batch, 3, POOLED_DIM) for _ in range(5)],
    }


def cosmos(s):
    """Cosmos 2, each frame with its own timestep; positions of Cosmos 1 do not run in double precision."""
    latents = s.video(16)
    options = {"in_channels": 17, "text_embed_dim": TEXT_DIM, "extra_pos_embed_type": None}
    return {**s.deep, **options}, {
        **{"hidden_states": latents, "encoder_hidden_states": s.text, "attention_mask": s.text_mask},
        "timestep": torch.rand(s.batch, 1, FRAMES, 1, 1),
        "condition_mask": torch.ones_like(latents[:, :1]),
        "padding_mask": torch.zeros(1, 1, *latents.shape[-2:]),
        "fps": 16,
    }


def easyanimate(s):
    """All blocks have parameters of their own for the text."""
    options = {"mmdit_layers": s.depth, "text_embed_dim": TEXT_DIM, "patch_size": 2}
    return {**s.deep, **options, "in_channels": 16, "out_channels": 16}, wan(s)[1]


def hunyuan_image(s):
    latents = {"hidden_states": s.image(64, patch_size=1), "timestep": 1000 * s.time}
    options = {"rope_axes_dim": (s.head_dim // 2,) * 2, "text_embed_dim": TEXT_DIM}
    return {**s.double_single, **options}, {**latents, **s.masked}


def hunyuan_video(s):
    options = {"rope_axes_dim": s.axes, "pooled_projection_dim": POOLED_DIM, "text_embed_dim": TEXT_DIM}
    return {**s.double_single, **options}, {
        **{"hidden_states": s.video(16), **s.masked, "pooled_projections": s.pooled},
        **{"timestep": s.steps, "guidance": torch.full((s.batch,), 6000.0)},
    }


def hunyuan_video_15(s):
    """With a second text and a reference image."""
    options = {"text_embed_dim": TEXT_DIM, "text_embed_2_dim": TEXT_DIM, "image_embed_dim": POOLED_DIM}
    return {**s.deep, **options, "rope_axes_dim": s.axes}, {
        "hidden_states": torch.randn(s.batch, 65, FRAMES, s.side // 2, s.side // 2),
        **{**s.masked, "encoder_hidden_states_2": s.text, "encoder_attention_mask_2": s.text_mask},
        **{"image_embeds": torch.randn(s.batch, 3, POOLED_DIM), "timestep": 1000 * s.time},
    }


def framepack(s):
    """After 1, 2 and 4 frames at three resolutions."""
    options, inputs = hunyuan_video(s)
    options |= {"has_image_proj": True, "image_proj_dim": POOLED_DIM, "has_clean_x_embedder": True}
    inputs |= {"image_embeds": torch.randn(s.batch, 3, POOLED_DIM), "indices_latents": torch.arange(7, 11)}
    for name, first, frames in (("history_4x", 0, 4), ("history_2x", 4, 2), ("clean", 6, 1)):
        inputs[f"latents_{name}"] = s.video(16, frames)
        inputs[f"indices_latents_{name}"] = torch.arange(first, first + frames)
    return options, inputs


def kandinsky(s, channels):
    return {
        **{"model_dim": s.width, "ff_dim": 4 * s.width, "time_dim": s.width, "axes_dims": s.axes},
        **{"num_text_blocks": 1, "num_visual_blocks": s.depth},
        **{"in_text_dim": TEXT_DIM, "in_text_dim2": POOLED_DIM},
    }, {
        **{"hidden_states": s.video(channels).movedim(1, -1), "encoder_hidden_states": s.text},
        **{"pooled_projections": s.pooled, "timestep": 1000 * s.time},
    }


def kandinsky_5(s):
    """The model takes no mask of the text."""
    options, inputs = kandinsky(s, channels=4)
    positions = tuple(torch.arange(n) for n in (FRAMES, s.side // 2, s.side // 2))
    return options, {**inputs, "visual_rope_pos": positions, "text_rope_pos": torch.arange(s.num_text)}


def kandinsky_6(s):
    """Video without sound: the latent, that of the condition, and a mask."""
    options, inputs = kandinsky(s, channels=33)
    on = ("text_token_padding", "ca_rope", "cross_gates", "fix_modulation")
    return {**options, **dict.fromkeys(on, True)}, {**inputs, "encoder_attention_mask": s.text_mask}


def ltx(s):
    grid = {"num_frames": FRAMES, "height": s.side // 2, "width": s.side // 2}
    return {**s.deep, "caption_channels": TEXT_DIM, "cross_attention_dim": s.width}, {
        **{"hidden_states": s.tokens(128), **s.masked, **grid, "timestep": s.token_steps}
    }


def ltx_2(s):
    """Video with a timestep for each token, and 3 tokens of audio, which are never routed."""
    options, inputs = ltx(s)
    return {
        **{**options, "audio_num_attention_heads": s.num_heads, "rope_type": "split"},
        **{"audio_attention_head_dim": s.head_dim // 2, "audio_cross_attention_dim": s.width // 2},
    }, {
        **{**inputs, "audio_hidden_states": torch.randn(s.batch, 3, 128), "audio_timestep": s.steps},
        **{"audio_encoder_hidden_states": s.text, "audio_encoder_attention_mask": s.text_mask},
        **{"audio_num_frames": 3, "isolate_modalities": True},
    }


def sana_refiner(s):
    """Without earlier frames."""
    inputs = {"hidden_states": s.tokens(128), **s.masked, "timestep": s.token_steps}
    return ltx(s)[0], {**inputs, "video_rotary_emb": s.rotary(s.width, (1, s.side**2))}


def mochi(s):
    options = {"text_embed_dim": TEXT_DIM, "time_embed_dim": 32, "pooled_projection_dim": s.width // 2}
    latents = s.image(12).unsqueeze(2)
    inputs = {"hidden_states": latents, **s.masked, "timestep": 1000 * s.time}
    return {**s.deep, **options, "max_sequence_length": s.num_text}, inputs


def motif(s):
    """With a reference image."""
    options = {"rope_axes_dim": s.axes, "text_embed_dim": TEXT_DIM, "image_embed_dim": POOLED_DIM}
    options |= {"enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True}
    return {**s.double_single, **options}, {
        **{"hidden_states": s.video(33), **s.masked, "timestep": s.steps},
        "image_embeds": torch.randn(s.batch, 3, POOLED_DIM),
    }


def ace_step(s):
    """The window is of the side to both sides."""
    length = 2 * s.side**2
    return {
        **{"hidden_size": s.width, "intermediate_size": 3 * s.width, "head_dim": s.head_dim},
        **{"num_attention_heads": s.num_heads, "num_key_value_heads": s.num_heads // 2},
        **{"num_hidden_layers": s.depth, "encoder_hidden_size": TEXT_DIM, "sliding_window": s.side},
    }, {
        "hidden_states": torch.randn(s.batch, length, 64),
        "context_latents": torch.randn(s.batch, length, 128),
        **{**s.condition, "timestep_r": s.time},
    }


def longcat_audio(s):
    options = {"dit_dim": s.width, "dit_depth": s.depth, "dit_heads": s.num_heads}
    return {**options, "dit_text_dim": TEXT_DIM}, {
        **{"hidden_states": s.tokens(64), "latent_cond": s.tokens(64), **s.condition},
        "attention_mask": s.longer(s.side**2),
        "encoder_attention_mask": s.longer(s.num_text),
    }


def minimax_music(s):
    """Half of a head rotates; each latent has a condition of its own, which is added before."""
    options = {**s.deep, "ff_inner_dim": 4 * s.width, "rotary_dim": s.head_dim // 2}
    states = {"hidden_states": s.tokens(128).transpose(1, 2), "encoder_hidden_states": s.tokens(TEXT_DIM)}
    return {**options, "condition_dim": TEXT_DIM}, {**states, "timestep": s.time}


def stable_audio(s):
    """Half of a head rotates; keys and values of the text have half of the heads."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed as rotary

    options = {"num_key_value_attention_heads": s.num_heads // 2, "cross_attention_dim": s.width // 2}
    options |= {"cross_attention_input_dim": TEXT_DIM, "global_states_input_dim": TEXT_DIM}
    length, halves = 1 + s.side**2, {"use_real": True, "repeat_interleave_real": False}
    return {**s.deep, **options}, {
        **{"hidden_states": s.tokens(64).transpose(1, 2), **s.condition},
        "global_hidden_states": torch.randn(s.batch, 1, TEXT_DIM),
        **{"attention_mask": s.longer(length - 1), "encoder_attention_mask": s.longer(s.num_text)},
        "rotary_embedding": rotary(s.head_dim // 2, length, **halves),
    }


def stable_audio_3(s):
    """With what is painted in, which each block adds to the latents."""
    options = {"embed_dim": s.width, "depth": s.depth, "num_heads": s.num_heads, "num_memory_tokens": 3}
    return {**options, "cond_token_dim": TEXT_DIM, "global_cond_dim": TEXT_DIM}, {
        **{"hidden_states": s.tokens(256).transpose(1, 2), **s.condition},
        "encoder_attention_mask": s.longer(s.num_text),
        "global_hidden_states": torch.randn(s.batch, TEXT_DIM),
        "local_add_cond": s.tokens(257).transpose(1, 2),
    }


def t5_film(s):
    """Two encodings, of which the first sample has less."""
    encoding, mask = (s.batch, s.num_text, s.width), s.longer(s.num_text).float()
    return {
        **{"targets_length": s.side**2, "d_model": s.width, "num_layers": s.depth},
        **{"num_heads": s.num_heads, "d_kv": s.head_dim, "d_ff": 4 * s.width},
    }, {
        "encodings_and_masks": [(torch.randn(encoding), mask), (torch.randn(encoding), mask)],
        "decoder_input_tokens": s.tokens(128),
        "decoder_noise_time": s.time,
    }


# Options and inputs of each class, of sizes.
MODELS: dict[str, Callable[[Sizes], tuple[dict[str, Any], dict[str, Any]]]] = {
    "AceStepTransformer1DModel": ace_step,
    "AllegroTransformer3DModel": allegro,
    "AnyFlowTransformer3DModel": anyflow,
    "AuraFlowTransformer2DModel": auraflow,
    "BriaTransformer2DModel": lambda s: like_flux(s, 1000.0),
    "BriaFiboTransformer2DModel": fibo,
    "BriaFibo2Transformer2DModel": fibo_2,
    "ChromaTransformer2DModel": chroma,
    "ChronoEditTransformer3DModel": wan,
    "CogVideoXTransformer3DModel": cogvideox,
    "CogView3PlusTransformer2DModel": cogview_3,
    "CogView4Transformer2DModel": cogview_4,
    "ConsisIDTransformer3DModel": consisid,
    "CosmosTransformer3DModel": cosmos,
    "DiTTransformer2DModel": lambda s: (
        {"sample_size": 2 * s.side, **s.deep},
        {"hidden_states": s.image(4), "timestep": s.steps, "class_labels": s.steps},
    ),
    "DreamLiteTransformer2DModel": dreamlite,
    "EasyAnimateTransformer3DModel": easyanimate,
    "ErnieImageTransformer2DModel": ernie,
    "FluxTransformer2DModel": flux,
    "Flux2Transformer2DModel": flux_2,
    "Flux3Transformer2DModel": flux_3,
    "GlmImageTransformer2DModel": glm,
    "HeliosTransformer3DModel": helios,
    "HiDreamImageTransformer2DModel": hidream,
    "HunyuanImageTransformer2DModel": hunyuan_image,
    "HunyuanVideoTransformer3DModel": hunyuan_video,
    "HunyuanVideo15Transformer3DModel": hunyuan_video_15,
    "HunyuanVideoFramepackTransformer3DModel": framepack,
    "Ideogram4Transformer2DModel": ideogram,
    "JoyImageEditTransformer3DModel": joyimage,
    "JoyImageEditPlusTransformer3DModel": joyimage_plus,
    "Kandinsky5Transformer3DModel": kandinsky_5,
    "Kandinsky6Transformer3DModel": kandinsky_6,
    "Krea2Transformer2DModel": krea,
    "LongCatAudioDiTTransformer": longcat_audio,
    "LongCatImageTransformer2DModel": lambda s: like_flux(s, plane=1.0),
    "LTXVideoTransformer3DModel": ltx,
    "LTX2VideoTransformer3DModel": ltx_2,
    "LuminaNextDiT2DModel": lumina_next,
    "Lumina2Transformer2DModel": lumina_2,
    "MiniMaxMusic3Transformer1DModel": minimax_music,
    "MochiTransformer3DModel": mochi,
    "MotifVideoTransformer3DModel": motif,
    "NucleusMoEImageTransformer2DModel": nucleus,
    "OmniGenTransformer2DModel": omnigen,
    "OvisImageTransformer2DModel": like_flux,
    "PixArtTransformer2DModel": pixart,
    "PRXTransformer2DModel": prx,
    "QwenImageTransformer2DModel": qwen,
    "QwenImage21Transformer2DModel": qwen_21,
    "SanaWMLTX2RefinerTransformer3DModel": sana_refiner,
    "SD3Transformer2DModel": sd3,
    "SkyReelsV2Transformer3DModel": skyreels,
    "StableAudioDiTModel": stable_audio,
    "StableAudio3DiTModel": stable_audio_3,
    "T5FilmDecoder": t5_film,
    "Transformer2DModel": transformer_2d,
    "WanTransformer3DModel": wan,
    "ZImageTransformer2DModel": z_image,
}


def cast_timesteps(embedder, linear):
    """Embed timesteps in the type of the weights: the model knows half and single precision alone."""
    embedder.register_forward_pre_hook(lambda module, args: args[0].to(linear.weight.dtype))


def prepare(name, model):
    """Finish a model as its pipeline does, or so that proofs see its attention."""
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0
    from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0

    if name == "DreamLiteTransformer2DModel":  # as the U-Net does: the default one cannot group heads
        for block in model.transformer_blocks:
            block.attn1.set_processor(DreamLiteAttnProcessor2_0())
            block.attn2.set_processor(DreamLiteAttnProcessor2_0())
    elif name == "T5FilmDecoder":  # its own processor, which scales no scores, hides attention
        for module in model.modules():
            if isinstance(module, Attention):
                module.set_processor(AttnProcessor2_0())
    elif name == "SkyReelsV2Transformer3DModel":
        model.register_to_config(num_frame_per_block=2)
    elif name == "NucleusMoEImageTransformer2DModel":
        for block in model.transformer_blocks:
            for parameter in block.img_mlp.experts.parameters() if block.moe_enabled else ():
                nn.init.normal_(parameter, std=0.1)  # diffusers leaves them as they are in memory
    elif name == "Kandinsky5Transformer3DModel":
        cast_timesteps(model.time_embeddings.in_layer, model.time_embeddings.in_layer)
    elif name == "MotifVideoTransformer3DModel":
        embedder = model.time_text_embed.timestep_embedder
        cast_timesteps(embedder, embedder.linear_1)


def build(name, sizes):
    """Build a model with random weights, and inputs."""
    from diffusers import models

    options, inputs = MODELS[name](sizes)
    model = getattr(models, name)(**options)
    prepare(name, model)
    return model, inputs


def built(name, sizes=Sizes()):  # noqa: B008
    """A model in double precision, and inputs."""
    torch.manual_seed(0)
    model, inputs = build(name, sizes)
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at 0 could hide a mistake
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.double(), tree_map(in_double, inputs)


def in_double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
