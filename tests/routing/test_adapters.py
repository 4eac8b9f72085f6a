"""Routes in models of other people, through adapters of a few lines."""

import copy

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

from routing import Adapter, BlockList, Route, Routing, attach, detach
from tests.routing.families import drawn, seeded

WINDOW = Route(0.5, 1, -2)
VIT = Adapter(
    [BlockList("blocks", tokens="x", joint=True)],
    accepts=["x"],
    num_prefix_tokens=lambda vit, arguments: vit.num_prefix_tokens,
)


def vit():
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=5, num_heads=2, num_classes=7
    ).train()


def test_a_vit_of_timm_routes_its_patches_and_keeps_its_class_token():
    model, x = vit(), torch.randn(3, 3, 32, 32)
    plain = copy.deepcopy(model)
    routes = attach(model, [WINDOW], adapter=VIT)
    assert torch.equal(model(x, routing=Routing(0)), plain(x))
    output, ids = model(x, generator=seeded()), drawn(routes)[0]
    for n in range(3):
        tokens = plain._pos_embed(plain.patch_embed(x[n : n + 1]))
        tokens = plain.norm_pre(plain.patch_drop(tokens))  # (1, 1 + 16, D)
        tokens, keep = plain.blocks[0](tokens), torch.cat([torch.zeros(1, dtype=torch.long), 1 + ids[n]])
        routed = tokens[:, keep]
        for block in plain.blocks[1:4]:
            routed = block(routed)
        tokens = tokens.clone()
        tokens[:, keep] = routed
        expected = plain.forward_head(plain.norm(plain.blocks[4](tokens)))
        torch.testing.assert_close(output[n : n + 1], expected, rtol=1e-4, atol=1e-5)
    detach(model)
    assert torch.equal(model(x), plain(x))


def test_a_model_that_does_not_run_its_list_of_blocks_is_refused():
    model = vit()
    attach(model, [WINDOW], adapter=VIT)
    model.set_grad_checkpointing(True)  # timm then runs over the list's children
    with pytest.raises(
        ValueError,
        match="the route of layers 1 to 3 was not taken: VisionTransformer does not run its blocks",
    ):
        model(torch.randn(1, 3, 32, 32))


def test_an_argument_that_no_adapter_names_is_refused():
    model = vit()
    attach(model, [WINDOW], adapter=VIT)
    with pytest.raises(ValueError, match="attn_mask of VisionTransformer does not go together with routing"):
        model(torch.randn(1, 3, 32, 32), attn_mask=torch.ones(17, 17, dtype=torch.bool))
    detach(model)
    attach(model, [WINDOW], adapter=Adapter(VIT.block_lists, ["x", "attn_mask"], VIT.num_prefix_tokens))
    with pytest.raises(ValueError, match="attn_mask of Block does not go together with routing"):
        model(torch.randn(1, 3, 32, 32), attn_mask=torch.ones(17, 17, dtype=torch.bool))


class DecoderLayer(nn.Module):
    """As in a language model: causal attention, rotary positions, a mask of what each token may see."""

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
        angles = torch.arange(T)[None, :, None] / 10 ** torch.linspace(0, 2, 16)  # (1, T, d)
        causal, eye = torch.ones(T, T, dtype=torch.bool).tril(), torch.eye(T, dtype=torch.bool)
        causal = causal & attention_mask[:, None, None].bool() | eye  # (N, 1, T, T)
        for layer in self.layers[:5]:  # by a slice, as such models do
            x = layer(x, attention_mask=causal, position_embeddings=(angles.cos(), angles.sin()))
        return x


DECODER = Adapter(
    [
        BlockList(
            "layers",
            by_token={
                "attention_mask": lambda mask, kept: kept.gather(kept.gather(mask, -1), -2),
                "position_embeddings": lambda tables, kept: tuple(kept.gather(table) for table in tables),
            },
        )
    ],
    accepts=["input_ids", "attention_mask"],
)


def test_a_language_model_keeps_positions_and_masks_with_the_tokens():
    torch.manual_seed(0)
    model, input_ids = Decoder().train(), torch.randint(11, (3, 16))
    seen = torch.ones(3, 16, dtype=torch.long)
    seen[1, :6], seen[2, 4:7] = 0, 0
    plain = copy.deepcopy(model)
    routes = attach(model, [WINDOW], adapter=DECODER)
    assert torch.equal(model(input_ids, seen, routing=Routing(0)), plain(input_ids, seen))
    output, ids = model(input_ids, seen, generator=seeded()), drawn(routes)[0]
    angles = torch.arange(16)[None, :, None] / 10 ** torch.linspace(0, 2, 16)
    for n in range(3):
        mask = (torch.ones(16, 16).tril() * seen[n] + torch.eye(16)).bool()
        x, keep = plain.embed(input_ids[n : n + 1]), ids[n]
        x = plain.layers[0](x, mask, (angles.cos(), angles.sin()))
        routed = x[:, keep]
        for layer in plain.layers[1:4]:
            routed = layer(routed, mask[keep][:, keep], (angles[:, keep].cos(), angles[:, keep].sin()))
        x = x.clone()
        x[:, keep] = routed
        expected = plain.layers[4](x, mask, (angles.cos(), angles.sin()))
        torch.testing.assert_close(output[n : n + 1], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError,
        match=r"a tensor of shape \(3, 1, 17, 17\) cannot be gathered by token along dimension -1",
    ):
        kept_mask = torch.ones(3, 1, 17, 17, dtype=torch.bool)
        attach(layer_model := Masked(kept_mask), [Route(0.5, 0, 0)], adapter=DECODER)
        layer_model.train()(input_ids, seen)


class Masked(Decoder):
    """Gives its layers a mask that is too large."""

    def __init__(self, mask):
        super().__init__(depth=1)
        self.mask = mask

    def forward(self, input_ids, attention_mask):
        tables = torch.ones(1, input_ids.shape[1], 16)
        for layer in self.layers:
            x = layer(self.embed(input_ids), attention_mask=self.mask, position_embeddings=(tables, tables))
        return x


class Twice(Decoder):
    """Runs its layers two times."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask) + super().forward(input_ids, attention_mask)


class Taken(Decoder):
    """Has an argument of a name that routing takes."""

    def forward(self, input_ids, generator=None):
        return self.embed(input_ids)


def test_blocks_that_run_twice_and_a_generator_argument_are_refused():
    input_ids, seen = torch.randint(11, (2, 16)), torch.ones(2, 16)
    attach(twice := Twice(), [WINDOW], adapter=DECODER)
    with pytest.raises(ValueError, match="layer 1, a DecoderLayer, runs twice in one forward"):
        twice(input_ids, seen)
    with pytest.raises(ValueError, match="forward of Taken has an argument generator"):
        attach(Taken(), [WINDOW], adapter=DECODER)
