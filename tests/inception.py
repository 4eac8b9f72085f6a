"""An Inception network of random weights: the graph of the published one, without a download."""

from functools import cache
from typing import ClassVar
from unittest import mock

import numpy as np
import torch

from evaluation import AdmSuite
from evaluation.detectors.inception import InceptionDetector
from evaluation.detectors.random_weights import random_state
from runtime.launch import ALONE

state = cache(random_state)


def write_random_weights(file):
    torch.save(state(), file)
    return file


class Remembering(InceptionDetector):
    """Evaluates each image once: most tests are about what is computed from the features."""

    def __init__(self, weights):
        self._known = {}
        super().__init__(weights, allow_unpublished=True)

    def __call__(self, images):
        keys = [(image.shape, image.tobytes()) for image in images]
        new = {key: image for key, image in zip(keys, images, strict=True) if key not in self._known}
        if new:
            computed = super().__call__(np.stack(list(new.values())))
            for i, key in enumerate(new):
                self._known[key] = {name: features[i] for name, features in computed.items()}
        names = self._known[keys[0]]
        return {name: torch.stack([self._known[key][name] for key in keys]) for name in names}


class Projections:
    """Random projections of the pixels, for tests in which any features will do."""

    device = torch.device("cpu")
    record: ClassVar = {"path": "none", "checked": "names and shapes", "tensors_sha256": "none"}

    def __init__(self, num_features=InceptionDetector.num_features):
        self.num_features = num_features

    def __call__(self, images):
        pixels = torch.from_numpy(images).flatten(1).double() / 255
        generator = torch.Generator().manual_seed(0)
        computed = {}
        for name, size in self.num_features.items():
            weight = torch.randn(pixels.shape[1], size, generator=generator).double()
            computed[name] = (pixels @ weight).float()
        return {**computed, "probs": computed["probs"].softmax(dim=1)}


def adm_suite(detector, reference, **options):
    """Build an ADM suite with a detector of the test's."""
    defaults = {"precision_recall": True, "exact_distances": False, "kid": True, "batch_size": 8, **options}
    defaults = {"num_samples": 5, "labels": "random", "launch": ALONE, **defaults}
    defaults = {"encoders": [], "encoder_weights": "", "metrics": {}, **defaults}
    with mock.patch("evaluation.adm.InceptionDetector", lambda *_: detector):
        return AdmSuite(reference, weights="", allow_unpublished_weights=True, **defaults)
