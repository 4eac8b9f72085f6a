"""Captions of images: files next to them, or an annotation file of COCO."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from data.images import Files
from data.text import MAX_PROMPTS, WORDS, LanguageModel, Words
from runtime.files import MAX_JSON_BYTES, parse_json, read_bounded

BESIDE, SUFFIXES = "beside", (".txt", ".json")
MAX_CAPTIONS = 5  # of an image, as in COCO; further ones are left out
MAX_ANNOTATION_BYTES = 2**32


class Captions:
    """The captions of images, as text and as arrays.

    Args:
        request: `beside`: NAME.txt with one caption per line, or NAME.json with the key `caption`, next to
            NAME.jpg. Otherwise a file of COCO's annotations.
        names: of the images.
        text_encoder: `words`, or a language model, see `data.text`.
        max_tokens: of a language model.

    Raises:
        ValueError: a file is damaged, or an image has no caption.
    """

    def __init__(
        self,
        request: str,
        source: str,
        names: Sequence[str],
        text_encoder: str,
        max_tokens: int,
        device: torch.device,
    ):
        self.texts = read_captions(request, source, names)
        self.count = max(map(len, self.texts))  # R
        if text_encoder == WORDS:
            self.encoder: Words | LanguageModel = Words.of_captions([*chain(*self.texts)])
        else:
            self.encoder = LanguageModel(text_encoder, max_tokens, device)

    def __call__(self, positions: Sequence[int]) -> np.ndarray:
        """Return captions (n, R, M) or (n, R, M, F) of images; those with fewer than R repeat theirs."""
        texts = [self.texts[i][k % len(self.texts[i])] for i in positions for k in range(self.count)]
        encoded = self.encoder(texts)
        return encoded.reshape(-1, self.count, *encoded.shape[1:])

    def describe(self, positions: Sequence[int]) -> dict[str, Any]:
        """Return their part of the manifest, with the first captions of images at `positions` as prompts."""
        prompts = [self.texts[i][0] for i in positions[:MAX_PROMPTS]]
        return self.encoder.describe() | {"num_captions": self.count, "prompts": prompts}


def read_captions(request: str, source: str, names: Sequence[str]) -> list[list[str]]:
    """Return 1 to 5 captions of each image, see `Captions`."""
    captions = _beside(source, names) if request == BESIDE else _of_annotations(Path(request), names)
    lines = [[" ".join(text.split()) for text in each] for each in captions]
    cleaned = [[line for line in each if line][:MAX_CAPTIONS] for each in lines]
    if missing := [name for name, each in zip(names, cleaned, strict=True) if not each]:
        count = f"{len(missing)} of {len(names)}"
        raise ValueError(f"captions={request} must have a caption for {missing[0]} ({count} have none)")
    return cleaned


def _beside(source: str, names: Sequence[str]) -> list[list[str]]:
    path = Path(source)
    files = Files(path if path.is_dir() or path.suffix in (".zip", ".tar") else path.parent, "source=")
    known, captions = {*files.names}, []
    for name in names:
        stem = str(PurePosixPath(name).with_suffix(""))
        beside = next((s for s in SUFFIXES if f"{stem}{s}" in known), None)
        captions.append([] if beside is None else _read(files, f"{stem}{beside}"))
    return captions


def _read(files: Files, name: str) -> list[str]:
    with files.open(name) as file:
        data = read_bounded(file, MAX_JSON_BYTES)
    try:
        if name.endswith(".txt"):
            return data.decode("utf-8-sig").splitlines()
        found = parse_json(data)["caption"]
        return [found] if isinstance(found, str) else [str(caption) for caption in found]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{files.path}/{name} must have captions in UTF-8: {error!r}") from error


def _of_annotations(path: Path, names: Sequence[str]) -> list[list[str]]:
    """Read COCO's annotations: `images` with id and file_name, `annotations` with image_id and caption."""
    try:
        with path.open("rb") as file:
            content: Any = json.loads(read_bounded(file, MAX_ANNOTATION_BYTES))
        by_id: dict[Any, list[str]] = {image["id"]: [] for image in content["images"]}
        by_name = {image["file_name"]: by_id[image["id"]] for image in content["images"]}
        for annotation in content["annotations"]:
            by_id[annotation["image_id"]].append(str(annotation["caption"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"captions={path} cannot be read as annotations of COCO: {error!r}") from error
    return [by_name.get(PurePosixPath(name).name, []) for name in names]
