"""Limits for servers: bytes at some rate, answers in some time, and no way into the local network."""

import ipaddress
import socket
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

SILENCE_SEC = 60.0  # to connect, and between two pieces of a download, which may take as long as it needs
ANSWER_SEC = 180.0  # until a download begins, with all that a server leads to
WINDOW_SEC, MIN_BYTES = 60.0, 2**18  # in so much time that is spent waiting, at least so much arrives

NAT64 = ipaddress.ip_network("64:ff9b::/96")
T = TypeVar("T")


class Rate:
    """How fast a download arrives; only the time counts that is spent waiting for it."""

    def __init__(self):
        self.waited_sec, self.num_bytes = 0.0, 0

    def add(self, num_bytes: int, waited_sec: float) -> None:
        """Count a piece; raise a TimeoutError where too little has arrived in WINDOW_SEC."""
        self.waited_sec, self.num_bytes = self.waited_sec + waited_sec, self.num_bytes + num_bytes
        if self.waited_sec < WINDOW_SEC:
            return
        if self.num_bytes < MIN_BYTES:
            raise TimeoutError(
                f"{self.num_bytes} bytes came in {self.waited_sec:.0f} s, must be at least {MIN_BYTES}"
            )
        self.__init__()


def answered(call: Callable[[], T]) -> T:
    """Make a call in a daemon thread; raise a TimeoutError after ANSWER_SEC."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return future.result(ANSWER_SEC)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {ANSWER_SEC:.0f} s") from error


def check_redirect(asked: str, to: str) -> None:
    """Raise a PermissionError if a host of the internet redirects to one of the local network.

    The name is looked up again to connect: this does not stop one whose address changes in between.
    """
    addresses, own = _addresses(to), _addresses(asked)
    is_local = own and all(map(_is_inside, own))
    if any(map(_is_inside, addresses)) and not is_local:
        address = f"{to} ({addresses[0]}), an address of a local network"
        raise PermissionError(f"{asked} leads to {address}: give it yourself")


def _is_inside(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """True for addresses that are not of the internet, and for IPv4 within IPv6."""
    translated = address.version == 6 and (address.sixtofour is not None or address in NAT64)
    return not address.is_global or address.is_multicast or translated


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return []  # left to a proxy
    return [ipaddress.ip_address(address[0]) for *_, address in found]
