"""The small self-supervised encoder of the study."""

import numpy as np
import pytest
import torch

from data import digits, open_latents, verify
from data.manifest import read_manifest
from study.encoder import contrastive_loss, write_features


def test_the_contrastive_loss_is_the_cross_entropy_between_partners():
    """Cross-entropy over the rows and the columns of the similarities, divided by 0.1."""
    a = torch.nn.functional.normalize(torch.randn(4, 3), dim=1)
    b = torch.nn.functional.normalize(a + 0.3 * torch.randn(4, 3), dim=1)
    logits = (a @ b.T).double().numpy() / 0.1
    rows, columns = (np.log(np.exp(x).sum(axis=1)) - np.diag(x) for x in (logits, logits.T))
    assert contrastive_loss(a, b).item() == pytest.approx((rows.mean() + columns.mean()) / 2, rel=1e-4)


def test_features_are_stored_once_and_know_the_classes(tmp_path):
    path = tmp_path / "digits"
    digits(str(path), 16, 1, 10)
    write_features(path, steps=20)
    manifest, dataset = read_manifest(path), open_latents(path)
    assert manifest.features["shape"] == [256, 32] and manifest.features["linear_probe"] > 0.3
    assert dataset.features.shape == (1797, 256, 32)
    assert all(damage is None for damage in verify.damages(path, manifest))
    before = (path / "features.npy").stat().st_mtime_ns
    write_features(path, steps=20)
    assert (path / "features.npy").stat().st_mtime_ns == before
