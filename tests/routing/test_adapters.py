"""Routes in models of other people, through adapters of a few lines."""

import copy
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

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


def test_an_adapter_that_would_route_the_prefix_is_refused():
    with pytest.raises(ValueError, match="joint=True needs num_prefix_tokens"):
        Adapter(VIT.block_lists, ["x"])


@pytest.mark.parametrize("names", [{"accepts": "x"}, {"accepts": ["x"], "residuals": "x"}])
def test_one_name_that_is_not_in_a_sequence_is_refused(names):
    with pytest.raises(ValueError, match=r"='x' must be a sequence of names: \('x',\)"):
        Adapter(VIT.block_lists, num_prefix_tokens=VIT.num_prefix_tokens, **names)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_routing_that_is_a_ratio_is_refused(ratio):
    model = vit()
    attach(model, [WINDOW], adapter=VIT)
    with pytest.raises(ValueError, match=f"routing={ratio} must be a routing.Routing, or None"):
        model(torch.randn(1, 3, 32, 32), routing=ratio)


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


class SequenceFirst(DecoderLayer):
    """Takes samples in the second dimension."""

    def forward(self, x, position_embeddings):
        return super().forward(x.transpose(0, 1), None, position_embeddings).transpose(0, 1)


def tables(positions):
    angles = positions[None, :, None] / 10 ** torch.linspace(0, 2, 16)  # (1, T, d)
    return angles.cos(), angles.sin()


class Packed(nn.Module):
    """Layers of the image alone, then of the image with text behind it, of which a part is for one layer.

    Args:
        cuts: that part is for one layer, and cut off at a place that is counted once.
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
        for layer, own in zip(self.layers, further, strict=True):
            if self.cuts:
                x = torch.cat([x[:num_cut], own.transpose(0, 1)])
            x = self.run(layer, x, tables(positions))
        return x[:num_tokens].transpose(0, 1)


POSITIONS = {"position_embeddings": lambda tables, kept: tuple(kept.gather(table) for table in tables)}


def packed_adapter(cuts):
    def num_text_tokens(model, arguments):
        return arguments["text"].shape[1] + arguments["further"].shape[2]

    last = {"tokens": "x", "sequence_first": True, "num_suffix_tokens": num_text_tokens}
    lists = [BlockList("image_layers", by_token=POSITIONS), BlockList("layers", by_token=POSITIONS, **last)]
    return Adapter(lists, accepts=["image", "text", "further"], whole_between_blocks=cuts)


def packed_oracle(model, image, text, further, windows):
    """The layers one after another on the tokens of one sample; windows: {first layer: (last layer, ids)}."""
    T, (last, ids), whole = image.shape[1], (-1, torch.arange(image.shape[1])), None
    behind, others = torch.arange(T, T + text.shape[1] + further.shape[2]), torch.cat([text, further[0]], 1)
    for i, layer in enumerate([*model.image_layers, *model.layers]):
        if i in windows:
            (last, ids), whole = windows[i], image
            image = image[:, ids]
        if i < 3:
            image = layer(image, None, tables(ids))
        else:
            if model.cuts:
                others = torch.cat([others[:, : text.shape[1]], further[i - 3]], dim=1)
            both = layer(torch.cat([image, others], 1).transpose(0, 1), tables(torch.cat([ids, behind])))
            image, others = both.transpose(0, 1).split([len(ids), len(behind)], dim=1)
        if i == last:
            whole = whole.clone()
            whole[:, ids], ids = image, torch.arange(T)
            image = whole
    return image


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("routes", [[Route(0.5, 1, 3), Route(0.25, 4, 4)], [Route(0.5, 3, 5)]])
def test_text_joins_in_a_later_list_with_samples_second(cuts, routes):
    torch.manual_seed(0)
    model, image = Packed(cuts).train(), torch.randn(3, 16, 32)
    text, further = torch.randn(3, 4, 32), torch.randn(3, 3, 2, 32)
    plain, arguments = copy.deepcopy(model), (image, text, further)
    routes = attach(model, routes, adapter=packed_adapter(cuts))
    assert torch.equal(model(*arguments, routing=Routing(0)), plain(*arguments))
    ids = drawn(routes)
    output = model(*arguments, generator=seeded())
    for n in range(3):
        at = slice(n, n + 1)
        windows = {r.start_layer_idx: (r.end_layer_idx, x[n]) for r, x in zip(routes, ids, strict=True)}
        expected = packed_oracle(plain, image[at], text[at], further[:, at], windows)
        torch.testing.assert_close(output[at], expected, rtol=1e-4, atol=1e-5)
    output.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.checkpointing = True
    model(*arguments, generator=seeded()).square().mean().backward()
    pairs = zip(gradients, (parameter.grad for parameter in model.parameters()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_mask_is_compared_with_tokens_of_samples_second():
    adapter = replace(packed_adapter(False), block_lists=packed_adapter(False).block_lists[1:])
    attach(model := Packed(False).train(), [Route(0.5, 0, 1)], adapter=adapter)
    arguments = (torch.randn(3, 16, 32), torch.randn(3, 4, 32), torch.randn(3, 3, 2, 32))
    model(*arguments, routing=Routing(0, force_keep=torch.ones(3, 16, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"force_keep=torch.bool \(3, 22\) must be torch.bool \(3, 16\)"):
        model(*arguments, routing=Routing(0, force_keep=torch.ones(3, 22, dtype=torch.bool)))


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
