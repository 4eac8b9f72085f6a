"""The suite on a few images, with a random Inception network, or projections where any features will do."""

import os
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm

from data import NpzImages, open_images
from evaluation import FrechetDistance, InceptionDetector, KernelDistance, PixelDetector, Reference, Suite
from evaluation.adm import with_count
from evaluation.features import ArrayImages, add_up, extract
from evaluation.metrics.inception_score import SplitScores
from evaluation.reference import Gaussian, evenly_spaced, make_reference, open_reference
from evaluation.statistics import AllFeatures, FeatureStatistics
from runtime.launch import ALONE, Launch
from runtime.machine import start_process
from tests.evaluation.test_metrics import inception_score, plain_precision_recall, precision_recall
from tests.inception import Projections, Remembering, adm_suite

RNG = np.random.default_rng(0)
# Images of one colour: in three dimensions some are near each other and some are not.
SAMPLES, REFERENCE = (
    RNG.integers(0, most, (count, 1, 1, 3), dtype=np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    for most, count in ((200, 22), (256, 17))
)
DETECTOR, FEW = Projections(), Projections({"pool": 32, "spatial": 24, "probs": 8})


class ReversedImages(NpzImages):
    """Images whose batches arrive out of order, as from several processes."""

    def batches(self, *arguments):
        return [*super().batches(*arguments)][::-1]


@pytest.fixture
def folder(tmp_path):
    np.savez(tmp_path / "samples.npz", SAMPLES)
    np.savez(tmp_path / "images.npz", REFERENCE)
    return tmp_path


def scores(folder, reference, detector=DETECTOR, **options):
    suite = adm_suite(detector, open_reference(folder / reference, open_images), **options)
    return suite.score(ReversedImages(folder / "samples.npz"))


def moments(f):
    f = f.double().numpy()
    return f.mean(0), np.cov(f.T)


def plain_distance(one, other):
    """The published definition by the matrix square root, in the subspace that the features span."""
    basis = torch.linalg.qr(torch.cat([one, other]).double().T).Q
    (mu1, sigma1), (mu2, sigma2) = moments(one.double() @ basis), moments(other.double() @ basis)
    return ((mu1 - mu2) ** 2).sum() + np.trace(sigma1 + sigma2 - 2 * sqrtm(sigma1 @ sigma2).real)


def test_scores_agree_with_the_definitions(weights, folder):
    detector, rng = Remembering(weights), np.random.default_rng(1)
    images = (rng.random((17, 24, 24, 1)) * 100 + rng.integers(0, 150, (17, 1, 1, 3))).astype(np.uint8)
    one, other = detector(images[:9]), detector(images[9:])
    np.savez(folder / "samples.npz", images[:9])
    np.savez(folder / "images.npz", images[9:])
    suite_scores = scores(folder, "images.npz", detector)
    assert not suite_scores.left_out
    # The covariances are singular: the matrix square root is accurate to a few digits.
    values = suite_scores.values
    assert values["fid9"] == pytest.approx(plain_distance(one["pool"], other["pool"]), rel=1e-3)
    assert values["sfid9"] == pytest.approx(plain_distance(one["spatial"], other["spatial"]), rel=1e-3)
    p = one["logits"].double().softmax(1).numpy()
    divergence = (p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean()
    assert values["is9"] == pytest.approx(np.exp(divergence), rel=1e-6)
    expected = plain_precision_recall(other["pool"].numpy(), one["pool"].numpy(), 3, 10_000)
    assert (values["precision9"], values["recall9"]) == pytest.approx(expected, abs=0.13)
    expected = KernelDistance(subset_size=4).compare(other["pool"], one["pool"])  # half of the smaller set
    assert (values["kid9"], values["kid_std9"]) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert values.keys() == {"fid9", "sfid9", "is9", "precision9", "recall9", "kid9", "kid_std9"}


def test_scores_without_their_reference_are_left_out_with_the_reason(folder):
    mu, sigma = moments(DETECTOR(REFERENCE)["pool"])
    np.savez(folder / "edm.npz", mu=mu, sigma=sigma)
    partial = scores(folder, "edm.npz")
    assert partial.values.keys() == {"fid22", "is22"}
    of_images = ("precision22", "recall22", "kid22", "kid_std22")
    left_out = dict.fromkeys(of_images, "the reference has no images (arr_0)")
    assert partial.left_out == left_out | {"sfid22": "the reference has no mu_s and sigma_s"}
    whole = scores(folder, "images.npz", precision_recall=False, kid=False)
    assert whole.values["fid22"] == pytest.approx(partial.values["fid22"], rel=1e-6)
    assert not whole.left_out


def test_a_reference_holds_evenly_spaced_images_and_the_statistics_of_all(folder, monkeypatch):
    monkeypatch.setattr("evaluation.reference.NUM_KEPT", 6)
    images = ReversedImages(folder / "images.npz")
    record = make_reference(DETECTOR, images, folder / "made.npz", 3, ALONE)
    assert record == {"num_images": 17, "num_kept": 6, "shape": (4, 4, 3), "batch_size": 3}
    with np.load(folder / "made.npz") as made:
        assert made.files == ["arr_0", "weights", "mu", "sigma", "mu_s", "sigma_s"]
        assert (made["arr_0"] == REFERENCE[[0, 2, 5, 8, 11, 14]]).all()
    assert evenly_spaced(3, 6).tolist() == [0, 1, 2]
    complete, stored = (scores(folder, name).values for name in ("images.npz", "made.npz"))
    for metric in ("fid22", "sfid22"):
        assert stored[metric] == pytest.approx(complete[metric], rel=1e-6)
    kept, samples = DETECTOR(REFERENCE[[0, 2, 5, 8, 11, 14]])["pool"], DETECTOR(SAMPLES)["pool"]
    assert (stored["precision22"], stored["recall22"]) == precision_recall(kept, samples)
    assert open_reference(folder / "made.npz", open_images).weights_hash == DETECTOR.record["tensors_sha256"]


@pytest.mark.parametrize(("detector", "sha"), [(DETECTOR, "other"), (PixelDetector(), None)])
def test_statistics_of_another_detector_are_refused(detector, sha):
    """Also if its features have the same name and size."""
    statistics = {(FeatureStatistics, "pool"): Gaussian(np.zeros(2048), np.eye(2048))}
    options = {"num_samples": 5, "labels": "random", "launch": Launch()}
    metrics = {"distance": FrechetDistance("fd", "pool")}
    with pytest.raises(ValueError, match=r"statistics .* were not made with (none|PixelDetector)"):
        Suite(
            Reference(statistics=statistics, weights_hash=sha), detector=detector, metrics=metrics, **options
        )


def test_features_are_kept_and_split_in_the_order_of_their_images(folder, monkeypatch):
    monkeypatch.setattr("evaluation.metrics.inception_score.SPLIT_SIZE", 9)
    images = ReversedImages(folder / "samples.npz")
    needs = [(AllFeatures, "pool"), (FeatureStatistics, "spatial"), (SplitScores, "probs")]
    parts = [*extract(FEW, images, batch_size=3, launch=ALONE)]
    total = add_up([dict(part) for part in parts], needs, 22, ALONE.device)
    features, (kept, spatial, splits) = FEW(SAMPLES), (total[need] for need in needs)
    np.testing.assert_allclose(kept.features, features["pool"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(spatial.mean, features["spatial"].double().mean(dim=0), rtol=1e-5, atol=1e-5)
    assert splits.score() == pytest.approx(inception_score(features["probs"], split_size=9), rel=1e-6)
    with pytest.raises(ValueError, match="the parts hold 21 images, must hold 22"):
        add_up(parts[:-1], needs, 22, ALONE.device)


def test_precision_recall_and_kernel_distance_follow_the_protocol(folder):
    reference, samples = (FEW(images)["pool"] for images in (REFERENCE, SAMPLES))
    for exact in (False, True):
        values = scores(folder, "images.npz", FEW, exact_distances=exact).values
        expected = precision_recall(reference, samples, k=3, exact=exact)
        assert (values["precision22"], values["recall22"]) == expected
    expected = KernelDistance(subset_size=8, num_subsets=100, seed=0).compare(reference, samples)
    assert (values["kid22"], values["kid_std22"]) == pytest.approx(expected, rel=1e-4)
    assert values["precision22"] != values["recall22"]


def test_parts_are_split_to_the_detectors_size():
    seen = []

    def detector(images):
        seen.append(len(images))
        return {"pool": images.reshape(len(images), -1)}

    images = ArrayImages(np.arange(12, dtype=np.uint8).reshape(12, 1, 1, 1))
    images.part_size = 5
    parts = [*extract(detector, images, batch_size=2, launch=ALONE)]
    assert seen == [2, 2, 1, 2, 2, 1, 2]
    assert np.concatenate([part["pool"] for part in parts]).ravel().tolist() == list(range(12))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mu": np.zeros(2048)}, "must hold both mu and sigma, or neither"),
        ({"mu": np.zeros(64), "sigma": np.eye(64)}, "mu is (64,), must be (2048,): of another network"),
        ({"mu": np.zeros(2048), "sigma": np.full((2048, 2048), np.nan)}, "sigma must be finite"),
        ({"mu": np.zeros(2048), "sigma": -np.eye(2048)}, "symmetric, without negative eigenvalues"),
        ({"mu": np.zeros(2048), "sigma": np.eye(2048) + np.tri(2048)}, "sigma must be symmetric"),
        ({"images": np.zeros(3)}, "must hold mu and sigma, or images (arr_0)"),
        ({"mu_s": np.zeros(2048), "sigma_s": np.zeros((2048, 2048))}, "mu_s is (2048,), must be (2023,)"),
        ({"arr_0": np.zeros((5, 8, 8, 3))}, "arr_0 is float64"),
    ],
)
def test_files_that_are_not_references_are_refused(tmp_path, arrays, message):
    np.savez(file := tmp_path / "reference.npz", **arrays)
    with pytest.raises(ValueError) as error:
        open_reference(file, open_images)
    assert message in str(error.value)
    assert "reference.npz" in str(error.value)


def test_a_folder_of_latents_needs_another_suite(tmp_path):
    (tmp_path / "latents.npy").touch()
    with pytest.raises(ValueError, match=r"is a folder of latents: .*suite=digits in"):
        open_reference(tmp_path, open_images)


@pytest.mark.parametrize(("name", "method"), [("mu", zipfile.ZIP_LZMA), ("arr_0", zipfile.ZIP_BZIP2)])
def test_a_reference_with_another_compression_than_numpys_is_refused(tmp_path, method, name):
    """Even if the compressed data is damaged."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
        archive.writestr(f"{name}.npy", bytes(10_000))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[50:60] = bytes(10)
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"cannot be read as an .npz.* is packed by method"):
        open_reference(tmp_path / "x.npz", open_images)


@pytest.mark.parametrize(
    ("num_images", "shape", "options", "message"),
    [
        (1, (8, 8, 3), {"precision_recall": False}, r"1 image\(s\) are too few: at least 2 are needed"),
        (3, (8, 8, 3), {}, r"3 image\(s\) are too few: at least 4 are needed for precision, recall"),
        (9, (8, 8, 1), {}, r"images are \(8, 8, 1\), must be \(H, W, 3\)"),
    ],
)
def test_images_that_cannot_be_scored_are_refused(num_images, shape, options, message):
    suite = adm_suite(DETECTOR, Reference(), **options)
    with pytest.raises(ValueError, match=message):
        suite.check(num_images, shape, "samples")


def test_scores_are_strict_fp32_also_if_tf32_is_allowed(detector, monkeypatch):
    """Every product and convolution of a score runs without TF32; the previous setting returns afterwards."""
    settings = []

    def record(*_):
        settings.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))

    def matmul(a, b, plain=torch.Tensor.__matmul__):
        record()
        return plain(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", matmul)
    start_process()
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (True, True)
    hook = detector._network.Conv2d_1a_3x3.register_forward_hook(record)
    features = detector(SAMPLES[:2])["pool"].repeat(2, 1)
    hook.remove()
    for exact in (False, True):
        precision_recall(features, features, exact=exact)
    assert set(settings) == {(False, False)}
    assert len(settings) > 5
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (True, True)


def test_a_damaged_reference_is_refused_before_samples_are_drawn(tmp_path):
    (tmp_path / "images").mkdir()
    for i, mode in enumerate(("RGB", "RGB", "RGB", "RGB", "L")):
        Image.fromarray(REFERENCE[i]).convert(mode).save(tmp_path / "images" / f"{i}.png")
    suite, samples = adm_suite(FEW, open_reference(tmp_path / "images", open_images)), ArrayImages(SAMPLES)
    samples.batches = lambda *_: pytest.fail("a sample was drawn")
    with pytest.raises(ValueError, match=r"4.png cannot be read: image mode L"):
        suite.score(samples)


def test_few_samples_and_unpublished_weights_give_warnings():
    one, two, three = adm_suite(DETECTOR, Reference()).warnings(22, (4, 4, 3))
    assert "checked by names and shapes only" in one
    assert "published scores use 50,000 samples" in two
    assert "the covariance is singular" in three


def test_names_carry_the_count():
    counts = (50_000, 5000, 512, 1500)
    assert [with_count("fid", n) for n in counts] == ["fid50k", "fid5k", "fid512", "fid1500"]


GOLDEN = ("ADM_WEIGHTS", "ADM_REFERENCE", "ADM_SAMPLES")


@pytest.mark.slow
@pytest.mark.skipif(
    not all(os.environ.get(name) for name in GOLDEN),
    reason=f"needs {', '.join(GOLDEN)}: paths of `python -m evaluation.fetch "
    f"inception imagenet256 golden256`",
)
def test_published_scores_of_adm():
    """The original's scores for the samples of ADM-G and ADM-U, ImageNet 256x256. [ADM]"""
    weights, reference, samples = (os.environ[name] for name in GOLDEN)
    launch = Launch(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    options = {"batch_size": 64, "kid": False, "launch": launch}
    detector = InceptionDetector(weights, launch.device)
    suite = adm_suite(detector, open_reference(reference, open_images), **options)
    values = suite.score(open_images(samples)).values
    expected = {"is": (215.837, 0.3), "fid": (3.94256, 0.005), "sfid": (6.14043, 0.02)}
    expected |= {"precision": (0.8265, 0.005), "recall": (0.5309, 0.005)}
    for metric, (value, tolerance) in expected.items():
        assert values[f"{metric}50k"] == pytest.approx(value, abs=tolerance), metric
