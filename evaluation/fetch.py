"""Download the files of the ADM suite: the weights of the Inception network, and reference batches.

    python -m evaluation.fetch                                    lists them
    python -m evaluation.fetch "files=[inception,imagenet256]"    downloads them into evaluation_files/
    python -m evaluation.fetch "files=[random]"                   draws weights at random, for trials

A broken download resumes where it stopped. A file is moved to its place when it has the length that the
server gives, and the published sha256, or else the MD5 that the server gives; what could not be checked is
printed.
"""

import base64
import hashlib
import http.client
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from evaluation.files import PUBLISHED, PublishedFile
from runtime.config import command, run_main
from runtime.errors import check_choice
from runtime.files import sha256
from runtime.lock import Lock
from runtime.servers import SILENCE_SEC, Rate, answered, check_redirect

_CHUNK = 2**20
RESUME = "the same command resumes"
RANDOM = "random"


@dataclass
class FetchConfig:
    """The keys of `evaluation.fetch`."""

    files: list[str] = field(default_factory=list)
    folder: str = "evaluation_files"


def fetch(published: PublishedFile, folder: Path) -> Path:
    """Download a file unless it is there already, and check it.

    Raises:
        OSError: the server cannot be reached, or the connection broke; what has arrived is kept.
        ValueError: it is not the published file; what has arrived is removed.
    """
    file = folder / published.name
    if file.exists():
        _check_sha256(file, published)
        return file
    partial = folder / f"{published.name}.partial"
    with Lock(folder / f".{published.name}.lock", str(file)):
        try:
            length, md5 = _download(published, partial)
            _check_sha256(partial, published)
            _check_transfer(partial, length, md5)
        except http.client.HTTPException as error:
            raise OSError(f"{published.url}: {error!r}: {RESUME}") from error
        except ValueError:
            partial.unlink(missing_ok=True)
            raise
        partial.replace(file)
    return file


def _download(published: PublishedFile, partial: Path) -> tuple[int | None, bytes | None]:
    """Download the rest of `partial`; return length and MD5 of the file, if the server states them."""
    url, rate = published.url, Rate()
    # By a request of its own: the answer to a range has the MD5 of the range, if any.
    with _open(url, {}, method="HEAD") as response:
        headers = response.headers
    length = int(headers["Content-Length"]) if "Content-Length" in headers else None
    _check_size(published, length or 0)
    md5 = base64.b64decode(headers["Content-MD5"]) if "Content-MD5" in headers else None
    have = partial.stat().st_size if partial.exists() else 0
    if length is not None and have >= length:
        return length, md5
    with _open(url, {"Range": f"bytes={have}-"} if have else {}) as response:
        have = have if response.status == 206 else 0  # otherwise the server sends the file from its start
        bar = {"desc": published.name, "unit": "B", "unit_scale": True, "unit_divisor": 1024}
        with partial.open("ab" if have else "wb") as out, tqdm(**bar, initial=have, total=length) as progress:
            start = time.monotonic()
            while chunk := response.read1(_CHUNK):  # not `read`, which waits until it has so much
                rate.add(len(chunk), time.monotonic() - start)
                have += len(chunk)
                _check_size(published, have)
                out.write(chunk)
                progress.update(len(chunk))
                start = time.monotonic()
    if length is not None and have < length:
        raise OSError(f"the connection broke after {have} of {length} bytes: {RESUME}")
    return length, md5


def _open(url: str, headers: dict[str, str], method: str = "GET") -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers=headers, method=method)
    return answered(lambda: urllib.request.build_opener(_Redirects).open(request, timeout=SILENCE_SEC))


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: urllib.request.Request, *answer: Any) -> Any:
        newurl = answer[-1]
        check_redirect(urlsplit(req.full_url).hostname or "", urlsplit(newurl).hostname or "")
        return super().redirect_request(req, *answer)


def _check_size(published: PublishedFile, num_bytes: int) -> None:
    if num_bytes > published.max_bytes:
        rule = f"must give at most {published.max_bytes}"
        raise ValueError(f"{published.url} gives {num_bytes} bytes or more, {rule}")


def _check_sha256(file: Path, published: PublishedFile) -> None:
    if published.sha256 and (found := sha256(file)) != published.sha256:
        raise ValueError(f"{file} has sha256 {found}, must be {published.sha256}: not the published file")


def _check_transfer(file: Path, length: int | None, md5: bytes | None) -> None:
    if length is not None and file.stat().st_size != length:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, the server has {length}")
    with file.open("rb") as opened:
        if md5 and (found := hashlib.file_digest(opened, "md5").digest()) != md5:
            told = f"has MD5 {found.hex()}, the server's is {md5.hex()}"
            raise ValueError(f"{file} {told}: damaged in transfer")


@command("fetch", FetchConfig, __doc__)
def main(request: FetchConfig) -> None:
    """List or download."""
    folder = Path(request.folder)
    for name in request.files:
        check_choice("files", name, (*PUBLISHED, RANDOM))
    if not request.files:
        for name, published in PUBLISHED.items():
            print(f"  {name:12} {published.about}\n  {'':12} {published.url}")
        print('\nDownload with `python -m evaluation.fetch "files=[NAME,...]"`.')
    for name in request.files:
        if name == RANDOM:
            from evaluation.detectors.random_weights import write_random_weights

            file = write_random_weights(folder / "inception-random.pth")
            print(f"{file}: scores by it mean nothing (weights={file} allow_unpublished_weights=true)")
            continue
        published = PUBLISHED[name]
        try:
            file = fetch(published, folder)
        except (OSError, ValueError) as error:
            expected = f" with sha256 {published.sha256}" if published.sha256 else ""
            copy = f"copy {published.url}{expected} to {folder / published.name}"
            raise ValueError(f"{name}: {error}. Without a connection, {copy}") from error
        note = "" if published.sha256 else "  (none is published: compare it with that of other users)"
        print(f"{file}  sha256 {sha256(file)}{note}")


if __name__ == "__main__":
    run_main(main)
