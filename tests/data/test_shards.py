import itertools
import json
import re
import shutil

import numpy as np
import pytest
import torch

import train
from data import LatentDataset, ShardStream, open_shards, remote, shards, tars
from data.make_shards import write_shards
from runtime.command_line import explanation
from runtime.errors import UserError
from tests.data.test_latents import remove
from tests.latents import numbered, write_latents
from tests.runs import TINY, composed, metrics, tiny_run, tiny_trainer
from tests.servers import serving
from training.checkpoint import latest_checkpoint
from training.fit import run_training

TRAIN_TAR, HELD_OUT_TAR = "train-000000.tar", "held_out-000000.tar"
COUNT, HELD_OUT, SHARD = 60, 5, 7  # 55 entries in 8 shards, the last of 6
SIZES = {"input_size": 8, "in_channels": 4, "num_classes": 10}


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """Numbered latents, sorted by class."""
    folder = tmp_path_factory.mktemp("latents") / "a"
    return write_latents(folder, numbered(COUNT), np.arange(COUNT) * 10 // COUNT, num_held_out=HELD_OUT)


@pytest.fixture(scope="module")
def folder(latents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "s"
    write_shards(latents, folder, SHARD)
    return folder


@pytest.fixture
def dataset(folder):
    return open_shards(str(folder), **SIZES)


def stream(dataset, start_step=0, *, seed=0, batch_size=6, micro_batch_size=3, rank=0, world_size=1):
    sizes = {"batch_size": batch_size, "micro_batch_size": micro_batch_size}
    return ShardStream(dataset, start_step, seed, **sizes, rank=rank, world_size=world_size)


def entries(micro_batch):
    """Which entry each sample of a micro-batch is, after a look at its label and at all of its numbers."""
    values = micro_batch.stored[:, 0, 0, 0]
    assert (micro_batch.stored == values[:, None, None, None]).all()
    assert micro_batch.labels.tolist() == [int(value) % 100 * 10 // COUNT for value in values]
    return [int(value) for value in values]


def first(stream, count):
    return [entries(batch) for batch in itertools.islice(stream, count)]


def test_shards_know_the_classes_that_are_not_trained(latents, tmp_path):
    labels = np.where(latents.labels == 4, 5, latents.labels)
    write_shards(LatentDataset(latents.stored, labels, latents.manifest), tmp_path / "s", SHARD)
    assert open_shards(str(tmp_path / "s"), **SIZES).manifest.untrained_classes == (4,)


def test_shards_hold_each_entry_once_mixed_and_the_held_out_apart(latents, folder, dataset):
    names = json.loads((folder / "shards.json").read_text())
    assert sum(names.values()) == COUNT
    read = {name: dataset.read_shard(name, count) for name, count in names.items()}
    found = {"train": [], "held_out": []}
    for name, (stored, _) in read.items():
        found[name.partition("-")[0]] += stored[:, 0, 0, 0, 0].tolist()
    assert sorted(found["train"]) == latents.train_ids.tolist()
    assert found["held_out"] == latents.held_out_ids.tolist()
    for name, (_, labels) in read.items():
        if names[name] == SHARD:
            assert len(set(labels.tolist())) >= 3, (
                "a folder that is sorted by class becomes shards that are not"
            )
    stored, labels = dataset.read(dataset.held_out_ids)
    assert torch.equal(stored, latents.read(latents.held_out_ids)[0])
    assert torch.equal(labels, latents.read(latents.held_out_ids)[1])
    assert dataset.manifest.encoder == latents.manifest.encoder


def test_a_shard_may_hold_more_entries_than_one_sample_may_take_bytes(tmp_path):
    write_shards(write_latents(tmp_path / "a", np.zeros((200, 4, 4, 4))), tmp_path / "s", 200)
    assert (tmp_path / "s/train-000000.tar").stat().st_size > 3 * tars.MAX_OVERHEAD_BYTES
    assert len(open_shards(str(tmp_path / "s")).read_shard("train-000000.tar", 200)[0]) == 200


def test_an_epoch_is_every_entry_once_and_the_next_is_in_another_order(latents, dataset):
    sequence = [x for batch in first(stream(dataset), 60) for x in batch]
    epochs = [[x % 100 for x in sequence[start : start + 55]] for start in (0, 55, 110)]
    assert all(sorted(epoch) == latents.train_ids.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    flipped = np.mean([x >= 100 for x in sequence])
    assert 0.35 < flipped < 0.65
    assert [x >= 100 for x in sequence[:55]] != [x >= 100 for x in sequence[55:110]]


def test_each_group_of_shards_has_draws_of_its_own(dataset):
    (epoch,) = first(stream(dataset, batch_size=55, micro_batch_size=55), 1)
    is_flipped = {value % 100: value >= 100 for value in epoch}
    sides = []
    for _, group, _ in itertools.islice(stream(dataset).groups(), 2):
        read = (dataset.read_shard(dataset.names[i], int(dataset.counts[i]))[0] for i in group)
        sides.append([is_flipped[int(value)] for latents in read for value in latents[:, 0, 0, 0, 0]])
    assert sides[0][: 3 * SHARD] != sides[1][: 3 * SHARD]
    # The same shards may come together in another epoch, and always do where there are few.
    one, other = (
        (stream(dataset)._read_group(epoch, [0, 1], 0)[0][:, 0, 0, 0] % 100).tolist() for epoch in (0, 1)
    )
    assert one != other and sorted(one) == sorted(other)


def test_samples_are_named_by_their_shards(dataset):
    told = shards.shards_by_step(dataset, 0, 6, 2, 2)(4)
    for rank, where in ((0, (0, 1, 4, 5)), (1, (2, 3))):
        _, group, _ = next(stream(dataset, 4, micro_batch_size=2, rank=rank, world_size=2).groups())
        assert {told[i] for i in where} == {" or ".join(dataset.names[i] for i in group)}
    assert len(set(told)) == 2


@pytest.mark.parametrize("share", [{}, {"world_size": 2}, {"world_size": 2, "rank": 1}])
def test_the_order_is_a_function_of_the_seed_the_step_and_the_rank(dataset, share):
    whole, batches = first(stream(dataset, **share), 100), 2 // share.get("world_size", 1)
    assert first(stream(dataset, **share), 100) == whole
    assert first(stream(dataset, seed=1, **share), 100) != whole
    for step in (1, 4, 9, 10, 37):  # within a group, at its end, in later epochs
        assert first(stream(dataset, step, **share), 100 - batches * step) == whole[batches * step :]
    (_, group, _), after, *_ = itertools.islice(stream(dataset).groups(), 3)
    steps = int(dataset.counts[group].sum())  # of one image each, to the end of a group
    assert next(stream(dataset, steps, batch_size=1, micro_batch_size=1).groups()) == after


def test_micro_batches_cut_one_order_which_differs_in_every_epoch(dataset):
    whole = first(stream(dataset), 100)
    pairs = [a + b for a, b in zip(whole[::2], whole[1::2], strict=True)]
    assert first(stream(dataset, micro_batch_size=6), 50) == pairs
    orders = [tuple(stream(dataset)._shards(epoch)) for epoch in range(4)]
    assert len(set(orders)) == 4
    assert orders[0] != tuple(range(8))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_read_shards_of_their_own_in_full_batches(latents, dataset, world_size):
    seen = []
    for rank in range(world_size):
        batches = first(stream(dataset, world_size=world_size, rank=rank), 200)
        assert {len(batch) for batch in batches} == {3}
        mine = next(stream(dataset, world_size=world_size, rank=rank).groups())[1]
        seen += stream(dataset, world_size=world_size, rank=rank)._shards(0)
        assert len(mine) <= shards.SHARDS_AT_ONCE
        counts = np.bincount([x % 100 for batch in batches for x in batch], minlength=COUNT)
        assert counts[latents.held_out_ids].sum() == 0
    assert sorted(seen) == list(range(8))


def test_fewer_shards_than_processes_are_refused(dataset):
    with pytest.raises(ValueError, match="has 8 shards, fewer than 9 processes"):
        stream(dataset, world_size=9)


def test_skipped_groups_are_not_read(dataset, monkeypatch):
    """A resumed run does not fetch what lies before its place."""
    read, read_shard = [], dataset.read_shard
    monkeypatch.setattr(
        dataset, "read_shard", lambda name, count: (read.append(name), read_shard(name, count))[1]
    )
    first(stream(dataset, 37), 1)
    assert len(read) <= 3 * shards.SHARDS_AT_ONCE


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_SEC", 0.01)
    shards.read_shard_manifest.cache_clear()  # of another server at the same address


@pytest.fixture(params=["http", "s3"])
def served(request, folder, monkeypatch):
    with serving(request.param, folder, monkeypatch) as (server, path):
        yield server, path


@pytest.fixture
def served_by_http(folder, monkeypatch):
    with serving("http", folder, monkeypatch) as (server, path):
        yield server, path


def test_shards_on_a_server_are_the_same(folder, served):
    local, distant = open_shards(str(folder), **SIZES), open_shards(f"{served[1]}/", **SIZES)
    assert first(stream(distant), 30) == first(stream(local), 30)
    assert first(stream(distant, 9), 12) == first(stream(local, 9), 12)
    assert distant.describe() == local.describe()


def test_a_shard_damaged_in_transfer_is_read_again(served_by_http, monkeypatch):
    dataset, parsed, parse_array = open_shards(served_by_http[1], **SIZES), [], shards.parse_array

    def spoilt_once(data):
        parsed.append(parse_array(data))
        return parsed[-1][:1] if len(parsed) == 3 else parsed[-1]

    monkeypatch.setattr(shards, "parse_array", spoilt_once)
    latents, _ = dataset.read_shard("train-000000.tar", SHARD)
    assert latents.shape == (SHARD, 2, 4, 8, 8)
    assert len(parsed) == 3 + SHARD


def spoil(name, change):
    def apply(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return apply


def replaced(old, new):
    return spoil("manifest.json", lambda data: data.replace(old, new))


def listing(**changes):
    return spoil("shards.json", lambda data: json.dumps({**json.loads(data), **changes}).encode())


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("manifest.json"), FileNotFoundError, "must hold shards, but .*manifest.json is not there"),
        (remove("shards.json"), FileNotFoundError, "must hold shards, but .*shards.json is not there"),
        (spoil("shards.json", lambda data: b"[]"), ValueError, "shards.json is damaged"),
        (listing(**{"train-000000.tar": -1}), ValueError, "must list shards .*: train-000000.tar"),
        (listing(**{"held_out-000000.tar": 4}), ValueError, "shards.json lists 59 entries, the manifest"),
        (listing(**{HELD_OUT_TAR: 4, TRAIN_TAR: 8}), ValueError, f"{HELD_OUT_TAR} cannot be read, .*must be"),
        (listing(**{HELD_OUT_TAR: 6, TRAIN_TAR: 6}), ValueError, "it holds 5 entries, must hold 6"),
        (spoil(HELD_OUT_TAR, lambda data: data[:2000]), ValueError, f"{HELD_OUT_TAR} cannot be read"),
        (replaced(b'"num_classes": 10', b'"num_classes": 2'), ValueError, "data.num_classes=10 must be 2"),
        (
            replaced(b'"num_classes": 10', b'"num_classes": 5'),
            ValueError,
            r"held_out-000000.tar cannot be read.*label \d at position \d",
        ),
        (replaced(b'"float16"', b'"float32"'), ValueError, r"float16 \(2, 4, 8, 8\), must be float32"),
    ],
)
def test_damaged_shards_are_one_clear_error(folder, tmp_path, damage, error, message):
    shutil.copytree(folder, tmp_path / "s")
    damage(tmp_path / "s")
    with pytest.raises(error, match=message):
        open_shards(str(tmp_path / "s"), **{**SIZES, "num_classes": 5} if "label" in message else SIZES)


RUN = ("data=stream", *TINY[1:], "model/size=tiny", "train.micro_batch_size=4")


def test_a_streamed_run_says_that_it_is_exempt_and_resumes_in_place(folder, tmp_path, capsys):
    path = f"data.path={folder}"
    short = (*RUN, path, "train.eval_every=2", "train.log_every=2")
    tiny_run(tmp_path / "whole", *short, "train.total_steps=4")
    assert "exempt from the promise of bitwise equality" in capsys.readouterr().out
    assert "val_loss_dense" in metrics(tmp_path / "whole")[-1]
    tiny_run(tmp_path / "parts", *short, "train.total_steps=2")
    trainer, run = tiny_trainer(tmp_path / "parts", *short, "train.total_steps=4")
    assert trainer.batches.read(trainer.step).start_step == 2
    run_training(trainer, run)
    # On one process and one machine the promise is kept all the same.
    assert metrics(tmp_path / "parts")[-1] == metrics(tmp_path / "whole")[-1]
    for name in ("net.safetensors", "ema.safetensors"):
        one, other = (latest_checkpoint(tmp_path / run) / name for run in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()


def test_a_run_ends_in_one_line_when_its_server_fails(served_by_http, tmp_path):
    server, address = served_by_http
    trainer, run = tiny_trainer(tmp_path / "r", *RUN, f"data.path={address}")
    server.faults = [503] * 100
    message = rf"^{address}/train-\d+.tar cannot be read, tried 3 times: .*Service Unavailable$"
    with pytest.raises(UserError, match=message):
        run_training(trainer, run)


def told(address, folder):
    """The line in which train.py refuses an address."""
    with pytest.raises(UserError) as raised:
        train.main(composed(*RUN, f"output_dir={folder}", f"data.path='{address}'"))
    return explanation(raised.value)


def test_a_run_without_its_shards_is_refused_in_one_line(served_by_http, tmp_path):
    server, address = served_by_http
    missing = (
        rf"data.path={address}/no must hold shards, but {address}/no/manifest.json is not there: [\w. ]+"
    )
    assert re.fullmatch(missing, told(f"{address}/no", tmp_path))
    server.__exit__()
    unread = rf"{address}/manifest.json cannot be read, tried 3 times: .*onnect.*"
    gone = rf"data.path={address} must hold shards, but {unread}"
    assert re.fullmatch(gone, told(address, tmp_path))
    offered = "must be a folder, or an address http://, https:// or s3:// of plain signs"
    assert told("gs://bucket", tmp_path) == f"data.path=gs://bucket {offered}"


def test_rules_of_streams(folder, latents, tmp_path):
    masked = (f"output_dir={tmp_path / 'r'}", f"data.path={folder}", "train.masked_loss=true")
    with pytest.raises(UserError, match=r"train.masked_loss=true needs masks"):
        train.main(composed(*RUN, *masked))
    other = tmp_path / "other"
    write_shards(latents, other, SHARD + 1)
    tiny_run(tmp_path / "run", *RUN, f"data.path={folder}", "train.total_steps=2")
    with pytest.raises(ValueError, match=r"data.path: .* -> "):
        tiny_trainer(tmp_path / "run", *RUN, f"data.path={other}")
