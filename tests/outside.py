"""Readers of untrusted files, small files for them, ways to damage them, and the table of all cases."""

import io
import json
import os
import struct
import tarfile
import zipfile
import zlib
from functools import partial, reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save

from builders.scoring import read_labels
from data import open_images, open_latents, read_manifest
from data.encoders import load_encoder
from data.importers import FORMATS
from data.listing import list_images
from data.verify import damages
from evaluation import open_reference
from evaluation.detectors import inception
from runtime.arrays import map_array
from runtime.parts import PartCache
from tests.latents import write_latents
from tests.networks import small_dit
from tests.photos import write_autoencoder
from training.weights import load_weights

COUNT, SHAPE, HUGE = 6, (4, 4, 4), 10**15
SIZES = {"input_size": 4, "in_channels": 4, "num_classes": 2}
LABELS = b'{"labels": [["a.npy", 0]]}'
# Parts of a configuration that would run code if they were built.
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


def read_reference(path):
    return open_reference(path, open_images)


def read_part(path):
    return PartCache(path, {}, 1, 1).read(0)


def read_format(name):
    def read(path):
        source = FORMATS[name].open(path)
        return [source.read(i) for i in range(source.count)]

    return read


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
    masks = np.ones((COUNT, 4, 4), np.uint8)
    write_latents("latents", np.ones((COUNT, *SHAPE)), np.arange(COUNT) % 2, masks, num_held_out=1)
    return written(f"latents/{name}", data).parent if name else Path("latents")


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


def wds(data, suffix, change=lambda info: None, name="a"):
    """A tar of one sample, whose header `change` may spoil."""
    with tarfile.open("w.tar", "w") as tar:
        for member, content in ((f"{name}.cls", b"0"), (f"{name}.{suffix}", data)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            if member.endswith(suffix):
                change(info)
            if info.size == len(content):
                tar.addfile(info, io.BytesIO(content))
            else:  # a header alone
                tar.offset += tar.fileobj.write(info.tobuf(tar.format))
    return Path("w.tar")


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
    """A tar whose list of holes continues to its end."""
    member = tarfile.TarInfo("a.latent.npy")
    sparse = {"major": "1", "minor": "0", "name": "a", "realsize": "9"}
    member.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}
    return written(path, member.tobuf(tarfile.PAX_FORMAT) + f"{10**9}\n".encode() + b"1\n" * 2**25)


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


# The table.
PICKLE, OBJECTS = b"cos\nsystem\n(S'touch EXECUTED'\ntR.", npy(np.array([Malicious()], dtype=object))
ZEROS, IMAGES = npy(np.zeros(1)), npy(np.zeros((2, 8, 8, 1), np.uint8))
LATENT = npy(np.zeros((8, 4, 4), np.float32))
BRACKETS, NESTED = b"[" + b"[]," * 2**22 + b"[]]", b"[" * 200_000
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n"  # PIL runs a program
LYING_TENSOR = b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'
tread, repa = read_format("tread_wds"), read_format("repa")

# What reads an array, and writes bytes in its place; the shape and the type that a lie must have.
ARRAYS = {
    "samples": (read_images, lambda data: npz(arr_0=data), (HUGE, 8, 8, 3), "|u1"),
    "labels of samples": (read_labels, lambda data: npz(arr_0=IMAGES, arr_1=data), (HUGE,), "|u1"),
    "reference": (read_reference, lambda data: npz(mu=data, sigma=data), (HUGE,), "<f8"),
    "hash of a reference": (read_reference, lambda data: npz(weights=data), (), "<U500000000"),
    "latents": (read_latents, partial(latent_folder, "latents.npy"), (HUGE, 4, 4, 4), "<f2"),
    "labels": (read_latents, partial(latent_folder, "labels.npy"), (10**30,), "<i8"),
    "masks": (read_latents, partial(latent_folder, "masks.npy"), (HUGE, 4, 4), "|u1"),
    "part": (read_part, parts, (HUGE,), "|u1"),
    "tread_wds": (tread, lambda data: wds(data, "latent.npy"), (HUGE,), "|u1"),
    "repa": (repa, npy_zip, (HUGE,), "|u1"),
    "folder of repa": (repa, npy_folder, (HUGE,), "|u1"),
    "edm2": (read_format("edm2"), npy_zip, (HUGE,), "|u1"),
    "inputs": (map_array, lambda data: written("inputs/latents.npy", data), (HUGE, 2), "|u1"),
}  # fmt: skip
ARRAY_DAMAGE = {
    "objects": (lambda *_: OBJECTS, "."),
    "a pickle": (lambda *_: PICKLE, "."),
    "a shape": (declared, "its shape .* needs|must be .*: of another network|must be a hash|than file size"),
    "a header": (
        lambda *_: b"\x93NUMPY" + struct.pack("<BBI", 2, 0, 2**30) + b" " * 100,
        "declares a header of .* bytes, must be at most 10000",
    ),
    "brackets": (lambda *_: b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10_000, "."),
}
JSON = {
    "manifest": (read_latents, partial(latent_folder, "manifest.json")),
    "dataset.json": (list_images, images_with_labels),
    "labels in a zip": (repa, lambda text: npy_zip(ZEROS, text, zipfile.ZIP_DEFLATED)),
}
JSON_DAMAGE = {
    "a pickle": (PICKLE, "."),
    "brackets": (BRACKETS, "brackets in .* bytes"),
    "depth": (NESTED, "."),
    "length": (b"{}" + b" " * (17 * 2**20), "more than .* bytes"),
}
TARS = {"tread_wds": (tread, lambda write: write(Path("w.tar")))}
NOTES = "has more than .* bytes"
TAR_DAMAGE = {
    "a note": (noted, NOTES),
    "a note of pax": (partial(noted, kind=tarfile.XHDTYPE), NOTES),
    "notes on notes": (notes_on_notes, "."),
    "a list of holes that is cut off": (cut_holes, "."),
    "a list of holes without end": (endless_holes, NOTES),
}
WEIGHTS = {
    "weights": (load_net, lambda write: write("w.pt")),
    "inception": (read_inception, lambda write: write("w.pth")),
}
WEIGHTS_DAMAGE = {
    "a pickle": (partial(written, data=PICKLE), "."),
    "objects": (lambda name: saved({"fc.weight": Malicious()}, name), "."),
    "compression": (repacked, "is compressed, must be stored, as torch.save does"),
    "two directories": (two_directories, "does not end as files that torch.save writes"),
    "a comment": (lambda name: repacked(name, zipfile.ZIP_STORED, tail=b"PK"), "does not end as files that"),
    "members that overlap": (overlapping, "declares .* bytes, but has "),
    "one number for many": (
        lambda name: saved({"fc.weight": torch.zeros(1).expand(HUGE)}, name),
        "weights do not match the model|declares .* bytes, more than the file holds",
    ),
}


def autoencoder_of_pickles():
    folder = Path(write_autoencoder(Path("autoencoder").resolve()))  # as diffusers once saved them
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    return saved({"x": Malicious()}, folder / "diffusion_pytorch_model.bin").parent


def lightningdit_of_pickles():
    tensors = {key: torch.zeros(2, 4, 8, 8) for key in ("latents", "latents_flip")}
    file = written("vavae/shard.safetensors", save({**tensors, "labels": torch.zeros(2, dtype=torch.int64)}))
    return saved({"mean": Malicious(), "std": Malicious()}, file.with_name("latents_stats.pt")).parent


def latents_of(**changes):
    return with_json(latent_folder(), "manifest.json", **changes)


# Cases of a single reader: (damage, reader, file, rule).
OTHERS = [
    ("weights.safetensors: a pickle", load_net, lambda: written("w.safetensors", PICKLE), "."),
    ("weights.safetensors: a tensor", load_net,
     lambda: written("w.safetensors", struct.pack("<Q", len(LYING_TENSOR)) + LYING_TENSOR), "."),
    ("weights.safetensors: a header", load_net,
     lambda: written("w.safetensors", struct.pack("<Q", HUGE) + b"{}"), "."),
    ("reference: a pickle", read_reference, lambda: written("r.npz", PICKLE), "."),
    ("reference: numbers", read_reference,
     lambda: npz(mu=declared((2048,), "|V2000000000"), sigma=ZEROS), "must be floats"),
    ("samples: an archive", read_images, lambda: inflated("a.npz", "arr_0.npy", declared((HUGE, 1, 1, 1))),
     "declares .* bytes, more than its .* compressed bytes can hold"),
    ("samples: a size", read_images,
     lambda: npz(arr_0=declared((1, 10**6, 10**6, 3))), "at most .* pixels per image"),
    ("manifest: count", read_latents, lambda: latents_of(count=HUGE), "."),
    ("manifest: scale", read_latents, lambda: latents_of(scale=10**400), "."),
    ("manifest: classes", read_latents, lambda: latents_of(num_classes=HUGE), "num_classes=.* must be in"),
    ("manifest: shape", read_latents,
     lambda: latents_of(shape=[4, 10**6, 10**6]), "at most .* numbers"),
    ("manifest: brackets", read_latents,
     lambda: latents_of(origin={"a": [[]] * 2**18}), "brackets in .* bytes"),
    ("manifest: blocks", lambda path: list(damages(path, read_manifest(path))),
     lambda: latents_of(block_bytes=10**30), "block_bytes=.* and at most"),
    ("tread_wds: a hole", tread,
     lambda: wds(ZEROS, "latent.npy", change=hole), "must have both parts of each entry"),
    ("tread_wds: a class", tread,
     lambda: wds(ZEROS, "cls", change=huge), "cannot be read as an uncompressed tar"),
    ("tread_wds: a note on all", tread, lambda: noted("w.tar", tarfile.XGLTYPE), NOTES),
    ("maskdit_lmdb: a pickle", read_format("maskdit_lmdb"),
     lambda: written("lmdb/data.mdb", PICKLE).parent, "."),
    ("lightningdit: a pickle", FORMATS["lightningdit"].open, lightningdit_of_pickles, "."),
    ("autoencoder: a pickle", lambda path: load_encoder(str(path), torch.device("cpu")),
     autoencoder_of_pickles, "."),
    ("repa: a packing", repa, lambda: npy_zip(ZEROS, method=zipfile.ZIP_BZIP2), "must be stored or deflated"),
    ("repa: an archive", repa, lambda: npy_zip(npz(a=ZEROS).read_bytes()), "."),
    ("list of images: a pickle", list_images, lambda: written("l.txt", PICKLE), "."),
    ("images: a pickle", read_images, lambda: written("images/a.png", PICKLE).parent, "."),
    ("images: PostScript", read_images,
     lambda: written("images/a.png", POSTSCRIPT).parent, "cannot identify image"),
    ("images: a side", partial(read_images, resolution=8), lambda: png(2**31 - 1), "exceeds limit"),
    ("images: a size in a zip", partial(read_images, resolution=8),
     lambda: inflated("a.zip", "a.webp", b"RIFF" + b"\0" * 2**20), "must have at most .*"),
    *((f"checksums: {name}", read_manifest, lambda name=name: latents_of(checksums={name: ["0" * 64]}),
       r"manifest\.json is not a latent manifest: checksums=.* files in the folder")
      for name in ("../secret", "/etc/hostname", "a/../../secret", "..")),
]  # fmt: skip


def cases():
    """All of them: a reader, what makes the file, the rule."""
    grids = [(JSON, JSON_DAMAGE), (TARS, TAR_DAMAGE), (WEIGHTS, WEIGHTS_DAMAGE)]
    rows = [
        (f"{name}: {damage}", read, partial(place, content), rule)
        for readers, damages in grids
        for name, (read, place) in readers.items()
        for damage, (content, rule) in damages.items()
    ]
    rows += [
        (f"{name}: {damage}", read, partial(write, content(shape, dtype)), rule)
        for name, (read, write, shape, dtype) in ARRAYS.items()
        for damage, (content, rule) in ARRAY_DAMAGE.items()
    ]
    return [pytest.param(*row, id=name) for name, *row in (*rows, *OTHERS)]


NET = small_dit(depth=1).state_dict()
OLD = {"_use_new_zipfile_serialization": False}
# Reader, valid file or folder, and the file in the folder.
VALID = {
    "samples": (read_images, lambda: npz(arr_0=npy(np.zeros((3, 8, 8, 3), np.uint8))), ""),
    "reference": (read_reference, lambda: npz(weights=npy(np.array("0" * 64)), arr_0=IMAGES), ""),
    "latents": (read_latents, latent_folder, "latents.npy"),
    "labels": (read_latents, latent_folder, "labels.npy"),
    "manifest": (read_latents, latent_folder, "manifest.json"),
    "tread_wds": (tread, lambda: wds(LATENT, "latent.npy"), ""),
    "repa": (repa, lambda: npy_zip(LATENT), ""),
    "folder of repa": (repa, lambda: npy_folder(LATENT), "a.npy"),
    "dataset.json": (repa, lambda: npy_folder(LATENT), "dataset.json"),
    "part": (read_part, lambda: parts(npy(np.zeros((1, 4, 4, 4), np.float16))), "0000000.npz"),
    "safetensors": (load_net, lambda: written("w.safetensors", save(NET)), ""),
    "pt": (load_net, lambda: saved({"ema": NET}, "w.pt"), ""),
    "old pt": (load_net, lambda: saved({"ema": NET}, "old.pt", **OLD), ""),
    "inception.pth": (read_inception, lambda: saved({"ema": NET}, "old.pth", **OLD), ""),  # refused
}  # fmt: skip


def spoil_run(run, change):
    """Change a run: keys of its configuration (a dict), text added to it, or a file (name, content)."""
    file = run / "config.yaml"
    if isinstance(change, list):
        for part in change:
            spoil_run(run, part)
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
