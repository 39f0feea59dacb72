"""The commands for MMaDA-8B on GenEval's prompts, with a tiny checkpoint in the released layout under its hub
id, and two processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import released_standins
import torch
from conftest import ROOT, shared
from safetensors.torch import load_file, save_file

import rebrl
from models.magvitv2 import MAGVITv2

PART = {"ch": 32, "ch_mult": [1, 1, 1, 1, 1], "num_res_blocks": [1, 1, 1, 1, 1], "z_channels": 6}
TASK = '''
from dataclasses import replace

from eval import geneval, image_statistics


def task(protocol=None):
    """GenEval's prompts, without its detector."""
    statistics = image_statistics.reward()
    return replace(geneval.task(protocol), reward=statistics, weights={"edges": 1.0}, score="edges")
'''
SMALL = (
    "--prompts 3 --group-size 3 --mu 2 --iterations 2 --steps 3 --eval-steps 2 --eval-prompts 8 "
    "--eval-every 0 --micro-batch 5 --max-prompt 16 --lr 1e-3"
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A cache of the hub that holds Gen-Verse/MMaDA-8B-Base and showlab/magvitv2, both tiny: 16 codes out of
    64, pictures of 64 pixels."""
    cache = tmp_path_factory.mktemp("hub")

    def snapshot(name: str) -> Path:
        repo = cache / f"models--{name.replace('/', '--')}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs/main").write_text("0" * 40)
        (repo / "snapshots" / ("0" * 40)).mkdir(parents=True)
        return repo / "snapshots" / ("0" * 40)

    released_standins.mmada(snapshot("Gen-Verse/MMaDA-8B-Base"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vq = MAGVITv2(PART, PART)
    path = snapshot("showlab/magvitv2")
    weights = {k: v * (30 if k.startswith("decoder.conv_out") else 1) for k, v in vq.state_dict().items()}
    save_file(weights, path / "pytorch_model.safetensors")
    (path / "config.json").write_text(json.dumps({"encoder": PART, "decoder": PART}))
    (cache / "task.py").write_text(TASK)
    return cache


def arguments(hub: Path, out: Path, *more: str) -> list[str]:
    data = shared("data/geneval_evaluation_metadata.jsonl")
    fixed = f"--model Gen-Verse/MMaDA-8B-Base --task {hub}/task.py --data {data} --reward edges --cfg 3.5"
    return [*fixed.split(), *SMALL.split(), "--sampler", "emerge", "--strict", "--out", str(out), *more]


def torchrun(hub: Path, script: str, *args: str) -> None:
    command = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command, script, *args],
        cwd=ROOT,
        env=os.environ | environment | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=400,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def check(out: Path) -> None:
    """Two iterations on nine completions with a signal, and a grid of eight pictures to look at."""
    from PIL import Image

    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(m["ratio_max_first"] == 1.0 and m["zero_spread"] == 0 and m["length"] == 16 for m in metrics)
    assert all(0 < m["reward/mean"] < 1 and m["grad_norm"] > 0 and m["kl"] > 0 for m in metrics)
    scores = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    assert {(s["step"], s["mode"]) for s in scores} == {(n, m) for n in (0, 2) for m in ("greedy", "sampled")}
    with Image.open(out / "samples" / "step_000002.png") as grid:
        assert grid.width > 4 * 144 and grid.height > 144
        assert len(grid.getcolors(grid.width * grid.height)) > 200  # rank 0's four of the eight, in colour


def test_maskgrpo_trains_mmada_on_geneval_prompts_in_two_processes(hub, tmp_path):
    out = tmp_path / "run"
    torchrun(hub, "maskgrpo.py", *arguments(hub, out, "--gamma", "0.8", "--remask", "random"))
    check(out)


def test_rebrl_trains_mmada_alike_in_one_process_and_two(hub, tmp_path, monkeypatch):
    """Report F1: 3 groups of 3 over 2 processes, so that a group spans both and the last share is padded."""
    torchrun(hub, "rebrl.py", *arguments(hub, tmp_path / "two", "--score", "guided"))
    check(tmp_path / "two")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rebrl.main(arguments(hub, tmp_path / "one", "--score", "guided"))
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two"))
    assert max((one[k] - two[k]).abs().max().item() for k in one) < 1e-5
    if keep := os.environ.get("KEEP_SAMPLES"):
        shutil.copytree(tmp_path / "two/samples", keep, dirs_exist_ok=True)
