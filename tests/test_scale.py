"""Many processes do what one does; LoRA and its reference; what is stored of a model, and read again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import released_standins
import torch
from conftest import shared
from safetensors.torch import load_file

import common
import maskgrpo
import run as run_module
import scale
from eval import evaluate
from eval.task import load_task
from models import load, lora, tiny

ROOT = Path(__file__).resolve().parent.parent
ONE = common.World(0, 1, torch.device("cpu"))
REWARD = """
import numpy as np

def sevens(rows, completions):
    return {"sevens": np.array([c.split().count("7") / max(len(c.split()), 1) for c in completions])}
"""
FIXED = (
    "--prompts 3 --group-size 3 --mu 2 --iterations 2 --micro-batch 4 --eval-prompts 2 --save-every 1 "
    "--steps 2 --block 8 --ref-every 2"
)
LORA = "--lora-rank 4 --lora-alpha 8 --lr 3e-3"
# name -> (flags of two processes, of one, tolerance of the weights after 4 updates)
RUNS = {
    "ddp": ("--shard ddp", "", 1e-6),
    "fsdp": ("--shard fsdp", "", 1e-5),
    "ddp-lora": (f"--shard ddp {LORA}", LORA, 1e-6),
    "fsdp-lora": (f"--shard fsdp --grad-checkpoint --export llada {LORA}", LORA, 1e-5),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """An untrained tiny-math policy."""
    path = tmp_path_factory.mktemp("base") / "model"
    tiny.build("tiny-math").save(path)
    (path / "reward.py").write_text(REWARD)
    return path


def arguments(base: Path, out: Path, flags: str) -> list[str]:
    return f"--model {base} --reward {base}/reward.py:sevens {FIXED} --out {out} {flags}".split()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load(str(path)).state_dict()


def distance(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max((a[k] - b[k]).abs().max().item() for k in a)


def gsm8k(root: Path) -> list[str]:
    """The recipe for LLaDA-8B on a slice of GSM8K, with a tiny checkpoint of that layout, name and chat."""
    config = released_standins.LLADA | {"max_sequence_length": 512}
    model = released_standins.llada(root / "LLaDA-8B-Instruct", config=config)
    slice_ = "".join(shared("data/gsm8k_test.jsonl").read_text().splitlines(True)[:4])
    (root / "gsm8k.jsonl").write_text(slice_)
    small = "--length 8 --steps 4 --block 4 --prompts 2 --group-size 2 --mu 2 --iterations 1 --eval-prompts 2"
    flags = f"--model {model} --task gsm8k --data {root}/gsm8k.jsonl --out {root}/two/gsm8k {small}"
    return [*flags.split(), "--reward", "int=1,format=1"]


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory) -> Path:
    """one/<name>: a run of this process. two/<name>: the same of two gloo processes, of which fsdp-lora
    ends half way, then is gone on with by one process; two/resumed: half by one process, the rest by two."""
    root = tmp_path_factory.mktemp("runs")
    maskgrpo.main(arguments(base, root / "one/ddp", ""))
    maskgrpo.main(arguments(base, root / "one/ddp-lora", LORA))
    half = "--iterations 1 --eval-every 0"
    maskgrpo.main(arguments(base, root / "two/resumed", half))
    every = [arguments(base, root / "two" / name, flags) for name, (flags, _, _) in RUNS.items()]
    every[-1] += half.split()
    every.append(arguments(base, root / "two/resumed", "--shard fsdp --resume"))
    every.append(gsm8k(root))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "tests/scale_worker.py", str(root / "calls.json"), json.dumps(every)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    maskgrpo.main(arguments(base, root / "two/fsdp-lora", f"{LORA} --export llada --resume"))
    return root


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_the_losses_and_weights_of_one(base, runs, name):
    """4 updates in float32, 9 completions over 2 processes, so that the last micro-batch of one rank holds
    nothing to train. M5: fsdp-lora was saved by two processes half way, loaded and finished by one."""
    one = runs / "one" / name.replace("fsdp", "ddp")
    two, tolerance = runs / "two" / name, RUNS[name][2]
    for a, b in zip(lines(one / "metrics.jsonl"), lines(two / "metrics.jsonl"), strict=True):
        assert a["reward/mean"] == pytest.approx(b["reward/mean"], abs=1e-12)
        assert a["kl"] == pytest.approx(b["kl"], abs=1e-7)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert b["ratio_max_first"] == 1.0
    trained = weights(two / "model")
    assert distance(weights(one / "model"), trained) <= tolerance
    if "lora" in name:
        assert max(t.abs().max() for n, t in trained.items() if "lora_B" in n) > 1e-3
    else:
        assert distance(weights(base), trained) > 1e-4


def test_checkpoint_of_one_process_is_gone_on_with_by_two(runs):
    """M5, the other way round: half a run by one process, the rest by two under FSDP."""
    assert distance(weights(runs / "one/ddp/model"), weights(runs / "two/resumed/model")) <= 1e-5


def test_recipe_of_llada_on_gsm8k_runs_on_two_processes(runs):
    """LoRA of rank 128 beside a bfloat16 base, blocks recomputed, as the recipe says; then scored."""
    (metrics,) = lines(runs / "two/gsm8k/metrics.jsonl")
    assert metrics["ratio_max_first"] == 1.0 and metrics["reward/errors"] == 0
    assert {"reward/correctness", "reward/format", "reward/int"} <= metrics.keys()
    config = json.loads((runs / "two/gsm8k/config.json").read_text())
    assert (config["lora_rank"], config["dtype"], config["grad_checkpoint"]) == (128, "bfloat16", True)
    result = evaluate.main(["--model", str(runs / "two/gsm8k")])
    assert (result["n"], result["dtype"], result["block_length"]) == (4, "bfloat16", 4)


def test_every_rank_makes_the_same_number_of_collectives(runs):
    first, second = json.loads((runs / "calls.json").read_text())
    assert first == second
    for calls in (first[1], first[3]):  # fsdp
        assert calls["foreach_all_gather"] > calls["foreach_reduce"] > 0
    assert "foreach_all_gather" not in first[0]


def test_lora_checkpoint_holds_no_base_weights(tmp_path):
    """M4: every key of the adapter and of a checkpoint's model says lora; under 5 % of the base's size."""
    wide = released_standins.LLADA | {"d_model": 512, "mlp_hidden_size": 1024, "n_heads": 8, "n_kv_heads": 8}
    base = released_standins.llada(tmp_path / "base", config=wide)
    policy = load(str(base))
    lora.add(policy, str(base), 2, 4.0)
    reference = scale.AdapterReference(policy)
    held = run_module.trained_state(policy)
    assert held and all("lora_" in name for name in held)
    assert {name.split(".")[-2] for name in held} == {lora.POLICY, lora.REFERENCE}
    lora.save(policy, tmp_path / "adapter", policy.backbone.state_dict())
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(stored) == 2 * 7 * 2 and all("lora" in name for name in stored)
    size = {p: sum(f.stat().st_size for f in (tmp_path / p).iterdir()) for p in ("base", "adapter")}
    assert size["adapter"] < 0.05 * size["base"]
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad])
    run_module.save_checkpoint(tmp_path, 1, {"policy": held}, optimizer, ONE)
    stored = sum(f.stat().st_size for f in (tmp_path / "checkpoints/step_000001").iterdir())
    assert stored < 4 * 0.05 * size["base"]  # two adapters and two moments
    assert reference.policy is policy


def test_exported_lora_model_computes_what_the_adapter_computes(runs):
    """--export llada merges the adapter into the released tensor names."""
    adapter, merged = (
        load(str(runs / "two/fsdp-lora/model")),
        load(str(runs / "two/fsdp-lora/llada"), length=16),
    )
    names = load_file(runs / "two/fsdp-lora/llada/model.safetensors").keys()
    assert "model.transformer.blocks.0.q_proj.weight" in names and not any("lora" in n for n in names)
    ids = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = (p.backbone(ids).logits for p in (adapter, merged))
    assert (a - b).abs().max() < 1e-5
    assert (a - load(str(runs / "one/ddp/model")).backbone(ids).logits).abs().max() > 1e-3


def probe(policy, model=None):
    """log p of fixed tokens under ``model`` (the policy itself if None)."""
    prompt = policy.encode(["ann has 3 pears gets 4 loses 2 ?"])
    x_0 = torch.arange(policy.length)[None] % 10 + 3
    return (model or policy)(prompt, torch.full_like(x_0, policy.mask_id), target=x_0)


def prepared(base: Path, flags: str):
    args = maskgrpo.flags(["--model", str(base), *flags.split()])
    return scale.load_policy(args, ONE, load_task("tiny-math"))


@pytest.mark.parametrize("flags", ["", LORA])
def test_reference_stays_until_it_is_refreshed(base, flags):
    """With LoRA and without: equal at the start, apart after a step, equal again; never trained."""
    policy, reference = prepared(base, flags)
    start = probe(policy).detach()
    assert torch.equal(start, probe(policy, reference)) and torch.equal(
        start, probe(load(str(base))).detach()
    )
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], 0.1)
    for _ in range(2):  # B = 0: the first step moves B, the second A too
        probe(policy).sum().backward()
        optimizer.step()
    assert torch.equal(start, probe(policy, reference))
    moved = probe(policy).detach()
    assert (moved - start).abs().max() > 1e-3
    reference.refresh(policy)
    assert torch.equal(moved, probe(policy, reference)) and torch.equal(moved, probe(policy))
    for name, p in policy.named_parameters():
        assert p.requires_grad == (f".{lora.POLICY}." in name if flags else True)


def test_lora_covers_all_seven_projections_without_dropout_in_float32(base):
    """Reports E7 and, of DESIGN, difference 11: the public names hit four of seven."""
    policy, _ = prepared(base, f"{LORA} --dtype bfloat16")
    adapted = [name.split(".")[-1] for name, _ in lora.layers(policy)]
    blocks = len(policy.backbone.get_decoder().layers)
    assert sorted(adapted) == sorted(blocks * lora.TARGETS) and not policy.training
    for _, layer in lora.layers(policy):
        assert isinstance(layer.lora_dropout[lora.POLICY], torch.nn.Identity)
        assert layer.lora_A[lora.POLICY].weight.dtype == torch.float32
        assert layer.get_base_layer().weight.dtype == torch.bfloat16
        assert layer.scaling[lora.POLICY] == 2.0


def test_adapter_can_be_trained_on_and_only_with_its_own_rank(base, runs, capsys):
    stored = runs / "one/ddp-lora/model"
    policy, reference = prepared(stored, LORA)
    assert torch.equal(probe(policy), probe(policy, reference))
    assert torch.equal(probe(policy), probe(load(str(stored))))
    with pytest.raises(ValueError, match="the adapter in .* has rank 4, alpha 8"):
        prepared(stored, "--lora-rank 8 --lora-alpha 8")
    with pytest.raises(ValueError, match="is a LoRA adapter: give its --lora-rank"):
        prepared(stored, "")


def test_adapter_under_the_released_names_is_read(tmp_path):
    """As public trainers write it: LLaDA's own module names, some projections only."""
    from safetensors.torch import save_file

    base = released_standins.llada(tmp_path / "base")
    noise = torch.Generator().manual_seed(0)
    A, B = torch.randn(2, 32, generator=noise), torch.randn(32, 2, generator=noise)
    key = "base_model.model.model.transformer.blocks.1.attn_out.lora_{}.weight"
    save_file({key.format("A"): A, key.format("B"): B}, tmp_path / "adapter_model.safetensors")
    config = {"base_model_name_or_path": str(base), "r": 2, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    policy = load(str(tmp_path))
    ((name, layer),) = lora.layers(policy)
    assert name == "model.layers.1.self_attn.o_proj"
    x = torch.randn(3, 32, generator=noise)
    W = layer.get_base_layer().weight
    assert torch.allclose(layer(x), x @ (W + 4 * B @ A).T, atol=1e-4)
    save_file({key.format("A"): A}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="missing, unexpected or of another shape.*o_proj.lora_B"):
        load(str(tmp_path))


def test_missing_peft_is_one_sentence(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="LoRA needs peft: pip install -r requirements.txt"):
        prepared(base, LORA)


def test_export_of_another_layout_is_refused(tmp_path):
    tiny.build("tiny-geneval", path="mixture").save(tmp_path)
    args = maskgrpo.flags(["--model", str(tmp_path), "--task", "tiny-geneval", "--export", "llada"])
    with pytest.raises(ValueError, match="--export llada: URSA has another layout"):
        scale.load_policy(args, ONE, load_task("tiny-geneval"))


def test_bfloat16_weights_are_not_trained_in_full_without_fsdp(base):
    with pytest.raises(ValueError, match="--dtype bfloat16 without --lora-rank"):
        prepared(base, "--dtype bfloat16")


def test_fsdp_holds_float32_computes_in_bfloat16_and_starts_at_ratio_one(base, tmp_path):
    """On one process without torchrun. The stored model is in --dtype."""
    out = tmp_path / "run"
    try:
        maskgrpo.main(arguments(base, out, "--shard fsdp --dtype bfloat16 --iterations 1 --eval-every 0"))
        (metrics,) = lines(out / "metrics.jsonl")
        assert metrics["ratio_max_first"] == 1.0
        assert {t.dtype for t in load_file(out / "model/model.safetensors").values()} == {torch.bfloat16}
        policy, reference = prepared(base, "--shard fsdp --dtype bfloat16")
        assert {p.dtype for p in policy.parameters()} == {torch.float32}
        log_p = probe(policy)
        assert log_p.dtype == torch.float32 and torch.equal(log_p, probe(policy, reference))
        whole = probe(load(str(base)))
        assert 0 < (log_p - whole).abs().max() < 0.1
    finally:
        torch.distributed.destroy_process_group()
