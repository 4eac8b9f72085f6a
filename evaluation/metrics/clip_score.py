"""The similarity of images and their captions by CLIP. [CLIPScore]"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.statistics import AllFeatures

CAPTIONS_AT_ONCE = 64


class ClipScore(Metric):
    """100 times the mean cosine of an image's and its caption's features; not rescaled, not cut at 0.

    Args:
        features: name of the image features, in CLIP's common space.
        text_model: the same CLIP in transformers, for its text encoder: a folder, or OWNER/NAME on the hub.
    """

    keys = ("clip_score",)
    higher_is_better = True
    needs_of_reference = ()
    needs_labels = needs_captions = True

    def __init__(self, features: str, text_model: str):
        self.features, self.text_model, self.needs = features, text_model, ((AllFeatures, features),)

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        images = torch.as_tensor(samples[AllFeatures, self.features].features, device=self.device).double()
        captions = self._embed(samples.labels.tolist()).double()
        return {"clip_score": 100 * F.cosine_similarity(images, captions).mean().item()}

    @torch.no_grad()
    def _embed(self, captions: Sequence[str]) -> torch.Tensor:
        """Return the features (N, F) of captions."""
        try:
            from transformers import AutoTokenizer, CLIPTextModelWithProjection
        except ImportError as error:
            raise ValueError("clip_score needs `pip install transformers`") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.text_model)
            net = CLIPTextModelWithProjection.from_pretrained(self.text_model, dtype=torch.float32)
        except (OSError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"clip_score: {self.text_model} cannot be loaded: {first}") from error
        net, parts = net.to(self.device).eval(), []
        for start in range(0, len(captions), CAPTIONS_AT_ONCE):
            batch = captions[start : start + CAPTIONS_AT_ONCE]
            tokens = tokenizer(batch, padding=True, truncation=True, max_length=77, return_tensors="pt")
            parts.append(net(**tokens.to(self.device)).text_embeds)
        return torch.cat(parts)
