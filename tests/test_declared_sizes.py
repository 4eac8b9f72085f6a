"""Sizes that a file declares but does not contain are refused before memory is allocated for them."""

import io
import os
import struct
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from builders.scoring import read_labels
from data import open_images, read_manifest, shards
from data.importers import FORMATS
from data.listing import list_images
from data.verify import damages
from evaluation.detectors import inception
from examples import finetune
from tests.outside import (
    declared,
    images_with_labels,
    latent_folder,
    load_net,
    manifest_with,
    npy,
    npy_zip,
    npz,
    parts,
    read_all,
    read_images,
    read_inception,
    read_latents,
    read_part,
    read_reference,
    read_stream,
    saved,
    shard_of,
    shards_folder,
    shards_with,
    spoilt,
    wds,
    written,
)

HUGE = 10**15
MAX_MEMORY, MAX_SECONDS = 2**26, 5
NESTED = b"[" * 200_000
ZEROS = npy(np.zeros(1))


def hole(info):
    """Turn a member of a tar into a sparse file that is one hole."""
    info.size = 0
    info.pax_headers = {"GNU.sparse.map": f"{HUGE},0", "GNU.sparse.size": str(HUGE)}


def huge(info):
    info.size = HUGE


def inflated(path, name, data):
    """Write a zip whose directory declares a larger member than its bytes can decompress to."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
        archive.infolist()[0].file_size = HUGE + len(declared((HUGE, 1, 1, 1))) - 16
    return Path(path)


def long_header(path, member, version=2):
    """Write a zip whose .npy has a header that is longer than MAX_MEMORY."""
    archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open(f"{member}.npy", "w") as file:
        file.write(b"\x93NUMPY" + struct.pack("<BBI", version, 0, 2**27))
        for _ in range(2**7):
            file.write(b" " * 2**20)
    return Path(path)


def labelled(path):
    """Add labels of a.npy to a zip or a folder."""
    text = '{"labels": [["a.npy", 0]]}'
    if path.is_dir():
        (path / "dataset.json").write_text(text)
        return path
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("dataset.json", text)
    return path


def packed_labels(path, text, method=zipfile.ZIP_DEFLATED):
    """Write a zip of latents with compressed labels."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.npy", ZEROS)
        archive.writestr("dataset.json", text)
    return Path(path)


def longer(folder, name):
    """Make a file longer than MAX_MEMORY; it is sparse."""
    os.truncate(folder / name, 2**28)
    return folder


def packed(name, method=zipfile.ZIP_DEFLATED, tail=b""):
    """Save weights as a zip whose members are compressed."""
    plain = zipfile.ZipFile(saved({"fc.weight": torch.zeros(2**20)}, "plain.pt"))
    with plain, zipfile.ZipFile(name, "w", method) as archive:
        for member in plain.namelist():
            archive.writestr(member, plain.read(member))
    return written(name, Path(name).read_bytes() + tail)


def two_directories(name):
    """Save weights as a zip with two directories: zipfile finds the second one, other readers the first."""
    data = packed(name).read_bytes()
    start = data.index(b"PK\1\2")
    stored = packed(name, zipfile.ZIP_STORED).read_bytes()
    directory = stored[stored.index(b"PK\1\2") :]
    end = data[-22:-6] + struct.pack("<L", start) + b"\0\0"
    return written(name, data[:-22] + directory[:-22] + end)


def overlapping(name):
    """Save weights as a zip whose directory names its member a hundred times."""
    file = saved({"fc.weight": torch.zeros(2**20)}, name)
    data = file.read_bytes()
    start = data.index(b"PK\1\2")
    directory = data[start : data.index(b"PK\6\6")] * 100
    count = 100 * data[start:].count(b"PK\1\2")
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), start, 0)
    return written(name, data[:start] + directory + end)


def noted(path, kind=tarfile.GNUTYPE_LONGNAME, size=2**28, fill=b""):
    """Write a sparse tar that begins with a note that is longer than MAX_MEMORY."""
    note = tarfile.TarInfo("note")
    note.type, note.size = kind, size
    file = written(path, note.tobuf() + fill)
    os.truncate(file, 2**28)
    return file


def notes_on_notes(path):
    """Write a tar of notes, each on the next."""
    note = tarfile.TarInfo("note")
    note.type, note.size = tarfile.GNUTYPE_LONGNAME, 1
    return written(path, (note.tobuf() + bytes(512)) * 2000)


def cut_holes(path):
    """Write a tar that ends where its list of holes should continue."""
    hole = tarfile.TarInfo("a.latent.npy")
    hole.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(hole.tobuf(tarfile.GNU_FORMAT))
    header[482] = 1
    header[148:156] = b"%06o\0 " % tarfile.calc_chksums(header)[0]
    return written(path, bytes(header))


def sparse_without_end(path):
    """Write a tar whose list of holes goes on to its end."""
    hole = tarfile.TarInfo("a.latents.npy")
    sparse = {"major": "1", "minor": "0", "name": "a", "realsize": "9"}
    hole.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}
    header = hole.tobuf(tarfile.PAX_FORMAT)
    return written(path, header + f"{10**9}\n".encode() + b"1\n" * 2**25)


def crowded(path):
    """Write a tar of one sample with many files."""
    with tarfile.open(path, "w") as tar:
        for i in range(100):
            info = tarfile.TarInfo(f"a.{i}")
            info.size = 2**13
            tar.addfile(info, io.BytesIO(bytes(2**13)))
    return path


def expanded(name):
    """Save weights of which one stored number is expanded to HUGE ones."""
    return saved({"fc.weight": torch.zeros(1).expand(HUGE)}, name)


def graph(shape):
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    found = GraphDef()
    tensor = found.node.add(name="softmax/weights", op="Const").attr["value"].tensor
    tensor.dtype = 1
    tensor.float_val.append(1)
    for size in shape:
        tensor.tensor_shape.dim.add(size=size)
    return written("g.pb", found.SerializeToString())


def png(side):
    """Write an image that declares a larger side than it has."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")
    data = bytearray(file.getvalue())
    data[16:24] = struct.pack(">2I", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return written("images/a.png", bytes(data)).parent


def crop_images(path):
    images = open_images(path, resolution=8)
    return list(images.batches(1, range(images.count)))


def tread(path):
    return read_all(FORMATS["tread_wds"].open(path))


def repa(path):
    return read_all(FORMATS["repa"].open(path))


LYING_SHARDS = {"manifest": {"count": HUGE + 3}, "shards": {"train-000000.tar": HUGE, "train-000001.tar": 2}}
LYING_HELD_OUT = {"manifest": {"count": HUGE + 5}, "shards": {"held_out-000000.tar": HUGE}}
LYING_TENSOR = b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'
BRACKETS = b"[" + b"[]," * 2**22 + b"[]]"
LONG_HEADER = b"\x93NUMPY" + struct.pack("<BBI", 2, 0, 2**30) + b" " * 100
LABELLED = npy(np.zeros((2, 8, 8, 1), np.uint8))
FILES = {
    "samples": (read_images, lambda: npz(arr_0=declared((HUGE, 8, 8, 3)))),
    "samples, and their archive": (
        read_images,
        lambda: inflated("a.npz", "arr_0.npy", declared((HUGE, 1, 1, 1))),
    ),
    "size of a sample": (read_images, lambda: npz(arr_0=declared((1, 10**6, 10**6, 3)))),
    "header of samples": (read_images, lambda: npz(arr_0=b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10_000)),
    "length of a header of samples": (read_images, lambda: long_header("a.npz", "arr_0")),
    "length of a header of version 3": (read_images, lambda: long_header("a.npz", "arr_0", version=3)),
    "labels of samples": (read_labels, lambda: npz(arr_0=LABELLED, arr_1=declared((HUGE,)))),
    "reference": (read_reference, lambda: npz(mu=declared((HUGE,), "<f8"), sigma=declared((HUGE,), "<f8"))),
    "numbers of a reference": (
        read_reference,
        lambda: npz(mu=declared((2048,), "|V2000000000"), sigma=ZEROS),
    ),
    "hash of a reference": (read_reference, lambda: npz(weights=declared((), "<U500000000"))),
    "length of a header of a reference": (read_reference, lambda: long_header("a.npz", "mu")),
    "length of a header of a hash": (read_reference, lambda: long_header("a.npz", "weights")),
    "length of a header of a part": (
        read_part,
        lambda: long_header(written("parts/0000000.npz", b""), "latents").parent,
    ),
    "length of a header of latents": (
        read_latents,
        lambda: spoilt(latent_folder(), "latents.npy", LONG_HEADER),
    ),
    "length of a header of inputs": (finetune._open, lambda: written("inputs/latents.npy", LONG_HEADER)),
    "latents": (
        read_latents,
        lambda: spoilt(latent_folder(), "latents.npy", declared((HUGE, 4, 4, 4), "<f2")),
    ),
    "labels": (read_latents, lambda: spoilt(latent_folder(), "labels.npy", declared((10**30,), "<i8"))),
    "masks": (read_latents, lambda: spoilt(latent_folder(), "masks.npy", declared((HUGE, 4, 4)))),
    "count": (read_latents, lambda: manifest_with(count=HUGE)),
    "scale": (read_latents, lambda: manifest_with(scale=10**400)),
    "classes": (read_latents, lambda: manifest_with(num_classes=HUGE)),
    "shape": (read_latents, lambda: manifest_with(shape=[4, 10**6, 10**6])),
    "blocks": (
        lambda path: list(damages(path, read_manifest(path))),
        lambda: manifest_with(block_bytes=10**30),
    ),
    "brackets of a manifest": (read_latents, lambda: spoilt(latent_folder(), "manifest.json", BRACKETS)),
    "length of a manifest": (read_latents, lambda: longer(latent_folder(), "manifest.json")),
    "brackets of an origin": (read_latents, lambda: manifest_with(origin={"a": [[]] * 2**18})),
    "depth of a manifest": (read_latents, lambda: spoilt(latent_folder(), "manifest.json", NESTED)),
    "shards.json": (read_stream, lambda: shards_with(**LYING_SHARDS)),
    "shards.json, held out": (read_stream, lambda: shards_with(**LYING_HELD_OUT)),
    "brackets of shards.json": (read_stream, lambda: spoilt(shards_folder(), "shards.json", BRACKETS)),
    "length of shards.json": (read_stream, lambda: longer(shards_folder(), "shards.json")),
    "length of the manifest of shards": (read_stream, lambda: longer(shards_folder(), "manifest.json")),
    "note in a shard": (read_stream, lambda: noted(shards_folder() / "train-000000.tar").parent),
    "note of pax in a shard": (
        read_stream,
        lambda: noted(shards_folder() / "train-000000.tar", tarfile.XHDTYPE).parent,
    ),
    "holes without end in a shard": (
        read_stream,
        lambda: sparse_without_end(shards_folder() / "train-000000.tar").parent,
    ),
    "files of a sample in a shard": (
        read_stream,
        lambda: crowded(shards_folder() / "train-000000.tar").parent,
    ),
    "notes on notes in a shard": (
        read_stream,
        lambda: notes_on_notes(shards_folder() / "train-000000.tar").parent,
    ),
    "depth of shards.json": (read_stream, lambda: spoilt(shards_folder(), "shards.json", NESTED)),
    "latents of a shard": (read_stream, lambda: shard_of(declared((HUGE,)))),
    "hole in a shard": (read_stream, lambda: shard_of(ZEROS, hole)),
    "member of a shard": (read_stream, lambda: shard_of(ZEROS, huge)),
    "part": (read_part, lambda: parts(declared((HUGE,)))),
    "safetensors": (
        load_net,
        lambda: written("w.safetensors", struct.pack("<Q", len(LYING_TENSOR)) + LYING_TENSOR),
    ),
    "header of safetensors": (load_net, lambda: written("w.safetensors", struct.pack("<Q", HUGE) + b"{}")),
    "weights.pt that are packed": (load_net, lambda: packed("w.pt")),
    "weights.pt of two directories": (load_net, lambda: two_directories("w.pt")),
    "weights.pt with a comment": (load_net, lambda: packed("w.pt", zipfile.ZIP_STORED, tail=b"PK")),
    "weights.pt whose members overlap": (load_net, lambda: overlapping("w.pt")),
    "inception.pth that is packed": (read_inception, lambda: packed("w.pth")),
    "weights.pt": (load_net, lambda: expanded("w.pt")),
    "inception.pth": (read_inception, lambda: expanded("w.pth")),
    "constant of a graph": (read_inception, lambda: graph((HUGE,))),
    "constant that wraps around": (read_inception, lambda: graph((2**32, 2**32))),
    "length in a graph": (read_inception, lambda: written("g.pb", b"\x0a\xff\xff\xff\xff\x0f")),
    "image": (crop_images, lambda: png(2**31 - 1)),
    "image in a zip": (crop_images, lambda: inflated("a.zip", "a.webp", b"RIFF" + b"\0" * 2**20)),
    "brackets of dataset.json": (list_images, lambda: images_with_labels(BRACKETS)),
    "length of dataset.json": (list_images, lambda: longer(images_with_labels(b"{}"), "dataset.json")),
    "depth of dataset.json": (list_images, lambda: images_with_labels(NESTED)),
    "latents in a tar": (tread, lambda: wds(declared((HUGE,)), "latent.npy")),
    "hole in a tar": (tread, lambda: wds(ZEROS, "latent.npy", change=hole)),
    "class in a tar": (tread, lambda: wds(ZEROS, "cls", change=huge)),
    "latents in a zip": (repa, lambda: npy_zip(declared((HUGE,)))),
    "length of a header in a zip": (repa, lambda: labelled(long_header("a.zip", "a"))),
    "length of a header in a folder": (repa, lambda: labelled(written("npys/a.npy", LONG_HEADER).parent)),
    "brackets of labels in a zip": (repa, lambda: packed_labels("a.zip", BRACKETS)),
    "length of labels in a zip": (repa, lambda: packed_labels("a.zip", BRACKETS * 7)),
    "note in a tar": (tread, lambda: noted("a.tar")),
    "note of pax in a tar": (tread, lambda: noted("a.tar", tarfile.XHDTYPE)),
    "note on all tars": (tread, lambda: noted("a.tar", tarfile.XGLTYPE)),
    "notes on notes in a tar": (tread, lambda: notes_on_notes("a.tar")),
    "holes that are cut off in a tar": (tread, lambda: cut_holes("a.tar")),
    "packing in a zip": (
        repa,
        lambda: packed_labels("a.zip", b'{"labels": [["a.npy", 0]]}', zipfile.ZIP_BZIP2),
    ),
    "archive in a zip": (repa, lambda: npy_zip(npz(a=ZEROS).read_bytes())),
}

# The rule that refuses a file, where a later one would refuse it as well.
LENGTH = "declares a header of .* bytes, must be at most 10000"
RULES = {
    "samples": "bytes, its shape .* needs",
    "samples, and their archive": "declares .* bytes, more than the .* that are there can be",
    "length of a header of samples": LENGTH,
    "length of a header of version 3": LENGTH,
    "length of a header of a reference": LENGTH,
    "length of a header of a hash": LENGTH,
    "length of a header of a part": LENGTH,
    "length of a header of latents": LENGTH,
    "length of a header in a zip": LENGTH,
    "length of a header in a folder": LENGTH,
    "brackets of a manifest": "brackets in .* bytes",
    "brackets of an origin": "brackets in .* bytes",
    "length of a manifest": "more than 16777216 bytes",
    "brackets of shards.json": "brackets in .* bytes",
    "length of shards.json": "more than 16777216 bytes",
    "length of the manifest of shards": "more than 16777216 bytes",
    "note in a shard": "a sample takes more than .* bytes",
    "note of pax in a shard": "a sample takes more than .* bytes",
    "holes without end in a shard": "a sample takes more than .* bytes",
    "files of a sample in a shard": "a sample takes more than .* bytes",
    "weights.pt that are packed": "is compressed, must be as torch.save writes it",
    "weights.pt of two directories": "does not end as files that torch.save writes",
    "weights.pt with a comment": "does not end as files that torch.save writes",
    "weights.pt whose members overlap": "declares .* bytes, more than the .* that are there",
    "inception.pth that is packed": "is compressed, must be as torch.save writes it",
    "brackets of dataset.json": "brackets in .* bytes",
    "length of dataset.json": "more than .* bytes",
    "brackets of labels in a zip": "brackets in .* bytes",
    "length of labels in a zip": "more than .* bytes",
    "note in a tar": "declares .* bytes of notes",
    "note of pax in a tar": "declares .* bytes of notes",
    "note on all tars": "declares .* bytes of notes",
    "packing in a zip": "must be stored or deflated",
    "size of a sample": "an image has at most .* pixels",
    "labels of samples": "bytes, its shape .* needs",
    "reference": "must be .*: of another network",
    "numbers of a reference": "must be floats",
    "hash of a reference": "must be a hash",
    "latents": "bytes, its shape .* needs",
    "classes": "num_classes=.* must be in",
    "shape": "must be of at most .* numbers",
    "blocks": "block_bytes=.* and at most",
    "hole in a shard": "declares .* bytes, must be a file",
    "member of a shard": "declares .* bytes, must be a file",
    "part": "bytes, its shape .* needs",
    "weights.pt": "weights do not match the model",
    "inception.pth": "declares .* bytes, more than the file holds",
    "constant of a graph": "must be at most .* numbers",
    "constant that wraps around": "must be at most .* numbers",
    "image": "exceeds limit",
    "image in a zip": "must have at most .*",
    "latents in a tar": "bytes, its shape .* needs",
    "hole in a tar": "declares .* bytes, more than are there",
    "class in a tar": "declares .* bytes, more than are there",
    "latents in a zip": "bytes, its shape .* needs",
}


def test_notes_on_notes_are_refused_in_one_line(tmp_path, monkeypatch):
    """Where the size of a sample does not stop them, the recursion limit does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shards, "MAX_OVERHEAD_BYTES", 2**24)
    folder = notes_on_notes(shards_folder() / "train-000000.tar").parent
    message = r"train-000000\.tar cannot be read, tried 3 times: maximum recursion depth"
    with pytest.raises(ValueError, match=message):
        read_stream(folder)


@pytest.mark.parametrize("name", FILES)
def test_what_is_only_declared_takes_no_memory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inception, "MIN_FILE_BYTES", 0)
    read, make = FILES[name]
    file = make()
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=RULES.get(name, ".")) as raised:
            read(file)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < MAX_SECONDS
    assert file.name in str(raised.value)
