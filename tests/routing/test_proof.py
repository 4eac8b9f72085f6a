"""Adapters of all families against networks that hide what bypasses, and wrong ones that must be seen."""

from dataclasses import replace
from importlib.metadata import version

import pytest

from routing import Route, attach
from routing.families import FAMILIES, Sizes, __main__, routable
from routing.families.__main__ import MAX_ERROR, built
from routing.proof import prove
from tests.programs import ROOT

FAST = ("FluxTransformer2DModel", "SD3Transformer2DModel", "AuraFlowTransformer2DModel")
FAST += ("WanTransformer3DModel", "HunyuanVideoTransformer3DModel", "QwenImageTransformer2DModel")
WINDOWS = [Route(0.5, 1, -2), Route(0.75, 0, -1), Route(0.25, 2, 2)]


def by_speed(names):
    """Return parameters of which a few are of the fast tests."""
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", by_speed(routable()))
def test_routes_are_those_of_a_network_that_hides_what_bypasses(name):
    model, arguments = built(FAMILIES[name], Sizes())
    before = [*model.parameters()]
    for window in WINDOWS:
        proof = prove(model, FAMILIES[name].adapter, arguments, window)
        assert proof.dense == 0 and proof.routed < MAX_ERROR
    assert type(model).forward is type(built(FAMILIES[name], Sizes())[0]).forward and model.training
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def without(adapter, key, gather):
    """Return an adapter that gathers an argument in another way."""
    lists = [replace(spec, by_token={**spec.by_token, key: gather}) for spec in adapter.block_lists]
    return replace(adapter, block_lists=lists)


@pytest.mark.parametrize(
    ("name", "key", "gather"),
    [
        ("WanTransformer3DModel", "rotary_emb", lambda t, kept: tuple(x[:, : kept.ids.shape[1]] for x in t)),
        ("WanTransformer3DModel", "rotary_emb", lambda t, kept: tuple(kept.gather(x)[:1] for x in t)),
        ("FluxTransformer2DModel", "image_rotary_emb", lambda t, kept: tuple(kept_first(x, kept) for x in t)),
    ],
    ids=["first positions", "positions of the first sample", "joint"],
)
def test_a_wrong_adapter_is_seen(name, key, gather):
    model, arguments = built(FAMILIES[name], Sizes())
    assert prove(model, without(FAMILIES[name].adapter, key, gather), arguments, WINDOWS[0]).routed > 0.01


def kept_first(table, kept):
    return table[: kept.num_prefix_tokens + kept.ids.shape[1]]


def test_the_table_says_what_is_known_of_every_class(monkeypatch):
    names = [*__main__.classes()]
    assert set(FAMILIES) <= set(names), "the class of another version"
    monkeypatch.delitem(FAMILIES, "T5FilmDecoder")
    found = [__main__.tried(name) for name in ("SD3Transformer2DModel", "T5FilmDecoder")]
    assert found == [("passes", "`transformer_blocks`"), ("not known", "")]


def test_what_fails_is_told(monkeypatch):
    family = FAMILIES["SD3Transformer2DModel"]
    wrong = replace(family, adapter=replace(family.adapter, block_lists=()))
    monkeypatch.setitem(FAMILIES, "SD3Transformer2DModel", wrong)
    text, is_right = __main__.table(["SD3Transformer2DModel"])
    assert not is_right and "| `SD3Transformer2DModel` | fails | ValueError" in text


def test_a_class_that_cannot_be_routed_says_why(monkeypatch):
    model, _ = built(FAMILIES["SD3Transformer2DModel"], Sizes())
    refused = replace(FAMILIES["SD3Transformer2DModel"], adapter=None, refused="it does not want to")
    monkeypatch.setitem(FAMILIES, "SD3Transformer2DModel", refused)
    with pytest.raises(ValueError, match=r"^SD3Transformer2DModel cannot be routed: it does not want to$"):
        attach(model, WINDOWS[:1])
    assert __main__.tried("SD3Transformer2DModel") == ("refused", "it does not want to")


@pytest.mark.slow
def test_the_page_has_the_table_of_the_installed_version():
    text, is_right = __main__.table([*__main__.classes()])
    assert is_right
    page = (ROOT / "routing/families/README.md").read_text()
    assert f"diffusers {version('diffusers')}" in page and page.endswith(text + "\n")
