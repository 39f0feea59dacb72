"""The flags: what is wrong is said in one sentence, recipes, help."""

import subprocess
import sys
from pathlib import Path

import pytest

import maskgrpo
from flags import describe
from models import tiny

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """An untrained tiny-math policy."""
    path = tmp_path_factory.mktemp("base") / "model"
    tiny.build("tiny-math").save(path)
    return path


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--gamma 1.5", "--gamma 1.5: must be a number in [0, 1)"),
        ("--group-size 1", "--group-size 1: must be a number, at least 2"),
        ("--lr nan", "--lr nan: must be a number, at least 0"),
        ("--block 7", "--block 7 must divide --length 16"),
        ("--steps 5", "--steps 5 must be a multiple of the 2 blocks"),
        ("--steps 48", "--steps 48 is more than the 16 tokens"),
        ("--task nope", "--task nope: unknown"),
        ("--reward nope", "--reward nope: unknown"),
        ("--model nowhere/at-all", "--model nowhere/at-all"),
        ("--data missing.jsonl", "missing.jsonl"),
        ("--max-prompt 3", "--max-prompt"),
        ("--ratio mean --loss-norm length", "--loss-norm length: applies to --ratio token"),
        ("--resume", "--resume:"),
        ("--cfg 1 --cfg-until 0.5 --score guided", "--score guided: with --cfg-until 1 only"),
        ("--protocol d1", "--protocol d1: tiny-math has none"),
        ("--betas 0.9 nan", "--betas nan: must be a number, from 0 to 1"),
        ("--seed -1", "--seed -1: must be a number, from 0 to"),
        ("--grad-clip 0", "--grad-clip 0.0: must be a number above 0"),
        ("--lora-alpha 8", "--lora-alpha: no effect with --lora-rank 0"),
        ("--beta 0 --ref-every 8", "--ref-every: no effect with --beta 0"),
        ("--cfg-until 0.5", "--cfg-until: no effect with --cfg 0.0"),
        ("--vq nowhere/at-all", "--vq nowhere/at-all: --model"),
        ("--iter 3", "unrecognized arguments: --iter"),
        ("--out flags.py", "flags.py"),
    ],
)
def test_wrong_flag_ends_in_one_sentence_that_names_it(base, tmp_path, capsys, wrong, says):
    with pytest.raises(SystemExit) as stopped:
        maskgrpo.main(["--model", str(base), "--out", str(tmp_path / "run"), *wrong.split()])
    said = f"{stopped.value} {capsys.readouterr().err}"
    assert says in said and "Traceback" not in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_one_process_of_many_without_an_exchange_of_gradients_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert maskgrpo.flags([]).shard == "ddp"
    with pytest.raises(SystemExit):
        maskgrpo.flags(["--shard", "none"])
    assert "--shard none: accepted under torchrun are ddp, fsdp" in capsys.readouterr().err


def test_image_tokenizer_of_the_flag_is_the_one_that_is_loaded(tmp_path):
    tiny.build("tiny-geneval").save(tmp_path / "model")
    argv = f"--model {tmp_path}/model --task tiny-geneval --vq ./nowhere --out {tmp_path}/run"
    with pytest.raises(SystemExit, match="--vq ./nowhere: no such directory"):
        maskgrpo.main(argv.split())


def test_help_names_the_symbols_and_loads_no_model_class():
    done = subprocess.run([sys.executable, "maskgrpo.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    for said in ("t_j = gamma + (1-gamma) j/mu (Eq. 11)", "Eq. 9", "Eq. 4", "Alg. 1", "--group-size G"):
        assert said in done.stdout
    heavy = ("transformers", "datasets", "peft", "matplotlib")
    code = f"import sys, maskgrpo; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert loaded.stdout == "[]\n"


LLADA = "--model GSAI-ML/LLaDA-8B-Instruct --task gsm8k"


def test_recipe_of_the_paper_needs_no_flag_and_any_flag_overrides_it():
    args = maskgrpo.flags([*LLADA.split(), "--gamma", "0.6", "--lr", "3e-6"])
    paper = dict(mu=12, group_size=6, lr=3e-6, beta=0.01, eps=0.2, length=256, steps=128, block=16)
    paper |= dict(temperature=0.9, lora_rank=128, lora_alpha=64, weight_decay=0.1, betas=(0.9, 0.99))
    paper |= dict(grad_clip=0.2, ref_every=64, remask="fading", gamma=0.6)
    assert {k: getattr(args, k) for k in paper} == paper
    said = describe(args).splitlines()
    assert [line.split(":")[0] for line in said] == ["paper", "ours", "command line"]
    assert "mu 12" in said[0] and "prompts" in said[1] and "warmup" in said[1]
    assert "gamma 0.6" in said[2] and "lr 3e-06" in said[2]  # given, though equal to the recipe
    assert "gamma" not in said[0]
    assert maskgrpo.flags([*LLADA.split(), "--mu", "3"]).mu == 3
    for model in ("GSAI-ML/LLaDA-1.5", "GSAI-ML/LLaDA-8B-Base", "Gen-Verse/MMaDA-8B-MixCoT", "/x/LLaDA-1.5"):
        assert maskgrpo.flags(["--model", model, "--task", "math500"]).lora_rank == 128
    assert maskgrpo.flags(["--model", "GSAI-ML/LLaDA-8B-Instruct", "--task", "tiny-math"]).lora_rank == 0


def test_a_model_without_a_recipe_is_told():
    said = describe(maskgrpo.flags("--model someone/else --task gsm8k --lr 1e-5".split())).splitlines()
    assert said[0] == "no recipe for this model and task: the script's defaults hold"
    assert said[1].startswith("command line:") and "lr 1e-05" in said[1]
    for known in (LLADA, "--model someone/else --task tiny-math", "--model tiny --task gsm8k"):
        assert "no recipe" not in describe(maskgrpo.flags(known.split()))
