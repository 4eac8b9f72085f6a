import itertools
from dataclasses import replace

import numpy as np
import torch

from data import LatentDataset, LatentManifest, synthetic
from data.stream import StreamOrder, entries_by_step, held_out_batches, mask_coverage, stream
from tests.data.test_latents import write_flipped


def order(ids=None, **changes):
    options = {"batch_size": 6, "micro_batch_size": 2, "start_step": 0, "rank": 0, "world_size": 1}
    options |= {"seed": 0, "hflip": False} | changes
    return StreamOrder(np.arange(10) if ids is None else ids, **options)


def small_data(num_classes=3, num_held_out=4, **changes):
    sizes = {"input_size": 4, "in_channels": 1, "num_entries": 20, "seed": 0, **changes}
    return synthetic(num_classes=num_classes, num_held_out=num_held_out, **sizes)


def masked(dataset, masks, conditioning_type):
    manifest = replace(dataset.manifest, conditioning_type=conditioning_type)
    return LatentDataset(dataset.stored, dataset.labels, manifest, masks)


def covered(masks):
    """Map masks to tokens of one pixel."""
    return (masks > 0).flatten(1)


def first(iterable, count):
    return [draw.ids.tolist() for draw in itertools.islice(iterable, count)]


def test_each_permutation_holds_every_entry_once_and_they_differ():
    positions = np.concatenate(first(order(), 15)).tolist()
    epochs = [positions[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    of_next_seed = np.concatenate(first(order(seed=1), 5)).tolist()
    assert of_next_seed not in epochs, "a seed does not shift the epochs of another"


def test_the_stream_is_a_function_of_the_position():
    assert first(order(start_step=3), 6) == first(order(), 15)[9:]
    whole_batches = np.concatenate(first(order(), 6)).reshape(2, 6).tolist()
    assert first(order(micro_batch_size=6), 2) == whole_batches
    assert first(order(seed=1), 3) != first(order(), 3)
    dataset = small_data(num_classes=0)
    batch = entries_by_step(dataset, seed=5, batch_size=6)(3)
    assert [batch] == first(order(dataset.train_ids, seed=5, start_step=3, micro_batch_size=6), 1)


def test_processes_share_each_batch_without_overlap():
    alone = first(order(batch_size=8), 8)
    two = [first(order(batch_size=8, rank=p, world_size=2), 4) for p in (0, 1)]
    assert [micro for pair in zip(*two, strict=True) for micro in pair] == alone


def test_a_batch_may_be_larger_than_the_data():
    (batch,) = first(order(np.arange(3), batch_size=8, micro_batch_size=8), 1)
    assert sorted(np.bincount(batch).tolist()) == [2, 3, 3]


def test_flips_are_a_function_of_the_seed_and_the_step():
    def flipped(count, **changes):
        return [draw.flipped.tolist() for draw in itertools.islice(order(hflip=True, **changes), count)]

    whole = flipped(300)
    assert flipped(291, start_step=3) == whole[9:]
    assert np.reshape(flipped(100, micro_batch_size=6), (300, 2)).tolist() == whole
    two = [flipped(99, rank=p, world_size=1, batch_size=6) for p in (0, 1)]
    assert two[1] == [batch for step in range(50) for batch in whole[3 * step + 1 : 3 * step + 3]][:99]
    assert 0.4 < np.mean(whole) < 0.6
    assert flipped(300, seed=1) != whole
    assert {draw.flipped for draw in itertools.islice(order(), 5)} == {None}


def batches_of(dataset, start_step=0, **changes):
    options = {"batch_size": 8, "micro_batch_size": 2, "num_workers": 0, "rank": 0, "world_size": 1}
    return stream(dataset, start_step, seed=0, pin_memory=False, **options | changes)


def test_a_stream_reads_flips_with_their_labels_and_masks(tmp_path):
    batches = batches_of(write_flipped(tmp_path / "a"), micro_batch_size=4, with_masks=True)
    seen = []
    for batch in itertools.islice(batches, 12):
        values = batch.stored[:, 0, 0, 0]
        assert batch.labels.tolist() == (values % 100 % 3).int().tolist()
        for value, mask in zip(values, batch.masks, strict=True):
            assert mask.nonzero().tolist() == [[2, 6 if value >= 100 else 1]]
        seen += values.int().tolist()
    assert sorted(value % 100 for value in seen) == sorted(4 * list(range(12))), "an epoch is each entry once"
    assert 0.2 < np.mean(np.array(seen) >= 100) < 0.8


def test_workers_change_nothing():
    dataset = small_data()
    streams = (batches_of(dataset, 2, batch_size=4, num_workers=n) for n in (0, 2))
    batches = [list(itertools.islice(stream, 12)) for stream in streams]
    steps = order(dataset.train_ids, batch_size=4, start_step=2)
    for here, read_ahead, ids in zip(*batches, first(steps, 12), strict=True):
        assert torch.equal(here.stored, read_ahead.stored)
        assert torch.equal(here.labels, read_ahead.labels)
        assert torch.equal(here.stored, dataset.read(np.array(ids))[0])
        assert (here.masks, here.num_forced) == (None, 0), "masks are not read by default"


def test_held_out_batches_are_the_same_on_any_number_of_processes():
    """Moments of two channels with variance only in the second, which shows the draws."""
    fields = {"scale": 0.5, "shift": 2.0, "num_held_out": 7, "conditioning_type": "mask"}
    manifest = LatentManifest(20, (4, 4, 4), "float32", "moments", 3, "identity", **fields)
    rng = np.random.default_rng(0)
    moments = rng.standard_normal(manifest.stored_shape).astype(np.float32)
    moments[:, 2], moments[:, 3] = -40, 0
    masks = rng.integers(0, 256, (20, 4, 4), dtype=np.uint8)
    dataset = LatentDataset(moments, np.arange(20) % 3, manifest, masks)
    ids = dataset.held_out_ids
    results = []
    for world_size in (1, 2, 5):
        batches = []
        for rank in range(world_size):
            share = torch.device("cpu"), rank, world_size
            batches += held_out_batches(dataset, 2, *share, with_masks=True)
        _, *columns = zip(*sorted(batches, key=lambda batch: batch[0]), strict=True)
        results.append([torch.cat(column) for column in columns])
    for latents, labels, weights in results:
        np.testing.assert_allclose(latents[:, 0], (moments[ids, 0] - 2) * 0.5, rtol=1e-6)
        assert torch.equal(latents, results[0][0])
        assert labels.tolist() == (ids % 3).tolist()
        assert torch.equal(weights, dataset.read_masks(ids))
    draws = results[0][0][:, 1].numpy() / 0.5 + 2 - moments[ids, 1]
    assert len(np.unique(draws.round(3), axis=0)) == len(ids), "the draws of all entries differ"


def test_held_out_moments_are_not_drawn_with_the_noise_of_the_loss():
    dataset = small_data(num_classes=0, num_held_out=8, in_channels=2)
    manifest = replace(dataset.manifest, kind="moments")
    dataset = LatentDataset(np.zeros_like(dataset.stored), None, manifest)
    (_, latents, *_), *_ = held_out_batches(dataset, 8, torch.device("cpu"), 0, 1)
    generator = torch.Generator().manual_seed(0)
    loss_draws = torch.randn(8 + latents.numel(), generator=generator)
    for start in range(9):
        assert not torch.allclose(loss_draws[start : start + 64], latents.flatten()[:64])


def test_synthetic_data_is_a_function_of_its_seed():
    arguments = {"input_size": 4, "in_channels": 2, "num_classes": 3, "num_held_out": 4, "num_entries": 50}
    a, b, c = (synthetic(**arguments, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(a.stored, b.stored)
    assert not np.array_equal(a.stored, c.stored)
    assert synthetic(**{**arguments, "num_classes": 0}, seed=0).labels is None


def test_all_micro_batches_of_a_step_know_its_largest_mask():
    masks = (np.arange(16) < np.arange(20)[:, None] % 17).reshape(20, 4, 4).astype(np.uint8)
    dataset = masked(small_data(), masks, "segmentation")
    steps = order(dataset.train_ids, batch_size=8, micro_batch_size=8)
    expected = [max(entry % 17 for entry in batch) for batch in first(steps, 5)]
    assert len(set(expected)) > 1
    for rank in (0, 1):
        batches = batches_of(dataset, rank=rank, world_size=2, with_masks=True, token_mask=covered)
        micro_batches = list(itertools.islice(batches, 2 * len(expected)))
        assert [batch.num_forced for batch in micro_batches] == np.repeat(expected, 2).tolist()
        assert micro_batches[0].masks.shape == (2, 4, 4)


def test_mask_coverage_uses_the_largest_mask_of_each_batch():
    masks = 255 * (np.arange(16) < 2 * np.arange(8)[:, None]).reshape(8, 4, 4).astype(np.uint8)
    dataset = masked(small_data(num_classes=0, num_held_out=0, num_entries=8), masks, "mask")
    assert mask_coverage(dataset, covered, batch_size=4) == np.mean([6 / 16, 14 / 16])
