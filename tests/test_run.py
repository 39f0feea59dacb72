"""A run as a whole: files, resume, processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import maskgrpo
import run as run_module
from models import load, tiny

ROOT = Path(__file__).resolve().parent.parent
REWARD = '''
import numpy as np

def sevens(rows, completions):
    """Share of sevens: a random policy earns it unevenly, so that there is something to learn."""
    return {"sevens": np.array([c.split().count("7") / max(len(c.split()), 1) for c in completions])}
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """An untrained tiny-math policy."""
    path = tmp_path_factory.mktemp("base") / "model"
    tiny.build("tiny-math").save(path)
    (path / "reward.py").write_text(REWARD)
    return path


def arguments(base: Path, out: Path, *more: str) -> list[str]:
    fixed = (
        f"--model {base} --reward {base}/reward.py:sevens --prompts 2 --group-size 4 --mu 2 --iterations 4"
    )
    return [*fixed.split(), "--eval-prompts", "8", "--save-every", "1", "--out", str(out), *more]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load(str(out / "model")).state_dict()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_equal(a: dict, b: dict, tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    assert max((a[k] - b[k]).abs().max().item() for k in a) <= tolerance


def torchrun(processes: int, *args: str, timeout: int = 240) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "maskgrpo.py", *args],
        cwd=ROOT,
        env=environment,
        timeout=timeout,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory) -> Path:
    """Four iterations without a break."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    maskgrpo.main(arguments(base, out))
    return out


def test_a_run_leaves_its_files_and_the_policy_has_moved(base, straight):
    metrics, scores = lines(straight / "metrics.jsonl"), lines(straight / "eval.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    names = "reward/mean reward/sevens reward/correct kl clip_fraction ratio_max_first grad_norm zero_spread"
    for key in names.split():
        assert key in metrics[0]
    for key in "length time/rollout time/reward time/update lr".split():
        assert key in metrics[0]
    assert {(s["step"], s["mode"]) for s in scores} == {(n, m) for n in (0, 4) for m in ("greedy", "sampled")}
    assert all({"task", "score", "se", "n"} <= s.keys() for s in scores)
    for name in ("config.json", "curve.png", "samples/step_000000.txt", "samples/step_000004.txt", "model"):
        assert (straight / name).exists()
    before = load(str(base)).state_dict()
    assert max((before[k] - v).abs().max().item() for k, v in weights(straight).items()) > 1e-4


def test_every_evaluation_holds_metrics_that_are_not_trained(straight):
    """Report K16: the trained reward (sevens) stands beside two that are only measured."""
    for score in lines(straight / "eval.jsonl"):
        assert {"sevens", "correct", "format", "length"} <= score.keys()


def test_first_ratio_is_exactly_one_in_every_iteration(straight):
    """Report E1: old and new log-probabilities come from one function, mask and micro-batch."""
    assert all(m["ratio_max_first"] == 1.0 for m in lines(straight / "metrics.jsonl"))


def test_resumed_run_gives_the_weights_of_the_unbroken_one(base, straight, tmp_path):
    """Reports M1, M2: the first step after a resume is the saved one + 1, and parameters are bit-equal. Lines
    written after the checkpoint, and a half-written one, are cut."""
    out = tmp_path / "run"
    maskgrpo.main(arguments(base, out, "--iterations", "2"))
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "reward/mean": 9}\n{"step": 4, "rew')
    maskgrpo.main(arguments(base, out, "--resume"))
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert_equal(weights(out), weights(straight))


def test_killed_run_resumes_to_the_same_weights(base, straight, tmp_path):
    """kill -9 in the middle of an iteration."""
    out = tmp_path / "run"
    command = [sys.executable, "maskgrpo.py", *arguments(base, out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, env=environment)
    while run_module.newest_checkpoint(out)[0] < 2 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    maskgrpo.main(arguments(base, out, "--resume"))
    assert_equal(weights(out), weights(straight))


def test_half_written_checkpoint_is_passed_over(tmp_path):
    for name in ("step_000002", "step_000004.tmp", "step_000006_old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert run_module.newest_checkpoint(tmp_path)[0] == 2
    (tmp_path / "checkpoints/step_1000000").mkdir()
    assert run_module.newest_checkpoint(tmp_path)[0] == 1000000


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("file", ["*.distcp", ".metadata"])
@pytest.mark.parametrize("damage", [Path.unlink, truncate, lambda path: path.write_bytes(b"0" * 5000)])
def test_damaged_checkpoint_is_named_and_once_removed_the_one_before_serves(
    base, straight, tmp_path, file, damage
):
    out = shutil.copytree(straight, tmp_path / "run")
    newest = out / "checkpoints/step_000004"
    damage(next(newest.glob(file)))
    with pytest.raises(SystemExit, match=f"--resume: {newest} cannot be read .*: remove it, and --resume"):
        maskgrpo.main(arguments(base, out, "--resume"))
    shutil.rmtree(newest)
    maskgrpo.main(arguments(base, out, "--resume"))
    assert_equal(weights(out), weights(straight))


def test_checkpoint_of_other_flags_is_refused(base, straight, tmp_path):
    out = shutil.copytree(straight, tmp_path / "run")
    with (
        pytest.warns(UserWarning, match="--lora-rank was 0, is now 2"),
        pytest.raises(SystemExit, match="step_000004 was saved with other flags, such as --model or --lora"),
    ):
        maskgrpo.main(arguments(base, out, "--resume", "--lora-rank", "2"))
    assert json.loads((out / "config.json").read_text())["lora_rank"] == 0  # that of the run, as it was


def test_log_is_read_up_to_a_line_that_a_kill_cut_off_and_other_damage_is_named(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert run_module.read_log(log) == []
    log.write_text('{"step": 1, "kl": 0.5}\n{"step": 2, "k')
    assert run_module.read_log(log) == [{"step": 1, "kl": 0.5}]
    for damaged in ('{"step": 1, "k', "[1]", '{"kl": 0.5}', '{"step": null}', "\x00\x00", ""):
        log.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 3}}\n')
        with pytest.raises(ValueError, match="metrics.jsonl:2: a damaged line"):
            run_module.read_log(log)


def test_two_processes_give_the_weights_of_one(base, tmp_path):
    """Report F1: a group of 3 over 2 processes (the last shard is padded), equal micro-batches: same samples,
    masks and rewards, and the weights after 4 updates within 1e-6."""
    sizes = "--iterations 2 --prompts 3 --group-size 3 --micro-batch 5".split()
    maskgrpo.main(arguments(base, tmp_path / "one", *sizes))
    done = torchrun(2, *arguments(base, tmp_path / "two", *sizes))
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = lines(tmp_path / "one/metrics.jsonl"), lines(tmp_path / "two/metrics.jsonl")
    for a, b in zip(one, two, strict=True):
        assert a["reward/mean"] == pytest.approx(b["reward/mean"], abs=1e-12)
        assert a["kl"] == pytest.approx(b["kl"], abs=1e-7)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert lines(tmp_path / "one/eval.jsonl") == lines(tmp_path / "two/eval.jsonl")
    assert_equal(weights(tmp_path / "one"), weights(tmp_path / "two"), 1e-6)


def test_completions_of_a_group_differ_and_seeds_are_apart(base):
    """Reports I1, I2: each sample has its own stream; the rollout seed does not move the data order."""
    from common import generator, prompt_indices

    draws = {torch.rand(1, generator=generator("rollout", 0, 0, n)).item() for n in range(64)}
    assert len(draws) == 64
    assert prompt_indices(100, 7, 3, 0) == prompt_indices(100, 7, 3, 0) != prompt_indices(100, 7, 3, 1)
    assert sorted(prompt_indices(100, 100, 0, 0)) == list(range(100))


def test_gradient_that_is_not_finite_stops_before_it_is_stepped_or_saved(base, tmp_path):
    """Report M2."""
    reward = tmp_path / "reward.py"
    huge = "{'huge': 1e30 * np.arange(len(rows))}"
    reward.write_text(f"import numpy as np\n\ndef huge(rows, completions):\n    return {huge}\n")
    out = tmp_path / "run"
    args = [a.replace(str(base) + "/reward.py:sevens", f"{reward}:huge") for a in arguments(base, out)]
    with pytest.raises(SystemExit, match="not finite in iteration 1"):
        maskgrpo.main([*args, "--adv-std", "none", "--lr", "1e30", "--grad-clip", "1e38", "--beta", "0"])
    assert run_module.newest_checkpoint(out) == (0, None)


def test_directory_of_a_run_is_not_overwritten(base, straight, capsys):
    with pytest.raises(SystemExit) as stopped:
        maskgrpo.main(arguments(base, straight))
    assert "already holds a run: add --resume" in f"{stopped.value} {capsys.readouterr().err}"


def test_rank_that_raises_ends_all_ranks_with_its_message(base, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\n\ndef bad(rows, completions):\n"
        "    if os.environ['RANK'] == '1':\n        raise KeyError('rank one is ill')\n"
        "    return {'bad': [0.0] * len(rows)}\n"
    )
    args = [
        a.replace(str(base) + "/reward.py:sevens", f"{reward}:bad") for a in arguments(base, tmp_path / "run")
    ]
    started = time.time()
    done = torchrun(2, *args, "--strict")
    assert done.returncode != 0 and "rank one is ill" in done.stderr
    assert time.time() - started < 120
