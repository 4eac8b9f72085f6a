"""Decoder of spectrograms: attention to its frames, then to encodings; positions are added before."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import Built, Family, Sizes, checked_by


def t5_film(sizes: Sizes) -> Built:
    """Two encodings, of which the first sample has less."""
    from diffusers.models import T5FilmDecoder
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0

    options = {"targets_length": sizes.side**2, "d_model": sizes.width, "num_layers": sizes.depth}
    options |= {"num_heads": sizes.num_heads, "d_kv": sizes.head_dim, "d_ff": 4 * sizes.width}
    mask = torch.ones(sizes.batch, sizes.num_text)
    mask[0, -2:] = 0
    encoding = (sizes.batch, sizes.num_text, sizes.width)
    model = T5FilmDecoder(**options)
    for module in model.modules():
        if isinstance(
            module, Attention
        ):  # its own processor, which scales no scores, hides attention from proofs
            module.set_processor(AttnProcessor2_0())
    return model, {
        "encodings_and_masks": [(torch.randn(encoding), mask), (torch.randn(encoding), mask)],
        "decoder_input_tokens": sizes.tokens(128),
        "decoder_noise_time": torch.rand(sizes.batch),
    }


FAMILIES = {
    "T5FilmDecoder": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "decoders",
                    output=0,
                    # (N, 1, T, L): a row of keys for each query.
                    by_token={"encoder_attention_mask": lambda mask, kept: kept.gather(mask, -2)},
                    shared=("conditioning_emb", "encoder_hidden_states"),
                ),
            ),
            accepts=("encodings_and_masks", "decoder_input_tokens", "decoder_noise_time"),
            check=checked_by(("AttnProcessor", "AttnProcessor2_0")),
        ),
        t5_film,
    ),
}
