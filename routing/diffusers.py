"""Adapters for the transformers of diffusers: FLUX (Kontext too), Stable Diffusion 3, PixArt, AuraFlow, Wan.

Written against the signatures of diffusers, which is not imported here. Layers are counted through all lists
of a model: FLUX's and AuraFlow's double blocks first, then the single ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from routing.adapter import Adapter, Arguments, BlockList, Kept, plain_forward


def adapter_of(model: nn.Module) -> Adapter:
    """Return the adapter that a class has, or the one for a model of diffusers.

    Raises:
        ValueError: the class is not known.
    """
    if isinstance(adapter := getattr(type(model), "routing_adapter", None), Adapter):
        return adapter
    for kind in type(model).__mro__:
        known = kind.__module__.startswith("diffusers.") and kind.__name__ in ADAPTERS
        if known and plain_forward(type(model)) is kind.forward:  # a class that shards it is derived from it
            return ADAPTERS[kind.__name__]
    raise ValueError(
        f"routing knows no {type(model).__name__}: pass one of diffusers' {', '.join(ADAPTERS)}, not its "
        "wrapper (peft: get_base_model()), or write an adapter (attach(model, routes, adapter=...))"
    )


class _TablePerSample:
    """A rotary table (N, L, d) in place of one (L, d) that diffusers indexes before it multiplies."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    def __getitem__(self, key: tuple) -> torch.Tensor:
        if key != (None, slice(None), None, slice(None)):  # (1, L, 1, d) was asked for
            raise ValueError(f"a rotary table that is indexed by {key} does not go together with routing")
        return self.table.unsqueeze(2)  # (N, L, 1, d)


def _flux_rotary(tables: tuple[torch.Tensor, torch.Tensor], kept: Kept) -> tuple[_TablePerSample, ...]:
    return tuple(_TablePerSample(kept.gather_joint(table.unsqueeze(0))) for table in tables)


def _joint_mask(attention_kwargs: dict[str, Any], kept: Kept) -> dict[str, Any]:
    mask = attention_kwargs.get("attention_mask")
    if mask is None:
        return attention_kwargs
    return {**attention_kwargs, "attention_mask": _gather_mask(mask, kept.gather_joint)}


def _gather_mask(mask: torch.Tensor, gather: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Gather the keys, and the queries if they differ: (N or 1, L) or (N or 1, ..., 1 or L, L)."""
    mask = gather(mask, -1)
    return gather(mask, -2) if mask.ndim > 2 and mask.shape[-2] > 1 else mask


def _num_reference_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count Kontext's reference tokens, which come last: the first coordinate of their positions is not 0."""
    img_ids = arguments["img_ids"]
    is_reference = (img_ids[0] if img_ids.ndim == 3 else img_ids)[:, 0] != 0  # (T + S,)
    num_reference_tokens = int(is_reference.sum())  # SYNC: shapes depend on it
    if num_reference_tokens == len(is_reference):
        raise ValueError("img_ids: there must be tokens of the image itself (first coordinate 0)")
    if num_reference_tokens and not is_reference[-num_reference_tokens:].all():
        raise ValueError("img_ids: the tokens of reference images (first coordinate not 0) must come last")
    return num_reference_tokens


def _num_auraflow_prefix_tokens(model: nn.Module, arguments: Arguments) -> int:
    return model.register_tokens.shape[1] + arguments["encoder_hidden_states"].shape[1]


def _check(
    processors: Sequence[str], attention_kwargs: str, accepted: Sequence[str]
) -> Callable[[nn.Module, Arguments], None]:
    """Return a check of how a model attends: by these processors, given these keys of `attention_kwargs`."""

    def check(model: nn.Module, arguments: Arguments) -> None:
        refused = f"of {type(model).__name__} does not go together with routing"
        for key in set(arguments.get(attention_kwargs) or ()) - set(accepted):
            raise ValueError(f"{attention_kwargs}.{key} {refused}, which accepts {', '.join(accepted)}")
        for processor in model.attn_processors.values():
            if (name := type(processor).__name__) not in processors:
                raise ValueError(f"{name} {refused}, which accepts {', '.join(processors)}")
        if getattr(model, "is_cache_enabled", False):
            raise ValueError(f"the cache {refused}: model.disable_cache()")
        if getattr(model, "_parallel_config", None) is not None:
            raise ValueError(f"context or tensor parallelism {refused}")
        if (kind := getattr(model.config, "attention_type", "default")) != "default":
            raise ValueError(f"attention_type={kind} {refused}")

    return check


INPUTS = ("hidden_states", "encoder_hidden_states", "timestep", "return_dict")  # of every model below
FLUX_BLOCK = {
    "output": 1,
    "by_token": {"image_rotary_emb": _flux_rotary, "joint_attention_kwargs": _joint_mask},
    "shared": ("encoder_hidden_states", "temb"),
}
FLUX_RESIDUALS = ("controlnet_block_samples", "controlnet_single_block_samples")
JOINT_BLOCK = {"output": 1, "shared": ("encoder_hidden_states", "temb", "joint_attention_kwargs")}
PIXART_BLOCK = {
    "by_token": {"attention_mask": lambda mask, kept: _gather_mask(mask, kept.gather)},
    "shared": ("encoder_hidden_states", "encoder_attention_mask", "timestep", "cross_attention_kwargs"),
}
WAN_BLOCK = {
    "by_token": {
        "rotary_emb": lambda tables, kept: tuple(kept.gather(table) for table in tables),  # (1, T, 1, d)
        # (N, T, 6, D) where each token has its own timestep, else (N, 6, D).
        "temb": lambda temb, kept: kept.gather(temb) if temb.ndim == 4 else temb,
    },
    "shared": ("encoder_hidden_states",),
}

ADAPTERS = {
    "FluxTransformer2DModel": Adapter(
        block_lists=(
            BlockList("transformer_blocks", **FLUX_BLOCK),
            BlockList("single_transformer_blocks", **FLUX_BLOCK),
        ),
        accepts=(
            *(*INPUTS, "pooled_projections", "img_ids", "txt_ids", "guidance", "joint_attention_kwargs"),
            *(*FLUX_RESIDUALS, "controlnet_blocks_repeat"),
        ),
        num_prefix_tokens=lambda model, arguments: arguments["encoder_hidden_states"].shape[1],
        num_suffix_tokens=_num_reference_tokens,
        residuals=FLUX_RESIDUALS,
        check=_check(("FluxAttnProcessor",), "joint_attention_kwargs", ("scale", "attention_mask")),
    ),
    "SD3Transformer2DModel": Adapter(
        block_lists=(BlockList("transformer_blocks", **JOINT_BLOCK),),
        accepts=(*INPUTS, "pooled_projections", "joint_attention_kwargs", "block_controlnet_hidden_states"),
        residuals=("block_controlnet_hidden_states",),
        check=_check(
            ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"), "joint_attention_kwargs", ("scale",)
        ),
    ),
    "PixArtTransformer2DModel": Adapter(
        block_lists=(BlockList("transformer_blocks", **PIXART_BLOCK),),
        accepts=(
            *(*INPUTS, "added_cond_kwargs", "cross_attention_kwargs"),
            *("attention_mask", "encoder_attention_mask"),
        ),
        check=_check(
            ("AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0"),
            "cross_attention_kwargs",
            ("scale",),
        ),
    ),
    "AuraFlowTransformer2DModel": Adapter(
        block_lists=(
            BlockList(
                "joint_transformer_blocks",
                output=1,
                shared=("encoder_hidden_states", "temb", "attention_kwargs"),
            ),
            BlockList("single_transformer_blocks", joint=True, shared=("temb", "attention_kwargs")),
        ),
        accepts=(*INPUTS, "attention_kwargs"),
        num_prefix_tokens=_num_auraflow_prefix_tokens,
        check=_check(
            ("AuraFlowAttnProcessor2_0", "FusedAuraFlowAttnProcessor2_0"), "attention_kwargs", ("scale",)
        ),
    ),
    "WanTransformer3DModel": Adapter(
        block_lists=(BlockList("blocks", **WAN_BLOCK),),
        accepts=(*INPUTS, "encoder_hidden_states_image", "attention_kwargs"),
        check=_check(("WanAttnProcessor",), "attention_kwargs", ("scale",)),
    ),
}
