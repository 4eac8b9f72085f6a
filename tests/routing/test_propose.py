"""Adapters that are found by watching a model run, beside those that are written by hand."""

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

from routing import Adapter, BlockList, Route, attach, prove
from routing.families import FAMILIES, Sizes, routable
from routing.families.__main__ import MAX_ERROR, built
from routing.families.parts import TablePerSample
from routing.propose import propose_adapter
from tests.routing.test_proof import by_speed

# No length is that of another: 36 tokens, 7 of text, heads of 48 channels.
SIZES = Sizes(width=96, num_heads=2, depth=12, side=6, batch=2, num_text=7)


# What is seen of those whose adapters were written by hand alone.
SEEN = {
    "ConsisIDTransformer3DModel": "a PerceiverCrossAttention, runs before",  # between the blocks
    "HeliosTransformer3DModel": "which no argument explains",  # earlier frames
    "JoyImageEditPlusTransformer3DModel": "The size of tensor",  # references and padding behind the image
    "LongCatAudioDiTTransformer": "The size of tensor",  # two rotary tables in a tuple of another kind
    "Lumina2Transformer2DModel": "which no argument explains",  # the text without its padding
    "MiniMaxMusic3Transformer1DModel": "which no argument explains",  # the timestep
    "MotifVideoTransformer3DModel": "The size of tensor",  # a mask that blocks leave behind
    "OmniGenTransformer2DModel": "which no argument explains",  # words, not states, and the timestep
    "StableAudio3DiTModel": "which no argument explains",  # the global states and the timestep
    "T5FilmDecoder": "must be a tensor among the arguments",  # it has another name
    "ZImageTransformer2DModel": "must be a tensor among the arguments",  # a list of images
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN)
def test_what_was_seen_is_told_of_a_class_whose_adapter_is_not_found(name):
    with pytest.raises(ValueError, match=SEEN[name]):
        propose_adapter(*built(FAMILIES[name], SIZES))


@pytest.mark.parametrize("name", by_speed(name for name in routable() if name not in SEEN))
def test_a_proposal_is_what_was_written_by_hand(name):
    model, arguments = built(FAMILIES[name], SIZES)
    proposal, by_hand = propose_adapter(model, arguments), FAMILIES[name].adapter
    assert proposal.proof.dense == 0 and proposal.proof.routed < MAX_ERROR
    scope = {"Adapter": Adapter, "BlockList": BlockList, "TablePerSample": TablePerSample}
    assert prove(model, eval(proposal.source, scope), arguments, Route(0.5, 1, -2)) == proposal.proof
    assert not hasattr(model, "_attached") and model.training
    for found, written in zip(proposal.adapter.block_lists, by_hand.block_lists, strict=True):
        for key in ("name", "tokens", "joint", "output"):
            assert getattr(found, key) == getattr(written, key)
        assert found.by_token.keys() <= written.by_token.keys()  # others were not given here
        assert set(found.shared) <= {*written.shared, *written.by_token}
    for count in ("num_prefix_tokens", "num_suffix_tokens"):
        if proposal.adapter.num_prefix_tokens(model, arguments):
            found, written = (getattr(each, count)(model, arguments) for each in (proposal.adapter, by_hand))
            assert found == written


def test_the_source_is_the_adapter_and_routes_the_model():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    proposal = propose_adapter(vit, {"x": torch.randn(2, 3, 64, 64)}, image="x")
    assert '"blocks",\n            tokens="x",\n            joint=True' in proposal.source
    assert "num_prefix_tokens=lambda model, arguments: model.cls_token.shape[1]" in proposal.source
    lengths = []
    vit.blocks[2].register_forward_pre_hook(lambda block, args: lengths.append(args[0].shape[1]))
    attach(vit.train(), [Route(0.5, 2, -4)], adapter=proposal.adapter)
    vit(torch.randn(2, 3, 64, 64)).sum().backward()
    assert lengths == [1 + 8]


class Convolving(nn.Module):
    """A block that sees its tokens as an image."""

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


@pytest.mark.parametrize(
    ("model", "samples", "saw"),
    [
        (lambda: Stack(Convolving), 2, "the routes differ by .* of what they change"),
        (lambda: Stack(Named), 2, "no attention to the tokens was seen"),
        (lambda: Backwards(Named), 2, "Backwards has no list of blocks, run one after another, with"),
        (lambda: Stack(Named), 1, "hidden_states has one sample: give two, which differ"),
    ],
)
def test_what_was_seen_is_told_where_there_is_no_adapter(model, samples, saw):
    with pytest.raises(ValueError, match=saw):
        propose_adapter(model(), {"hidden_states": torch.randn(samples, 36, 8)})
