"""Readers of files from outside, small files for them, and the damage that is done to these."""

import io
import json
import os
import struct
import tarfile
import zipfile
import zlib
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image

from data import LatentManifest, LatentWriter, open_images, open_latents, open_shards
from data.importers import FORMATS
from data.make_shards import write_shards
from data.parts import EncodedParts
from data.shards import read_shard_manifest
from evaluation import open_reference
from evaluation.detectors import inception
from tests.networks import small_dit
from training.weights import load_weights

COUNT, SHAPE, HUGE = 6, (4, 4, 4), 10**15
SIZES = {"input_size": 4, "in_channels": 4, "num_classes": 2}
LABELS = b'{"labels": [["a.npy", 0]]}'
# In place of a part of a configuration: what would run code if it were built.
TIMEIT = {"_target_": "timeit.timeit", "stmt": "pass", "number": 0}
TIMEIT["setup"] = "__import__('pathlib').Path('EXECUTED').touch()"


class Malicious:
    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


# Readers: each takes a file or folder, and reads all of it.
def read_images(path, resolution=None):
    images = open_images(path, resolution=resolution)
    return list(images.batches(2, range(-(-images.count // 2))))


def read_latents(path):
    return open_latents(str(path), **SIZES)


def read_stream(path):
    read_shard_manifest.cache_clear()  # of another test's folder of this name
    dataset = open_shards(str(path), **SIZES)
    shards = zip(dataset.names, dataset.counts, strict=True)
    return [dataset.read_shard(name, int(count)) for name, count in shards]


def read_reference(path):
    return open_reference(path, open_images)


def read_part(path):
    return EncodedParts(path, {}, 1).read_part(0)


def read_format(name):
    return lambda path: list(FORMATS[name].open(path).entries())


def load_net(path):
    load_weights(small_dit(depth=1), path)


def read_inception(path):
    return inception.read_weights(path, allow_unpublished=True)


# Valid files, and files with given bytes in one place.
def written(name, data):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(data)
    return Path(name)


def latent_folder(name=None, data=None):
    layout = {"num_held_out": 1, "conditioning_type": "mask"}
    manifest = LatentManifest(COUNT, SHAPE, "float16", "samples", 2, "identity", **layout)
    with LatentWriter(Path("latents"), manifest) as writer:
        writer.append(np.ones((COUNT, *SHAPE)), np.arange(COUNT) % 2, np.ones((COUNT, 4, 4), np.uint8))
    return written(f"latents/{name}", data).parent if name else Path("latents")


def shards_folder(name=None, data=None):
    manifest = LatentManifest(COUNT, SHAPE, "float16", "samples", 2, "identity", num_held_out=1)
    with LatentWriter("to_shard", manifest) as writer:
        writer.append(np.ones((COUNT, *SHAPE)), np.arange(COUNT) % 2)
    write_shards(read_latents("to_shard"), Path("shards"), 3)
    return written(f"shards/{name}", data).parent if name else Path("shards")


def with_json(folder, name, **changes):
    text = json.loads((folder / name).read_text())
    return written(folder / name, json.dumps({**text, **changes}).encode()).parent


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def declared(shape, dtype="|u1"):
    """An .npy that declares a shape and contains 16 bytes."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + b"\0" * 16


def packed(path, method=zipfile.ZIP_DEFLATED, **members):
    """A zip with members of given bytes; `__` in a name is a dot."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "."), data)
    return Path(path)


def npz(path="a.npz", **members):
    return packed(path, zipfile.ZIP_STORED, **{f"{name}__npy": data for name, data in members.items()})


def npy_zip(data, labels=LABELS, method=zipfile.ZIP_STORED):
    return packed("npy.zip", method, a__npy=data, dataset__json=labels)


def npy_folder(data, labels=LABELS):
    written("npys/dataset.json", labels)
    return written("npys/a.npy", data).parent


def wds(data, suffix, path="w.tar", change=lambda info: None, name="a"):
    """A tar of one sample, whose header `change` may spoil."""
    with tarfile.open(path, "w") as tar:
        for member, content in ((f"{name}.cls", b"0"), (f"{name}.{suffix}", data)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            if member.endswith(suffix):
                change(info)
            if info.size == len(content):
                tar.addfile(info, io.BytesIO(content))
            else:  # a header alone
                tar.offset += tar.fileobj.write(info.tobuf(tar.format))
    return Path(path)


def shard_of(data, change=lambda info: None):
    folder = shards_folder()
    return wds(data, "latents.npy", folder / "train-000000.tar", change).parent


def parts(data):
    written("parts/0000000.npz", npz(latents=data, positions=npy(np.zeros(1, np.int64))).read_bytes())
    return Path("parts")


def saved(content, name, **options):
    torch.save(content, name, **options)
    return Path(name)


def images_with_labels(data):
    written("images/dataset.json", data)
    Image.new("RGB", (8, 8)).save("images/a.png")
    return Path("images")


def graph(**constants):
    """A graph of TensorFlow with constants of given shapes; one of few numbers has them all."""
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    found = GraphDef()
    for name, shape in constants.items():
        tensor = found.node.add(name=name.replace("__", "/"), op="Const").attr["value"].tensor
        tensor.dtype, num_bytes = 1, 4 * int(np.prod(shape))
        for size in shape:
            tensor.tensor_shape.dim.add(size=size)
        if 0 < num_bytes < 1000:
            tensor.tensor_content = bytes(num_bytes)
        else:
            tensor.float_val.append(1)
    return written("g.pb", found.SerializeToString())


# Damage.
def hole(info):
    """Turn a member of a tar into a sparse file that is one hole."""
    info.size = 0
    info.pax_headers = {"GNU.sparse.map": f"{HUGE},0", "GNU.sparse.size": str(HUGE)}


def huge(info):
    info.size = HUGE


def noted(path, kind=tarfile.GNUTYPE_LONGNAME):
    """A sparse tar that begins with a note of 256 MiB."""
    note = tarfile.TarInfo("note")
    note.type, note.size = kind, 2**28
    file = written(path, note.tobuf())
    os.truncate(file, 2**28)
    return file


def notes_on_notes(path):
    note = tarfile.TarInfo("note")
    note.type, note.size = tarfile.GNUTYPE_LONGNAME, 1
    return written(path, (note.tobuf() + bytes(512)) * 2000)


def cut_holes(path):
    """A tar that ends where its list of holes should continue."""
    member = tarfile.TarInfo("a.latent.npy")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[482] = 1
    header[148:156] = b"%06o\0 " % tarfile.calc_chksums(header)[0]
    return written(path, bytes(header))


def endless_holes(path):
    """A tar whose list of holes goes on to its end."""
    member = tarfile.TarInfo("a.latents.npy")
    sparse = {"major": "1", "minor": "0", "name": "a", "realsize": "9"}
    member.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}
    return written(path, member.tobuf(tarfile.PAX_FORMAT) + f"{10**9}\n".encode() + b"1\n" * 2**25)


def crowded(path):
    """A tar of one sample with many files."""
    with tarfile.open(path, "w") as tar:
        for i in range(100):
            info = tarfile.TarInfo(f"a.{i}")
            info.size = 2**13
            tar.addfile(info, io.BytesIO(bytes(2**13)))
    return path


def inflated(path, name, data):
    """A zip whose directory declares a larger member than its bytes can decompress to."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
        archive.infolist()[0].file_size = HUGE + len(declared((HUGE, 1, 1, 1))) - 16
    return Path(path)


def repacked(name, method=zipfile.ZIP_DEFLATED, tail=b""):
    """Weights in a zip that torch.save did not write."""
    plain = zipfile.ZipFile(saved({"fc.weight": torch.zeros(2**20)}, "plain.pt"))
    with plain, zipfile.ZipFile(name, "w", method) as archive:
        for member in plain.namelist():
            archive.writestr(member, plain.read(member))
    return written(name, Path(name).read_bytes() + tail)


def two_directories(name):
    """Weights in a zip with two directories: zipfile finds the second one, other readers the first."""
    data = repacked(name).read_bytes()
    start = data.index(b"PK\1\2")
    stored = repacked(name, zipfile.ZIP_STORED).read_bytes()
    directory = stored[stored.index(b"PK\1\2") :]
    return written(name, data[:-22] + directory[:-22] + data[-22:-6] + struct.pack("<L", start) + b"\0\0")


def overlapping(name):
    """Weights in a zip whose directory names its member a hundred times."""
    file = saved({"fc.weight": torch.zeros(2**20)}, name)
    data = file.read_bytes()
    start = data.index(b"PK\1\2")
    directory, count = data[start : data.index(b"PK\6\6")] * 100, 100 * data[start:].count(b"PK\1\2")
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), start, 0)
    return written(name, data[:start] + directory + end)


def png(side):
    """An image that declares a larger side than it has."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")
    data = bytearray(file.getvalue())
    data[16:24] = struct.pack(">2I", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return written("images/a.png", bytes(data)).parent


def spoil_run(run, change):
    """Change a run: keys of its configuration (a dict), text added to it, or a file (name, content)."""
    file = run / "config.yaml"
    if isinstance(change, list):
        for each in change:
            spoil_run(run, each)
    elif isinstance(change, dict):
        config = yaml.safe_load(file.read_text())
        for place, value in change.items():
            *groups, key = place.split("/")
            reduce(getitem, groups, config)[key] = value
        file.write_text(yaml.safe_dump(config, sort_keys=False))
    elif isinstance(change, str):
        file.write_text(file.read_text() + change)
    else:
        written(run / change[0], change[1])
