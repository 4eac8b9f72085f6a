"""Scenes: every caption and every attribute is read back exactly."""

from dataclasses import replace

import numpy as np
import pytest

from data import scenes
from data.scenes import draw_scene
from evaluation import SceneAccuracy, SceneReader
from evaluation.detectors.scenes import things_of
from evaluation.features import FeatureSet
from evaluation.statistics import AllFeatures
from runtime.scenes import COLOURS, KINDS, SHAPES, Thing, is_shown, parse, read_scene, render


def image_of(things, side=32):
    return render(things, side).transpose(1, 2, 0)


def named(things):
    return sorted((thing.colour, thing.shape) for thing in things)


@pytest.mark.parametrize(("side", "count"), [(32, 1400), (64, 280), (128, 70)])
def test_attributes_are_read_back_exactly(side, count):
    for index in range(count):
        caption, things = draw_scene(0, index)
        assert parse(str(caption)) == caption
        assert caption.kind == KINDS[index % 7]
        found = read_scene(image_of(things, side))
        assert named(found) == named(things) and is_shown(caption, found), (str(caption), things, found)
        for thing in things:
            near = min(abs(t.x - thing.x) + abs(t.y - thing.y) for t in found if t.shape == thing.shape)
            assert near < 1 / 32


def test_a_scene_with_one_change_is_not_shown():
    """One attribute of one object at a time, for every kind."""
    for index in range(70):
        caption, things = draw_scene(1, index)
        first, rest = things[0], things[1:]
        shape = next(s for s in SHAPES if s not in {t.shape for t in things})
        changed = [replace(first, shape=shape), *rest], rest
        if caption.groups[0].colour:
            colour = next(c for c in COLOURS if c not in {t.colour for t in things})
            changed += ([replace(first, colour=colour), *rest],)
        if caption.relation not in (None, "and"):
            changed += ([replace(t, x=1 - t.x, y=1 - t.y) for t in things],)
        for wrong in changed:
            assert not is_shown(caption, read_scene(image_of(wrong, 64))), (str(caption), wrong)


def test_more_objects_or_swapped_colours_are_not_shown():
    square, circle = Thing("red", "square", 0.2, 0.5, 0.13), Thing("blue", "circle", 0.7, 0.5, 0.13)
    caption = parse("a red square and a blue circle")
    assert is_shown(caption, read_scene(image_of([square, circle])))
    swapped = [replace(square, colour="blue"), replace(circle, colour="red")]
    assert not is_shown(caption, read_scene(image_of(swapped)))
    assert not is_shown(caption, read_scene(image_of([square, circle, replace(circle, y=0.85)])))
    other = Thing("green", "diamond", 0.45, 0.85, 0.13)
    assert not is_shown(caption, read_scene(image_of([square, circle, other])))


def test_objects_that_are_no_shapes_are_unclear():
    half = np.zeros((64, 64, 3), np.uint8)
    half[:, 30:34] = (255, 0, 0)
    assert named(read_scene(half)) == [("red", "?")]
    half[10:30, 10:26] = 255
    assert ("?", "square") in named(read_scene(half))
    assert read_scene(np.zeros((32, 32, 3), np.uint8)) == []


NO_CAPTIONS = """
red square
two red square
a red squares
a square left of a square
a red square and a square
a square and a circle and a diamond
five squares
a purple square
a square beside a circle
"""


@pytest.mark.parametrize("text", NO_CAPTIONS.split("\n")[1:])
def test_other_captions_are_refused(text):
    with pytest.raises(ValueError, match="must be like 'two red squares left of a blue circle'"):
        parse(text)


def test_scenes_can_be_described_with_capitals_spaces_and_punctuation():
    assert str(parse("Two Blue circles!")) == "two blue circles"
    assert str(parse("  Two red  squares LEFT of a blue circle")) == "two red squares left of a blue circle"
    assert parse("two red squares left of a blue circle").kind == "combined"
    assert parse("two red squares").kind == "combined" and parse("two squares").kind == "counting"


def test_a_larger_set_starts_with_a_smaller_one_and_resolutions_share_scenes(tmp_path):
    def opened(name, **keys):
        options = {"input_size": 32, "in_channels": 3, "num_classes": 7, "num_images": 70, "seed": 3}
        return scenes(str(tmp_path / name), **options | keys)

    small, large, high = opened("a"), opened("b", num_images=140), opened("c", input_size=64)
    ids = np.arange(70)
    for first, second in zip(small.read(ids), large.read(ids), strict=True):
        assert np.array_equal(first, second)
    assert np.array_equal(small.text, high.text) and high.stored.shape == (70, 3, 64, 64)
    texts = small.captions(ids)
    assert texts.tolist() == [str(draw_scene(3, i)[0]) for i in ids]
    assert small.manifest.text["prompts"] == texts[small.held_out_ids].tolist()
    assert {parse(text).kind for text in texts} == {*KINDS}
    with pytest.raises(ValueError, match="must be a multiple of 8 from 32 to 128"):
        opened("d", input_size=30)
    with pytest.raises(ValueError, match=r"9 tokens .a vocabulary of 24 words. .*, but .* has captions of 8"):
        opened("a", text={"num_tokens": 9, "vocab_size": 24, "num_features": None})


def test_the_accuracy_of_each_kind_is_counted():
    drawn = [draw_scene(0, i) for i in range(21)]
    images = np.stack([image_of(things) for _, things in drawn])
    images[7] = images[14] = 0  # two of three images of the first kind
    features = SceneReader()(images)
    assert {name: values.shape[1] for name, values in features.items()} == SceneReader.num_features
    labels = np.array([str(caption) for caption, _ in drawn])
    things = AllFeatures(36).update(features["things"], 0)
    scores = SceneAccuracy()(FeatureSet(), FeatureSet({(AllFeatures, "things"): things}, labels=labels))
    expected = {f"accuracy_{kind}": 1.0 for kind in KINDS}
    assert scores == expected | {"accuracy": (6 + 1 / 3) / 7, "accuracy_one_object": 1 / 3}
    assert named(things_of(features["things"][20])) == named(drawn[20][1])
    cell = features["cells"][0].reshape(8, 8, 3)[3, 4]
    np.testing.assert_allclose(cell, images[0][12:16, 16:20].mean((0, 1)) / 255)
