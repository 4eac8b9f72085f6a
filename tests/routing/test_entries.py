"""Small models of every class prove its row, and fail if any entry of the row is wrong."""

import inspect
from dataclasses import replace

import pytest

from routing import detach
from routing.adapters.adapter import TokenSelection, _zero
from routing.adapters.families import ACCEPTED, FAMILIES, SHARED, table
from routing.adapters.families.parts import PROCESSORS
from tests.routing.models import MODELS, built
from tests.routing.test_proof import NUM_TOKENS, OTHERS, WINDOWS, check
from tests.routing.test_propose import slow_but_few

# Entries whose values are equal for all image tokens: the values of other tokens are as good.
EQUAL = """
BriaFiboTransformer2DModel transformer_blocks.joint_attention_kwargs
BriaFiboTransformer2DModel single_transformer_blocks.joint_attention_kwargs
ErnieImageTransformer2DModel layers.temb
Flux3Transformer2DModel mode_blocks.image.temb_mod
Ideogram4Transformer2DModel layers.attention_mask
Krea2Transformer2DModel transformer_blocks.attention_mask
LuminaNextDiT2DModel layers.attention_mask
NucleusMoEImageTransformer2DModel transformer_blocks.attention_kwargs
OmniGenTransformer2DModel layers.attention_mask
QwenImage21Transformer2DModel transformer_blocks.key_valid
QwenImage21Transformer2DModel transformer_blocks.target_token_mask
HeliosTransformer3DModel blocks.temb
HeliosTransformer3DModel blocks.original_context_length
MiniMaxH3Transformer3DModel transformer_blocks.adaln_indices
T5FilmDecoder decoders.encoder_attention_mask
""".splitlines()
MASKED = """ChromaTransformer2DModel HunyuanImageTransformer2DModel HunyuanVideoTransformer3DModel
HunyuanVideoFramepackTransformer3DModel MotifVideoTransformer3DModel"""
LISTS = ("transformer_blocks", "single_transformer_blocks")
EQUAL += [f"{name} {blocks}.attention_mask" for name in MASKED.split() for blocks in LISTS]


def inputs_of(name):
    """Yield every small model of a class, with its arguments and T."""
    plain = ((variant, lambda _, arguments: arguments, NUM_TOKENS.get(variant, 16)) for variant in MODELS)
    for variant, changed, num_tokens in (*plain, *OTHERS):
        if variant.partition(",")[0] == name:
            model, arguments = built(variant)
            yield model, changed(model, arguments), num_tokens


def is_right(adapter, model, arguments, num_tokens):
    """Prove a window over all lists of blocks, and one that ends in the first list."""
    try:
        check(model, adapter, arguments, num_tokens, (WINDOWS[0], WINDOWS[2]))
    except Exception:  # whatever a wrong shape leads to
        if hasattr(model, "_attached"):
            detach(model)
        return False
    return True


def others(kept):
    """Select the tokens at the mirrored positions."""
    ids = (kept.num_tokens - 1 - kept.ids).flip(1)
    return TokenSelection(ids, kept.num_tokens, kept.num_prefix_tokens)


def wrong_rows(row):
    """Yield the name of an entry and rows in which it is wrong."""
    has_prefix = row.num_prefix_tokens is not _zero
    for i, spec in enumerate(row.block_lists):

        def with_list(i=i, spec=spec, **changed):
            lists = [*row.block_lists[:i], replace(spec, **changed), *row.block_lists[i + 1 :]]
            return replace(row, block_lists=lists)

        for key, gather in spec.by_token.items():
            ways = (lambda x, kept: x, lambda x, kept, gather=gather: gather(x, others(kept)))
            yield f"{spec.name}.{key}", [with_list(by_token={**spec.by_token, key: way}) for way in ways]
        output = {None: 0, 0: 1, 1: 0}[spec.output]
        yield f"{spec.name}.output", [with_list(output=output)]
        if spec.joint or has_prefix:
            yield f"{spec.name}.joint", [with_list(joint=not spec.joint)]
        if spec.num_suffix_tokens:
            yield f"{spec.name}.num_suffix_tokens", [with_list(num_suffix_tokens=None)]
        if spec.sequence_first:
            yield f"{spec.name}.sequence_first", [with_list(sequence_first=False)]
    for name in ("num_prefix_tokens", "num_suffix_tokens"):
        count = getattr(row, name)
        if count is not _zero:
            more = lambda model, arguments, count=count: count(model, arguments) + 1  # noqa: E731
            yield name, [replace(row, **{name: wrong}) for wrong in (more, lambda model, arguments: 0)]
    for name in ("whole_between_blocks", "one_subset"):
        if getattr(row, name):
            yield name, [replace(row, **{name: False})]
    if row.residuals:
        yield "residuals", [replace(row, residuals=())]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_passes_the_proof(name):
    for model, arguments, num_tokens in inputs_of(name):
        check(model, FAMILIES[name], arguments, num_tokens)


@pytest.mark.parametrize("name", slow_but_few(FAMILIES))
def test_a_wrong_entry_of_a_row_fails_the_proof(name):
    variants = [*inputs_of(name)]
    for entry, rows in wrong_rows(FAMILIES[name]):
        unseen = [all(is_right(row, *variant) for variant in variants) for row in rows]
        assert unseen in ([False], [False, f"{name} {entry}" in EQUAL]), entry


def test_every_name_is_used_by_a_small_model():
    given, of_blocks, processors = {}, set(), set()  # arguments of models, arguments of blocks

    def note(block, args, kwargs):
        arguments = inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments
        of_blocks.update(key for key, value in arguments.items() if value is not None)

    for name, adapter in FAMILIES.items():
        for model, arguments, _ in inputs_of(name):
            given.setdefault(name, set()).update(arguments)
            processors |= {type(m.processor).__name__ for m in model.modules() if hasattr(m, "processor")}
            for spec in adapter.block_lists:
                for block in spec.blocks(model):
                    block.register_forward_pre_hook(note, with_kwargs=True)
            model(**arguments)
    for name, row in table.ROWS.items():
        assert {*row.accepts, *row.residuals} <= given[name], name
    assert set(ACCEPTED.split()) - set().union(*given.values()) == {"return_dict"}  # it changes no number
    assert set(SHARED.split()) - of_blocks == set()
    fused = {name for name in PROCESSORS.split() if name.startswith("Fused")}  # by fuse_qkv_projections
    assert set(PROCESSORS.split()) - processors == fused
