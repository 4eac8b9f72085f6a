"""The families of diffusers that are timed: what is counted and what is recorded."""

from functools import partial

import pytest
import torch

from benchmarks import families
from benchmarks.families import Size
from tests.routing.models import Sizes, build

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "T5FilmDecoder", "ZImageTransformer2DModel"])
def test_a_routed_step_saves_the_flops_of_its_window(name):
    """Also of classes that return something else than an image."""
    sizes, size = Sizes(depth=12), Size(32, 2, side=4, batch=2)
    (row,) = families.measure(partial(build, name, sizes), size, repeats=1, device=CPU)
    # 7 of 12 blocks take half of the image's tokens: their products save at most half, attention at most
    # three quarters.
    assert 1 < row["predicted_speedup"] < 12 / (12 - 7 * 0.75)
    assert row["dense_sec"] / row["routed_sec"] == pytest.approx(row["speedup"])


@pytest.mark.parametrize("name", families.WIDTHS)
def test_the_published_configurations_are_those_of_the_small_models(name):
    size, sizes = Size(256, 2, side=8, batch=2), Sizes(256, 2, families.DEPTH, 8, 2, families.NUM_TEXT)
    model, inputs = families.published(name, size)
    small, of_small = build(name, sizes)
    assert dict(model.config) == dict(small.config) and inputs.keys() == of_small.keys()
    shapes = [{k: x.shape for k, x in each.items() if torch.is_tensor(x)} for each in (inputs, of_small)]
    assert shapes[0] == shapes[1]
