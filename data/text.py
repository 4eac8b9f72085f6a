"""Captions as arrays: token ids of a vocabulary, or the embeddings of a language model.

Shapes: N captions, M tokens, F numbers of an embedding. Padding is 0.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from data.encoders import tensors_hash
from data.manifest import MAX_TEXT_TOKENS, MAX_WORDS
from runtime.errors import as_value_error
from runtime.language_models import TextModel

WORDS = "words"
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
WORDS_SHOWN = 40
# Class in transformers, by the model type; for Qwen and others AutoModel.
TEXT_MODELS = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel", "clip": "CLIPTextModel"}
TEXT_MODELS |= {"clip_text_model": "CLIPTextModel"}

TextEncoder = Callable[[Sequence[str]], np.ndarray]


class Words:
    """A vocabulary of words; the id of a word is its position, from 1 on.

    Args:
        num_tokens: M, the largest number of words in a caption.
    """

    name, weights_hash = WORDS, None

    def __init__(self, words: Sequence[str], num_tokens: int):
        self.words, self.num_tokens = tuple(words), num_tokens
        self._ids = {word: i for i, word in enumerate(self.words, 1)}

    @classmethod
    def of_captions(cls, captions: Sequence[str]) -> "Words":
        """Collect the words of captions."""
        split = [words_of(caption) for caption in captions]
        words, longest = sorted({word for parts in split for word in parts}), max(map(len, split))
        if not words or len(words) > MAX_WORDS or longest > MAX_TEXT_TOKENS:
            counts = f"{len(words)} different words, up to {longest} in a caption"
            rule = f"must have 1 to {MAX_WORDS}, and up to {MAX_TEXT_TOKENS}; or use a language model"
            raise ValueError(f"text_encoder={WORDS}: the captions have {counts}, {rule}")
        return cls(words, longest)

    def describe(self) -> dict[str, Any]:
        """Return its part of a manifest."""
        return {"encoder": self.name, "num_tokens": self.num_tokens, "words": list(self.words)}

    def __call__(self, captions: Sequence[str]) -> np.ndarray:
        """Return the ids (N, M) int16.

        Raises:
            ValueError: a word is unknown, or a caption is too long.
        """
        ids = np.zeros((len(captions), self.num_tokens), dtype=np.int16)
        for row, caption in zip(ids, captions, strict=True):
            words = words_of(caption)
            if unknown := [word for word in words if word not in self._ids]:
                known = ", ".join(self.words[:WORDS_SHOWN]) + (", ..." if self.words[WORDS_SHOWN:] else "")
                rule = f"must be among the words of the data: {known}"
                raise ValueError(f"'{caption}': {', '.join(unknown)} {rule}")
            if len(words) > self.num_tokens:
                raise ValueError(f"'{caption}' has {len(words)} words, must have at most {self.num_tokens}")
            row[: len(words)] = [self._ids[word] for word in words]
        return ids


class LanguageModel:
    """The last hidden states of a language model of transformers.

    Args:
        name: a folder, or OWNER/NAME on the hub.
        num_tokens: M; the tokenizer truncates longer captions.
    """

    def __init__(self, name: str, num_tokens: int, device: torch.device):
        self.name, self.num_tokens = name, num_tokens
        self._model = TextModel(name, TEXT_MODELS, "text_encoder", device)
        impossible = f"max_text_tokens={num_tokens} is not possible with {name}"
        with as_value_error(impossible, ValueError, IndexError):  # a model can have fewer positions
            self.num_features = self(["a"]).shape[2]
        self.weights_hash = tensors_hash(self._model.net.state_dict())

    def describe(self) -> dict[str, Any]:
        """Return its part of a manifest."""
        record = {"encoder": self.name, "weights_hash": self.weights_hash, "num_tokens": self.num_tokens}
        return {**record, "num_features": self.num_features}

    def __call__(self, captions: Sequence[str]) -> np.ndarray:
        """Return the embeddings (N, M, F) float16; padding is 0."""
        outputs = self._model(captions, self.num_tokens)
        parts = [(out.last_hidden_state * mask.unsqueeze(-1)).half().cpu() for mask, out in outputs]
        embeddings = torch.cat(parts).numpy()
        if not np.isfinite(embeddings).all():
            raise ValueError(f"text_encoder={self.name}: its embeddings are not finite in float16")
        return embeddings


def words_of(caption: str) -> list[str]:
    """Split a caption into lower-case words, without punctuation."""
    return WORD.findall(caption.lower())


def text_encoder_for(text: Mapping[str, Any], device: torch.device, name: str | None = None) -> TextEncoder:
    """Build the encoder of the captions that a manifest describes.

    Args:
        name: the language model's folder or name on the hub; None: the manifest's.

    Raises:
        ValueError: it cannot be loaded, or has other weights.
    """
    if text["encoder"] == WORDS:
        return Words(text["words"], text["num_tokens"])
    model = LanguageModel(name or text["encoder"], text["num_tokens"], device)
    if model.weights_hash != text["weights_hash"]:
        rule = f"must have the weights of {text['encoder']}, which embedded the captions of the data"
        raise ValueError(f"text_encoder={model.name} {rule}")
    return model
