"""Functions that count tokens for a single class, too long for a row of the table."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from routing.adapters.adapter import Arguments
from routing.adapters.families.parts import Count

GIST = ("min_num_gist_tokens", "max_num_gist_tokens", "gist_step", "gist_min_text_len", "gist_max_text_len")
IDEOGRAM_IMAGE = 2  # code for image tokens
# Z-Image: the default patch size, as its argument is not accepted; image and text are padded to multiples.
Z_PATCH_SIZE, Z_MULTIPLE = 2, 32


def fibo_2_gists(model: Any, arguments: Arguments) -> list[int]:
    """Count the gist tokens, which summarize the text, of each sample."""
    from diffusers.models.transformers.transformer_bria_fibo2 import compute_gist_count

    text, mask = arguments["encoder_hidden_states"], arguments.get("encoder_attention_mask")
    # SYNC: the model does the same
    lengths = [text.shape[2]] * text.shape[0] if mask is None else mask.sum(dim=1).tolist()
    return compute_gist_count(lengths, *(model.config[key] for key in GIST))


def fibo_2_prefix(model: Any, arguments: Arguments) -> int:
    """Count the gist tokens before the image: 0 if their number differs, since padded ones come last."""
    counts = fibo_2_gists(model, arguments)
    return counts[0] if len(set(counts)) == 1 else 0


def fibo_2_suffix(model: Any, arguments: Arguments) -> int:
    """Count the tokens of images to edit, and gist tokens that come last."""
    counts, patch_size = fibo_2_gists(model, arguments), model.config.patch_size
    images = arguments.get("context_latents") or ()
    num_context_tokens = sum(math.prod(size // patch_size for size in x.shape[2:4]) for x in images)
    return num_context_tokens + (max(counts) if len(set(counts)) > 1 else 0)


def hidream_padding(model: Any, arguments: Arguments) -> int:
    """Count the padding after the image. Square images have none, others are padded to the maximum."""
    x = arguments["hidden_states"]
    if x.ndim == 4:  # (N, C, height, width)
        height, width = (size // model.config.patch_size for size in x.shape[-2:])
        return 0 if height == width else model.max_seq - height * width
    lengths = {int(height) * int(width) for height, width in arguments["img_sizes"]}  # x is (N, T + S, C)
    if len(lengths) > 1:
        raise ValueError(f"img_sizes: images of a batch must have equal token counts, not {sorted(lengths)}")
    return x.shape[1] - lengths.pop()


def hidream_others(model: Any, arguments: Arguments) -> int:
    """Count the padding, the T5 text, and two Llama texts: one for all blocks, one for each block."""
    num_t5 = arguments["encoder_hidden_states_t5"].shape[-2]
    num_llama = arguments["encoder_hidden_states_llama3"][0].shape[-2]
    return hidream_padding(model, arguments) + num_t5 + 2 * num_llama


def history(names: Sequence[str], patch_size: Sequence[int] | None = None) -> Count:
    """Count the tokens of earlier frames, given as `latents_NAME` (N, C, frames, height, width).

    Args:
        names: three names. Along each axis a token covers one patch in the first, two in the second, four in
            the third.
        patch_size: (frames, height, width); None: the model's.
    """

    def count(model: Any, arguments: Arguments) -> int:
        total = 0
        for name, stride in zip(names, (1, 2, 4), strict=True):
            latents = arguments.get(f"latents_{name}")
            if latents is not None and arguments.get(f"indices_latents_{name}") is not None:
                patches = zip(latents.shape[2:], patch_size or model.config.patch_size, strict=True)
                total += math.prod(math.ceil(size / (stride * patch)) for size, patch in patches)
        return total

    return count


def hunyuan_first_frame(model: Any, arguments: Arguments) -> int:
    """Count the tokens of the first frame if it is given (token replacement)."""
    if model.config.image_condition_type != "token_replace":
        return 0
    return math.prod(size // model.config.patch_size for size in arguments["hidden_states"].shape[-2:])


def ideogram_prefix(model: Any, arguments: Arguments) -> int:
    """Count the tokens before the image, which must come last, at the same position in all samples."""
    is_image = arguments["indicator"] == IDEOGRAM_IMAGE  # (N, P + T)
    num_image_tokens = int(is_image[0].sum())  # SYNC: shapes depend on it
    first = is_image.shape[1] - num_image_tokens
    if not num_image_tokens or is_image[:, :first].any() or not is_image[:, first:].all():
        raise ValueError("indicator: image tokens must come last, in equal number in all samples")
    return first


def joyimage_references(model: Any, arguments: Arguments) -> int:
    """Count references and padding. They come after the image, whose shape is the first of each sample."""
    lengths = {math.prod(first) for first, *_ in arguments["shape_list"]}
    if len(lengths) != 1:
        raise ValueError(f"shape_list: images of a batch must have equal token counts, not {sorted(lengths)}")
    return arguments["hidden_states"].shape[1] - lengths.pop()


def ltx_2_references(model: Any, arguments: Arguments) -> int:
    """Count the tokens of keyframes and references after the video; 0 if its size is not given."""
    sizes = [arguments[name] for name in ("num_frames", "height", "width") if arguments.get(name)]
    return arguments["hidden_states"].shape[1] - math.prod(sizes) if len(sizes) == 3 else 0


def lumina_2_prefix(model: Any, arguments: Arguments) -> int:
    """Count the text tokens without padding, which the model removes before its blocks."""
    lengths = arguments["encoder_attention_mask"].sum(dim=1).tolist()  # SYNC: the model does the same
    if len(set(lengths)) > 1:
        raise ValueError(
            f"encoder_attention_mask: texts of {lengths} tokens put the images of a batch at different "
            "positions, but routing needs texts of equal length"
        )
    return int(lengths[0])


def minimax_h3_prefix(model: Any, arguments: Arguments) -> int:
    """Count the tokens before the video to generate: the last tokens, all of one timestep."""
    steps = arguments["timestep_indices"]  # (P + T,)
    is_video = torch.zeros_like(steps).index_fill(0, arguments["video_indices"], 1)
    is_target = is_video * (steps == steps[-1])
    num_target_tokens = int(is_target.flip(0).cumprod(0).sum())  # SYNC: shapes depend on it
    if not num_target_tokens:
        raise ValueError("video_indices: the video to generate must come last")
    return len(steps) - num_target_tokens


def qwen_references(model: Any, arguments: Arguments) -> int:
    """Count the tokens of reference images; for layered models, of the last entry, the source image."""
    shapes = arguments["img_shapes"][0]  # of all samples, as in the model
    others = shapes[1:] if isinstance(shapes, list) else []
    return sum(map(math.prod, others[-1:] if model.config.use_layer3d_rope else others))


def qwen_21_prefix(model: Any, arguments: Arguments) -> int:
    """Count the tokens of text and reference images, which come before the image."""
    num_text_tokens = int((~arguments["img_mask"][0]).sum())  # SYNC: the model does the same
    num_target_tokens = math.prod(arguments["img_shapes"][0][-1])
    return num_text_tokens + arguments["hidden_states"].shape[1] - num_target_tokens


def z_image_suffix(model: Any, arguments: Arguments) -> int:
    """Count the padding of the image and the padded longest text. All images must have the same size."""
    images, texts = arguments["x"], arguments["cap_feats"]
    if any(not isinstance(image, torch.Tensor) or image.shape != images[0].shape for image in images):
        raise ValueError("x: routing needs one image per sample, all of the same size")
    _, frames, height, width = images[0].shape
    num_tokens = frames * (height // Z_PATCH_SIZE) * (width // Z_PATCH_SIZE)
    return _pad(num_tokens) - num_tokens + max(_pad(len(text)) for text in texts)


def _pad(num_tokens: int) -> int:
    return -(-num_tokens // Z_MULTIPLE) * Z_MULTIPLE


def ace_step_backend(model: Any, arguments: Arguments) -> Any:
    """Return the attention backend. A backend applies windows of attention by position in the sequence."""
    backends = (layer.self_attn.processor._attention_backend for layer in model.layers)
    return next((backend for backend in backends if backend is not None), None)
