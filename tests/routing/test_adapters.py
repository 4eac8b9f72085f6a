"""Routes in other people's models, with short adapters."""

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from routing import Adapter, BlockList, Route, TokenSelection, attach, detach
from tests.routing.test_proof import check

WINDOW = Route(0.5, 1, -2)
VIT = Adapter(
    BlockList("blocks", tokens="x", joint=True),
    accepts=["x"],
    num_prefix_tokens=lambda vit, arguments: vit.num_prefix_tokens,
)


def vit():
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=5, num_heads=2, num_classes=7
    ).train()


def test_a_vit_of_timm_routes_its_patches_and_keeps_its_class_token():
    check(vit().double(), VIT, {"x": torch.randn(3, 3, 32, 32).double()}, 16, [WINDOW], bound=1e-9)


def test_a_model_that_does_not_run_its_list_of_blocks_is_refused():
    model = vit()
    attach(model, [WINDOW], adapter=VIT)
    model.set_grad_checkpointing(True)  # timm then runs the children of the list
    with pytest.raises(ValueError, match="route of layers 1 to 3 was not applied: VisionTransformer does n"):
        model(torch.randn(1, 3, 32, 32))


def test_an_adapter_that_would_route_the_prefix_is_refused():
    with pytest.raises(ValueError, match="joint=True needs num_prefix_tokens"):
        Adapter(VIT.block_lists, ["x"])


def test_an_argument_that_no_adapter_names_is_refused():
    model = vit()
    attach(model, [WINDOW], adapter=VIT)
    with pytest.raises(ValueError, match="attn_mask of VisionTransformer is not supported with routing"):
        model(torch.randn(1, 3, 32, 32), attn_mask=torch.ones(17, 17, dtype=torch.bool))
    detach(model)
    attach(model, [WINDOW], adapter=Adapter(VIT.block_lists, ["x", "attn_mask"], VIT.num_prefix_tokens))
    with pytest.raises(ValueError, match="attn_mask of Block is not supported with routing"):
        model(torch.randn(1, 3, 32, 32), attn_mask=torch.ones(17, 17, dtype=torch.bool))


class DecoderLayer(nn.Module):
    """A layer of a language model: causal attention, rotary positions, an attention mask."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.norm1, self.norm2 = num_heads, nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj, self.mlp = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None):
        N, T, D = hidden_states.shape
        qkv = self.qkv(self.norm1(hidden_states)).view(N, T, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (N, heads, T, d)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)  # (N or 1, 1, T, d)
        q, k = (x * cos + torch.cat([-x[..., 1::2], x[..., ::2]], -1) * sin for x in (q, k))
        x = F.scaled_dot_product_attention(q, k, v, attention_mask).transpose(1, 2).reshape(N, T, D)
        hidden_states = hidden_states + self.proj(x)
        return hidden_states + F.silu(self.mlp(self.norm2(hidden_states)))


class Decoder(nn.Module):
    def __init__(self, depth=5):
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.layers = nn.ModuleList(DecoderLayer(32, 2) for _ in range(depth))

    def forward(self, input_ids, attention_mask):
        x, T = self.embed(input_ids), input_ids.shape[1]
        causal, eye = torch.ones(T, T, dtype=torch.bool).tril(), torch.eye(T, dtype=torch.bool)
        causal = causal & attention_mask[:, None, None].bool() | eye  # (N, 1, T, T)
        for layer in self.layers[:5]:  # a slice, as in such models
            x = layer(x, attention_mask=causal, position_embeddings=tables(torch.arange(T)))
        return x


POSITIONS = {"position_embeddings": lambda tables, kept: tuple(kept.gather(table) for table in tables)}
BY_TOKEN = POSITIONS | {"attention_mask": lambda mask, kept: kept.gather(kept.gather(mask, -1), -2)}
DECODER = Adapter(BlockList("layers", by_token=BY_TOKEN), accepts=["input_ids", "attention_mask"])


def test_a_language_model_keeps_positions_and_masks_with_the_tokens():
    torch.manual_seed(0)
    input_ids, seen = torch.randint(11, (3, 16)), torch.ones(3, 16, dtype=torch.long)
    seen[1, :6], seen[2, 4:7] = 0, 0
    arguments = {"input_ids": input_ids, "attention_mask": seen}
    check(Decoder().double(), DECODER, arguments, 16, [WINDOW], bound=1e-9)
    with pytest.raises(ValueError, match=r"shape \(3, 1, 17, 17\) cannot be gathered .* along dimension -1"):
        TokenSelection(torch.zeros(3, 8, dtype=torch.int64), 16, 0).gather(torch.ones(3, 1, 17, 17), -1)


class SequenceFirst(DecoderLayer):
    """Takes tokens as (T, N, D)."""

    def forward(self, x, position_embeddings):
        return super().forward(x.transpose(0, 1), None, position_embeddings).transpose(0, 1)


def tables(positions):
    angles = positions[None, :, None] / 10 ** torch.linspace(0, 2, 16)  # (1, T, d)
    return angles.cos(), angles.sin()


class Packed(nn.Module):
    """Layers for the image alone, then for the image with text after it. A part of the text differs by layer.

    Args:
        cuts: True to replace this part before each layer, at a position that is computed once.
    """

    def __init__(self, cuts):
        super().__init__()
        self.cuts, self.checkpointing = cuts, False
        self.image_layers = nn.ModuleList(DecoderLayer(32, 2) for _ in range(3))
        self.layers = nn.ModuleList(SequenceFirst(32, 2) for _ in range(3))

    def run(self, layer, x, *others):
        return checkpoint(layer, x, *others, use_reentrant=False) if self.checkpointing else layer(x, *others)

    def forward(self, image, text, further):  # (N, T, D), (N, Q, D), (3, N, R, D)
        positions = torch.arange(image.shape[1] + text.shape[1] + further.shape[2])
        x = image
        for layer in self.image_layers:
            x = self.run(layer, x, None, tables(positions[: image.shape[1]]))
        x = torch.cat([x, text, further[0]], dim=1).transpose(0, 1)
        num_tokens, num_cut = image.shape[1], image.shape[1] + text.shape[1]
        for layer, layer_text in zip(self.layers, further, strict=True):
            if self.cuts:
                x = torch.cat([x[:num_cut], layer_text.transpose(0, 1)])
            x = self.run(layer, x, tables(positions))
        return x[:num_tokens].transpose(0, 1)


def packed_adapter(cuts):
    def num_text_tokens(model, arguments):
        return arguments["text"].shape[1] + arguments["further"].shape[2]

    last = {"tokens": "x", "sequence_first": True, "num_suffix_tokens": num_text_tokens}
    lists = [BlockList("image_layers", by_token=POSITIONS), BlockList("layers", by_token=POSITIONS, **last)]
    return Adapter(lists, accepts=["image", "text", "further"], whole_between_blocks=cuts)


@pytest.mark.parametrize("cuts", [True, False])
def test_text_joins_in_a_later_list_with_samples_second(cuts):
    torch.manual_seed(0)
    model, (N, T) = Packed(cuts).train(), (3, 16)
    tokens = torch.randn(N, T, 32), torch.randn(N, 4, 32), torch.randn(3, N, 2, 32)
    arguments = dict(zip(("image", "text", "further"), (x.double() for x in tokens), strict=True))
    windows = [Route(0.5, 1, 3), Route(0.25, 4, 4), Route(0.5, 3, 5)]
    check(model.double(), packed_adapter(cuts), arguments, T, windows, bound=1e-9)
    attach(model, [Route(0.5, 1, 3), Route(0.25, 4, 4)], adapter=packed_adapter(cuts))
    gradients = []
    for model.checkpointing in (False, True):
        model.zero_grad(set_to_none=True)
        model(**arguments, generator=torch.Generator().manual_seed(0)).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


class Twice(Decoder):
    """Runs its layers twice."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask) + super().forward(input_ids, attention_mask)


def test_blocks_that_run_twice_and_a_generator_argument_are_refused():
    input_ids, seen = torch.randint(11, (2, 16)), torch.ones(2, 16)
    attach(twice := Twice(), [WINDOW], adapter=DECODER)
    with pytest.raises(ValueError, match="layer 1, a DecoderLayer, runs twice"):
        twice(input_ids, seen)
    taken = type("Taken", (Decoder,), {"forward": lambda self, input_ids, generator=None: None})
    with pytest.raises(ValueError, match="forward of Taken has an argument generator"):
        attach(taken(), [WINDOW], adapter=DECODER)
