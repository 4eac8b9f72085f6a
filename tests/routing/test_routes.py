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


KNOWN = {
    "paper": [0.5],
    "basic": [0.5],
    "advanced": [0.3, 0.5, 0.7],
    "balanced": [0.5],
    "max_speed": [0.7],
    "high_res": [0.6],
    "lora": [0.4],
    "masked": [0.7],
}
VALID = {
    8: {
        "paper": [(2, 4)],
        "basic": [(2, 5)],
        "balanced": [(2, 6)],
        "max_speed": [(1, 7)],
        "high_res": [(2, 5)],
        "lora": [(3, 4)],
    },
    12: {
        "paper": [(2, 8)],
        "basic": [(2, 5)],
        "balanced": [(2, 10)],
        "max_speed": [(1, 11)],
        "high_res": [(2, 9)],
        "lora": [(3, 8)],
    },
    24: {
        "advanced": [(1, 3), (4, 8), (20, 23)],
        "basic": [(2, 5)],
        "lora": [(3, 20)],
        "max_speed": [(1, 23)],
    },
    28: {
        "advanced": [(1, 3), (4, 8), (24, 27)],
        "paper": [(2, 24)],
        "masked": [(2, 26)],
        "high_res": [(2, 25)],
    },
}


def known_routes(name):
    routes = OmegaConf.load(ROOT / f"configs/model/routes/{name}.yaml").routes
    return [Route(**route) for route in routes]


def test_known_settings_give_these_ratios():
    assert {name: [route.selection_ratio for route in known_routes(name)] for name in KNOWN} == KNOWN


@pytest.mark.parametrize("depth", VALID)
def test_known_settings_give_these_windows(depth):
    for name, windows in VALID[depth].items():
        resolved = resolve_routes(known_routes(name), depth)
        assert [(route.start_layer_idx, route.end_layer_idx) for route in resolved] == windows


@pytest.mark.parametrize("depth", [8, 12, 24, 28])
@pytest.mark.parametrize("name", KNOWN)
def test_recipes_are_valid_unless_their_windows_do_not_fit(name, depth):
    if name == "advanced" and depth < 24:
        message = (
            r"model\.routes\.\d .* and model\.routes\.\d .* overlap"
            if depth == 12
            else "end_layer_idx=8 must be in"
        )
        with pytest.raises(ValueError, match=message):
            resolve_routes(known_routes(name), depth)
    else:
        assert resolve_routes(known_routes(name), depth)


def test_the_five_windows_of_wan_follow_each_other_in_thirty_blocks():
    resolved = resolve_routes(known_routes("wan"), depth=30)
    assert [(r.start_layer_idx, r.end_layer_idx) for r in resolved] == [
        (2, 8),
        (9, 11),
        (12, 15),
        (16, 23),
        (24, 28),
    ]
    assert [r.selection_ratio for r in resolved] == [0.1, 0.25, 0.35, 0.25, 0.1]


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
