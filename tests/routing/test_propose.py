"""Proposed adapters, compared with the adapters of the table."""

import inspect

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

from routing import Adapter, BlockList, Route, attach, prove
from routing.adapters.families import FAMILIES
from routing.adapters.propose import propose_adapter
from tests.routing.models import Sizes, built
from tests.routing.test_proof import MAX_ERROR

FAST = ("FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel")
# All lengths differ: 36 tokens, 7 of text, heads of 48 channels.
SIZES = Sizes(width=96, num_heads=2, depth=6, side=6, batch=2, num_text=7)
# Classes with counts that no shape gives: strides of earlier frames, texts without padding or cut off later,
# padding to a multiple, references inside the image's argument. They are proposed with the table's counts.
COUNTED = (
    "BriaFibo2Transformer2DModel",
    "HeliosTransformer3DModel",
    "HiDreamImageTransformer2DModel",
    "HunyuanVideoFramepackTransformer3DModel",
    "Ideogram4Transformer2DModel",
    "JoyImageEditPlusTransformer3DModel",
    "Lumina2Transformer2DModel",
    "QwenImage21Transformer2DModel",
    "ZImageTransformer2DModel",
)
IMAGES = {"T5FilmDecoder": "decoder_input_tokens", "ZImageTransformer2DModel": "x"}  # default: hidden_states


def slow_but_few(names):
    """Parameters for these classes; all but FAST are slow."""
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in names]


# Modulation that all samples share shows in no shape.
@pytest.mark.parametrize("name", slow_but_few(name for name in FAMILIES if not FAMILIES[name].one_subset))
def test_a_proposal_equals_the_adapter_of_the_table(name):
    model, arguments = built(name, SIZES)
    expected = FAMILIES[name]
    num_suffix_tokens = expected.block_lists[-1].num_suffix_tokens or expected.num_suffix_tokens
    counts = {"num_prefix_tokens": expected.num_prefix_tokens, "num_suffix_tokens": num_suffix_tokens}
    given = counts if name in COUNTED else {}
    proposal = propose_adapter(model, arguments, IMAGES.get(name, "hidden_states"), **given)
    assert proposal.proof.dense == 0 and proposal.proof.routed < MAX_ERROR
    file = dict(given)  # the user adds the counts to the file
    exec(proposal.source, file)
    assert prove(model, file["adapter"], arguments, Route(0.5, 1, -2)).passes
    assert not hasattr(model, "_attached") and model.training
    for proposed, listed in zip(proposal.adapter.block_lists, expected.block_lists, strict=True):
        joint = ["joint"] if expected.num_prefix_tokens(model, arguments) else []  # it says nothing without P
        for key in ("name", "tokens", "output", "sequence_first", *joint):
            assert getattr(proposed, key) == getattr(listed, key)
        assert proposed.by_token.keys() <= listed.by_token.keys()  # some arguments are not given here
        assert set(proposed.shared) <= {*listed.shared, *listed.by_token}
    proposed_counts, expected_counts = (
        (adapter.num_prefix_tokens(model, arguments), adapter.num_suffix_tokens_of(model, arguments))
        for adapter in (proposal.adapter, expected)
    )
    assert proposed_counts == expected_counts
    assert proposal.adapter.whole_between_blocks == expected.whole_between_blocks
    takes_return_dict = "return_dict" in inspect.signature(model.forward).parameters
    assert ("return_dict" in proposal.adapter.accepts) == takes_return_dict


def test_the_source_is_the_adapter_and_routes_the_model():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    proposal = propose_adapter(vit, {"x": torch.randn(2, 3, 64, 64)}, image="x")
    assert '"blocks",\n            tokens="x",\n            joint=True' in proposal.source
    assert "num_prefix_tokens=lambda model, arguments: model.cls_token.shape[-2]" in proposal.source
    assert proposal.adapter.accepts == ("x",)
    lengths = []
    vit.blocks[2].register_forward_pre_hook(lambda block, args: lengths.append(args[0].shape[1]))
    attach(vit.train(), [Route(0.5, 2, -4)], adapter=proposal.adapter)
    vit(torch.randn(2, 3, 64, 64)).sum().backward()
    assert lengths == [1 + 8]


class Convolving(nn.Module):
    """A block that convolves over its tokens as an image."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, hidden_states):
        N, T, D = hidden_states.shape
        x = F.scaled_dot_product_attention(*(hidden_states[:, None],) * 3)[:, 0]
        image = x.transpose(1, 2).reshape(N, D, 6, T // 6)
        return hidden_states + self.convolution(image).flatten(2).transpose(1, 2)


class Stack(nn.Module):
    def __init__(self, block, num_blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, hidden_states):
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


class Attending(nn.Module):
    """Attention to all tokens, and a bias on the last ones."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, hidden_states, num_last=0):
        q, k, v = (x[:, None] for x in self.qkv(hidden_states).chunk(3, dim=-1))
        hidden_states = hidden_states + F.scaled_dot_product_attention(q, k, v)[:, 0]
        num_first = hidden_states.shape[1] - num_last
        return torch.cat([hidden_states[:, :num_first], hidden_states[:, num_first:] + 1], dim=1)


class Padded(Stack):
    def forward(self, hidden_states):
        return super().forward(F.pad(hidden_states, (0, 0, 0, 5)))


class Backwards(Stack):
    def forward(self, hidden_states):
        for block in reversed(list(self.blocks)):
            hidden_states = block(hidden_states)
        return hidden_states


class Named(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, hidden_states):
        return super().forward(hidden_states)


class Encoder(nn.Module):
    """Torch's own encoder."""

    def __init__(self, batch_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=batch_first)
        self.batch_first = batch_first

    def forward(self, tokens, padding=None, mask=None):
        x = tokens if self.batch_first else tokens.transpose(0, 1)
        return self.encoder(x, mask=mask, src_key_padding_mask=padding)


PADDING = torch.arange(9) == torch.tensor([[8], [9]])  # the last token of the first sample


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", [{}, {"padding": PADDING}])
def test_torch_s_own_layers_are_proposed_and_proved(batch_first, masks):
    arguments = {"tokens": torch.randn(2, 9, 16).double(), **masks}
    model = Encoder(batch_first).double()
    proposal = propose_adapter(model, arguments, image="tokens")
    assert proposal.proof.dense == 0 and proposal.proof.routed < MAX_ERROR
    (spec,) = proposal.adapter.block_lists
    assert (spec.name, spec.tokens, spec.sequence_first) == ("encoder.layers", "src", not batch_first)


@pytest.mark.parametrize("masks", [{}, {"padding": PADDING}])
def test_torch_s_own_causal_layers_are_proved(masks):
    """The mask (L, L) becomes one per sample and head."""
    causal = nn.Transformer.generate_square_subsequent_mask(9).double()
    arguments = {"tokens": torch.randn(2, 9, 16).double(), "mask": causal, **masks}

    def per_head(mask, kept):
        per_sample = kept.gather(kept.gather(mask.expand(2, -1, -1), 1), 2)
        return per_sample.repeat_interleave(2, dim=0)  # (N heads, K, K)

    by_token = {"src_mask": per_head, "src_key_padding_mask": lambda mask, kept: kept.gather(mask)}
    spec = BlockList("encoder.layers", tokens="src", by_token=by_token, shared=("is_causal",))
    proof = prove(Encoder(True).double(), Adapter((spec,), tuple(arguments)), arguments, Route(0.5, 1, -2))
    assert proof.dense == 0 and proof.routed < MAX_ERROR


@pytest.mark.parametrize(
    ("model", "samples", "prefix", "message"),
    [
        (lambda: Stack(Convolving), 2, None, "the error is .* of the change that routes make"),
        (lambda: Stack(Named), 2, None, "Stack has no list of blocks that run in order and whose attention"),
        (lambda: Backwards(Convolving), 2, None, "Backwards has no list of blocks that run in order and wh"),
        (lambda: Stack(Named), 1, None, "hidden_states must have at least two samples"),
        (lambda: Padded(Attending), 2, None, "hidden_states of blocks has 5 suffix tokens .*: pass num_suff"),
        (lambda: Stack(Attending), 2, lambda *_: 4, "no sequence has the 4 prefix tokens that"),
    ],
)
def test_an_error_says_what_was_observed_if_no_adapter_passes(model, samples, prefix, message):
    with pytest.raises(ValueError, match=message):
        propose_adapter(model(), {"hidden_states": torch.randn(samples, 48, 8)}, num_prefix_tokens=prefix)


def test_a_proof_needs_attention_that_it_can_observe():
    adapter = Adapter(BlockList("blocks"), ("hidden_states",))
    with pytest.raises(ValueError, match="no attention to the tokens was observed"):
        prove(Stack(Named), adapter, {"hidden_states": torch.randn(2, 16, 8)}, Route(0.5, 0, -1))


@pytest.mark.slow
def test_a_text_whose_length_completes_the_number_of_channels_is_not_gathered():
    model, arguments = built("WanTransformer3DModel", SIZES._replace(num_text=60))  # 36 + 60 = 96
    source = propose_adapter(model, arguments).source
    assert 'shared=("encoder_hidden_states", "temb",)' in source


def test_a_count_that_no_shape_gives_comes_from_the_caller():
    arguments = {"hidden_states": torch.randn(2, 48, 8)}
    proposal = propose_adapter(Padded(Attending), arguments, num_suffix_tokens=lambda model, arguments: 5)
    assert "num_suffix_tokens=lambda model, arguments: num_suffix_tokens(model, arguments)" in proposal.source
    assert proposal.adapter.num_suffix_tokens(None, arguments) == 5


class Joint(nn.Module):
    """Runs one block, then three, on a sequence of timestep, image and text."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList([Attending()])
        self.blocks = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, images, texts, timestep):
        timestep = timestep[:, None, None].expand(-1, 1, 8)
        x = torch.cat([timestep, torch.stack(images), torch.stack(texts)], dim=1)
        for blocks in (self.first, self.blocks):
            for block in blocks:
                x = block(x, num_last=x.shape[1] - 1)
        return x


def test_tokens_around_the_image_are_counted_by_arguments():
    images, texts = [*torch.randn(2, 36, 8)], [*torch.randn(2, 5, 8)]
    arguments = {"images": images, "texts": texts, "timestep": torch.rand(2)}
    source = propose_adapter(Joint(), arguments, "images").source
    assert "num_prefix_tokens=lambda model, arguments: 1,\n" in source
    assert 'num_suffix_tokens=lambda model, arguments: max(map(len, arguments["texts"])),\n' in source
    gathered = '"num_last": lambda value, kept: kept.ids.shape[1]'
    assert source.index('"first"') < source.index('"blocks"') and source.count(gathered) == 2


class Tabled(Attending):
    """Attention with a table (T, D) of positions that all samples share."""

    def forward(self, hidden_states, positions):
        return super().forward(hidden_states * positions.cos()[None])


class Positioned(Stack):
    def forward(self, hidden_states):
        positions = torch.arange(hidden_states.shape[1])[:, None] / torch.arange(1, 9)
        for block in self.blocks:
            hidden_states = block(hidden_states, positions)
        return hidden_states


def test_all_samples_keep_the_same_tokens_if_they_share_a_table():
    proposal = propose_adapter(Positioned(Tabled), {"hidden_states": torch.randn(2, 48, 8)})
    assert '"positions": lambda value, kept: kept.gather(value[None])[0]' in proposal.source
    assert proposal.adapter.one_subset


def test_a_model_that_cannot_run_is_not_changed():
    model = Stack(Attending)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        propose_adapter(model, {"hidden_states": torch.randn(2, 36, 9)})
    assert all(module.training and not module._forward_hooks for module in model.modules())
