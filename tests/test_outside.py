"""Files from outside: each reader meets each damage, and refuses it in one line that names the file.

Nothing that a file holds is executed, nothing is written, and no memory is taken for what it only declares.
"""

import ast
import contextlib
import io
import json
import pickle
import re
import struct
import tarfile
import time
import tracemalloc
import zipfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from builders.scoring import read_labels
from data import read_manifest, shards
from data.encoders import load_encoder
from data.images import IMAGE_ERRORS, read_image
from data.importers import FORMATS
from data.listing import list_images
from data.manifest import LatentManifest, load_manifest, to_json
from data.masks import read_mask
from data.unpickle import unpickle_array
from data.verify import damages
from evaluation.detectors import inception
from examples import finetune
from tests import outside
from tests.networks import small_dit
from tests.outside import (
    HUGE,
    Malicious,
    declared,
    graph,
    hole,
    huge,
    images_with_labels,
    inflated,
    latent_folder,
    load_net,
    npy,
    npy_folder,
    npy_zip,
    npz,
    parts,
    png,
    read_format,
    read_images,
    read_inception,
    read_latents,
    read_part,
    read_reference,
    read_stream,
    repacked,
    saved,
    shard_of,
    shards_folder,
    wds,
    with_json,
    written,
)
from tests.photos import write_autoencoder
from tests.programs import ROOT
from tests.test_import_rules import FILES

MAX_MEMORY, MAX_SECONDS = 2**26, 5
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
    "shard": (read_stream, shard_of, (HUGE,), "|u1"),
    "tread_wds": (tread, lambda data: wds(data, "latent.npy"), (HUGE,), "|u1"),
    "repa": (repa, npy_zip, (HUGE,), "|u1"),
    "folder of repa": (repa, npy_folder, (HUGE,), "|u1"),
    "edm2": (read_format("edm2"), npy_zip, (HUGE,), "|u1"),
    "inputs": (finetune._open, lambda data: written("inputs/latents.npy", data), (HUGE, 2), "|u1"),
}  # fmt: skip
ARRAY_DAMAGE = {
    "objects": (lambda *_: OBJECTS, "."),
    "a pickle": (lambda *_: PICKLE, "."),
    "a shape": (
        declared,
        "bytes, its shape .* needs|must be .*: of another network|must be a hash|than file size",
    ),
    "a header": (
        lambda *_: b"\x93NUMPY" + struct.pack("<BBI", 2, 0, 2**30) + b" " * 100,
        "declares a header of .* bytes, must be at most 10000",
    ),
    "a header of version 3": (
        lambda *_: b"\x93NUMPY" + struct.pack("<BBI", 3, 0, 2**30) + b" " * 100,
        "declares a header of .* bytes, must be at most 10000",
    ),
    "brackets": (lambda *_: b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10_000, "."),
}
JSON = {
    "manifest": (read_latents, partial(latent_folder, "manifest.json")),
    "manifest of shards": (read_stream, partial(shards_folder, "manifest.json")),
    "shards.json": (read_stream, partial(shards_folder, "shards.json")),
    "dataset.json": (list_images, images_with_labels),
    "labels in a zip": (repa, lambda text: npy_zip(ZEROS, text, zipfile.ZIP_DEFLATED)),
}
JSON_DAMAGE = {
    "a pickle": (PICKLE, "."),
    "brackets": (BRACKETS, "brackets in .* bytes"),
    "depth": (NESTED, "."),
    "length": (b"{}" + b" " * (17 * 2**20), "more than .* bytes"),
}
TARS = {
    "shard": (read_stream, lambda write: write(shards_folder() / "train-000000.tar").parent, "latents.npy"),
    "tread_wds": (tread, lambda write: write(Path("w.tar")), "latent.npy"),
}
NOTES = "takes? more than .* bytes"
TAR_DAMAGE = {
    "a note": (outside.noted, NOTES),
    "a note of pax": (partial(outside.noted, kind=tarfile.XHDTYPE), NOTES),
    "notes on notes": (outside.notes_on_notes, "."),
    "a list of holes that is cut off": (outside.cut_holes, "."),
    "a list of holes without end": (outside.endless_holes, NOTES),
}
WEIGHTS = {"weights": (load_net, "w.pt"), "inception": (read_inception, "w.pth")}
WEIGHTS_DAMAGE = {
    "a pickle": (partial(written, data=PICKLE), "."),
    "objects": (lambda name: saved({"fc.weight": Malicious()}, name), "."),
    "compression": (repacked, "is compressed, must be as torch.save writes it"),
    "two directories": (outside.two_directories, "does not end as files that torch.save writes"),
    "a comment": (
        lambda name: repacked(name, zipfile.ZIP_STORED, tail=b"PK"),
        "does not end as files that torch.save writes",
    ),
    "members that overlap": (outside.overlapping, "declares .* bytes, more than the .* that are there"),
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


def lying_shards(name):
    counts = {"train-000000.tar": 3, "train-000001.tar": 2, "held_out-000000.tar": 1, name: HUGE}
    folder = with_json(shards_folder(), "shards.json", **counts)
    return with_json(folder, "manifest.json", count=sum(counts.values()))


def latents_of(**changes):
    return with_json(latent_folder(), "manifest.json", **changes)


# What one reader alone meets: (the damage, the reader, the file, the rule).
OTHERS = [
    ("weights.safetensors: a pickle", load_net, lambda: written("w.safetensors", PICKLE), "."),
    ("weights.safetensors: a tensor", load_net,
     lambda: written("w.safetensors", struct.pack("<Q", len(LYING_TENSOR)) + LYING_TENSOR), "."),
    ("weights.safetensors: a header", load_net,
     lambda: written("w.safetensors", struct.pack("<Q", HUGE) + b"{}"), "."),
    ("graph: a pickle", read_inception, lambda: written("w.pb", PICKLE), "."),
    ("graph: a constant", read_inception,
     lambda: graph(softmax__weights=(HUGE,)), "must be at most .* numbers"),
    ("graph: a constant that wraps around", read_inception, lambda: graph(softmax__weights=(2**32, 2**32)),
     "must be at most .* numbers"),
    ("graph: a length", read_inception, lambda: written("g.pb", b"\x0a\xff\xff\xff\xff\x0f"), "."),
    ("reference: a pickle", read_reference, lambda: written("r.npz", PICKLE), "."),
    ("reference: numbers", read_reference,
     lambda: npz(mu=declared((2048,), "|V2000000000"), sigma=ZEROS), "must be floats"),
    ("samples: an archive", read_images, lambda: inflated("a.npz", "arr_0.npy", declared((HUGE, 1, 1, 1))),
     "declares .* bytes, more than the .* that are there can be"),
    ("samples: a size", read_images,
     lambda: npz(arr_0=declared((1, 10**6, 10**6, 3))), "an image has at most .* pixels"),
    ("manifest: count", read_latents, lambda: latents_of(count=HUGE), "."),
    ("manifest: scale", read_latents, lambda: latents_of(scale=10**400), "."),
    ("manifest: classes", read_latents, lambda: latents_of(num_classes=HUGE), "num_classes=.* must be in"),
    ("manifest: shape", read_latents,
     lambda: latents_of(shape=[4, 10**6, 10**6]), "at most .* numbers"),
    ("manifest: brackets", read_latents,
     lambda: latents_of(origin={"a": [[]] * 2**18}), "brackets in .* bytes"),
    ("manifest: blocks", lambda path: list(damages(path, read_manifest(path))),
     lambda: latents_of(block_bytes=10**30), "block_bytes=.* and at most"),
    ("shards.json: count", read_stream, lambda: lying_shards("train-000000.tar"), "."),
    ("shards.json: count held out", read_stream, lambda: lying_shards("held_out-000000.tar"), "."),
    ("shard: a hole", read_stream, lambda: shard_of(ZEROS, hole), "declares .* bytes, must be a file"),
    ("shard: a member", read_stream, lambda: shard_of(ZEROS, huge), "declares .* bytes, must be a file"),
    ("shard: a crowd of files", read_stream,
     lambda: outside.crowded(shards_folder() / "train-000000.tar").parent,
     "a sample takes more than .* bytes"),
    ("tread_wds: a hole", tread,
     lambda: wds(ZEROS, "latent.npy", change=hole), "declares .* bytes, more than are there"),
    ("tread_wds: a class", tread,
     lambda: wds(ZEROS, "cls", change=huge), "declares .* bytes, more than are there"),
    ("tread_wds: a note on all", tread, lambda: outside.noted("w.tar", tarfile.XGLTYPE), NOTES),
    ("maskdit_wds: a pickle", read_format("maskdit_wds"),
     lambda: wds(pickle.dumps(Malicious()), "latent"), "."),
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
    *((f"shards.json: {name!r}", read_stream,
       lambda name=name: with_json(shards_folder(), "shards.json", **{name: 1}),
       "must list shards train-N.tar and held_out-N.tar")
      for name in ("../train-0.tar", "/train-0.tar", "x/train-0.tar", "pipe:touch x", "train-0.tar\n")),
    *((f"address: {path}", read_stream, lambda path=path: path, "must be a folder, or an address")
      for path in ("pipe:touch EXECUTED;", "https://host/x'; touch EXECUTED; '", "file:shards", "ftp://x/$(ls)")),
    *((f"checksums: {name}", read_manifest, lambda name=name: latents_of(checksums={name: ["0" * 64]}),
       r"manifest\.json is not a latent manifest: checksums are of .* the folder itself")
      for name in ("../secret", "/etc/hostname", "a/../../secret", "..")),
]  # fmt: skip


def cases():
    """All of them as (reader, what makes the file, the rule)."""
    for name, (read, write, shape, dtype) in ARRAYS.items():
        for damage, (content, rule) in ARRAY_DAMAGE.items():
            make = lambda write=write, content=content, lie=(shape, dtype): write(content(*lie))  # noqa: E731
            yield pytest.param(read, make, rule, id=f"{name}: {damage}")
    for name, (read, write) in JSON.items():
        for damage, (content, rule) in JSON_DAMAGE.items():
            yield pytest.param(read, partial(write, content), rule, id=f"{name}: {damage}")
    for name, (read, place, _) in TARS.items():
        for damage, (write, rule) in TAR_DAMAGE.items():
            yield pytest.param(read, partial(place, write), rule, id=f"{name}: {damage}")
    for name, (read, file) in WEIGHTS.items():
        for damage, (make, rule) in WEIGHTS_DAMAGE.items():
            yield pytest.param(read, partial(make, file), rule, id=f"{name}: {damage}")
    for name, read, make, rule in OTHERS:
        yield pytest.param(read, make, rule, id=name)


@pytest.fixture(autouse=True)
def nothing_happens(tmp_path, monkeypatch):
    """Run each test in a folder of its own: nothing may appear beside it, and nothing may be executed."""
    folder = tmp_path / "inside"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(inception, "MIN_FILE_BYTES", 0)
    yield
    assert not list(tmp_path.rglob("EXECUTED"))
    assert {path.name for path in tmp_path.iterdir()} == {"inside"}


@pytest.mark.parametrize(("read", "make", "rule"), list(cases()))
def test_a_damaged_file_is_refused_in_one_line_and_takes_no_memory(read, make, rule):
    file = make()
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rule) as raised:
            read(file)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < MAX_SECONDS
    assert len(str(raised.value).splitlines()) == 1
    assert getattr(file, "name", file) in str(raised.value)


def test_notes_on_notes_are_refused_in_one_line(monkeypatch):
    """Where the size of a sample does not stop them, the recursion limit does."""
    monkeypatch.setattr(shards, "MAX_OVERHEAD_BYTES", 2**24)
    folder = outside.notes_on_notes(shards_folder() / "train-000000.tar").parent
    message = r"train-000000\.tar cannot be read, tried 3 times: maximum recursion depth"
    with pytest.raises(ValueError, match=message):
        read_stream(folder)


def test_masks_run_nothing():
    for data, message in ((PICKLE, "cannot identify"), (POSTSCRIPT, "cannot identify image file")):
        with pytest.raises(IMAGE_ERRORS, match=message):
            read_mask(io.BytesIO(data), (8, 8), 8, True)


def test_the_damage_is_done_to_careless_readers():
    for data in (PICKLE, pickle.dumps(Malicious())):
        pickle.loads(data)
        Path("EXECUTED").unlink()
    np.load(io.BytesIO(OBJECTS), allow_pickle=True)
    Path("EXECUTED").unlink()
    assert Image.open(io.BytesIO(POSTSCRIPT)).format == "EPS"


def test_every_importer_meets_a_malicious_file():
    assert {name.partition(":")[0] for name in (*ARRAYS, *(row[0] for row in OTHERS))} >= set(FORMATS)


@pytest.mark.parametrize("name", ["../x", "/x", "../../x", "inside/../../x"])
def test_names_of_members_lead_nowhere(name):
    secret = written("secret.npy", npy(np.ones((8, 4, 4), np.float32)))
    labels = json.dumps({"labels": [[f"{name}.npy", 0], [str(secret), 0]]})
    archive = outside.packed("a.zip", **{f"{name}.npy": LATENT, "dataset.json": labels})
    assert all((entry == 0).all() for entry in tread(wds(LATENT, "latent.npy", name=name)))
    if name.startswith("/"):
        assert all((entry == 0).all() for entry in repa(archive))
    else:
        with pytest.raises(ValueError, match=r"a\.zip holds \.\./.*, a place outside of it"):
            repa(archive)
    assert {path.name for path in Path().iterdir()} == {"secret.npy", "a.zip", "w.tar"}


RISKY = r"(pickle|dill|marshal|joblib|shelve)\.(loads?|open|Unpickler)|yaml\.(unsafe|full)_load"
RISKY += r"|eval|exec|os\.system|shutil\.unpack_archive|.*\.extract(all)?"
# Calls that are safe with one argument alone.
NEEDED = {
    "torch.load": ("weights_only", "True"),
    "np.load": ("allow_pickle", "False"),
    "np.lib.format.read_array": ("allow_pickle", "False"),
    "Image.open": ("formats", None),
    "yaml.load": ("Loader", "yaml.CSafeLoader"),
}


def risky_calls(source):
    """Yield what in a source could execute or unpack a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            given |= {"Loader": ast.unparse(node.args[1])} if name == "yaml.load" and node.args[1:] else {}
            key, value = NEEDED.get(name.removeprefix("PIL.").replace("numpy.", "np."), (None, None))
            if key and (key not in given or value not in (None, given[key])):
                yield f"{name} without {key}"
            if re.fullmatch(RISKY, name) or "True" in (given.get("shell"), given.get("trust_remote_code")):
                yield name
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch.serialization", "marshal"):
            yield f"from {node.module}"
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases):
            yield "pickle.Unpickler"


def test_no_source_could_run_or_unpack_a_file():
    sources = {str(file.relative_to(ROOT)): file for file in FILES}
    found = {name: [*risky_calls(file.read_text())] for name, file in sources.items() if "tests/" not in name}
    assert {name: calls for name, calls in found.items() if calls} == {
        "data/unpickle.py": ["pickle.Unpickler"]
    }


@pytest.mark.parametrize(
    "source",
    [
        *(
            "torch.load(f)",
            "torch.load(f, weights_only=False)",
            "np.load(f)",
            "np.load(f, allow_pickle=True)",
        ),
        *("numpy.load(f)", "pickle.load(f)", "pickle.Unpickler(f)", "from pickle import loads", "eval(x)"),
        *("archive.extractall()", "tar.extract(member)", "shutil.unpack_archive(f)", "Image.open(f)"),
        *("PIL.Image.open(f)", "yaml.load(f)", "yaml.load(f, yaml.Loader)", "subprocess.run(x, shell=True)"),
    ],
)
def test_the_rules_see_a_risky_call(source):
    assert list(risky_calls(source))


# Whatever bytes a file contains, its reader returns, or raises an error of one line that names the file.
FUZZED = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
EDIT = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "number"]),
    st.floats(0, 1, exclude_max=True),
    st.binary(max_size=4),
)
EDITS = st.lists(EDIT, min_size=1, max_size=4)
DAMAGE = st.one_of(st.binary(max_size=300), EDITS)
NUMBERS = (b"\xff" * 4, b"\x7f" + b"\xff" * 3, b"\0" * 4, b"9" * 8, b"-1")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN | st.sampled_from([10**400, -(10**19), 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
MANIFEST = LatentManifest(
    6, (4, 4, 4), "float16", "moments", 2, "identity", class_names=("a", "b"), num_held_out=1
)
NET = small_dit(depth=1).state_dict()
SMALL_GRAPH = {"softmax__weights": (4, 3), "softmax__biases": (3,), "conv__conv2d_params": (1, 1, 2, 2)}
OLD = {"_use_new_zipfile_serialization": False}
# Reader, valid file or folder, and the file in the folder.
VALID = {
    "samples": (read_images, lambda: npz(arr_0=npy(np.zeros((3, 8, 8, 3), np.uint8))), ""),
    "reference": (read_reference, lambda: npz(weights=npy(np.array("0" * 64)), arr_0=IMAGES), ""),
    "latents": (read_latents, latent_folder, "latents.npy"),
    "labels": (read_latents, latent_folder, "labels.npy"),
    "manifest": (read_latents, latent_folder, "manifest.json"),
    "shards.json": (read_stream, shards_folder, "shards.json"),
    "shard": (read_stream, shards_folder, "train-000000.tar"),
    "tread_wds": (tread, lambda: wds(LATENT, "latent.npy"), ""),
    "repa": (repa, lambda: npy_zip(LATENT), ""),
    "folder of repa": (repa, lambda: npy_folder(LATENT), "a.npy"),
    "dataset.json": (repa, lambda: npy_folder(LATENT), "dataset.json"),
    "part": (read_part, lambda: parts(npy(np.zeros((1, 4, 4, 4), np.float16))), "0000000.npz"),
    "safetensors": (load_net, lambda: written("w.safetensors", save(NET)), ""),
    "pt": (load_net, lambda: saved({"ema": NET}, "w.pt"), ""),
    "old pt": (load_net, lambda: saved({"ema": NET}, "old.pt", **OLD), ""),
    "inception.pth": (read_inception, lambda: saved({"ema": NET}, "old.pth", **OLD), ""),  # refused
    "graph": (read_inception, lambda: graph(**SMALL_GRAPH), ""),  # refused, once all of it is read
}  # fmt: skip


def damaged(data, damage):
    """The damage itself if it is bytes, else the data with the edits that it lists."""
    if isinstance(damage, bytes):
        return damage
    data = bytearray(data)
    for kind, place, filler in damage:
        at = int(place * len(data))
        if kind == "flip" and data:
            data[at] ^= (filler or b"\x01")[0] or 255
        elif kind == "cut":
            del data[at : at + 1 + len(filler) ** 4]
        elif kind == "insert":
            data[at:at] = filler
        elif kind == "number":
            number = NUMBERS[len(filler)]
            data[at : at + len(number)] = number
    return bytes(data)


def reads_or_refuses(file, data, read):
    """Write the bytes and read them: the outcome is a value, or an error of one line that names the file."""
    file.write_bytes(data)
    try:
        read()
    except (ValueError, FileNotFoundError) as error:  # the second where a list names a missing shard
        assert isinstance(error, ValueError) or file.name == "shards.json"
        assert len(str(error).splitlines()) == 1
        assert str(file) in str(error) or str(file.parent) in str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VALID)
def test_any_bytes_are_read_or_refused(name):
    read, make, inner = VALID[name]
    path = make()
    file = path / inner if inner else path
    content = file.read_bytes()
    with pytest.raises(ValueError) if read is read_inception else contextlib.nullcontext():
        read(path)

    @FUZZED
    @given(DAMAGE)
    def fuzz(damage):
        reads_or_refuses(file, damaged(content, damage), lambda: read(path))

    fuzz()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "bmp", "ppm", "tiff"])
def test_any_bytes_are_an_image_or_refused(kind):
    buffer = io.BytesIO()
    Image.effect_noise((24, 20), 50).convert("RGB").save(buffer, kind)

    @FUZZED
    @given(DAMAGE)
    def fuzz(damage):
        with contextlib.suppress(*IMAGE_ERRORS):
            assert read_image(io.BytesIO(damaged(buffer.getvalue(), damage)), 8).shape == (8, 8, 3)

    fuzz()


@FUZZED
@given(EDITS, st.integers(0, 5))
def test_any_pickle_is_an_array_or_refused(damage, protocol):
    data = pickle.dumps(np.arange(6, dtype=np.float32), protocol=protocol)
    with contextlib.suppress(ValueError):
        assert isinstance(unpickle_array(damaged(data, damage)), np.ndarray)


@FUZZED
@given(VALUES, VALUES)
def test_any_header_of_safetensors_is_read_or_refused(shape, offsets):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    file = Path("w.safetensors")
    reads_or_refuses(file, struct.pack("<Q", len(header)) + header, lambda: load_net(file))


@settings(FUZZED, max_examples=1000)
@given(st.sampled_from(sorted(asdict(MANIFEST))), VALUES)
def test_any_values_of_a_manifest_are_read_or_refused(key, value):
    text = json.dumps({**asdict(MANIFEST), key: value}).encode()
    try:
        manifest = load_manifest(io.BytesIO(text), "a/manifest.json")
    except ValueError as error:
        assert "a/manifest.json is not a latent manifest" in str(error)
    else:
        to_json(manifest)
        manifest.to_latents(torch.zeros(1, *manifest.shape))
