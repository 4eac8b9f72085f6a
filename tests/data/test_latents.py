import os
import pickle
import re
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from builders.references import latent_reference
from data import IdentityEncoder, LatentDataset, LatentManifest, LatentWriter, digits, open_latents
from data.encoders import real_images, to_uint8
from tests.latents import write_latents
from tests.outside import with_json

SIZES = {"input_size": 8, "in_channels": 4, "num_classes": 5}
MANIFEST = LatentManifest(20, (4, 8, 8), "float16", "samples", 5, "identity")
HELD_OUT_OF_20 = [2, 4, 6, 13, 16, 19]


def write(path, kind="samples", count=20, **changes):
    """Write a folder of random latents. Return the latents and labels."""
    rng = np.random.default_rng(0)
    shape = (8 if kind == "moments" else 4, 8, 8)
    stored = rng.standard_normal((count, *shape)).astype(np.float16)
    labels = rng.integers(0, 5, count)
    with LatentWriter(path, replace(MANIFEST, count=count, shape=shape, kind=kind, **changes)) as writer:
        writer.append(stored[:13], labels[:13])
        writer.append(stored[13:], labels[13:])
    return stored, labels


def test_reading_returns_what_was_written(tmp_path):
    stored, labels = write(tmp_path / "a", num_held_out=6)
    dataset = open_latents(str(tmp_path / "a"), **SIZES)
    ids = np.array([3, 17, 3, 0])
    got, got_labels = dataset.read(ids)
    assert np.array_equal(got.numpy(), stored[ids])
    assert got_labels.tolist() == labels[ids].tolist()
    assert isinstance(dataset.stored, np.memmap)
    assert dataset.held_out_ids.tolist() == HELD_OUT_OF_20, "the same in all versions"
    together = np.sort(np.concatenate([dataset.train_ids, dataset.held_out_ids]))
    assert len(dataset.held_out_ids) == 6
    assert np.array_equal(together, np.arange(20))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_classes_without_training_entries_are_listed():
    labels = np.full(20, 3)
    labels[HELD_OUT_OF_20] = 1  # held out
    dataset = LatentDataset(np.zeros((20, 4, 8, 8)), labels, replace(MANIFEST, num_held_out=6))
    assert dataset.manifest.untrained_classes == (0, 1, 2, 4)
    assert dataset.describe()["manifest"]["untrained_classes"] == (0, 1, 2, 4)
    assert LatentDataset(dataset.stored, labels, MANIFEST).manifest.untrained_classes == (0, 2, 4)


def test_moments_are_sampled_at_each_call():
    manifest = LatentManifest(20, (2, 8, 8), "float16", "moments", 0, "identity", scale=0.5)
    assert manifest.in_channels == 1
    mean, logvar = torch.full((20_000, 1, 8, 8), 3.0), torch.full((20_000, 1, 8, 8), -1.0)
    generator = torch.Generator().manual_seed(0)
    first, second = (manifest.to_latents(torch.cat([mean, logvar], dim=1), generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert abs(first.mean() - 1.5) < 0.01
    # std = exp(logvar / 2) * scale
    assert abs(first.std() - np.exp(-0.5) * 0.5) < 0.01
    draws, again = (
        manifest.to_latents(torch.zeros(6, 2, 8, 8), torch.Generator().manual_seed(0)) for _ in range(2)
    )
    assert draws.shape == (6, 1, 8, 8)
    assert len(draws.unique()) > 0.99 * draws.numel(), "all draws differ"
    assert torch.equal(again, draws)


STORED, LABELS, MASKS = np.zeros((3, 4, 8, 8)), np.zeros(3, int), np.zeros((3, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("conditioning_type", "entries", "message"),
    [
        (None, (STORED, LABELS[:1]), r"labels int64 \(1,\), must be .* labels int64 \(3,\)"),
        (None, (STORED[..., :7], LABELS), r"latents float16 \(3, 4, 8, 7\), .* must be latents"),
        (None, (STORED + 1e6, LABELS), "not finite in float16"),
        (None, (STORED, np.array([0, 4, 5])), r"label 5 at position 5 must be in \[0, 4\]"),
        (None, (STORED[:2], LABELS[:2]), "5 entries written, must be count=6"),
        (None, (STORED, LABELS, MASKS), r"masks uint8 \(3, 8, 8\), must be"),
        ("mask", (STORED, LABELS), r"must be .*, masks uint8 \(3, 8, 8\)"),
        ("segmentation", (STORED, LABELS, MASKS.astype(float)), r"masks float64 \(3, 8, 8\), must be"),
    ],
)
def test_entries_that_do_not_fit_are_refused_and_leave_nothing(tmp_path, conditioning_type, entries, message):
    manifest = replace(MANIFEST, count=6, conditioning_type=conditioning_type)
    with pytest.raises(ValueError, match=message), LatentWriter(tmp_path / "a", manifest) as writer:
        writer.append(STORED, LABELS, MASKS if conditioning_type else None)
        writer.append(*entries)
    assert not list(tmp_path.iterdir())


def test_a_worker_process_gets_the_file_and_not_its_content(tmp_path):
    stored, _ = write(tmp_path / "a")
    pickled = pickle.dumps(open_latents(str(tmp_path / "a"), **SIZES))
    assert len(pickled) < stored.nbytes / 2
    assert np.array_equal(pickle.loads(pickled).read(np.arange(20))[0].numpy(), stored)


def change(**changes):
    return lambda folder: with_json(folder, "manifest.json", **changes)


# Malicious files are in tests/test_outside.py, and invalid manifests below.
@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), FileNotFoundError, r"data\.path=.* must be a latent"),
        (lambda d: (d / "latents.npy").unlink(), ValueError, r"latents\.npy is missing"),
        (change(conditioning_type="mask"), ValueError, r"masks\.npy is missing"),
        (lambda d: os.truncate(d / "latents.npy", 10_000), ValueError, r"latents\.npy is missing, truncated"),
        (lambda d: np.save(d / "labels.npy", np.full(20, 5)), ValueError, "npy: label 5 at position 0 must"),
        (change(count=21), ValueError, r"latents\.npy is float16 \(20, 4, 8, 8\), must be .* the manifest"),
        (change(num_classes=4), ValueError, r"data\.num_classes=5 must be 4, as in"),
        (change(shape=[4, 16, 16]), ValueError, r"data\.input_size=8 must be 16, as in"),
        (change(surprise=1), ValueError, "manifest.json is not a latent manifest: .*surprise"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(tmp_path, damage, error, message):
    write(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(error, match=message):
        open_latents(str(tmp_path / "a"), **SIZES)


def test_digits_go_through_the_format_and_come_back(tmp_path):
    from sklearn.datasets import load_digits

    source = load_digits()
    dataset = digits(str(tmp_path / "digits"), input_size=8, in_channels=1, num_classes=10)
    images, labels = real_images(dataset, np.arange(1797), IdentityEncoder())
    assert np.array_equal(images[..., 0], np.rint(source.images * 255 / 16))
    assert np.array_equal(labels, source.target) and dataset.masks is None
    assert (len(dataset.train_ids), len(dataset.held_out_ids)) == (1500, 297)
    latents = dataset.manifest.to_latents(dataset.read(dataset.train_ids)[0])
    assert abs(latents.mean()) < 0.01
    assert abs(latents.std() - 0.5) < 0.01
    again = digits(str(tmp_path / "digits"), input_size=8, in_channels=1, num_classes=10)
    assert again.describe() == dataset.describe()


def test_fewer_digits_to_train_on_keep_the_held_out_ones(tmp_path):
    sets = [
        digits(str(tmp_path / f"{number}"), 8, 1, 10, foreground_masks=True, num_images=number)
        for number in (200, 40, None)
    ]
    of_all = {name: real_images(sets[2], getattr(sets[2], name), IdentityEncoder()) for name in IDS}
    for dataset, number in zip(sets, (200, 40), strict=False):
        held_out, trained = (real_images(dataset, getattr(dataset, name), IdentityEncoder()) for name in IDS)
        for actual, expected in zip(held_out, of_all[IDS[0]], strict=True):
            assert np.array_equal(actual, expected)
        assert len(trained[0]) == len({image.tobytes() for image in trained[0]}) == number
        assert {*keys_of(*trained)} < {*keys_of(*of_all[IDS[1]])}, "training images with their labels"
        assert np.unique(trained[1]).size == 10
        assert dataset.manifest.scale == sets[2].manifest.scale
        weights = dataset.read_masks(dataset.train_ids).numpy()
        assert np.array_equal(weights > 0, trained[0][..., 0] > 0)
    few, many = ({*keys_of(*real_images(d, d.train_ids, IdentityEncoder()))} for d in (sets[1], sets[0]))
    assert few < many
    assert (sets[2].manifest.origin, sets[0].manifest.origin) == (None, {"num_images": 200})
    assert latent_reference(str(tmp_path / "200")).images.count == 200


IDS = ("held_out_ids", "train_ids")


def keys_of(images, labels):
    return [(image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True)]


def test_digits_may_be_enlarged(tmp_path):
    """The same entries, by Pillow's bicubic filter."""
    small, large = (digits(str(tmp_path / str(size)), size, 1, 10) for size in (8, 16))
    ids = np.arange(5)
    assert np.array_equal(small.labels, large.labels)
    pairs = (real_images(dataset, ids, IdentityEncoder())[0][..., 0] for dataset in (small, large))
    for original, image in zip(*pairs, strict=True):
        enlarged = Image.fromarray(original).resize((16, 16), Image.Resampling.BICUBIC)
        assert np.abs(np.asarray(enlarged).astype(int) - image).max() <= 1
    with pytest.raises(ValueError, match=r"data\.input_size=12 must be a multiple of 8, at most 64"):
        digits(str(tmp_path / "12"), 12, 1, 10)


def test_a_folder_of_another_number_of_digits_is_refused(tmp_path):
    paths = {number: str(tmp_path / f"{number}") for number in (30, None)}
    for number, path in paths.items():
        digits(path, 8, 1, 10, num_images=number)
    cases = ((31, paths[30], 31, 30), (None, paths[30], "null", 30), (30, paths[None], 30, "null"))
    for number, path, shown, rule in cases:
        message = f"data.num_images={shown} must be {rule}, as in {path}/manifest.json"
        with pytest.raises(ValueError, match=re.escape(message)):
            digits(path, 8, 1, 10, num_images=number)
    for number in (0, 1501):
        with pytest.raises(ValueError, match=rf"data.num_images={number} must be in \[1, 1500\]"):
            digits(str(tmp_path / "new"), 8, 1, 10, num_images=number)


def test_bytes_survive_the_identity_encoder_and_the_rounding_rule():
    every_byte = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    encoder = IdentityEncoder()
    assert torch.equal(to_uint8(encoder.decode(encoder.encode(every_byte).half().float())), every_byte)
    # 127.5 x + 128, truncated: the middle rounds up, and values outside [-1, 1] are clamped.
    assert to_uint8(torch.tensor([-2.0, -1.0, 0.0, 0.996, 1.0, 2.0])).tolist() == [0, 0, 128, 254, 255, 255]


@pytest.mark.parametrize("conditioning_type", ["mask", "segmentation"])
def test_masks_are_weights_and_segmentations_are_all_or_nothing(tmp_path, conditioning_type):
    masks = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
    fields = {"conditioning_type": conditioning_type}
    dataset = write_latents(tmp_path / "a", np.zeros((6, 4, 8, 8)), masks=masks, **fields)
    weights = dataset.read_masks(np.array([5, 0, 5]))
    expected = masks[[5, 0, 5]] / 255 if conditioning_type == "mask" else masks[[5, 0, 5]] > 0
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6)
    assert weights.dtype == torch.float32


def write_flipped(path, **changes):
    """Write entries filled with their number, 100 more in the flip, and masks of one pixel."""
    stored = np.add.outer(np.add.outer(np.arange(12), [0, 100]), np.zeros((4, 8, 8)))
    masks = np.zeros((12, 8, 8), np.uint8)
    masks[:, 2, 1] = 255
    return write_latents(path, stored, np.arange(12) % 3, masks, **changes)


def test_flips_are_read_on_request_with_their_masks(tmp_path):
    dataset = write_flipped(tmp_path / "a", num_held_out=4)
    ids = np.array([7, 0, 7, 3])
    stored, labels = dataset.read(ids, np.array([1, 0, 0, 1]))
    assert stored[:, 0, 0, 0].tolist() == [107, 0, 7, 103]
    assert labels.tolist() == [1, 0, 1, 0]
    assert dataset.read(ids)[0][:, 0, 0, 0].tolist() == [7, 0, 7, 3], "images by default"
    assert stored.shape == (4, 4, 8, 8)
    assert dataset.read_masks(ids[:2], np.array([0, 1])).nonzero().tolist() == [[0, 2, 1], [1, 2, 6]]
    assert dataset.read_masks(ids[:1]).nonzero().tolist() == [[0, 2, 1]]
    # An image and its flip are one entry: no flip of a held-out image is trained on.
    assert set(dataset.held_out_ids).isdisjoint(dataset.train_ids)
    assert len(dataset.train_ids) == 8


@pytest.mark.parametrize("std, warned", [(0.6, False), (1.7, False), (0.18, True), (5.5, True), (0.5, True)])
def test_a_standard_deviation_far_from_the_expected_one_warns(std, warned):
    manifest = replace(MANIFEST, scale=0.18215, std=1.0)
    warning = manifest.std_warning(torch.tensor(std))
    assert bool(warning) == warned
    if warned:
        assert f"standard deviation of {std:.3g}, the manifest expects 1." in warning
        assert f"set scale to {0.18215 / std:.4g} in manifest.json" in warning
    assert MANIFEST.std_warning(torch.tensor(9.0)) is None, "the expected one is unknown"


@pytest.mark.parametrize(
    ("key", "values", "rule"),
    [
        ("kind", ["mean"], "one of samples, moments"),
        ("dtype", ["bfloat16"], "one of float16, float32"),
        ("format_version", [99], "1"),
        ("scale", ["0.18", 0, True, (1.0, 2.0), (1.0, 2.0, 0.0, 1.0)], "a number other than 0, or one per"),
        ("shift", [float("nan"), (1.0, 2.0)], "a number, or one per channel (4)"),
        ("num_held_out", [20, 3.0], "in [0, 19]"),
        ("std", [0.0], "a number greater than 0, or null"),
        ("pixel_range", [(1.0, 1.0)], "two different numbers: the values of black and white"),
        ("class_names", [(1, 2, 3, 4, 5), ("a", "b")], "num_classes=5 strings"),
        ("untrained_classes", [(3, 3), (4, 1), (5,), (-1,), (True,), ("1",), (0, 1, 2, 3, 4)], "some of 5"),
        ("encoder", [None], "a name"),
        ("hflip", ["x"], "true or false"),
        ("checksums", [{"latents.npy": "abc"}], "lists of hashes, by names of files"),
    ],
)
def test_an_invalid_manifest_is_refused(key, values, rule):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{key}={value!r} must be {rule}")):
            replace(MANIFEST, **{key: value})


def test_a_manifest_is_saved_and_read(tmp_path):
    names = ("a", "b", "c", "d", "e")
    fields = {"origin": {"by": ["hand", 1]}, "std": 1.0, "resolution": 64, "pixel_range": (0.0, 1.0)}
    write(tmp_path / "a", class_names=names, **fields)
    manifest = open_latents(tmp_path / "a").manifest
    assert replace(manifest, checksums=None) == replace(MANIFEST, class_names=names, **fields)
    assert set(manifest.checksums) == {"latents.npy", "labels.npy"}


def test_a_fingerprint_depends_on_all_but_the_origin():
    """A change of one number, in the 64 entries that are read, changes the fingerprint."""
    manifest = replace(MANIFEST, count=500, shape=(1, 4, 4), conditioning_type="mask")
    arrays = [np.zeros((500, 1, 4, 4)), np.zeros(500, np.int64), np.zeros((500, 4, 4), np.uint8)]
    prints = []
    for key in (None, "origin", "scale", 0, 1, 2):
        stored, labels, masks = (array.copy() for array in arrays)
        if isinstance(key, int):
            (stored, labels, masks)[key][0] = 1
        changed = replace(manifest, **{key: 2.0} if key == "scale" else {}, origin={"by": key or "hand"})
        prints.append(LatentDataset(stored, labels, changed, masks).describe()["fingerprint"])
    changed = replace(manifest, checksums={"latents.npy": ["0" * 64]})  # of entries that are not read
    prints.append(LatentDataset(*arrays[:2], changed, arrays[2]).describe()["fingerprint"])
    assert prints[0] == prints[1]
    assert len(set(prints)) == 6


@pytest.mark.parametrize("limit", [0, 100, 30_000])
def test_a_full_disk_is_one_error_with_the_file_and_leaves_nothing(tmp_path, limit):
    """A limit on the size of files simulates a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*latents.npy"):
            write(tmp_path / "a", count=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
