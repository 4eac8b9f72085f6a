"""Text encoders of transformers, whose weights are all checked."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

CAPTIONS_AT_ONCE = 64


class TextModel:
    """A text encoder and its tokenizer, in fp32 and eval mode.

    Args:
        name: a folder, or OWNER/NAME on the hub.
        kind: class of transformers, by the model type of its configuration; `AutoModel` for others.
        key: name of the setting, for messages.

    Raises:
        ValueError: transformers is not installed, or cannot load it with all of its weights.
    """

    def __init__(self, name: str, kind: dict[str, str], key: str, device: torch.device | None):
        try:
            import transformers  # pyright: ignore (optional)
        except ImportError as error:
            raise ValueError(f"{key}={name} needs `pip install transformers`") from error
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
            config = transformers.AutoConfig.from_pretrained(name)
            model = getattr(transformers, kind.get(config.model_type, "AutoModel"))
            options = {"dtype": torch.float32, "output_loading_info": True, "use_safetensors": True}
            self.net, loaded = model.from_pretrained(name, **options)
            if missing := sorted(loaded["missing_keys"]):
                raise ValueError(f"{missing[0]} is missing in its weights")
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"{key}={name} cannot be loaded by transformers: {first}") from error
        self.net.to(device).eval().requires_grad_(False)
        self.tokenizer.padding_side, self.device = "right", device
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    @torch.no_grad()
    def __call__(self, captions: Sequence[str], max_tokens: int) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yield the attention mask (n, max_tokens) and the output of the model for batches of captions."""
        options = {"padding": "max_length", "truncation": True, "max_length": max_tokens}
        for start in range(0, len(captions), CAPTIONS_AT_ONCE):
            batch = [*captions[start : start + CAPTIONS_AT_ONCE]]
            tokens = self.tokenizer(batch, **options, return_tensors="pt").to(self.device)
            mask = tokens["attention_mask"]
            with torch.autocast(mask.device.type, enabled=False):
                output = self.net(input_ids=tokens["input_ids"], attention_mask=mask)
            yield mask, output
