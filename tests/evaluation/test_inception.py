from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchvision.models import inception_v3

from evaluation import ArrayImages, Reference
from evaluation.detectors.inception import RANDOM_WEIGHTS, InceptionDetector, read_weights
from evaluation.detectors.random_weights import write_random_weights
from tests.inception import adm_suite, state

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (3, 40, 56, 3), dtype=np.uint8)


def test_features_have_the_shapes_of_the_suite_and_logits_no_bias(detector):
    features = detector(IMAGES)
    assert [tuple(f.shape) for f in features.values()] == [(3, 2048), (3, 2023), (3, 1008), (3, 1008)]
    assert all(
        features[name].dtype == torch.float32 and features[name].std() > 0.01 for name in ("pool", "logits")
    )
    assert torch.equal(features["probs"], features["logits"].softmax(dim=1))
    logits = features["pool"] @ state()["fc.weight"].T
    torch.testing.assert_close(features["logits"], logits, rtol=1e-4, atol=1e-4)
    assert (state()["fc.bias"].abs() > 0.01).any()


def test_spatial_features_are_the_first_seven_channels_row_by_row(detector):
    seen = []
    branch = detector._network.Mixed_6d.branch1x1
    hook = branch.register_forward_hook(lambda module, inputs, output: seen.append(output))
    spatial = detector(IMAGES)["spatial"]
    hook.remove()
    (output,) = seen
    assert output.shape == (3, 192, 17, 17)
    for row, column, channel in ((0, 0, 0), (0, 0, 6), (0, 1, 0), (3, 5, 2), (16, 16, 6)):
        assert torch.equal(spatial[:, (row * 17 + column) * 7 + channel], output[:, channel, row, column])
    channels_first = output[:, :7].flatten(1)
    assert not torch.allclose(spatial, channels_first)


def tf1_resize(image, size):
    """TensorFlow 1's bilinear rule: source = target * (old / new), without half-pixel centres."""

    def weights(old):
        position = np.arange(size) * np.float32(old / size)
        low = np.floor(position).astype(int)
        return low, np.minimum(low + 1, old - 1), (position - low)[:, None].astype(np.float32)

    top, bottom, down = weights(image.shape[0])
    left, right, along = weights(image.shape[1])
    rows = lambda i: image[i][:, left] + (image[i][:, right] - image[i][:, left]) * along[None]  # noqa: E731
    return rows(top) + (rows(bottom) - rows(top)) * down[:, :, None]


@pytest.mark.parametrize("size", [(40, 56), (299, 299), (320, 500)])
def test_images_are_resized_by_the_rule_of_the_graph(detector, size):
    images = RNG.integers(0, 256, (1, *size, 3), dtype=np.uint8)
    seen = []
    hook = detector._network.Conv2d_1a_3x3.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    detector(images)
    hook.remove()
    expected = (tf1_resize(images[0].astype(np.float32), 299) - 128) / 128
    np.testing.assert_allclose(seen[0][0].permute(1, 2, 0).numpy(), expected, atol=2e-4)


def test_the_network_differs_from_torchvisions(detector):
    """The graph excludes padding from its averages, and uses max pooling in its last block."""
    network = inception_v3(weights=None, num_classes=1008, aux_logits=False, init_weights=False).eval()
    network.load_state_dict(state())
    network.fc = torch.nn.Identity()
    image = RNG.integers(0, 256, (1, 299, 299, 3), dtype=np.uint8)
    with torch.inference_mode():
        theirs = network((torch.from_numpy(image).permute(0, 3, 1, 2).float() - 128) / 128)
    assert not torch.allclose(theirs, detector(image)["pool"], rtol=0.05)


def test_features_depend_neither_on_the_batch_nor_on_autocast(detector):
    with torch.autocast("cpu", torch.bfloat16):
        inside = detector(IMAGES)
    assert torch.equal(inside["pool"], detector(IMAGES)["pool"])
    for alone, together in zip(detector(IMAGES[1:2]).values(), inside.values(), strict=True):
        torch.testing.assert_close(alone, together[1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 8, 8, 3), "f8"), ((2, 8, 8, 1), "u1"), ((2, 3, 8, 8), "u1"), ((8, 8, 3), "u1")]
)
def test_images_of_another_type_or_shape_are_refused(detector, shape, dtype):
    with pytest.raises(ValueError, match=r"must be uint8 \(N, H, W, 3\)"):
        detector(np.zeros(shape, dtype))


def test_random_weights_are_used_and_marked(tmp_path, weights):
    file = write_random_weights(tmp_path / "random.pth")
    with pytest.raises(ValueError, match="not the published one"):
        read_weights(file)
    images = Reference(images=ArrayImages(np.concatenate([IMAGES, IMAGES])))
    cases = ((file, RANDOM_WEIGHTS, "fid4_of_random_weights"), (weights, "names and shapes", "fid4"))
    for source, checked, key in cases:
        _, record = read_weights(source, allow_unpublished=True)
        assert record["checked"] == checked
        suite = adm_suite(SimpleNamespace(record=record), images)
        assert suite.score_name("fid", 4) == key
        mean_nothing = [w for w in suite.warnings(4, IMAGES.shape[1:]) if "these scores mean nothing" in w]
        assert len(mean_nothing) == (checked == RANDOM_WEIGHTS)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    damaged = {**state(), "fc.weight": state()["fc.weight"] * float("nan")}
    torch.save(damaged, tmp_path / "nan.pth")
    with pytest.raises(ValueError, match="not finite"):
        InceptionDetector(tmp_path / "nan.pth", allow_unpublished=True)


def test_files_that_are_not_the_weights_are_refused(tmp_path, weights):
    def refused(file, *words, **options):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            InceptionDetector(file, **options)
        for word in (str(file), 'python -m evaluation.fetch "files=[inception]"', *words):
            assert word in str(error.value)
        assert "\n" not in str(error.value)

    published = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
    refused(tmp_path / "nowhere.pth", "not found", published)
    refused(weights, "not the published one", published)
    cut = tmp_path / "cut.pth"
    cut.write_bytes(weights.read_bytes()[: 20 * 2**20])
    refused(cut, "is damaged: it does not end as files that torch.save writes", allow_unpublished=True)
    cut.write_bytes(weights.read_bytes()[100 : 20 * 2**20])
    refused(cut, "holds more than plain tensors", allow_unpublished=True)
    big = torch.zeros(4 * 2**20)
    torch.save({"other": big}, tmp_path / "other.pth")
    refused(tmp_path / "other.pth", "do not fit the network", allow_unpublished=True)
    torch.save([big], tmp_path / "list.pth")
    refused(tmp_path / "list.pth", "must be a state dict", allow_unpublished=True)
