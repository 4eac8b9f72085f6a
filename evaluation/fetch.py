"""Download files for scores: weights of the Inception network and of other encoders, and reference batches.

    python -m evaluation.fetch                                    lists them
    python -m evaluation.fetch "files=[inception,imagenet256]"    downloads them into evaluation_files/
    python -m evaluation.fetch "files=[random]"                   draws weights at random, for trials

A file with a published sha256 must match it; for other files the sha256 is printed. A broken download starts
from the beginning; `curl -C - -o FILE URL` resumes it by hand.
"""

import http.client
import socket
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch.hub import download_url_to_file

from evaluation.files import PUBLISHED, PublishedFile
from runtime.config import command, run_main
from runtime.errors import check_choice
from runtime.files import atomic_write, sha256

RANDOM = "random"
TIMEOUT_SEC = 60  # without an answer


@dataclass
class FetchConfig:
    """The keys of `evaluation.fetch`."""

    files: list[str] = field(default_factory=list)
    folder: str = "evaluation_files"


def fetch(published: PublishedFile, folder: Path) -> Path:
    """Download a file, or check it if it already exists.

    Raises:
        OSError: the server cannot be reached, or the connection breaks.
        RuntimeError: the downloaded file does not have the published sha256.
        ValueError: the file is damaged, or not the published one.
    """
    file = folder / published.name
    if file.exists():
        _check(file, published)
        return file
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f".{file.stem}.partial{file.suffix}*"):
        if time.time() - left_over.stat().st_mtime > 2 * TIMEOUT_SEC:  # of a download that was killed
            left_over.unlink()
    with atomic_write(file) as partial:
        download_url_to_file(published.url, str(partial), hash_prefix=published.sha256)
        _check(partial, published)
    return file


def _check(file: Path, published: PublishedFile) -> None:
    if published.sha256 is None:
        # torch.hub does not notice a broken connection; a zip has its directory at the end.
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:  # it compares the length of the file with its header
                opened.keys()
        elif not zipfile.is_zipfile(file):
            raise ValueError(f"{file} is truncated, or not an .npz")
    elif (digest := sha256(file)) != published.sha256:
        raise ValueError(f"{file} has sha256 {digest}, must be {published.sha256}: not the published file")


@command("fetch", FetchConfig, __doc__)
def main(request: FetchConfig) -> None:
    """List the files, or download the requested ones."""
    folder = Path(request.folder)
    socket.setdefaulttimeout(TIMEOUT_SEC)  # torch.hub sets none
    for name in request.files:
        check_choice("files", name, (*PUBLISHED, RANDOM))
    if not request.files:
        for name, published in PUBLISHED.items():
            print(f"  {name:12} {published.description}\n  {'':12} {published.url}")
        print('\nDownload with `python -m evaluation.fetch "files=[NAME,...]"`.')
    for name in request.files:
        if name == RANDOM:
            from evaluation.detectors.random_weights import write_random_weights

            file = write_random_weights(folder / "inception-random.pth")
            print(f"{file}: scores with it mean nothing (weights={file} allow_unpublished_weights=true)")
            continue
        published = PUBLISHED[name]
        try:
            file = fetch(published, folder)
        except (OSError, http.client.HTTPException, RuntimeError, ValueError, SafetensorError) as error:
            expected = f" with sha256 {published.sha256}" if published.sha256 else ""
            copy = f"copy {published.url}{expected} to {folder / published.name}"
            by_hand = f"Without a connection, {copy}; `curl -C - -o FILE URL` resumes a broken download"
            raise ValueError(f"{name}: {error or type(error).__name__}. {by_hand}") from error
        note = "" if published.sha256 else "  (no sha256 is published: compare with other users)"
        print(f"{file}  sha256 {sha256(file)}{note}")


if __name__ == "__main__":
    run_main(main)
