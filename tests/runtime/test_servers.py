"""What servers are held to."""

import pytest

from runtime.servers import MIN_BYTES, WINDOW_SEC, Rate, check_redirect

# The second row: other spellings of 127.0.0.1.
LOCAL = "::1 10.1.2.3 192.168.0.1 169.254.169.254 fe80::1 fd12::1 0.0.0.0 100.64.0.1 224.0.0.1 localhost"
LOCAL += " ::ffff:127.0.0.1 127.1 2130706433 0x7f.1 64:ff9b::7f00:1 2002:7f00:1::"


@pytest.mark.parametrize("to", LOCAL.split())
@pytest.mark.parametrize("asked", ["8.8.8.8", "2001:4860:4860::8888", "not.there.invalid"])
def test_what_is_not_local_does_not_lead_to_what_is(asked, to):
    with pytest.raises(PermissionError, match=r"leads to .* an address of a local network: give it yourself"):
        check_redirect(asked, to)


@pytest.mark.parametrize(
    ("asked", "to"),
    [
        ("8.8.8.8", "8.8.4.4"),
        ("8.8.8.8", "not.there.invalid"),
        ("127.0.0.1", "10.0.0.1"),
        ("localhost", "8.8.8.8"),
    ],
)
def test_other_redirects_are_followed(asked, to):
    check_redirect(asked, to)


def test_a_rate_is_of_all_that_came_in_a_window():
    rate = Rate()
    rate.add(MIN_BYTES - 1, WINDOW_SEC / 2)
    rate.add(1, WINDOW_SEC / 2)  # enough in all, and the next window begins
    rate.add(0, WINDOW_SEC - 6)
    with pytest.raises(
        TimeoutError, match=f"^{MIN_BYTES - 1} bytes came in 60 s, must be at least {MIN_BYTES}"
    ):
        rate.add(MIN_BYTES - 1, 6)
