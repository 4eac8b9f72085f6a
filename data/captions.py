"""Captions of images: files next to them, or an annotation file of COCO."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from data.listing import ImageList
from data.manifest import MAX_LETTERS, MAX_PROMPTS
from data.text import WORDS, LanguageModel, Words, words_of
from runtime.files import parse_json, read_bounded, read_json

BESIDE, SUFFIXES = "beside", (".txt", ".json")
MAX_CAPTIONS = 5  # of an image, as in COCO; further ones are left out
MAX_CAPTION_BYTES, MAX_ANNOTATION_BYTES = 2**20, 2**30


class Captions:
    """The captions of images, as text and as arrays.

    Args:
        request: `beside`: NAME.txt with one caption per line, or NAME.json with the key `caption`, next to
            NAME.jpg. Otherwise a COCO annotation file.
        encoder: `words`, or a language model, see `data.text`.
        max_tokens: number of tokens of a caption; only for a language model.

    Raises:
        ValueError: a file is damaged, or an image has no caption.
    """

    def __init__(self, request: str, images: ImageList, encoder: str, max_tokens: int, device: torch.device):
        self.texts = read_captions(request, images)
        self.count = max(map(len, self.texts))  # R
        if encoder == WORDS:
            self.encoder: Words | LanguageModel = Words.of_captions([*chain(*self.texts)])
        else:
            self.encoder = LanguageModel(encoder, max_tokens, device)

    def __call__(self, positions: Sequence[int]) -> np.ndarray:
        """Encode R captions of each image, (n, R, M) or (n, R, M, F); shorter lists of captions repeat."""
        texts = [self.texts[i][k % len(self.texts[i])] for i in positions for k in range(self.count)]
        encoded = self.encoder(texts)
        return encoded.reshape(-1, self.count, *encoded.shape[1:])

    def describe(self, positions: Sequence[int]) -> dict[str, Any]:
        """Return the manifest's `text`; its prompts are first captions of the images at `positions`."""
        first = [self.texts[i][0] for i in positions]
        if not (texts := [text for text in first if len(text) <= MAX_LETTERS]):
            raise ValueError(f"all captions have more than {MAX_LETTERS} letters")
        ids = np.unique(np.linspace(0, len(texts) - 1, MAX_PROMPTS).astype(int)).tolist()
        return self.encoder.describe() | {"num_captions": self.count, "prompts": [texts[i] for i in ids]}

    def key(self) -> list[Any]:
        """Identify the encoder."""
        return [self.encoder.name, self.encoder.weights_hash, self.encoder.num_tokens]

    def mentions_sides(self) -> bool:
        """True if captions say left or right."""
        return not {"left", "right"}.isdisjoint(chain(*map(words_of, chain(*self.texts))))


def read_captions(request: str, images: ImageList) -> list[list[str]]:
    """Return 1 to 5 captions of each image, see `Captions`."""
    if request == BESIDE:
        captions = [_read_files(images, name) for name in images.names]
    else:
        captions = _read_annotations(Path(request), images.names)
    lines = [[" ".join(text.split()) for text in texts] for texts in captions]
    cleaned = [[line for line in texts if line][:MAX_CAPTIONS] for texts in lines]
    if missing := [name for name, texts in zip(images.names, cleaned, strict=True) if not texts]:
        count = f"{len(missing)} of {len(images.names)}"
        raise ValueError(f"captions={request} must have a caption for {missing[0]} ({count} have none)")
    return cleaned


def _read_files(images: ImageList, name: str) -> list[str]:
    for suffix in SUFFIXES:
        with suppress(FileNotFoundError, KeyError):  # no such file in a folder; in a zip or tar
            return _read(images, str(PurePosixPath(name).with_suffix(suffix)))
    return []


def _read(images: ImageList, name: str) -> list[str]:
    with images.open(name) as file:
        try:
            data = read_bounded(file, MAX_CAPTION_BYTES)
            if name.endswith(".txt"):
                return data.decode("utf-8-sig").splitlines()
            captions = parse_json(data).get("caption")
            return _check_captions([captions] if isinstance(captions, str) else captions)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{name} must have captions in UTF-8: {error}") from error


def _read_annotations(path: Path, names: Sequence[str]) -> list[list[str]]:
    """Read COCO's annotations: `images` with id and file_name, `annotations` with image_id and caption."""
    content: Any = read_json(path, MAX_ANNOTATION_BYTES)
    try:
        by_id: dict[Any, list[str]] = {image["id"]: [] for image in content["images"]}
        by_name = {image["file_name"]: by_id[image["id"]] for image in content["images"]}
        for annotation in content["annotations"]:
            by_id[annotation["image_id"]] += _check_captions([annotation["caption"]])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"captions={path} must be annotations of COCO: {error!r}") from error
    return [by_name.get(PurePosixPath(name).name, []) for name in names]


def _check_captions(captions: Any) -> list[str]:
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise ValueError(f"{captions!r:.100} must be text, or a list of texts")
    return captions
