"""The stage `check` sees wrong results of a device, a step that is not skipped, a run that differs."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import check, check_runs
from runtime.machine import start_process

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def failed(rows):
    return [row["what"] for row in rows if row["failed"]]


@pytest.fixture(scope="module")
def routed():
    with torch.random.fork_rng():
        return check.model("routed", tiny=True)


@torch.no_grad()
def a_weight_off(net):
    net.blocks[3].attn.proj.weight[0, 0] += 1


def other_tokens(net):
    router, T = net.router, net.num_tokens
    net.router = lambda *args, **kwargs: ((router(*args, **kwargs) + 1) % T).sort(dim=1).values


@torch.no_grad()
def weights_in_tf32(net):
    for parameter in net.parameters():
        parameter.copy_(((parameter.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32))


def another_label_dropout(net):
    net.class_dropout_prob = 0.6


@pytest.mark.parametrize("spoil", [a_weight_off, other_tokens, weights_in_tf32, another_label_dropout])
def test_another_computation_is_seen(routed, spoil):
    config, net = routed
    spoilt = deepcopy(net)
    spoil(spoilt)
    found = failed(check.errors("routed", config, net, spoilt, CPU))
    assert {"routed, fp32: loss", "routed, fp32: gradients", "routed, masks, fp32: gradients"} <= set(found)


def test_samples_of_another_network_are_seen(routed):
    config, net = routed
    spoilt = deepcopy(net)
    weights_in_tf32(spoilt)
    assert "dense, guided, fp32: samples" in failed(check.errors("dense", config, net, spoilt, CPU))


def test_all_devices_draw_the_same():
    generators = [torch.Generator().manual_seed(0) for _ in range(3)]
    with check.DrawnByGenerator():
        here, there = (
            torch.randn(3, generator=g, device=d) for g, d in zip(generators, (CPU, "meta"), strict=False)
        )
    assert torch.equal(here, torch.randn(3, generator=generators[2]))
    assert there.device.type == "meta"
    states = [generator.get_state() for generator in generators]
    assert torch.equal(states[0], states[1])  # "meta" alone draws nothing


@pytest.fixture
def trainer():
    with torch.random.fork_rng(), check_runs.small_trainer(True, "train.mixed_precision=no") as trainer:
        check_runs.perturb(trainer.net)
        yield trainer


def test_a_step_that_is_not_skipped_is_seen(trainer):
    assert not failed(check_runs.spoil_one_step(trainer))
    step = trainer.optimizer.step

    trainer.optimizer.step = lambda skipped: step(torch.zeros_like(skipped))
    whole, _ = check_runs.spoil_one_step(trainer)
    assert whole["failed"]
    assert whole["error"] > len(trainer.parameters)


def test_a_step_that_moves_nothing_is_seen(trainer):
    trainer.optimizer.step = lambda skipped: None
    for parameter in trainer.parameters:
        trainer.optimizer.optimizers["all"].state[parameter] = {}
    _, left = check_runs.spoil_one_step(trainer)
    assert left["error"] >= len(trainer.parameters)


def test_where_a_step_waits_is_told(trainer):
    assert check_runs.steps_without_waiting(trainer) == ""

    def wait(loss):
        raise RuntimeError("called a synchronizing CUDA operation")

    trainer.update_weights = wait
    told = check_runs.steps_without_waiting(trainer)
    assert told.startswith("test_check.py, line ")
    assert told.endswith(": called a synchronizing CUDA operation")


def a_run(folder, weight=1.0, average=1.0, loss=0.5):
    checkpoint = folder / f"checkpoints/step_{check_runs.TOTAL_STEPS:08d}"
    checkpoint.mkdir(parents=True)
    for file, value in (("net", weight), ("ema", average)):
        save_file({"a": torch.ones(100), "b": torch.full((1,), value)}, checkpoint / f"{file}.safetensors")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "loss": loss}) + "\n" for s in (2, 4))
    )
    return folder


@pytest.mark.parametrize(
    ("changed", "seen"),
    [({"weight": 1.01}, "weights"), ({"average": 1.01}, "average"), ({"loss": 0.51}, "losses")],
)
def test_a_run_that_ends_elsewhere_is_seen(tmp_path, changed, seen):
    first, same, other = (
        a_run(tmp_path / "first"),
        a_run(tmp_path / "same"),
        a_run(tmp_path / "other", **changed),
    )
    rows = check_runs.compared_runs(first, same, same, CPU)
    assert [row["what"] for row in rows[3:]] == [
        f"killed and resumed: {what}" for what in check_runs.RUN_BOUNDS
    ]
    assert not failed(rows)
    for device in (CPU, CUDA):
        found = failed(check_runs.compared_runs(first, other, same, device))
        assert found == [f"killed and resumed: {seen}"]
    found = failed(check_runs.compared_runs(first, same, other, CPU))
    assert found == [f"two runs with one seed: {seen}"]


@pytest.mark.parametrize(
    ("again", "resumed", "device", "num_failed"),
    [(1.0, 1 + 1e-6, CPU, 1), (1.0, 1 + 1e-6, CUDA, 0), (1.01, 1.04, CUDA, 0), (1.01, 1.06, CUDA, 1)],
)
def test_a_resumed_run_may_be_as_far_as_cuda_parts_two_equal_runs(
    tmp_path, again, resumed, device, num_failed
):
    names = {"first": 1.0, "again": again, "resumed": resumed}
    first, again, resumed = (a_run(tmp_path / name, weight=weight) for name, weight in names.items())
    assert len(failed(check_runs.compared_runs(first, resumed, again, device))) == num_failed


@pytest.mark.parametrize(
    ("said", "status", "device", "reason"),
    [
        ("....\n4 passed, 9 deselected in 1.2s", 0, CUDA, ""),
        ("ss\n2 skipped in 1s", 0, CPU, ""),
        ("ss\n2 skipped in 1s", 0, CUDA, "no test has passed on a GPU"),
        ("F.s\n1 failed, 1 passed, 1 skipped in 1s", 1, CUDA, "pytest ended with status 1"),
    ],
)
def test_tests_fail_that_fail_or_are_skipped_on_a_gpu(said, status, device, reason):
    row = check_runs.outcome(said, status, device)
    assert row == {"what": said.partition("\n")[2], "failed": reason}


def test_an_error_that_is_not_a_number_fails():
    assert check_runs.compared("a", 1e-3, 1e-3)["failed"] == ""
    assert check_runs.compared("a", float("nan"), 1e-3)["failed"]


@pytest.mark.parametrize("setting", ["precision", "skipped step", "no host synchronisation"])
def test_a_setting_passes_here_and_leaves_nothing_behind(tmp_path, setting):
    start_process()  # as the stage does: it allows TF32
    before = (
        torch.get_rng_state(),
        torch._dynamo.config.recompile_limit,
        torch.backends.cuda.matmul.allow_tf32,
    )
    rows = check.plan(CPU, True, tmp_path)[setting]()
    assert rows
    assert failed(rows) == []
    after = (
        torch.get_rng_state(),
        torch._dynamo.config.recompile_limit,
        torch.backends.cuda.matmul.allow_tf32,
    )
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", [False, True])
def test_tf32_is_allowed_where_it_is_asked_for(before):
    def allowed():
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    at_first = allowed()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = before
    try:
        for precision in ("fp32", "tf32", "bf16"):
            with check.computing(precision):
                assert allowed() == (precision == "tf32",) * 2
            assert allowed() == (before, before)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = at_first
