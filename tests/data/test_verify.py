import numpy as np
import pytest

from data import LatentManifest, LatentWriter, open_latents, read_manifest, verify
from data.make_shards import write_shards
from data.writer import hash_blocks
from tests.runs import composed

BLOCK = 1000


@pytest.fixture
def folder(tmp_path):
    """Twenty entries in small blocks."""
    rng = np.random.default_rng(0)
    fields = {"hflip": True, "conditioning_type": "mask", "block_bytes": BLOCK, "num_held_out": 4}
    manifest = LatentManifest(20, (4, 8, 8), "float16", "moments", 5, "identity", **fields)
    with LatentWriter(tmp_path / "a", manifest) as writer:
        for _ in range(4):
            masks = rng.integers(0, 256, (5, 8, 8), dtype=np.uint8)
            writer.append(rng.standard_normal((5, 2, 4, 8, 8)), rng.integers(0, 5, 5), masks)
    return tmp_path / "a"


def found(folder):
    return [damage for damage in verify.damages(folder, read_manifest(folder)) if damage]


def test_checksums_are_those_of_the_files_on_disk(folder):
    checksums = read_manifest(folder).checksums
    assert checksums.keys() == {"latents.npy", "labels.npy", "masks.npy"}
    for name, hashes in checksums.items():
        assert hashes == hash_blocks(folder / name, BLOCK)
        assert len(hashes) == -(-(folder / name).stat().st_size // BLOCK)
    assert np.load(folder / "latents.npy").shape == (20, 2, 4, 8, 8)
    assert found(folder) == []


def test_a_file_of_full_blocks_has_no_empty_block(tmp_path):
    manifest = LatentManifest(4, (1, 8, 8), "float32", "samples", 0, "identity", block_bytes=128)
    with LatentWriter(tmp_path / "a", manifest) as writer:
        writer.append(np.zeros((4, 1, 8, 8)), None)
    assert len(read_manifest(tmp_path / "a").checksums["latents.npy"]) == (128 + 4 * 256) // 128
    assert found(tmp_path / "a") == []


@pytest.mark.parametrize("name", ["latents.npy", "labels.npy", "masks.npy"])
def test_one_flipped_bit_in_any_block_is_found_and_named(folder, name):
    file = folder / name
    whole = file.read_bytes()
    for block in range(-(-len(whole) // BLOCK)):
        at = min(block * BLOCK + 777, len(whole) - 1)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        (damage,) = found(folder)
        assert f"{name}: block {block} (bytes {block * BLOCK} to {(block + 1) * BLOCK}" in damage


def test_the_entries_of_a_block_are_named(folder):
    """An entry has 1024 bytes behind a header of 128: byte 128 + 1024 i begins entry i."""
    file = folder / "latents.npy"
    whole = file.read_bytes()
    for entry in (0, 7, 19):
        at = 128 + 1024 * entry + 500
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        (damage,) = found(folder)
        first, last = map(int, damage.partition("entries ")[2].partition(")")[0].split(" to "))
        assert first <= entry <= last <= first + 1


def test_what_is_missing_cut_or_too_long_is_found(folder):
    whole = (folder / "latents.npy").read_bytes()
    (folder / "latents.npy").write_bytes(whole[:-1])
    assert len(found(folder)) == 1
    (folder / "latents.npy").write_bytes(whole[:1500])
    assert len(found(folder)) == len(read_manifest(folder).checksums["latents.npy"]) - 1
    (folder / "latents.npy").write_bytes(whole + b"more" * 2000)
    assert any("bytes more than were written" in damage for damage in found(folder))
    (folder / "latents.npy").write_bytes(whole)
    (folder / "labels.npy").unlink()
    assert found(folder) == [f"{folder / 'labels.npy'}: block 0 cannot be read: No such file or directory"]


def call(path):
    verify.main(composed(f"path={path}", config_name="verify"))


def test_verify_names_damaged_blocks_and_fails(folder, capsys):
    call(folder)
    assert "all 24 blocks are intact" in capsys.readouterr().out
    data = bytearray((folder / "latents.npy").read_bytes())
    data[2500] ^= 1
    (folder / "latents.npy").write_bytes(data)
    with pytest.raises(SystemExit, match=r".*1 of 24 blocks are damaged"):
        call(folder)
    assert "latents.npy: block 2 (bytes 2000 to 3000, entries 1 to 2)" in capsys.readouterr().out


def test_folders_without_checksums_are_refused(folder, tmp_path):
    text = (folder / "manifest.json").read_text()
    head, _, _ = text.partition('"checksums"')
    (folder / "manifest.json").write_text(head + '"checksums": {}, "format_version": 1}')
    with pytest.raises(SystemExit, match=r"labels.npy has no checksums in the manifest"):
        call(folder)
    (folder / "manifest.json").write_text(head + '"checksums": null, "format_version": 1}')
    with pytest.raises(SystemExit, match=r".* was written without checksums: it cannot be checked"):
        call(folder)
    with pytest.raises(SystemExit, match=r"data.path=.*must be a latent folder"):
        call(tmp_path)


def test_shards_are_checked_as_well(folder, tmp_path, capsys):
    dataset = open_latents(folder)
    with pytest.raises(ValueError, match="conditioning_type=mask: shards hold no masks"):
        write_shards(dataset, tmp_path / "shards", 4)
    manifest = LatentManifest(6, (1, 8, 8), "float32", "samples", 0, "identity")
    with LatentWriter(tmp_path / "b", manifest) as writer:
        writer.append(np.zeros((6, 1, 8, 8)), None)
    write_shards(open_latents(tmp_path / "b"), tmp_path / "shards", 4)
    call(tmp_path / "shards")
    assert "all 3 blocks" in capsys.readouterr().out
    listing = (tmp_path / "shards" / "shards.json").read_text()
    (tmp_path / "shards" / "shards.json").write_text('{"train-000000.tar": 4}')
    with pytest.raises(SystemExit, match="1 of 3 blocks are damaged"):
        call(tmp_path / "shards")
    (tmp_path / "shards" / "shards.json").write_text(listing)
    (tmp_path / "shards" / "train-000001.tar").write_bytes(b"x")
    with pytest.raises(SystemExit, match="1 of 3 blocks are damaged"):
        call(tmp_path / "shards")
