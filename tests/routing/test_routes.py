import json

import pytest
from omegaconf import OmegaConf

from routing import Route, from_simpletuner, resolve_routes
from tests.runs import ROOT


def test_negative_indices_count_from_the_end():
    assert resolve_routes([Route(0.5, 2, -4)], depth=12) == (Route(0.5, 2, 8),)
    assert resolve_routes([Route(0.5, 2, -4)], depth=28) == (Route(0.5, 2, 24),)
    assert resolve_routes([Route(0.5, -2, -1)], depth=8) == (Route(0.5, 6, 7),)


def test_routes_come_back_in_the_order_of_the_layers_and_may_touch():
    assert resolve_routes([Route(0.3, 4, 7), Route(0.5, 0, 3)], depth=8) == (
        Route(0.5, 0, 3),
        Route(0.3, 4, 7),
    )


@pytest.mark.parametrize(
    ("routes", "depth", "message"),
    [
        ([Route(1.0, 2, 4)], 8, r"model\.routes\.0\.selection_ratio=1\.0 must be in \[0, 1\)"),
        ([Route(-0.1, 2, 4)], 8, r"model\.routes\.0\.selection_ratio=-0\.1"),
        ([Route(float("nan"), 2, 4)], 8, r"model\.routes\.0\.selection_ratio=nan"),
        ([Route(0.5, 2, 4), Route(0.5, 5, 8)], 8, r"model\.routes\.1\.end_layer_idx=8 must be in \[-8, 7\]"),
        ([Route(0.5, -9, 4)], 8, r"model\.routes\.0\.start_layer_idx=-9"),
        (
            [Route(0.5, 5, 4)],
            8,
            r"model\.routes\.0\.start_layer_idx=5 .* must not come after end_layer_idx=4",
        ),
        ([Route(0.5, 2, -4)], 4, r"model\.routes\.0\.start_layer_idx=2 .* end_layer_idx=-4 \(layer 0\)"),
        ([Route(0.5, 4, 6), Route(0.5, 2, 4)], 8, r"model\.routes\.1 .* and model\.routes\.0 .* overlap"),
        ([Route(0.5, 1, 6), Route(0.5, 3, -4)], 8, r"model\.routes\.0 .* and model\.routes\.1 .* overlap"),
    ],
)
def test_errors_name_the_route_the_value_and_the_rule(routes, depth, message):
    with pytest.raises(ValueError, match=message):
        resolve_routes(routes, depth)


RATIOS = {
    **{"paper": [0.5], "basic": [0.5], "advanced": [0.3, 0.5, 0.7], "balanced": [0.5], "max_speed": [0.7]},
    **{"high_res": [0.6], "lora": [0.4], "masked": [0.7], "wan": [0.1, 0.25, 0.35, 0.25, 0.1]},
}
WINDOWS = {  # of each recipe, at a depth
    "paper": {8: [(2, 4)], 12: [(2, 8)], 28: [(2, 24)]},
    "basic": {8: [(2, 5)], 12: [(2, 5)], 24: [(2, 5)]},
    "advanced": {24: [(1, 3), (4, 8), (20, 23)], 28: [(1, 3), (4, 8), (24, 27)]},
    "balanced": {8: [(2, 6)], 12: [(2, 10)], 24: [(2, 22)]},
    "max_speed": {8: [(1, 7)], 12: [(1, 11)], 24: [(1, 23)]},
    "high_res": {8: [(2, 5)], 12: [(2, 9)], 28: [(2, 25)]},
    "lora": {8: [(3, 4)], 12: [(3, 8)], 24: [(3, 20)]},
    "masked": {8: [(2, 6)], 24: [(2, 22)], 28: [(2, 26)]},
    "wan": {30: [(2, 8), (9, 11), (12, 15), (16, 23), (24, 28)]},
}


def known_routes(name):
    routes = OmegaConf.load(ROOT / f"configs/model/routes/{name}.yaml").routes
    return [Route(**route) for route in routes]


@pytest.mark.parametrize("name", WINDOWS)
def test_recipes_have_these_windows(name):
    assert [route.selection_ratio for route in known_routes(name)] == RATIOS[name]
    for depth, windows in WINDOWS[name].items():
        resolved = resolve_routes(known_routes(name), depth)
        assert [(route.start_layer_idx, route.end_layer_idx) for route in resolved] == windows


@pytest.mark.parametrize(
    ("depth", "message"),
    [(8, "end_layer_idx=8 must be in"), (12, r"model\.routes\.\d .* and model\.routes\.\d .* overlap")],
)
def test_a_recipe_whose_windows_do_not_fit_is_refused(depth, message):
    with pytest.raises(ValueError, match=message):
        resolve_routes(known_routes("advanced"), depth)


def test_the_configuration_of_simpletuner_is_read():
    text = '{"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}]}'
    assert from_simpletuner(json.loads(text)) == (Route(0.5, 2, -2),)
    assert from_simpletuner({"model_family": "flux", "tread_config": json.loads(text)}) == (
        Route(0.5, 2, -2),
    )
    assert list(
        from_simpletuner({"routes": [vars(route) for route in known_routes("advanced")]})
    ) == known_routes("advanced")


THEIRS = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 3}


@pytest.mark.parametrize(
    ("tread_config", "message"),
    [
        ({}, "must have one key, routes"),
        ({"routes": {}}, "must have one key, routes, with a list"),
        ({"tread_config": None}, "tread_config=None must have one key, routes"),
        ({"model_family": "flux"}, "must have one key, routes"),
        ({"routes": [None]}, r"routes\.0=None must have the keys"),
        ({"routes": [THEIRS | {"selection_ratio": "0.5"}]}, r"0\.selection_ratio='0\.5' must be a number"),
        ({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2}]}, r"routes\.0=.* must have the keys"),
        ({"routes": [THEIRS | {"ratio": 0.5}]}, r"routes\.0=.* must have the keys"),
    ],
)
def test_a_wrong_configuration_of_simpletuner_is_refused(tread_config, message):
    with pytest.raises(ValueError, match=message):
        from_simpletuner(tread_config)
