import hashlib

import numpy as np
import pytest

from data import read_manifest, verify
from tests.latents import write_latents
from tests.runs import composed

BLOCK = 1000


@pytest.fixture
def folder(tmp_path):
    """Write twenty entries in small blocks."""
    rng = np.random.default_rng(0)
    stored, masks = rng.standard_normal((20, 2, 4, 8, 8)), rng.integers(0, 256, (20, 8, 8), dtype=np.uint8)
    fields = {"kind": "moments", "block_bytes": BLOCK, "num_held_out": 4}
    write_latents(tmp_path / "a", stored, rng.integers(0, 5, 20), masks, **fields)
    return tmp_path / "a"


def damages_of(folder):
    return [damage for damage in verify.damages(folder, read_manifest(folder)) if damage]


def test_checksums_match_the_files_on_disk(folder):
    checksums = read_manifest(folder).checksums
    assert checksums.keys() == {"latents.npy", "labels.npy", "masks.npy"}
    for name, hashes in checksums.items():
        data = (folder / name).read_bytes()
        blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
        assert hashes == [hashlib.sha256(block).hexdigest() for block in blocks]
    assert damages_of(folder) == []


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def test_one_flipped_bit_in_any_block_is_found_and_named(folder):
    for name in ("latents.npy", "labels.npy", "masks.npy"):
        size = (folder / name).stat().st_size
        for block in range(-(-size // BLOCK)):
            at = min(block * BLOCK + 777, size - 1)
            flip(folder / name, at)
            (damage,) = damages_of(folder)
            assert f"{name}: block {block} (bytes {block * BLOCK} to {(block + 1) * BLOCK}" in damage
            flip(folder / name, at)


def test_missing_truncated_and_too_long_files_are_found(folder):
    whole = (folder / "latents.npy").read_bytes()
    (folder / "latents.npy").write_bytes(whole[:-1])
    assert len(damages_of(folder)) == 1
    (folder / "latents.npy").write_bytes(whole[:1500])
    assert len(damages_of(folder)) == len(read_manifest(folder).checksums["latents.npy"]) - 1
    (folder / "latents.npy").write_bytes(whole + b"more" * 2000)
    assert len(damages_of(folder)) == 1
    (folder / "latents.npy").write_bytes(whole)
    (folder / "labels.npy").unlink()
    assert damages_of(folder) == [f"{folder}/labels.npy: block 0 cannot be read: No such file or directory"]


def call(path):
    verify.main(composed(f"path={path}", config_name="verify"))


def test_verify_names_damaged_blocks_and_fails(folder, capsys):
    call(folder)
    assert "all 24 blocks are intact" in capsys.readouterr().out
    flip(folder / "latents.npy", 2500)
    with pytest.raises(SystemExit, match=r".*1 of 24 blocks are damaged"):
        call(folder)
    assert "latents.npy: block 2 (bytes 2000 to 3000) is damaged" in capsys.readouterr().out


def test_folders_without_checksums_are_refused(folder, tmp_path):
    text = (folder / "manifest.json").read_text()
    head, _, _ = text.partition('"checksums"')
    (folder / "manifest.json").write_text(head + '"checksums": {}, "format_version": 1}')
    with pytest.raises(SystemExit, match=r"labels.npy has no checksums in the manifest"):
        call(folder)
    (folder / "manifest.json").write_text(head + '"checksums": null, "format_version": 1}')
    with pytest.raises(SystemExit, match=r".* has no checksums in its manifest: it cannot be checked"):
        call(folder)
    with pytest.raises(SystemExit, match=r"data.path=.*must be a latent folder"):
        call(tmp_path)
