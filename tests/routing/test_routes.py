import pytest

from routing import Route, resolve_routes


def test_negative_indices_count_from_the_end():
    assert resolve_routes([Route(0.5, 2, -4)], depth=12) == (Route(0.5, 2, 8),)
    assert resolve_routes([Route(0.5, 2, -4)], depth=28) == (Route(0.5, 2, 24),)
    assert resolve_routes([Route(0.5, -2, -1)], depth=8) == (Route(0.5, 6, 7),)


def test_routes_come_back_in_the_order_of_the_layers_and_may_touch():
    assert resolve_routes([Route(0.3, 4, 7), Route(0.5, 0, 3)], depth=8) == (Route(0.5, 0, 3), Route(0.3, 4, 7))


@pytest.mark.parametrize(
    ("routes", "depth", "message"),
    [
        ([Route(1.0, 2, 4)], 8, r"model\.routes\.0\.selection_ratio=1\.0 must be in \[0, 1\)"),
        ([Route(-0.1, 2, 4)], 8, r"model\.routes\.0\.selection_ratio=-0\.1"),
        ([Route(float("nan"), 2, 4)], 8, r"model\.routes\.0\.selection_ratio=nan"),
        ([Route(0.5, 2, 4), Route(0.5, 5, 8)], 8, r"model\.routes\.1\.end_layer_idx=8 must be in \[-8, 7\]"),
        ([Route(0.5, -9, 4)], 8, r"model\.routes\.0\.start_layer_idx=-9"),
        ([Route(0.5, 5, 4)], 8, r"model\.routes\.0\.start_layer_idx=5 .* must not come after end_layer_idx=4"),
        ([Route(0.5, 2, -4)], 4, r"model\.routes\.0\.start_layer_idx=2 .* end_layer_idx=-4 \(layer 0\)"),
        ([Route(0.5, 4, 6), Route(0.5, 2, 4)], 8, r"model\.routes\.1 .* and model\.routes\.0 .* overlap"),
        ([Route(0.5, 1, 6), Route(0.5, 3, -4)], 8, r"model\.routes\.0 .* and model\.routes\.1 .* overlap"),
    ],
)
def test_errors_name_the_route_the_value_and_the_rule(routes, depth, message):
    with pytest.raises(ValueError, match=message):
        resolve_routes(routes, depth)
