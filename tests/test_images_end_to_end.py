"""The commands for the released image models, with tiny checkpoints in their layouts: MMaDA-8B on GenEval's
prompts under its hub id and in two processes; URSA and FUDOKI without a policy.json."""

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

import models
import rebrl
import udm_grpo
from models import lora
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


UNIFORM = """
import numpy as np

from eval.task import Task


def rows(split, data):
    return [{"prompt": prompt} for prompt in ("a red cube", "two small dogs", "a blue ball")]


def reward(rows, images):
    return {"red": np.array([image[0].float().mean().item() / 255 for image in images])}


def task(protocol=None):
    return Task("red", "image", rows, reward, weights={"red": 1.0}, score="red")
"""
ONCE = (
    "--length 16 --iterations 1 --prompts 2 --group-size 3 --micro-batch 4 --steps 5 --eval-steps 1 "
    "--eval-prompts 2 --eval-every 0 --save-every 0 --lr 1e-2"
)


def uniform(model: Path, *more: str) -> dict:
    """What udm_grpo.py logs of one iteration on the model, its run beside it."""
    (model.parent / "task.py").write_text(UNIFORM)
    fixed = f"--model {model} --task {model.parent}/task.py --out {model.parent}/run {ONCE}"
    udm_grpo.main([*fixed.split(), *more])
    (metrics,) = (model.parent / "run/metrics.jsonl").read_text().splitlines()
    return json.loads(metrics)


def test_udm_grpo_trains_ursa_as_released(tmp_path):
    """The naive row of the ablation, guided in the first two of five steps, under FSDP in one process."""
    model = released_standins.ursa(tmp_path / "ursa")
    naive = "--trajectory backward --action intermediate --update each --mu 2"
    try:
        metrics = uniform(
            model, *"--shard fsdp --cfg 2 --cfg-until 0.15 --max-prompt 8".split(), *naive.split()
        )
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert metrics["ratio_max_first"] == 1.0 and metrics["grad_norm"] > 0
    base, trained = models.load(str(model)), models.load(str(tmp_path / "run/model"))
    assert (trained.length, trained.text_length) == (16, 8)
    assert trained.path_settings == base.path_settings and torch.equal(trained.codebook, base.codebook)
    moved = [not torch.equal(a, b) for a, b in zip(base.parameters(), trained.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2


def test_udm_grpo_trains_an_adapter_of_fudoki_as_released(tmp_path):
    """With guidance, whose empty prompt is of the released id, and each block computed again."""
    model = released_standins.fudoki(tmp_path / "fudoki")
    metrics = uniform(model, *"--lora-rank 4 --lora-alpha 8 --grad-checkpoint --cfg 2".split())
    assert metrics["ratio_max_first"] == 1.0 and metrics["grad_norm"] > 0
    trained = models.load(str(tmp_path / "run/model"))
    up = {name: layer.lora_B[lora.POLICY].weight for name, layer in lora.layers(trained)}
    assert len(up) == 2 * 7 and all(B.abs().max() > 1e-3 for B in up.values())


@pytest.mark.parametrize("file", [None, '{"shift": 1.0}'])
def test_a_path_that_no_file_gives_is_asked_for(tmp_path, file):
    """Without URSA's scheduler folder, and with a file that has no alpha."""
    model = released_standins.ursa(tmp_path / "ursa")
    shutil.rmtree(model / "scheduler")
    if file:
        (model / "scheduler").mkdir()
        (model / "scheduler/scheduler_config.json").write_text(file)
    says = (
        "error: no scheduler file of the checkpoint gives path: give --path, --shift .*--path-alpha.*--path-c"
    )
    with pytest.raises(SystemExit, match=says):
        uniform(model)
    assert not (tmp_path / "run").exists()
