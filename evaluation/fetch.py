"""Download the files of the ADM suite: the weights of the Inception network, and reference batches.

    python -m evaluation.fetch                             lists them
    python -m evaluation.fetch inception imagenet256       downloads them into evaluation_files/

A download that was broken off goes on where it stopped. A file is moved to its place when it is whole and its hash agrees.
"""

import argparse
import base64
import hashlib
import sys
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

from tqdm import tqdm

from evaluation.files import PUBLISHED, PublishedFile, sha256

CHUNK = 2**20
TIMEOUT_SEC = 60


def fetch(published: PublishedFile, folder: Path) -> Path:
    """Download a file unless it is there already, and check it.

    Raises:
        OSError: the server can not be reached, or the connection broke; what has arrived is kept.
        ValueError: the file is another than the published one; what has arrived is removed.
    """
    file = folder / published.name
    if file.exists():
        _check(file, published, md5=None)
        return file
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    md5 = _download(published.url, partial)
    try:
        _check(partial, published, md5)
    except ValueError:
        partial.unlink()
        raise
    partial.replace(file)
    return file


def _download(url: str, partial: Path) -> bytes | None:
    """Get what is missing of `partial`; return the MD5 of the whole where the server tells it."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SEC)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # There is nothing after what is here: it is whole, or too much.
        whole = error.headers.get("Content-Range", "").rpartition("/")[2]
        if whole != str(have):
            partial.unlink()
            raise OSError(f"{partial} held {have} bytes of {whole}: removed, start again") from error
        return _declared_md5(error.headers)
    with response:
        resumed = response.status == 206  # otherwise the server sends the whole file again
        length = int(response.headers["Content-Length"]) if "Content-Length" in response.headers else None
        bar = {"desc": partial.name.removesuffix(".partial"), "unit": "B", "unit_scale": True, "unit_divisor": 1024}
        bar |= {"initial": have if resumed else 0, "total": length and length + (have if resumed else 0)}
        with partial.open("ab" if resumed else "wb") as out, tqdm(**bar) as progress:
            while chunk := response.read(CHUNK):
                out.write(chunk)
                progress.update(len(chunk))
        if length is not None and progress.n != progress.total:
            raise OSError(f"the connection broke after {progress.n} of {progress.total} bytes: start again to go on")
        return _declared_md5(response.headers)


def _declared_md5(headers: Message) -> bytes | None:
    return base64.b64decode(headers["Content-MD5"]) if "Content-MD5" in headers else None


def _check(file: Path, published: PublishedFile, md5: bytes | None) -> None:
    if published.sha256 and sha256(file) != published.sha256:
        raise ValueError(f"{file} has sha256 {sha256(file)}, expected {published.sha256}: not the file that was published")
    if md5:
        with file.open("rb") as f:
            found = hashlib.file_digest(f, "md5").digest()
        if found != md5:
            raise ValueError(f"{file} has MD5 {found.hex()}, the server says {md5.hex()}: damaged on the way")


def main() -> None:
    """List or download."""
    listing = "\n".join(f"  {key:12} {file.about}\n  {'':12} {file.url}" for key, file in PUBLISHED.items())
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.fetch",
        description=__doc__,
        epilog=f"files:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--folder", type=Path, default=Path("evaluation_files"), help="default: %(default)s")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in PUBLISHED]
    if unknown:
        sys.exit(f"error: {unknown[0]} is not known: {', '.join(PUBLISHED)}")
    if not arguments.names:
        print(f"{listing}\n\nDownload with `python -m evaluation.fetch NAME ...`.")
    for name in arguments.names:
        try:
            file = fetch(PUBLISHED[name], arguments.folder)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {name}: {error}")
        print(f"{file}  sha256 {sha256(file)}")


if __name__ == "__main__":
    main()
