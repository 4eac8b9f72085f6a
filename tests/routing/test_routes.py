import re

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from routing import Route, Routing, from_simpletuner, resolve_routes
from tests.runs import ROOT


def test_negative_indices_count_from_the_end():
    assert resolve_routes([Route(0.5, 2, -4)], depth=12) == (Route(0.5, 2, 8),)
    assert resolve_routes([Route(0.5, 2, -4)], depth=28) == (Route(0.5, 2, 24),)
    assert resolve_routes([Route(0.5, -2, -1)], depth=8) == (Route(0.5, 6, 7),)


def test_routes_come_back_in_the_order_of_the_layers_and_may_touch():
    first, second = Route(0.5, 0, 3), Route(0.3, 4, 7)
    assert resolve_routes([second, first], depth=8) == (first, second)


@pytest.mark.parametrize(
    ("routes", "depth", "message"),
    [
        ([Route(1.0, 2, 4)], 8, r"model\.routes\.0\.selection_ratio=1\.0 must be in \[0, 1\)"),
        ([Route(-0.1, 2, 4)], 8, r"model\.routes\.0\.selection_ratio=-0\.1"),
        ([Route(float("nan"), 2, 4)], 8, r"model\.routes\.0\.selection_ratio=nan"),
        ([Route(0.5, 2, 4), Route(0.5, 5, 8)], 8, r"model\.routes\.1\.end_layer_idx=8 must be in \[-8, 7\]"),
        ([Route(0.5, -9, 4)], 8, r"model\.routes\.0\.start_layer_idx=-9"),
        ([Route(0.5, 5, 4)], 8, r"routes\.0\.start_layer_idx=5 .* must not come after end_layer_idx=4"),
        ([Route(0.5, 2, -4)], 4, r"model\.routes\.0\.start_layer_idx=2 .* end_layer_idx=-4 \(layer 0\)"),
        ([Route(0.5, 4, 6), Route(0.5, 2, 4)], 8, r"model\.routes\.1 .* and model\.routes\.0 .* overlap"),
        ([Route(0.5, 1, 6), Route(0.5, 3, -4)], 8, r"model\.routes\.0 .* and model\.routes\.1 .* overlap"),
    ],
)
def test_errors_name_the_route_the_value_and_the_rule(routes, depth, message):
    with pytest.raises(ValueError, match=message):
        resolve_routes(routes, depth)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Route(True, 1, 2), "selection_ratio=True of a route must be a number"),
        (lambda: Route(0.5, 1.0, 2), "start_layer_idx=1.0 of a route must be an integer"),
        (lambda: Route(0.5, 1, "-1"), "end_layer_idx='-1' of a route must be an integer"),
    ],
)
def test_errors_name_a_value_of_another_type(build, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        build()


@pytest.mark.parametrize(
    "ratio", ["0.5", True, [0.5], torch.tensor(0.5), np.array([0.5, 0.5]), 1.5, float("nan")], ids=repr
)
def test_a_ratio_is_a_number_for_all_routes_or_one_for_each(ratio):
    routes = (Route(0.5, 1, 2), Route(0.5, 3, 4))
    assert Routing(0.25).ratios(routes, active=False) == Routing((0.25, 0.25)).ratios(routes, False)
    for of in (routes, ()):
        with pytest.raises(ValueError, match=r"^selection_ratio=.* must be in \[0, 1\]: one number"):
            Routing(ratio).ratios(of, active=True)
    assert Routing(0.0).ratios((), active=True) == () == Routing(()).ratios((), active=True)


def known_routes(name):
    routes = OmegaConf.load(ROOT / f"configs/model/routes/{name}.yaml").routes
    return [Route(**route) for route in routes]


def window(routes, depth):
    """Return the cell of the page for routes at a depth."""
    try:
        resolved = resolve_routes(routes, depth)
    except ValueError as error:
        return "overlap" if "overlap" in str(error) else "out of range"
    return f"{resolved[0].start_layer_idx}..{resolved[0].end_layer_idx}" if len(routes) == 1 else "valid"


def test_the_page_has_the_recipes_and_their_windows():
    page = (ROOT / "routing/README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\| (\d.*) \|$", page, re.MULTILINE))
    assert {*rows, "off"} == {file.stem for file in (ROOT / "configs/model/routes").glob("*.yaml")}
    for name, row in rows.items():
        given, *windows = row.split(" | ")
        routes = known_routes(name)
        parts = [f"{r.selection_ratio}, {r.start_layer_idx}..{r.end_layer_idx}" for r in routes]
        assert given.partition(":")[0] == "; ".join(parts)
        assert windows == [window(routes, depth) for depth in (8, 12, 24, 28)]


def test_a_configuration_of_simpletuner_is_read():
    config = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}
    for given in (config, {"model_family": "flux", "tread_config": config}):
        assert from_simpletuner(given) == (Route(0.5, 2, -2),)
    routes = known_routes("advanced")
    assert from_simpletuner({"routes": [vars(route) for route in routes]}) == tuple(routes)


ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 3}


@pytest.mark.parametrize(
    ("tread_config", "message"),
    [
        ({}, "must have one key, routes"),
        ({"routes": {}}, "must have one key, routes, whose value is a list"),
        ({"tread_config": None}, "tread_config=None must have one key, routes"),
        ({"model_family": "flux"}, "must have one key, routes"),
        ({"routes": [None]}, r"routes\.0=None must have selection_ratio, start_layer_idx, end_layer_idx"),
        ({"routes": [ROUTE | {"selection_ratio": "0.5"}]}, r"routes\.0: selection_ratio='0.5' of a route"),
        ({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2}]}, r"routes\.0=.* must have selection_r"),
        ({"routes": [ROUTE, ROUTE | {"ratio": 0.5}]}, r"routes\.1=.* must have selection_ratio"),
    ],
)
def test_a_wrong_configuration_of_simpletuner_is_refused(tread_config, message):
    with pytest.raises(ValueError, match=message):
        from_simpletuner(tread_config)
