"""Files of a folder on a disk or a server: http://, https:// and s3://, which fsspec reads.

Other schemes of fsspec, its chains of addresses, and whatever runs a program are refused.
"""

import asyncio
import re
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from data.tars import DAMAGED
from runtime import servers

ATTEMPTS, PAUSE_SEC = 3, 2.0
_CHUNK = 2**20  # bytes
LIKE_ADDRESS = r"\s*[\w.+-]+:"
ADDRESS = r"(?!.*::)(https?|s3)://[A-Za-z0-9._~:/@%+=,-]+"  # plain signs
FINAL = {FileNotFoundError: "is not there", PermissionError: "cannot be read"}  # not tried again

LIBRARIES = ("aiohttp.", "botocore.")  # whose errors are of reading from a server

T = TypeVar("T")


def read_file(path: str, name: str, use: Callable[[BinaryIO], T]) -> T:
    """Call `use` with an open file in a folder or at an address; try ATTEMPTS times.

    Raises:
        ValueError: the address is refused, s3fs is missing, or `use` finds the file damaged.
        FileNotFoundError, PermissionError: the file is not there, or not readable; it is not tried again.
        OSError: it cannot be read.
    """
    remote = _is_address(path)
    for attempt in range(ATTEMPTS):
        if attempt and remote:
            time.sleep(PAUSE_SEC * attempt)
        try:
            with _open(path, name) as stream:
                return use(stream)
        except Exception as error:
            last, kind = error, _kind(error)
            if kind is None:
                raise
            if kind in FINAL:
                break
    what = FINAL.get(kind, f"cannot be read, tried {ATTEMPTS} times")
    raise kind(f"{path.rstrip('/')}/{name} {what}: {_reason(last)}") from last


def _is_address(path: str) -> bool:
    """True if a path is an address; raise a ValueError for one that is not allowed."""
    if not re.match(LIKE_ADDRESS, path):
        return False
    if not re.fullmatch(ADDRESS, path):
        rule = "must be a folder, or an address http://, https:// or s3:// of plain signs"
        raise ValueError(f"data.path={path} {rule}")
    if path.startswith("s3:") and not find_spec("s3fs"):
        raise ValueError(f"data.path={path} needs s3fs: pip install s3fs")
    return True


def _open(path: str, name: str) -> BinaryIO:
    if not _is_address(path):
        return (Path(path) / name).open("rb")
    server = _s3() if path.startswith("s3:") else _http()
    return BufferedReader(_Stream(server, f"{path.rstrip('/')}/{name}"), _CHUNK)


class _Stream(RawIOBase):
    """A file on a server, read from start to end in one request, never all of it in memory."""

    def __init__(self, server: Any, url: str):
        from fsspec.asyn import sync

        self._sync, self._rate = partial(sync, server.loop), servers.Rate()
        # Any size will do: without one, fsspec asks for it first.
        self._file = self._sync(server.open_async, url, size=1)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        start, is_first = time.monotonic(), self._file.r is None
        data = self._sync(self._file.read, len(buffer), timeout=servers.ANSWER_SEC if is_first else None)
        if data and not is_first:
            self._rate.add(len(data), time.monotonic() - start)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._sync(self._close)
        super().close()

    async def _close(self) -> None:
        if self._file.r is not None:
            self._file.r.close()  # S3 leaves it open, and an unread rest would keep the connection
        await self._file.close()


def _http() -> Any:
    import aiohttp
    import fsspec

    silence = servers.SILENCE_SEC
    options = {
        "timeout": aiohttp.ClientTimeout(total=None, connect=silence, sock_read=silence),
        "trace_configs": (_trace(),),
        "trust_env": True,  # proxies
        "raise_for_status": True,  # which closes the connection after a 404; fsspec does not
    }
    return fsspec.filesystem("http", client_kwargs=options)


@cache
def _trace() -> Any:
    """Check redirects; one object, since fsspec caches connections by it."""
    import aiohttp

    async def check(session: Any, context: Any, redirect: Any) -> None:
        headers = redirect.response.headers
        to = headers.get("Location") or headers.get("URI", "")  # as aiohttp does
        hosts = redirect.url.host, redirect.url.join(type(redirect.url)(to)).host
        await asyncio.to_thread(servers.check_redirect, *hosts)

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check)
    return trace


def _s3() -> Any:
    import fsspec

    # The retries of botocore and s3fs would multiply ours.
    silence = servers.SILENCE_SEC
    config = {"connect_timeout": silence, "read_timeout": silence, "retries": {"total_max_attempts": 1}}
    server = fsspec.filesystem("s3", config_kwargs=config)
    server.retries = 1
    return server


def _kind(error: Exception) -> type[Exception] | None:
    """The error that tells of one; None for a mistake of ours."""
    status = getattr(error, "status", None)  # of HTTP
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError
    is_unknown = type(error).__name__ == "NoCredentialsError"
    if isinstance(error, PermissionError) or status in (401, 403) or is_unknown:
        return PermissionError
    if isinstance(error, OSError) or type(error).__module__.startswith(LIBRARIES):
        return OSError
    return ValueError if isinstance(error, DAMAGED) else None


def _reason(error: Any) -> str:
    # The text of aiohttp repeats the address, which may be signed.
    status = getattr(error, "status", None)
    text = f"{status} {error.message}" if status else getattr(error, "strerror", None) or str(error)
    is_late = isinstance(error, TimeoutError)
    late = f"no answer in {servers.ANSWER_SEC:.0f} s" if is_late else type(error).__name__
    return " ".join((text or str(error.__cause__ or "") or late).split())
