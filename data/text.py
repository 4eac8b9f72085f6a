"""Captions as arrays: token ids of a vocabulary, or the embeddings of a language model.

Shapes: N captions, M tokens, F numbers of an embedding. Padding is 0.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from data.encoders import tensors_hash
from data.manifest import MAX_WORDS

WORDS = "words"
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
MAX_PROMPTS, WORDS_SHOWN, CAPTIONS_AT_ONCE = 1000, 40, 64
# Class of the encoder in transformers, by the model type of its configuration.
TEXT_MODELS = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel", "clip": "CLIPTextModel"}
TEXT_MODELS |= {"clip_text_model": "CLIPTextModel"}
OTHER_MODELS = "AutoModel"  # Qwen and others: the last hidden states

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
        words = sorted(Counter(word for each in split for word in each))
        if not words or len(words) > MAX_WORDS:
            rule = f"must be 1 to {MAX_WORDS} different words: choose a language model as text_encoder"
            raise ValueError(f"text_encoder={WORDS}: the captions have {len(words)} different words, {rule}")
        return cls(words, max(map(len, split)))

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
                raise ValueError(f"'{caption}': {unknown[0]} must be one of the words of the data: {known}")
            if len(words) > self.num_tokens:
                raise ValueError(f"'{caption}' has {len(words)} words, must have at most {self.num_tokens}")
            row[: len(words)] = [self._ids[word] for word in words]
        return ids


class LanguageModel:
    """The last hidden states of a language model of transformers, in fp32 on the device.

    Args:
        name: a folder, or OWNER/NAME on the hub.
        num_tokens: M; longer captions are cut, as the tokenizer does.
    """

    def __init__(self, name: str, num_tokens: int, device: torch.device):
        try:
            import transformers
        except ImportError as error:
            raise ValueError(f"text_encoder={name} needs `pip install transformers`") from error
        self.name, self.num_tokens, self.device = name, num_tokens, device
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
            config = transformers.AutoConfig.from_pretrained(name)
            kind = TEXT_MODELS.get(config.model_type, OTHER_MODELS)
            self._net: Any = getattr(transformers, kind).from_pretrained(name, dtype=torch.float32)
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"text_encoder={name} cannot be loaded by transformers: {first}") from error
        self._net.to(device).eval().requires_grad_(False)
        self._tokenizer.padding_side = "right"
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self.num_features = len(self(["a"])[0, 0])
        self.weights_hash = tensors_hash(self._net.state_dict())

    def describe(self) -> dict[str, Any]:
        """Return its part of a manifest."""
        record = {"encoder": self.name, "weights_hash": self.weights_hash, "num_tokens": self.num_tokens}
        return {**record, "num_features": self.num_features}

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> np.ndarray:
        """Return the embeddings (N, M, F) float16; those of padding are 0."""
        options = {"padding": "max_length", "truncation": True, "max_length": self.num_tokens}
        parts = []
        for start in range(0, len(captions), CAPTIONS_AT_ONCE):
            batch = [*captions[start : start + CAPTIONS_AT_ONCE]]
            tokens = self._tokenizer(batch, **options, return_tensors="pt").to(self.device)
            inputs = tokens["input_ids"], tokens["attention_mask"]
            with torch.autocast(self.device.type, enabled=False):
                hidden = self._net(input_ids=inputs[0], attention_mask=inputs[1]).last_hidden_state
            parts.append((hidden * inputs[1].unsqueeze(-1)).half().cpu())
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
        name: where it is on this machine; None: where the manifest says.

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
