"""Files from outside execute nothing and lead to no other file."""

import ast
import io
import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from builders.scoring import read_labels
from data import read_manifest
from data.encoders import load_encoder
from data.images import IMAGE_ERRORS
from data.importers import FORMATS
from data.listing import list_images
from data.masks import read_mask
from evaluation.detectors import inception
from tests.outside import (
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
from tests.photos import write_autoencoder
from tests.programs import ROOT
from tests.test_import_rules import FILES

SOURCES = [file for file in FILES if "tests" not in file.relative_to(ROOT).parts]
MALICIOUS = b"cos\nsystem\n(S'touch EXECUTED'\ntR."


class Malicious:
    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


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


OBJECTS = np.array([Malicious()], dtype=object)
# Each loader of files from outside, and a file for it that would execute something.
MALICIOUS_FILES = {
    "weights.pt": (load_net, lambda: written("w.pt", MALICIOUS)),
    "weights.pth in a zip": (load_net, lambda: saved({"ema": Malicious()}, "w.pth")),
    "weights.safetensors": (load_net, lambda: written("w.safetensors", MALICIOUS)),
    "inception.pth": (read_inception, lambda: written("w.pth", MALICIOUS)),
    "inception.pth in a zip": (read_inception, lambda: saved({"fc.weight": Malicious()}, "w.pth")),
    "inception.pb": (read_inception, lambda: written("w.pb", MALICIOUS)),
    "reference": (read_reference, lambda: npz(mu=npy(OBJECTS), sigma=npy(OBJECTS))),
    "reference, its hash": (read_reference, lambda: npz(weights=npy(OBJECTS))),
    "reference that is a pickle": (read_reference, lambda: written("r.npz", MALICIOUS)),
    "samples": (read_images, lambda: npz(arr_0=npy(OBJECTS))),
    "samples that are a pickle": (read_images, lambda: npz(arr_0=MALICIOUS)),
    "labels of samples": (
        read_labels,
        lambda: npz(arr_0=npy(np.zeros((2, 8, 8, 1), np.uint8)), arr_1=npy(OBJECTS)),
    ),
    "latents": (read_latents, lambda: spoilt(latent_folder(), "latents.npy", npy(OBJECTS))),
    "latents that are a pickle": (read_latents, lambda: spoilt(latent_folder(), "latents.npy", MALICIOUS)),
    "labels": (read_latents, lambda: spoilt(latent_folder(), "labels.npy", npy(OBJECTS))),
    "masks": (read_latents, lambda: spoilt(latent_folder(), "masks.npy", npy(OBJECTS))),
    "manifest": (read_latents, lambda: spoilt(latent_folder(), "manifest.json", MALICIOUS)),
    "shards.json": (read_stream, lambda: spoilt(shards_folder(), "shards.json", MALICIOUS)),
    "shard": (read_stream, lambda: shard_of(npy(OBJECTS))),
    "shard of a pickle": (read_stream, lambda: shard_of(MALICIOUS)),
    "part": (read_part, lambda: parts(npy(OBJECTS))),
    "images": (read_images, lambda: written("images/a.png", MALICIOUS).parent),
    "mask files": (
        lambda file: read_mask(file.open("rb"), (8, 8), 8, False),
        lambda: written("m.png", MALICIOUS),
    ),
    "dataset.json": (list_images, lambda: images_with_labels(MALICIOUS)),
    "list of images": (list_images, lambda: written("l.txt", MALICIOUS)),
    "tread_wds": (lambda p: read_all(FORMATS["tread_wds"].open(p)), lambda: wds(npy(OBJECTS), "latent.npy")),
    "maskdit_wds": (
        lambda p: read_all(FORMATS["maskdit_wds"].open(p)),
        lambda: wds(pickle.dumps(Malicious()), "latent"),
    ),
    "maskdit_lmdb": (
        lambda p: read_all(FORMATS["maskdit_lmdb"].open(p)),
        lambda: written("lmdb/data.mdb", MALICIOUS).parent,
    ),
    "repa": (lambda p: read_all(FORMATS["repa"].open(p)), lambda: npy_zip(npy(OBJECTS))),
    "edm2": (lambda p: read_all(FORMATS["edm2"].open(p)), lambda: npy_zip(MALICIOUS)),
    "lightningdit": (lambda p: FORMATS["lightningdit"].open(p), lambda: statistics_of_pickles()),
    "autoencoder": (lambda p: load_encoder(str(p), torch.device("cpu")), lambda: autoencoder_of_pickles()),
}


def statistics_of_pickles():
    """Latents of LightningDiT whose statistics are no tensors."""
    (folder := Path("vavae").resolve()).mkdir()
    numbers = torch.zeros(2, 4, 8, 8)
    tensors = {
        "latents": numbers,
        "latents_flip": numbers.clone(),
        "labels": torch.zeros(2, dtype=torch.int64),
    }
    save_file(tensors, folder / "shard.safetensors")
    saved({"mean": Malicious(), "std": Malicious()}, folder / "latents_stats.pt")
    return folder


def autoencoder_of_pickles():
    """An autoencoder as diffusers saved them before safetensors."""
    folder = Path(write_autoencoder(Path("autoencoder").resolve()))
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    saved({"x": Malicious()}, folder / "diffusion_pytorch_model.bin")
    return folder


@pytest.mark.parametrize("name", MALICIOUS_FILES)
def test_no_loader_runs_what_a_file_holds(name):
    read, make = MALICIOUS_FILES[name]
    file = make()
    with pytest.raises((ValueError, Image.UnidentifiedImageError)) as raised:  # the second by masks
        read(file)
    assert len(str(raised.value).splitlines()) == 1
    assert file.name in str(raised.value)


def test_the_malicious_files_run_in_careless_readers(tmp_path):
    for data in (MALICIOUS, pickle.dumps(Malicious())):
        pickle.loads(data)
        Path("EXECUTED").unlink()
    np.load(io.BytesIO(npy(OBJECTS)), allow_pickle=True)
    Path("EXECUTED").unlink()


def test_every_importer_and_both_kinds_of_weights_meet_a_malicious_file():
    assert set(FORMATS) <= set(MALICIOUS_FILES)


RISKY = r"(pickle|dill|marshal|joblib|shelve)\.(loads?|open|Unpickler)"
RISKY += r"|yaml\.(unsafe|full)_load|eval|exec|os\.system"
RISKY += r"|shutil\.unpack_archive|.*\.extract(all)?"


def risky_calls(source):
    """Yield calls in a source that could execute or unpack a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name == "torch.load" and given.get("weights_only") != "True":
                yield f"{name} without weights_only=True"
            reads_array = name in ("np.load", "numpy.load", "np.lib.format.read_array")
            if reads_array and given.get("allow_pickle") != "False":
                yield f"{name} without allow_pickle=False"
            if name in ("Image.open", "PIL.Image.open") and "formats" not in given:
                yield f"{name} without formats"
            loaders = [ast.unparse(argument) for argument in node.args[1:]]
            if name == "yaml.load" and loaders != ["yaml.CSafeLoader"]:
                yield f"{name} without yaml.CSafeLoader"
            if re.fullmatch(RISKY, name) or "True" in (given.get("shell"), given.get("trust_remote_code")):
                yield name
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch.serialization", "marshal"):
            yield f"from {node.module}"
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases):
            yield "pickle.Unpickler"


@pytest.mark.parametrize("file", [str(file.relative_to(ROOT)) for file in SOURCES])
def test_no_source_could_run_or_unpack_a_file(file):
    found = list(risky_calls((ROOT / file).read_text()))
    assert found == (["pickle.Unpickler"] if file == "data/unpickle.py" else [])


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "pickle.load(f)",
        "pickle.Unpickler(f)",
        "from pickle import loads",
        "archive.extractall()",
        "tar.extract(member)",
        "shutil.unpack_archive(f)",
        "yaml.load(f)",
        "yaml.load(f, yaml.Loader)",
        "subprocess.run(x, shell=True)",
        "Image.open(f)",
        "eval(x)",
    ],
)
def test_the_rules_see_a_risky_call(source):
    assert list(risky_calls(source))


@pytest.mark.parametrize("name", ["../x", "/x", "../../x", "inside/../../x"])
def test_names_of_members_lead_nowhere(name):
    array = npy(np.zeros((8, 4, 4), np.float32))
    secret = written("secret.npy", npy(np.ones((8, 4, 4), np.float32)))
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.writestr(f"{name}.npy", array)
        archive.writestr("dataset.json", json.dumps({"labels": [[f"{name}.npy", 0], [str(secret), 0]]}))
    tread, repa = (FORMATS[key].open for key in ("tread_wds", "repa"))
    assert all((entry == 0).all() for entry in read_all(tread(wds(array, "latent.npy", name=name))))
    if name.startswith("/"):
        assert all((entry == 0).all() for entry in read_all(repa(Path("a.zip"))))
    else:
        with pytest.raises(ValueError, match=r"a\.zip holds \.\./.*, a place outside of it"):
            repa(Path("a.zip"))
    assert {path.name for path in Path().iterdir()} == {"secret.npy", "a.zip", "w.tar"}


@pytest.mark.parametrize(
    "name", ["../train-0.tar", "/train-0.tar", "x/train-0.tar", "pipe:touch EXECUTED", "train-0.tar\n"]
)
def test_a_list_of_shards_stays_in_its_folder(name):
    with pytest.raises(ValueError, match=r"must list shards train-N.tar and held_out-N.tar"):
        read_stream(shards_with(shards={name: 1}))


@pytest.mark.parametrize(
    "path", ["pipe:touch EXECUTED;", "https://host/x'; touch EXECUTED; '", "file:shards", "ftp://x/$(ls)"]
)
def test_an_address_of_shards_runs_nothing(path):
    with pytest.raises(ValueError, match=r"data\.path=.* must be a folder, or an address"):
        read_stream(path)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", ".."])
def test_a_manifest_names_no_file_outside_its_folder(name):
    message = r"manifest\.json is not a latent manifest: checksums are of .* the folder itself"
    with pytest.raises(ValueError, match=message):
        read_manifest(manifest_with(checksums={name: ["0" * 64]}))


def test_an_image_of_a_format_for_which_other_programs_are_run_is_refused():
    """PIL hands PostScript to a program, whatever the file is called."""
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n"
    assert Image.open(io.BytesIO(postscript)).format == "EPS"
    with pytest.raises(ValueError, match=r"a\.png cannot be used: cannot identify image file"):
        read_images(written("images/a.png", postscript).parent)
    with pytest.raises(IMAGE_ERRORS, match="cannot identify image file"):
        read_mask(io.BytesIO(postscript), (8, 8), 8, True)
