"""The similarity of images and their captions by CLIP. [CLIPScore]"""

import numpy as np
import torch
import torch.nn.functional as F

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.precision import strict_fp32
from evaluation.statistics import AllFeatures
from runtime.language_models import TextModel

KIND, MAX_TOKENS = "CLIPTextModelWithProjection", 77


class ClipScore(Metric):
    """100 times the mean cosine of image and caption features, without [CLIPScore]'s factor 2.5 and clipping.

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
        self._known: dict[str, torch.Tensor] = {}  # features (F,) of captions

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        images = torch.as_tensor(samples[AllFeatures, self.features].features, device=self.device).double()
        captions = torch.stack([self._known[text] for text in samples.labels.tolist()])
        return {"clip_score": 100 * F.cosine_similarity(images, captions).mean().item()}

    @strict_fp32()
    def prepare(self, labels: np.ndarray) -> None:
        """Embed new captions, before images are drawn."""
        if not (texts := [text for text in np.unique(labels).tolist() if text not in self._known]):
            return
        model = TextModel(self.text_model, {"clip": KIND, "clip_text_model": KIND}, "text_model", self.device)
        parts = [output.text_embeds for _, output in model(texts, MAX_TOKENS)]
        self._known |= dict(zip(texts, torch.cat(parts).double(), strict=True))
