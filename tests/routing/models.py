"""Small models with random weights of all diffusers classes that can be routed, and their inputs."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from benchmarks.families import POOLED_DIM, TEXT_DIM, WIDTHS, Size, options_and_inputs

FRAMES = 4  # of a video, each of half the side


class Sizes(Size):
    """Sizes of a small model, and parts of its inputs."""

    @property
    def head_dim(self):
        return self.width // self.num_heads

    @property
    def double_single(self):
        """Depths: one third double blocks, the rest single."""
        return {"num_layers": self.depth // 3, "num_single_layers": self.depth - self.depth // 3}

    @property
    def axes(self):
        """Number of channels of a head that rotate with each of three coordinates."""
        first = self.head_dim // 8 if self.head_dim * 7 % 32 == 0 else self.head_dim // 4
        return first, (self.head_dim - first) // 2, (self.head_dim - first) // 2

    @property
    def text(self):
        return torch.randn(self.batch, self.num_text, TEXT_DIM)

    @property
    def text_mask(self):
        """Mask (N, P) of text tokens without padding: half of them, one less for each further sample."""
        half = self.num_text // 2
        return torch.arange(self.num_text) < (half - torch.arange(self.batch) % half).unsqueeze(1)

    def longer(self, length):
        """Return a mask (N, length) that excludes the last two tokens of the first sample."""
        mask = torch.ones(self.batch, length, dtype=torch.bool)
        mask[0, -2:] = False
        return mask

    @property
    def joint_mask(self):
        """Mask (N, P + T) of text and image."""
        return torch.cat([self.text_mask, torch.ones(self.batch, self.side**2, dtype=torch.bool)], dim=1)

    def image(self, channels, patch_size=2):
        return torch.randn(self.batch, channels, *(patch_size * self.side,) * 2)

    def video(self, channels, frames=FRAMES):
        return torch.randn(self.batch, channels, frames, self.side, self.side)

    def tokens(self, channels):
        return torch.randn(self.batch, self.side**2, channels)

    @property
    def positions(self):
        """Coordinates (T, 3) of the tokens: 0, row, column."""
        return torch.cartesian_prod(torch.zeros(1), *(torch.arange(float(self.side)),) * 2)

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
    def pixels(self):
        """Height and width of each image (N, 2)."""
        return torch.full((self.batch, 2), 16.0 * self.side)

    @property
    def pooled(self):
        return torch.randn(self.batch, POOLED_DIM)

    @property
    def condition(self):
        """Arguments of most models besides the image."""
        return {"encoder_hidden_states": self.text, "timestep": self.time}

    @property
    def masked(self):
        return {"encoder_hidden_states": self.text, "encoder_attention_mask": self.text_mask}

    def rotary(self, channels, length=None):
        angles = torch.randn(*(length or (self.side**2,)), channels // 2).repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()


SMALL = Sizes(width=32, num_heads=2, depth=6, side=4, batch=2, num_text=5)
# Names of the sizes in the classes.
NAMES = {
    "num_heads": """num_attention_heads num_heads n_heads n_kv_heads dit_heads cross_attn_num_heads
        audio_num_attention_heads""",
    "head_dim": "attention_head_dim head_dim d_kv cross_attn_dim_head",
    "depth": "num_layers depth n_layers num_visual_blocks dit_depth num_hidden_layers mmdit_layers",
    "width": """hidden_size dim model_dim time_dim dit_dim embed_dim d_model adaln_dim moe_intermediate_dim
        caption_projection_dim""",
    "mlp": "ffn_dim ff_dim ff_inner_dim ffn_hidden_size d_ff intermediate_size",
    "axes": "axes_dims_rope axes_dims rope_dim_list axes_dim_rope rope_axes_dim",
    "text": """text_embed_dim joint_attention_dim text_dim caption_channels cap_feat_dim in_text_dim
        context_in_dim encoder_hidden_size text_encoder_dim text_in_dim llm_features_dim text_hidden_dim
        dit_text_dim cond_token_dim global_cond_dim cross_attention_input_dim global_states_input_dim""",
    "pooled": "in_text_dim2 LFE_id_dim LFE_vit_dim image_embed_dim text_emb_dim image_proj_dim",
}


def usual(kind, s):
    """Return the options of a class that are sizes."""
    values = {"num_heads": s.num_heads, "head_dim": s.head_dim, "depth": s.depth, "width": s.width}
    values |= {"mlp": 4 * s.width, "axes": s.axes, "text": TEXT_DIM, "pooled": POOLED_DIM}
    given = {name: values[what] for what, names in NAMES.items() for name in names.split()}
    return {name: given[name] for name in inspect.signature(kind).parameters if name in given}


def plus(model, options, inputs):
    """Return the options and inputs of a model, with additions and replacements."""
    return {**model[0], **options}, {**model[1], **inputs}


def like_flux(s, timestep=1.0, plane=0.0):
    return s.double_single, {
        **{"hidden_states": s.tokens(64), "encoder_hidden_states": s.text, "timestep": timestep * s.time},
        "img_ids": s.positions + torch.tensor([plane, 0.0, 0.0]),
        "txt_ids": torch.zeros(s.num_text, 3),
    }


def flux_2(s):
    return {**s.double_single, "axes_dims_rope": (s.head_dim // 4,) * 4}, {
        **{"hidden_states": s.tokens(128), **s.condition, "img_ids": pad(s.positions, (0, 1))},
        "txt_ids": pad(torch.arange(float(s.num_text))[:, None], (3, 0)),
    }


def cogview(s):
    return {"time_embed_dim": s.width, "condition_dim": 8}, {
        **{"hidden_states": s.image(16), "encoder_hidden_states": s.text, "timestep": s.steps},
        "target_size": s.pixels,
        "crop_coords": torch.zeros(s.batch, 2),
    }


def transformer_2d(s):
    """Build the model as in a U-Net: tokens are features, not patches."""
    return {"in_channels": s.width, "cross_attention_dim": TEXT_DIM}, {
        "hidden_states": s.image(s.width, patch_size=1),
        "encoder_hidden_states": s.text,
        "encoder_attention_mask": s.longer(s.num_text).float(),
    }


def ideogram(s):
    """Every second text is one token shorter, with padding before it."""
    text, image, rows = s.num_text, s.side**2, s.head_dim // 6
    positions = torch.cat([torch.arange(float(text))[:, None].expand(-1, 3), 65536 + s.positions])
    is_padding = torch.zeros(s.batch, text + image, dtype=torch.bool)
    is_padding[1::2, 0] = True
    return {"mrope_section": (s.head_dim // 2 - 2 * rows, rows, rows)}, {
        "hidden_states": torch.randn(s.batch, text + image, 128),
        "encoder_hidden_states": torch.randn(s.batch, text + image, TEXT_DIM),
        "timestep": s.time,
        "position_ids": positions.long().expand(s.batch, -1, -1),
        "segment_ids": torch.where(is_padding, -1, 1),
        "indicator": torch.where(is_padding, 0, torch.tensor([3] * text + [2] * image)),
    }


def joyimage(s):
    latents = s.image(16).unsqueeze(2)
    return {}, {"hidden_states": latents, "encoder_hidden_states": s.text, "timestep": 1000 * s.time}


def lumina(s):
    return {"multiple_of": 8, "num_kv_heads": s.num_heads}


def lumina_next(s):
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return {**lumina(s), "cross_attention_dim": TEXT_DIM}, {
        **{"hidden_states": s.image(4), **s.condition, "encoder_mask": s.text_mask},
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(s.head_dim, s.side, s.side),
        "cross_attention_kwargs": {},  # the model needs it
    }


def omnigen(s):
    """Padding comes first. Text attends causally, the rest to all. The first sample has a reference image."""
    length, factors = s.num_text + 1 + s.side**2, [1.0] * (s.head_dim // 2)
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    sees[s.num_text :] = True
    is_token = pad(s.text_mask.flip(1), (0, 1 + s.side**2), value=True)
    return {
        **{"rope_scaling": {"short_factor": factors, "long_factor": factors}, "vocab_size": 32},
        **{"pad_token_id": 0, "pos_embed_max_size": s.side, "num_key_value_heads": s.num_heads},
    }, {
        **{"hidden_states": s.image(4), "timestep": s.time},
        "input_ids": torch.randint(1, 32, (s.batch, s.num_text)),
        "input_img_latents": [torch.randn(1, 4, 2, 2)],
        "input_image_sizes": {0: [[1, 2]]},
        "attention_mask": (sees & is_token.unsqueeze(1)).float(),
        "position_ids": torch.arange(length).expand(s.batch, -1),
    }


def qwen(s):
    return {}, {
        **{"hidden_states": s.tokens(64), **s.condition, "encoder_hidden_states_mask": s.text_mask},
        "img_shapes": [[(1, s.side, s.side)]] * s.batch,
    }


def qwen_21(s):
    """A reference image of four tokens in a padded text."""
    slots = torch.zeros(s.num_text + s.side**2 // 4, dtype=torch.bool)  # one for four tokens
    slots[1], slots[s.num_text :] = True, True
    return {}, {
        **qwen(s)[1],
        "hidden_states": torch.cat([torch.randn(s.batch, 4, 64), s.tokens(64)], dim=1),
        "img_shapes": [[(1, 2, 2), (1, s.side, s.side)]] * s.batch,
        "img_mask": slots.expand(s.batch, -1),
    }


def allegro(s):
    """Return tables for each axis, and the coordinates of the tokens in them."""
    axes = [torch.arange(FRAMES), torch.arange(s.side // 2), torch.arange(s.side // 2)]
    coordinates = [grid.reshape(1, -1) for grid in torch.meshgrid(*axes, indexing="ij")]
    angles = [
        torch.randn(len(axis), len(channels) // 2).repeat(1, 2)
        for axis, channels in zip(axes, torch.ones(s.head_dim).chunk(3), strict=True)
    ]
    return {"cross_attention_dim": s.width, "sample_height": s.side, "sample_width": s.side}, {
        **{"hidden_states": s.video(4), **s.masked, "timestep": s.steps},
        "image_rotary_emb": ([(table.cos(), table.sin()) for table in angles], coordinates),
    }


def wan(s):
    inputs = {"hidden_states": s.video(16), "encoder_hidden_states": s.text, "timestep": s.steps}
    return {}, inputs


def with_image(s):
    """Blocks take all but the last 512 tokens of the text as image embeddings."""
    options, inputs = wan(s)
    text, image = torch.randn(s.batch, 512, TEXT_DIM), torch.randn(s.batch, 3, POOLED_DIM)
    options |= {"image_dim": POOLED_DIM, "added_kv_proj_dim": s.width}
    return options, {**inputs, "encoder_hidden_states": text, "encoder_hidden_states_image": image}


def anyflow(s):
    """Each frame has its own timesteps."""
    options, inputs = wan(s)
    timestep = torch.randint(1000, (s.batch, FRAMES))
    latents = inputs["hidden_states"].transpose(1, 2)
    return options, {**inputs, "hidden_states": latents, "timestep": timestep, "r_timestep": timestep // 2}


def helios(s):
    """The video follows 1 + 3 + 9 frames at three resolutions."""
    options, inputs = wan(s)
    rows = s.head_dim // 3 // 2 * 2
    inputs["indices_hidden_states"] = torch.arange(13, 17).expand(s.batch, -1)
    for name, first, frames in (("long", 0, 9), ("mid", 9, 3), ("short", 12, 1)):
        inputs[f"latents_history_{name}"] = s.video(16, frames)
        indices = torch.arange(first, first + frames).expand(s.batch, -1)
        inputs[f"indices_latents_history_{name}"] = indices
    return {**options, "rope_dim": (s.head_dim - 2 * rows, rows, rows), "is_amplify_history": True}, inputs


def cogvideox(s):
    options = {"sample_frames": 13, "max_text_seq_length": s.num_text}
    options |= {"sample_width": s.side, "sample_height": s.side, "use_rotary_positional_embeddings": True}
    return options, {
        **{"hidden_states": s.video(16).transpose(1, 2), "encoder_hidden_states": s.text},
        **{"timestep": s.steps, "image_rotary_emb": s.rotary(s.head_dim)},
    }


def hunyuan_video(s):
    return {**s.double_single, "pooled_projection_dim": POOLED_DIM}, {
        **{"hidden_states": s.video(16), **s.masked, "pooled_projections": s.pooled},
        **{"timestep": s.steps, "guidance": torch.full((s.batch,), 6000.0)},
    }


def framepack(s):
    """The video follows 1, 3 and 9 frames at three resolutions."""
    options, inputs = hunyuan_video(s)
    options |= {"has_image_proj": True, "has_clean_x_embedder": True}
    inputs |= {"image_embeds": torch.randn(s.batch, 3, POOLED_DIM), "indices_latents": torch.arange(13, 17)}
    for name, first, frames in (("history_4x", 0, 9), ("history_2x", 9, 3), ("clean", 12, 1)):
        inputs[f"latents_{name}"] = s.video(16, frames)
        inputs[f"indices_latents_{name}"] = torch.arange(first, first + frames)
    return options, inputs


def kandinsky(s, channels):
    return {"num_text_blocks": 1}, {
        **{"hidden_states": s.video(channels).movedim(1, -1), "encoder_hidden_states": s.text},
        **{"pooled_projections": s.pooled, "timestep": 1000 * s.time},
    }


def ltx(s):
    grid = {"num_frames": FRAMES, "height": s.side // 2, "width": s.side // 2}
    return {"cross_attention_dim": s.width}, {
        **{"hidden_states": s.tokens(128), **s.masked, **grid, "timestep": s.token_steps}
    }


def minimax_h3(s):
    lengths = (s.num_text, 3, 2, s.side**2)
    tags, levels = (
        [value for value, n in zip(values, lengths, strict=True) for _ in range(n)]
        for values in ((1, 2, 0, 0), (0, 1, 0, 2))
    )
    tags, levels = torch.tensor(tags), torch.tensor(levels)
    options = {"freq_dim": 32, "time_embed_hidden_dim": s.width, "time_embed_dim": s.width}
    return {**options, "rope_freq_dim": s.head_dim // 6, "num_refiner_layers": 1}, {
        "hidden_states": torch.randn(s.batch, 2 + s.side**2, 96),
        "audio_hidden_states": torch.randn(s.batch, 3, 32),
        "encoder_hidden_states": s.text,
        "timestep": torch.rand(3),
        **{"timestep_indices": levels, "token_tags": tags},
        "position_ids": torch.rand(len(tags), 3) * 9,
        **{
            f"{name}_indices": (tags == tag).nonzero()[:, 0]
            for tag, name in enumerate(("video", "text", "audio"))
        },
    }


def sound(s):
    return {"audio_attention_head_dim": s.head_dim // 2, "audio_cross_attention_dim": s.width // 2}


def stable_audio(s):
    """Half of a head rotates. Keys and values of the text have half as many heads."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed as rotary

    options = {"num_key_value_attention_heads": s.num_heads // 2, "cross_attention_dim": s.width // 2}
    length, halves = 1 + s.side**2, {"use_real": True, "repeat_interleave_real": False}
    return options, {
        **{"hidden_states": s.tokens(64).transpose(1, 2), **s.condition},
        "global_hidden_states": torch.randn(s.batch, 1, TEXT_DIM),
        **{"attention_mask": s.longer(length - 1), "encoder_attention_mask": s.longer(s.num_text)},
        "rotary_embedding": rotary(s.head_dim // 2, length, **halves),
    }


# Options of each class in addition to the usual ones, and its inputs. A variant has a name after the class.
MODELS: dict[str, Callable[[Sizes], tuple[dict[str, Any], dict[str, Any]]]] = {
    **{name: partial(options_and_inputs, name) for name in WIDTHS},  # as in the benchmark
    "SD3Transformer2DModel, dual": lambda s: plus(  # the image attends also to itself alone
        MODELS["SD3Transformer2DModel"](s), {"dual_attention_layers": (0, 2), "qk_norm": "rms_norm"}, {}
    ),
    "WanTransformer3DModel, image": with_image,
    "AceStepTransformer1DModel": lambda s: (  # the window extends by `side` in both directions
        {"num_key_value_heads": s.num_heads // 2, "sliding_window": s.side, "intermediate_size": 3 * s.width},
        {
            "hidden_states": torch.randn(s.batch, 2 * s.side**2, 64),
            "context_latents": torch.randn(s.batch, 2 * s.side**2, 128),
            **{**s.condition, "timestep_r": s.time},
        },
    ),
    "AllegroTransformer3DModel": allegro,
    "AnyFlowTransformer3DModel": anyflow,
    "BriaTransformer2DModel": lambda s: like_flux(s, 1000.0),
    "BriaFiboTransformer2DModel": lambda s: plus(
        like_flux(s, 1000.0),
        {},
        {
            "text_encoder_layers": [s.text for _ in range(s.depth)],
            "joint_attention_kwargs": {"attention_mask": s.joint_mask[:, None, None]},
        },
    ),
    "BriaFibo2Transformer2DModel": lambda s: (  # an image to edit of two tokens; one block reads the text
        {
            **{"min_num_gist_tokens": 3, "max_num_gist_tokens": 3, "gist_step": 1, "patch_size": 2},
            **{"injection_layer_ids": (s.depth // 2,), "axes_lens": (64, 64, 64)},
        },
        {
            "hidden_states": s.image(32),
            "encoder_hidden_states": torch.stack([s.text, s.text], dim=1),
            "encoder_attention_mask": s.text_mask,
            "timestep": s.time,
            "context_latents": [torch.randn(s.batch, 32, 2, 4)],
        },
    ),
    "ChromaTransformer2DModel": lambda s: plus(
        like_flux(s),
        {"approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 2},
        {"attention_mask": s.joint_mask},
    ),
    "ChronoEditTransformer3DModel": with_image,
    "CogVideoXTransformer3DModel": lambda s: plus(
        cogvideox(s), {"ofs_embed_dim": 512}, {"ofs": torch.full((1,), 2.0)}
    ),
    "CogView3PlusTransformer2DModel": lambda s: plus(  # the model takes no mask of the text
        cogview(s), {"pos_embed_max_size": s.side}, {"original_size": s.pixels}
    ),
    "CogView4Transformer2DModel": lambda s: plus(
        cogview(s),
        {"rope_axes_dim": (256, 256)},
        {"original_size": s.pixels, "attention_mask": s.text_mask},
    ),
    "ConsisIDTransformer3DModel": lambda s: plus(  # every second block is followed by attention to a face
        cogvideox(s),
        {"LFE_depth": 5, "LFE_num_scale": 5, "LFE_output_dim": s.width * 2 // 3, "is_train_face": True},
        {"id_cond": s.pooled, "id_vit_hidden": [torch.randn(s.batch, 3, POOLED_DIM) for _ in range(5)]},
    ),
    # Each frame has its own timestep (Cosmos 2), each block adds learned positions (Cosmos 1).
    "CosmosTransformer3DModel": lambda s: (
        {"in_channels": 17, "controlnet_block_every_n": 2},
        {
            **{"hidden_states": s.video(16), "encoder_hidden_states": s.text, "attention_mask": s.text_mask},
            "timestep": torch.rand(s.batch, 1, FRAMES, 1, 1),
            "condition_mask": torch.ones(s.batch, 1, FRAMES, s.side, s.side),
            "padding_mask": torch.zeros(1, 1, s.side, s.side),
            "fps": 16,
            "block_controlnet_hidden_states": [s.tokens(s.width) for _ in range(s.depth // 2)],
        },
    ),
    "DiTTransformer2DModel": lambda s: (
        {"sample_size": 2 * s.side},
        {"hidden_states": s.image(4), "timestep": s.steps, "class_labels": s.steps},
    ),
    "DreamLiteTransformer2DModel": lambda s: plus(
        transformer_2d(s), {"qk_norm": "rms_norm", "num_kv_heads": s.num_heads // 2}, {}
    ),
    "EasyAnimateTransformer3DModel": lambda s: (  # all blocks have separate parameters for the text
        {"patch_size": 2, "in_channels": 16 + 16 + 17, "out_channels": 16},
        wan(s)[1] | {"control_latents": s.video(16), "inpaint_latents": s.video(17)},
    ),
    "ErnieImageTransformer2DModel": lambda s: (
        {},
        {
            **{"hidden_states": s.image(128, patch_size=1), "timestep": s.steps},
            **{"text_bth": s.text, "text_lens": s.text_mask.sum(dim=1)},
        },
    ),
    "Flux2Transformer2DModel": lambda s: plus(flux_2(s), {}, {"guidance": torch.full((s.batch,), 4.0)}),
    "Flux3Transformer2DModel": lambda s: plus(  # a reference image of three tokens
        flux_2(s),
        {"flow_map": True},
        {
            "target_timestep": s.time,
            "image_cond_hidden_states": torch.randn(s.batch, 3, 128),
            "image_cond_ids": pad(s.positions[:3], (0, 1)) + torch.tensor([10.0, 0, 0, 0]),
        },
    ),
    "GlmImageTransformer2DModel": lambda s: plus(  # one prior token per image token
        cogview(s),
        {"prior_vq_quantizer_codebook_size": 32},
        {
            "prior_token_id": torch.randint(32, (s.batch, s.side**2)),
            "prior_token_drop": torch.zeros(s.batch, s.side**2, dtype=torch.bool),
            "attention_mask": s.text_mask,
        },
    ),
    "HeliosTransformer3DModel": helios,
    "HiDreamImageTransformer2DModel": lambda s: (  # a second text of three tokens
        {
            **{**s.double_single, "patch_size": 2, "in_channels": 16},
            "caption_channels": [TEXT_DIM, TEXT_DIM],
            "axes_dims_rope": (s.head_dim // 2, s.head_dim // 4, s.head_dim // 4),
            **{"llama_layers": list(range(s.depth)), "max_resolution": (4 * s.side, 4 * s.side)},
        },
        {
            **{"hidden_states": s.image(16), "timesteps": s.steps, "pooled_embeds": s.pooled},
            "encoder_hidden_states_t5": s.text,
            "encoder_hidden_states_llama3": torch.randn(s.depth, s.batch, 3, TEXT_DIM),
        },
    ),
    "HunyuanImageTransformer2DModel": lambda s: (  # with a second text
        {
            **{**s.double_single, "rope_axes_dim": (s.head_dim // 2,) * 2, "text_embed_2_dim": TEXT_DIM},
            **{"guidance_embeds": True, "use_meanflow": True},
        },
        {
            **{"hidden_states": s.image(64, patch_size=1), "timestep": 1000 * s.time, **s.masked},
            **{"guidance": 1000 * s.time, "timestep_r": 500 * s.time},
            **{"encoder_hidden_states_2": s.text, "encoder_attention_mask_2": s.text_mask},
        },
    ),
    "HunyuanVideoTransformer3DModel": hunyuan_video,
    "HunyuanVideoTransformer3DModel, token replacement": lambda s: plus(
        hunyuan_video(s), {"image_condition_type": "token_replace"}, {}
    ),
    "HunyuanVideo15Transformer3DModel": lambda s: (  # with a second text and a reference image
        {"text_embed_2_dim": TEXT_DIM, "use_meanflow": True},
        {
            "hidden_states": torch.randn(s.batch, 65, FRAMES, s.side // 2, s.side // 2),
            **{**s.masked, "encoder_hidden_states_2": s.text, "encoder_attention_mask_2": s.text_mask},
            **{"image_embeds": torch.randn(s.batch, 3, POOLED_DIM), "timestep": 1000 * s.time},
            "timestep_r": 500 * s.time,
        },
    ),
    "HunyuanVideoFramepackTransformer3DModel": framepack,
    "Ideogram4Transformer2DModel": ideogram,
    "JoyImageEditTransformer3DModel": joyimage,
    # A reference of one row, of two rows for the last sample; the others are padded.
    "JoyImageEditPlusTransformer3DModel": lambda s: plus(
        joyimage(s),
        {},
        {
            "hidden_states": torch.randn(s.batch, s.side * (s.side + 2), 16, 1, 2, 2),
            "encoder_hidden_states_mask": s.longer(s.num_text).float(),
            "shape_list": [
                [(1, s.side, s.side), *[(1, 1, s.side)] * num_rows] for num_rows in [1] * (s.batch - 1) + [2]
            ],
        },
    ),
    "Kandinsky5Transformer3DModel": lambda s: plus(  # the model takes no mask of the text
        kandinsky(s, channels=4),
        {},
        {
            "visual_rope_pos": tuple(torch.arange(n) for n in (FRAMES, s.side // 2, s.side // 2)),
            "text_rope_pos": torch.arange(s.num_text),
            "scale_factor": (1.0, 2.0, 2.0),
        },
    ),
    # Video: the latent, the latent of the condition, and a mask; and 3 audio tokens, which are never routed.
    "Kandinsky6Transformer3DModel": lambda s: plus(
        kandinsky(s, channels=33),
        dict.fromkeys(("text_token_padding", "ca_rope", "cross_gates", "fix_modulation"), True)
        | {"visual_token_type_num_embeddings": 2},
        {
            "encoder_attention_mask": s.text_mask,
            "visual_token_type_ids": torch.randint(2, (s.batch, FRAMES)),
            "audio_hidden_states": torch.randn(s.batch, 3, 20),
        },
    ),
    "Krea2Transformer2DModel": lambda s: (  # text states of three layers, with padding
        {
            **{"num_key_value_heads": s.num_heads, "num_text_layers": 3},
            **{"text_intermediate_size": 32, "text_num_attention_heads": 2, "text_num_key_value_heads": 2},
        },
        {
            "hidden_states": s.tokens(64),
            "encoder_hidden_states": torch.stack([s.text for _ in range(3)], dim=2),
            "timestep": s.time,
            "position_ids": torch.cat([torch.zeros(s.num_text, 3), s.positions]),
            "encoder_attention_mask": s.text_mask,
        },
    ),
    "LongCatAudioDiTTransformer": lambda s: (
        {},
        {
            **{"hidden_states": s.tokens(64), "latent_cond": s.tokens(64), **s.condition},
            "attention_mask": s.longer(s.side**2),
            "encoder_attention_mask": s.longer(s.num_text),
        },
    ),
    "LongCatImageTransformer2DModel": lambda s: like_flux(s, plane=1.0),
    "LTXVideoTransformer3DModel": lambda s: plus(ltx(s), {}, {"rope_interpolation_scale": (0.5, 32, 32)}),
    "LTXVideoTransformer3DModel, coordinates": lambda s: plus(
        ltx(s), {}, {"video_coords": torch.rand(s.batch, 3, s.side**2)}
    ),
    # Video with one timestep per token and a mask, and 3 audio tokens, which are never routed.
    "LTX2VideoTransformer3DModel": lambda s: plus(
        ltx(s),
        sound(s) | {"rope_type": "split"},
        {
            **{"audio_hidden_states": torch.randn(s.batch, 3, 128), "audio_timestep": s.steps},
            **{"audio_encoder_hidden_states": s.text, "audio_encoder_attention_mask": s.text_mask},
            **{"audio_num_frames": 3, "fps": 12.0, "isolate_modalities": False},
            "video_self_attention_mask": (torch.rand(s.batch, s.side**2, s.side**2) > 0.3).float(),
        },
    ),
    # LTX-2.3: the text is modulated too, and the tokens have coordinates.
    "LTX2VideoTransformer3DModel, 2.3": lambda s: plus(
        MODELS["LTX2VideoTransformer3DModel"](s),
        dict.fromkeys(("cross_attn_mod", "audio_cross_attn_mod", "gated_attn", "perturbed_attn"), True)
        | {"use_keyframes_abs_pos_embedding": True},
        {
            **{"sigma": 1000 * s.time, "audio_sigma": 500 * s.time, "use_cross_timestep": True},
            "video_coords": torch.rand(s.batch, 3, s.side**2, 2),
            "audio_coords": torch.rand(s.batch, 1, 3, 2),
            "video_keyframes_mask": torch.randint(2, (s.batch, s.side**2, 1)),
        },
    ),
    "LuminaNextDiT2DModel": lumina_next,
    "Lumina2Transformer2DModel": lambda s: (  # texts of equal length, with one token of padding
        lumina(s),
        {
            **{"hidden_states": s.image(16), **s.condition},
            "encoder_attention_mask": torch.arange(s.num_text).expand(s.batch, -1) < s.num_text - 1,
        },
    ),
    # Text, three audio tokens and a reference of two, then the video; three noise levels.
    "MiniMaxH3Transformer3DModel": minimax_h3,
    # Half of a head rotates. Each latent has its own condition, which is added before the blocks.
    "MiniMaxMusic3Transformer1DModel": lambda s: (
        {"rotary_dim": s.head_dim // 2, "condition_dim": TEXT_DIM},
        {
            **{"hidden_states": s.tokens(128).transpose(1, 2), "encoder_hidden_states": s.tokens(TEXT_DIM)},
            "timestep": s.time,
        },
    ),
    "MochiTransformer3DModel": lambda s: (
        {"time_embed_dim": 32, "pooled_projection_dim": s.width // 2, "max_sequence_length": s.num_text},
        {"hidden_states": s.image(12).unsqueeze(2), **s.masked, "timestep": 1000 * s.time},
    ),
    "MotifVideoTransformer3DModel": lambda s: (  # with a reference image
        s.double_single
        | {"enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True},
        {
            **{"hidden_states": s.video(33), **s.masked, "timestep": s.steps},
            "image_embeds": torch.randn(s.batch, 3, POOLED_DIM),
        },
    ),
    # The first three blocks and the last one have no experts. Each expert takes all tokens.
    "NucleusMoEImageTransformer2DModel": lambda s: (
        {
            **{"in_channels": 64, "patch_size": 1, "num_experts": 8, "capacity_factors": 8.0},
            "mlp_ratio": max(4.0, 192 / s.width),  # inner layers are multiples of 128
        },
        {
            **{"hidden_states": s.tokens(64), **s.condition, "encoder_hidden_states_mask": s.text_mask},
            "img_shapes": [(1, s.side, s.side)] * s.batch,
        },
    ),
    "OmniGenTransformer2DModel": omnigen,
    "OvisImageTransformer2DModel": like_flux,
    "PRXTransformer2DModel": lambda s: (
        {"axes_dim": [s.head_dim // 2, s.head_dim // 2]},
        {"hidden_states": s.image(16), **s.condition, "attention_mask": s.text_mask},
    ),
    "QwenImageTransformer2DModel": lambda s: plus(
        qwen(s), {"use_additional_t_cond": True}, {"additional_t_cond": torch.arange(s.batch) % 2}
    ),
    "QwenImage21Transformer2DModel": qwen_21,
    "SanaWMLTX2RefinerTransformer3DModel": lambda s: (  # without earlier frames and audio
        ltx(s)[0] | sound(s),
        {
            **{"hidden_states": s.tokens(128), **s.masked, "timestep": s.token_steps},
            "video_rotary_emb": s.rotary(s.width, (1, s.side**2)),
        },
    ),
    # Diffusion forcing: pairs of frames see earlier frames, and each frame has its own timestep.
    "SkyReelsV2Transformer3DModel": lambda s: plus(
        with_image(s),
        {},
        {"timestep": torch.randint(1000, (s.batch, FRAMES)), "enable_diffusion_forcing": True},
    ),
    "SkyReelsV2Transformer3DModel, fps": lambda s: plus(  # diffusion forcing takes it for one sample only
        wan(s), {"inject_sample_info": True}, {"fps": [i % 2 for i in range(s.batch)]}
    ),
    "StableAudioDiTModel": stable_audio,
    "StableAudio3DiTModel": lambda s: (  # each block adds the inpainting condition to the latents
        {"num_memory_tokens": 3},
        {
            **{"hidden_states": s.tokens(256).transpose(1, 2), **s.condition},
            "encoder_attention_mask": s.longer(s.num_text),
            "global_hidden_states": torch.randn(s.batch, TEXT_DIM),
            "local_add_cond": s.tokens(257).transpose(1, 2),
        },
    ),
    "T5FilmDecoder": lambda s: (  # two encodings, shorter for the first sample
        {"targets_length": s.side**2},
        {
            "encodings_and_masks": [
                (torch.randn(s.batch, s.num_text, s.width), s.longer(s.num_text).float()) for _ in range(2)
            ],
            "decoder_input_tokens": s.tokens(128),
            "decoder_noise_time": s.time,
        },
    ),
    "Transformer2DModel": lambda s: plus(transformer_2d(s), {"caption_channels": None}, {}),
    "ZImageTransformer2DModel": lambda s: (  # every second text is 32 tokens longer; the others are padded
        {},
        {
            **{"x": [*s.image(16).unsqueeze(2)], "t": s.time},
            "cap_feats": [torch.randn(s.num_text + 32 * (i % 2), TEXT_DIM) for i in range(s.batch)],
        },
    ),
}


def cast_timesteps(embedder, linear):
    """Embed timesteps in the dtype of the weights: the model supports half and single precision only."""
    embedder.register_forward_pre_hook(lambda module, args: args[0].to(linear.weight.dtype))


def prepare(name, model):
    """Finish a model as its pipeline does, or so that proofs can observe its attention."""
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0
    from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0

    if name == "DreamLiteTransformer2DModel":  # as in the U-Net: the default processor cannot group heads
        for block in model.transformer_blocks:
            block.attn1.set_processor(DreamLiteAttnProcessor2_0())
            block.attn2.set_processor(DreamLiteAttnProcessor2_0())
    elif name == "T5FilmDecoder":  # its own processor, without scaling, hides attention
        for module in model.modules():
            if isinstance(module, Attention):
                module.set_processor(AttnProcessor2_0())
    elif name == "SkyReelsV2Transformer3DModel":
        model.register_to_config(num_frame_per_block=2)
    elif name == "NucleusMoEImageTransformer2DModel":
        for block in model.transformer_blocks:
            for parameter in block.img_mlp.experts.parameters() if block.moe_enabled else ():
                nn.init.normal_(parameter, std=0.1)  # diffusers does not initialize them
    elif name == "CosmosTransformer3DModel":  # learned positions run in single precision only
        model.learnable_pos_embed._apply = lambda *_: model.learnable_pos_embed
    elif name == "Kandinsky5Transformer3DModel":
        cast_timesteps(model.time_embeddings.in_layer, model.time_embeddings.in_layer)
    elif name == "MotifVideoTransformer3DModel":
        embedder = model.time_text_embed.timestep_embedder
        cast_timesteps(embedder, embedder.linear_1)


def built(name, sizes=SMALL):
    """Return a model with random weights in double precision, and inputs."""
    from diffusers import models

    torch.manual_seed(0)
    kind, (options, inputs) = getattr(models, name.partition(",")[0]), MODELS[name](sizes)
    model = kind(**usual(kind, sizes) | options)
    prepare(name, model)
    with torch.no_grad():
        for parameter in model.parameters():  # parameters that start at 0 could hide a mistake
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.double(), tree_map(in_double, inputs)


def in_double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
