"""Foreign formats, written here from their public descriptions, and what contradicts the assumptions about them."""

import contextlib
import io
import json
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
from dataclasses import replace

import lmdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from data import convert, open_latents
from data.importers import FORMATS
from data.unpickle import unpickle_array
from runtime.errors import UserError
from tests.runs import composed

COUNT, SIZE = 24, 8
LABELS = np.arange(COUNT) % 5
# Of the latents of sd-vae-ft-* on photographs: standard deviations near 4.9, 5.3, 3.9, 4.0 before scaling.
STDS = np.array([4.9, 5.3, 3.9, 4.0], np.float32).reshape(4, 1, 1)


def latents(seed=0):
    """Mean and log-variance (COUNT, 4, SIZE, SIZE) like those of a public autoencoder: smooth, not symmetric, quite certain."""
    rng = np.random.default_rng(seed)
    coarse = rng.standard_normal((COUNT, 4, SIZE // 2, SIZE // 2)).astype(np.float32)
    mean = STDS * coarse.repeat(2, axis=2).repeat(2, axis=3)
    return mean, rng.uniform(-18, -6, mean.shape).astype(np.float32)


MEAN, LOGVAR = latents()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def write_tar(file, members):
    with tarfile.open(file, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_wds(folder, arrays, suffix, encode, labels=LABELS):
    """Two shards of KEY.SUFFIX and KEY.cls."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, ids in enumerate(np.array_split(np.arange(len(arrays)), 2)):
        members = []
        for i in ids:
            members += [(f"{i:07d}.cls", str(labels[i]).encode()), (f"{i:07d}.{suffix}", encode(arrays[i]))]
        write_tar(folder / f"imagenet-{shard:04d}.tar", members)
    return folder


def write_tread(folder, arrays=MEAN * 0.18215, **options):
    return write_wds(folder, arrays, "latent.npy", npy, **options)


def write_maskdit_wds(folder, protocol=pickle.DEFAULT_PROTOCOL, arrays=None):
    arrays = np.concatenate([MEAN, LOGVAR], axis=1) if arrays is None else arrays
    return write_wds(folder, arrays, "latent", lambda array: pickle.dumps(array, protocol=protocol))


def write_lmdb(folder, first=None, second=None, labels=None):
    """MaskDiT's extraction: all images, then all flips; `length` counts both."""
    first = np.concatenate([MEAN, LOGVAR], axis=1) if first is None else first
    second = first[..., ::-1] if second is None else second
    folder.mkdir(parents=True)
    entries = np.concatenate([first, second]).astype(np.float32)
    labels = np.concatenate([LABELS, LABELS]) if labels is None else labels
    environment = lmdb.open(str(folder), map_size=2**26)
    with environment.begin(write=True) as transaction:
        for i, (entry, label) in enumerate(zip(entries, labels, strict=True)):
            transaction.put(f"z-{i}".encode(), np.ascontiguousarray(entry).tobytes())
            transaction.put(f"y-{i}".encode(), str(label).encode())
        transaction.put(b"length", str(len(entries)).encode())
    environment.close()
    return folder


def write_npy_folder(folder, arrays, labels=LABELS):
    """The tools of EDM2 and REPA: numbered folders of mean and standard deviation, and dataset.json in any order."""
    entries = []
    for i, array in enumerate(arrays):
        name = f"{i // 10:05d}/img-mean-std-{i:08d}.npy"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(npy(array))
        entries.append([name, int(labels[i])])
    (folder / "dataset.json").write_text(json.dumps({"labels": entries[::-1]}))
    return folder


def pack(folder, file):
    with zipfile.ZipFile(file, "w") as archive:
        for item in sorted(folder.rglob("*.*")):
            archive.write(item, item.relative_to(folder))
    return file


def mean_std(mean=MEAN, logvar=LOGVAR):
    return np.concatenate([mean, np.exp(0.5 * logvar)], axis=1)


def run(source, out, name, *overrides):
    convert.main(
        composed(f"format={name}", f"source={source}", f"out={out}", *overrides, config_name="convert")
    )
    return open_latents(out)


def close(stored, expected):
    np.testing.assert_allclose(np.asarray(stored, np.float32), expected, rtol=1e-3, atol=2e-2)


def test_tread(tmp_path):
    dataset = run(write_tread(tmp_path / "tread"), tmp_path / "out", "tread_wds")
    manifest = dataset.manifest
    close(dataset.stored, MEAN)  # the scale is taken out, to be applied once
    assert (manifest.kind, manifest.scale) == ("samples", 0.18215)
    assert (manifest.hflip, manifest.num_classes) == (False, 5)
    assert np.array_equal(dataset.labels, LABELS)
    seen = manifest.to_latents(dataset.read(np.arange(COUNT))[0])
    close(seen.numpy(), MEAN * 0.18215)
    unscaled = run(write_tread(tmp_path / "raw", MEAN), tmp_path / "raw_out", "tread_wds", "scaled=false")
    close(unscaled.stored, MEAN)


def test_moments_in_the_format_of_tread_are_refused_and_then_understood(tmp_path):
    """What users met who fed MaskDiT's shards to the official code."""
    moments = write_tread(tmp_path / "moments", np.concatenate([MEAN, LOGVAR], axis=1))
    with pytest.raises(UserError, match=r"24 entries contradict .* nearly all .*: stored_as=mean_logvar"):
        run(moments, tmp_path / "out", "tread_wds")
    spread = write_tread(tmp_path / "spread", mean_std())
    with pytest.raises(UserError, match=r"never negative, .*: stored_as=mean_std"):
        run(spread, tmp_path / "out", "tread_wds")
    assert not (tmp_path / "out").exists()
    for folder, stored_as in ((moments, "mean_logvar"), (spread, "mean_std")):
        dataset = run(folder, tmp_path / stored_as, "tread_wds", f"stored_as={stored_as}", "scaled=false")
        close(dataset.stored, np.concatenate([MEAN, LOGVAR], axis=1))
        assert dataset.manifest.kind == "moments"


def test_scaled_moments_are_unscaled(tmp_path):
    """(m, v) of z give (scale m, scale^2 v) of scale z."""
    scaled = np.concatenate([MEAN * 0.18215, LOGVAR + 2 * np.log(0.18215)], axis=1)
    folder = write_tread(tmp_path / "scaled", scaled)
    dataset = run(folder, tmp_path / "out", "tread_wds", "stored_as=mean_logvar")
    close(dataset.stored, np.concatenate([MEAN, LOGVAR], axis=1))


@pytest.mark.parametrize("stored_as", ["samples", "mean_logvar", "mean_std"])
def test_scale_and_shift_of_each_channel_are_taken_out(stored_as):
    chosen = replace(FORMATS["edm2"], stored_as=stored_as, scaled=True)
    scale, shift = (np.reshape(value, (4, 1, 1)).astype(np.float32) for value in (chosen.scale, chosen.shift))
    spread = {
        "samples": None,
        "mean_logvar": LOGVAR + 2 * np.log(scale),
        "mean_std": np.exp(0.5 * LOGVAR) * scale,
    }[stored_as]
    seen = (MEAN - shift) * scale
    stored = chosen.to_stored(seen if spread is None else np.concatenate([seen, spread], axis=1))
    np.testing.assert_allclose(
        stored, MEAN if spread is None else np.concatenate([MEAN, LOGVAR], axis=1), atol=1e-4
    )


def test_variances_are_clamped_as_diffusers_does():
    entry = np.array([1.0, 1.0, 1.0, 0.0, 1.0, 1e10]).reshape(1, 6, 1, 1)
    assert FORMATS["repa"].to_stored(entry)[0, 3:].ravel().tolist() == [-30, 0, 20]


def test_maskdit_lmdb(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "ENTRIES_AT_ONCE", 7)
    dataset = run(write_lmdb(tmp_path / "lmdb" / "train"), tmp_path / "out", "maskdit_lmdb", "num_held_out=3")
    manifest, moments = dataset.manifest, np.concatenate([MEAN, LOGVAR], axis=1)
    assert (manifest.count, manifest.num_held_out) == (COUNT, 3)
    assert (manifest.hflip, manifest.kind) == (True, "moments")
    close(dataset.stored[:, 0], moments)
    close(dataset.stored[:, 1], moments[..., ::-1])
    assert np.array_equal(dataset.labels, LABELS)


def test_an_lmdb_without_flips(tmp_path):
    folder = write_lmdb(tmp_path / "lmdb", second=np.concatenate(latents(seed=1), axis=1))
    with pytest.raises(UserError, match=r"the second half is not flips .*: hflip=false"):
        run(folder, tmp_path / "out", "maskdit_lmdb")
    assert run(folder, tmp_path / "out", "maskdit_lmdb", "hflip=false").manifest.count == 2 * COUNT
    moments = np.concatenate([MEAN, LOGVAR], axis=1)
    with pytest.raises(UserError, match="the second half is not flips"):
        run(write_lmdb(tmp_path / "twice", second=moments), tmp_path / "no", "maskdit_lmdb")
    shuffled = np.concatenate([LABELS, LABELS[::-1]])
    with pytest.raises(UserError, match=r"the classes of the second half are not .* first: hflip=false"):
        run(write_lmdb(tmp_path / "shuffled", labels=shuffled), tmp_path / "no", "maskdit_lmdb")


def test_an_lmdb_that_is_cut_off_does_not_kill_the_process(tmp_path):
    folder = write_lmdb(tmp_path / "lmdb")
    cut(folder / "data.mdb")
    with pytest.raises(UserError, match=r"data.mdb is cut off: it has \d+ of \d+ bytes"):
        run(folder, tmp_path / "out", "maskdit_lmdb")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (b"length", b"-3", r"length is b'-3', must be a number"),
        (b"length", b"1", "1 entries are not images and their flips"),
        (b"length", b"0", "holds no entries"),
        (b"y-3", b"9" * 30, r"y-3 is b'9+', must be .*, less than 1000000"),
        (b"z-3", b"12345678", "z-3 has 2 numbers, must be 8 channels of a square"),
        (b"z-3", None, "has no entry z-3"),
    ],
)
def test_an_lmdb_of_nonsense_is_one_clear_error(tmp_path, key, value, message):
    folder = write_lmdb(tmp_path / "lmdb")
    environment = lmdb.open(str(folder), map_size=2**26)
    with environment.begin(write=True) as transaction:
        if value is None:
            transaction.delete(key)
        else:
            transaction.put(key, value)
    environment.close()
    with pytest.raises(UserError, match=message):
        run(folder, tmp_path / "out", "maskdit_lmdb")
    assert not (tmp_path / "out").exists()


def test_a_tar_that_ends_between_two_members_is_cut_off(tmp_path):
    folder = write_tread(tmp_path / "tread")
    file = folder / "imagenet-0001.tar"
    with tarfile.open(file) as tar:
        end = [member.offset for member in tar][6]  # a whole number of samples stands before it
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(UserError, match=r"imagenet-0001.tar is cut off: an archive ends with 1024 zeros"):
        run(folder, tmp_path / "out", "tread_wds")


def test_npy_files_without_labels_and_with_flips(tmp_path):
    both = np.concatenate([mean_std(), mean_std()[..., ::-1]])
    folder = write_npy_folder(tmp_path / "source", both, labels=np.zeros(2 * COUNT, int))
    (folder / "dataset.json").write_text('{"labels": null}')
    dataset = run(folder, tmp_path / "out", "repa", "hflip=true")
    assert (dataset.manifest.count, dataset.manifest.num_classes, dataset.labels) == (COUNT, 0, None)
    close(dataset.stored[:, 1], np.concatenate([MEAN, LOGVAR], axis=1)[..., ::-1])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_maskdit_wds(tmp_path, protocol):
    dataset = run(write_maskdit_wds(tmp_path / "wds", protocol), tmp_path / "out", "maskdit_wds")
    close(dataset.stored, np.concatenate([MEAN, LOGVAR], axis=1))
    assert np.array_equal(dataset.labels, LABELS)


@pytest.mark.parametrize("packed", [False, True])
def test_repa(tmp_path, packed):
    source = write_npy_folder(tmp_path / "vae-sd", mean_std())
    source = pack(source, tmp_path / "vae-sd.zip") if packed else source
    dataset = run(source, tmp_path / "out", "repa")
    close(dataset.stored, np.concatenate([MEAN, LOGVAR], axis=1))
    assert np.array_equal(dataset.labels, LABELS)
    assert dataset.manifest.encoder == "stabilityai/sd-vae-ft-mse"
    assert dataset.manifest.pixel_range == (-1.0, 1.0)


EDM2_MEAN = np.array([5.81, 3.25, 0.12, -2.15], np.float32).reshape(4, 1, 1)
EDM2_STD = np.array([4.17, 4.62, 3.71, 3.28], np.float32).reshape(4, 1, 1)


def write_edm2(folder):
    return write_npy_folder(folder, mean_std(MEAN / STDS * EDM2_STD + EDM2_MEAN))


def test_edm2(tmp_path):
    dataset = run(write_edm2(tmp_path / "edm2"), tmp_path / "out", "edm2")
    seen = dataset.manifest.to_means(dataset.read(np.arange(COUNT))[0])
    close(seen.numpy(), MEAN / STDS * 0.5)
    assert dataset.manifest.pixel_range == (0.0, 1.0)
    assert dataset.manifest.std == 0.5


def write_lightningdit(folder, stats=None, sizes=(10, 14), **changed):
    """Two shards, and statistics that differ from channel to channel."""
    folder.mkdir()
    start = 0
    for i, size in enumerate(sizes):
        part = slice(start, start := start + size)
        tensors = {
            "latents": MEAN[part],
            "latents_flip": MEAN[part, ..., ::-1],
            "labels": LABELS[part],
        } | changed
        tensors = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}
        save_file(tensors, folder / f"latents_rank00_shard{i:03d}.safetensors")
    stats = {"mean": torch.tensor(VAVAE_MEAN), "std": torch.tensor(STDS)[None]} if stats is None else stats
    torch.save(stats, folder / "latents_stats.pt")
    return folder


VAVAE_MEAN = np.array([0.5, -0.2, 0.0, 0.1], np.float32).reshape(1, 4, 1, 1)


def test_lightningdit(tmp_path, capsys):
    """Images and flips of all shards in order, and the statistics of each channel as shift and scale."""
    dataset = run(write_lightningdit(tmp_path / "vavae"), tmp_path / "out", "lightningdit")
    close(dataset.stored[:, 0], MEAN)
    close(dataset.stored[:, 1], MEAN[..., ::-1])
    assert np.array_equal(dataset.labels, LABELS)
    assert dataset.manifest.shift == pytest.approx((0.5, -0.2, 0.0, 0.1))
    assert dataset.manifest.scale == pytest.approx(tuple(1 / STDS.ravel()))
    seen = dataset.manifest.to_means(dataset.read(np.arange(COUNT))[0])
    close(seen.numpy()[:, 0] if seen.dim() == 5 else seen.numpy(), (MEAN - VAVAE_MEAN[0]) / STDS)
    assert "shift=(0.5, -0.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("scale=0.2",), "scale=0.2 needs shift as well"),
        (("shift=0.1",), "shift=0.1 needs scale as well"),
        (("scale=0.2", "shift=0.1"), None),
        (("scale=0.1", "shift=0.1", "std=0.5"), None),
        (("encoder=some/other", "scale=0.2"), "scale=0.2 needs shift as well"),
    ],
)
@pytest.mark.parametrize("name", ["lightningdit", "edm2", "tread_wds"])
def test_scale_and_shift_come_from_one_source(tmp_path, name, given, message):
    write = {
        "lightningdit": write_lightningdit,
        "edm2": lambda path: write_npy_folder(path, mean_std()),
        "tread_wds": lambda path: write_tread(path, (MEAN - 0.1) * float(given[0][-3:])),
    }[name]
    std = ("std=1",) if name == "edm2" and "std=0.5" not in given else ()
    source = tmp_path / "source"
    if message:
        with pytest.raises(UserError, match=message):
            run(source, tmp_path / "out", name, *given)
        return
    found = run(write(source), tmp_path / "out", name, *given, *std).manifest
    assert (found.scale, found.shift) == (float(given[0][-3:]), 0.1)
    assert found.std == (0.5 if "std=0.5" in given else 1)
    assert found.origin["assumed"]["shift"] == 0.1


def test_repa_and_edm2_are_distinguished_by_their_numbers(tmp_path):
    with pytest.raises(UserError, match=r"a mean of 1.0\d in channel 0.*another range of pixels"):
        run(write_edm2(tmp_path / "edm2"), tmp_path / "out", "repa")
    with pytest.raises(UserError, match=r"in channel 0.*another range of pixels"):
        run(write_npy_folder(tmp_path / "repa", mean_std()), tmp_path / "out", "edm2")


@pytest.mark.parametrize(
    ("name", "write", "overrides", "message"),
    [
        ("tread_wds", lambda p: write_tread(p, MEAN), (), r"standard deviation of 4\.\d+, not 1:"),
        ("tread_wds", write_tread, ("scaled=false",), r"standard deviation of 0\.15\d?, not 1: scaled=true"),
        (
            "tread_wds",
            write_tread,
            ("scale=0.5", "shift=0", "scaled=false"),
            r"standard deviation of 0\.41\d, not 1",
        ),
        (
            "maskdit_wds",
            write_maskdit_wds,
            ("stored_as=mean_std",),
            "not a standard deviation: stored_as=mean_logvar",
        ),
        (
            "repa",
            lambda p: write_npy_folder(p, mean_std()),
            ("stored_as=mean_logvar",),
            "as standard deviations are: stored_as=mean_std",
        ),
        ("repa", lambda p: write_npy_folder(p, MEAN[:, :3]), (), "3 channels are not two halves:"),
        ("repa", lambda p: write_npy_folder(p, MEAN * np.nan), (), "there are values that are not finite"),
    ],
)
def test_numbers_that_contradict_the_assumptions_are_refused(tmp_path, name, write, overrides, message):
    with pytest.raises(UserError, match=rf"{message}"):
        run(write(tmp_path / "source"), tmp_path / "out", name, *overrides)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def spoil_tar(folder):
    cut(folder / "imagenet-0001.tar")


def spoil_npy(folder):
    cut(folder / "00000" / "img-mean-std-00000003.npy")


def rename_member(folder):
    write_tar(folder / "imagenet-0001.tar", [("7.latent.npy", npy(MEAN[0])), ("8.cls", b"0")])


def break_order(folder):
    a, b = npy(MEAN[0]), npy(MEAN[1])
    write_tar(
        folder / "imagenet-0001.tar",
        [("7.cls", b"0"), ("8.latent.npy", a), ("7.latent.npy", b), ("8.cls", b"1")],
    )


@pytest.mark.parametrize(
    ("name", "write", "spoil", "overrides", "message"),
    [
        ("tread_wds", write_tread, spoil_tar, (), r"imagenet-0001.tar is damaged"),
        ("tread_wds", write_tread, rename_member, (), r"imagenet-0001.tar: 7 must hold both .cls and .latent.npy"),
        ("tread_wds", write_tread, break_order, (), r"8.latent.npy must be 7.latent.npy, in the order"),
        ("tread_wds", lambda p: write_tread(p, labels=["a"] * COUNT), None, (), r"0000000.cls is b'a', must be a number 0, 1"),
        ("tread_wds", write_tread, None, ("num_classes=4",), r"label 4 at position 4 must be in \[0, 3\]"),
        ("maskdit_wds", write_tread, None, (), r"0000000 must hold both .cls and .latent|must hold both"),
        ("maskdit_wds", lambda p: write_maskdit_wds(p, arrays=[{"no": "array"}] * COUNT), None, (), "not a pickled array"),
        ("repa", lambda p: write_npy_folder(p, mean_std()), lambda p: (p / "dataset.json").unlink(), (), "has no dataset.json"),
        ("repa", lambda p: write_npy_folder(p, mean_std()), spoil_npy, (), "00000003.npy cannot be read"),
        ("repa", lambda p: p.mkdir(), None, (), r"holds no .npy files"),
        ("repa", lambda p: write_npy_folder(p, np.full((4, 8, 8, 8), "a")), None, (), "they are <U1, not numbers"),
        ("tread_wds", lambda p: write_tread(p, labels=[10**30] * COUNT), None, (), "cls is .*, must be .*, less than 1000000"),
        ("tread_wds", lambda p: p.mkdir(), None, (), r"holds no .tar files"),
        ("lightningdit", lambda p: p.mkdir(), None, (), r"holds no .safetensors files"),
        ("lightningdit", write_lightningdit, lambda p: cut(p / "latents_rank00_shard001.safetensors"), (), r"shard001.safetensors is damaged, or lacks"),
        ("lightningdit", lambda p: write_lightningdit(p, sizes=(24,), labels=LABELS[1:]), None, (), r"has \[24, 24, 23\] entries of"),
        ("lightningdit", write_lightningdit, lambda p: (p / "latents_stats.pt").unlink(), (), "latents_stats.pt not found"),
        ("lightningdit", write_lightningdit, lambda p: cut(p / "latents_stats.pt"), (), "latents_stats.pt is damaged"),
        ("lightningdit", lambda p: write_lightningdit(p, {"mean": 1}), None, (), "does not hold the tensors mean and std"),
        ("lightningdit", lambda p: write_lightningdit(p, dict.fromkeys(("mean", "std"), torch.zeros(4))), None, (), "standard deviation above 0"),
        ("repa", lambda p: write_npy_folder(p, [*mean_std()[1:], MEAN[0]]), None, (), "entries must all be of one shape"),
    ],
)  # fmt: skip
def test_damaged_sources_are_one_clear_error(tmp_path, name, write, spoil, overrides, message):
    write(tmp_path / "source")
    if spoil:
        spoil(tmp_path / "source")
    with pytest.raises(UserError, match=message):
        run(tmp_path / "source", tmp_path / "out", name, *overrides)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hflip=true", "hflip=true needs a format whose entries can be read in any order"),
        ("num_held_out=24", r"num_held_out=24 must be in \[0, 23\]"),
    ],
)
def test_what_does_not_fit_the_source_is_refused(tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        run(write_tread(tmp_path / "source"), tmp_path / "out", "tread_wds", override)
    assert not (tmp_path / "out").exists()


def test_the_readme_has_every_format():
    from tests.runs import ROOT

    text = (ROOT / "data" / "README.md").read_text()
    for name, chosen in FORMATS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"`{chosen.stored_as}`" in row
        assert chosen.encoder.removeprefix("stabilityai/") in row
        assert ("second half" in row) == chosen.hflip
        assert ("| yes" in row) == chosen.scaled


class Evil:
    """Runs what it is given as soon as it is unpickled by an ordinary unpickler."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def attacks(marker):
    import os
    import shutil

    return {
        "system": Evil(os.system, f"touch {marker}"),
        "eval": Evil(eval, f"open({str(marker)!r}, 'w')"),
        "numpy": Evil(np.save, str(marker), np.zeros(1)),
        "rmtree": Evil(shutil.rmtree, str(marker.parent)),
        "huge": Evil(np.ndarray, (10**13,)),
        "in an array": np.array([Evil(os.system, f"touch {marker}")], dtype=object),
        "objects": np.array([1, "a", None], dtype=object),
        "words": np.array(["a", "b"]),
        "records": np.zeros(2, dtype=[("a", "f4")]),
        "none": None,
        "list": [1.0, 2.0],
    }


@pytest.mark.parametrize("name", attacks(__import__("pathlib").Path("x")))
def test_a_malicious_pickle_runs_nothing(tmp_path, name):
    marker = tmp_path / "inner" / "ran"
    marker.parent.mkdir()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ValueError, match="not a pickled array of numbers"):
            unpickle_array(pickle.dumps(attacks(marker)[name], protocol=protocol))
    assert [path.name for path in tmp_path.rglob("*")] == ["inner"]


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<f2", "<i4", "|u1", ">i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_numbers_survive_pickling(dtype, order):
    array = np.asarray(np.arange(24).reshape(2, 3, 4).astype(dtype), order=order)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(array, protocol=protocol)
        for old in (
            data,
            data.replace(b"numpy._core.", b"numpy.core.") if protocol < 4 else data,
        ):  # before numpy 2
            found = unpickle_array(old)
            assert np.array_equal(found, array)
            assert found.dtype == array.dtype


@settings(max_examples=300, deadline=None)
@given(
    position=st.integers(0, 10_000),
    value=st.integers(0, 255),
    protocol=st.integers(0, 5),
    length=st.floats(0, 1),
)
def test_damaged_pickles_raise_nothing_but_the_documented_error(position, value, protocol, length):
    data = bytearray(pickle.dumps(np.arange(6, dtype=np.float32).reshape(2, 3), protocol=protocol))
    data[position % len(data)] = value
    for damaged in (bytes(data), bytes(data[: int(length * len(data))])):
        with contextlib.suppress(ValueError):
            assert isinstance(unpickle_array(damaged), np.ndarray)


def test_pickles_that_fill_memory_or_change_their_reader_are_refused():
    """Each of these went wrong with an unpickler that only looked at names."""
    array = pickle.dumps(np.zeros(2, np.float32), protocol=5)
    place = b"\x80\x02Nr" + struct.pack("<I", 300_000_000) + b"."
    nested = b"\x80\x02}N" + b"\x85" * 400_000 + b"Ns."
    deep = b"\x80\x02N" + b"\x85" * 400_000 + b"."
    on_a_class = b"\x80\x02cnumpy._core.numeric\n_frombuffer\nN}(X\x08\x00\x00\x00__init__Nu\x86b."
    tracemalloc.start()
    for data in (place, nested, deep, on_a_class, b"", b".", b"\x80\x05."):
        with pytest.raises(ValueError, match="not a pickled array of numbers"):
            unpickle_array(data)
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()
    assert np.array_equal(unpickle_array(array), np.zeros(2))
