"""sft.py: its forward process and loss against the exact bound."""

import argparse
import json
import math

import pytest
import released_standins
import torch
from toys import Pairwise, any_order_bound

import models
import models.tiny
import sft
from common import World, elbo, end_of_text, generator
from sft import forward_process, held_out_bound


def test_t_is_uniform_on_zero_to_one_and_stratified():
    """In every batch one t in each B-th of (0, 1], and the t of each row is uniform over batches."""
    B = 8
    t = torch.stack([forward_process(B, 3, generator("t", n))[0] for n in range(2000)])
    assert t.min() > 0 and t.max() <= 1
    assert torch.equal((t * B).ceil().sort(-1).values, torch.arange(1.0, B + 1).expand(2000, B))
    for moment, expected in ((1, 1 / 2), (2, 1 / 3), (3, 1 / 4)):
        row = t.double() ** moment
        assert ((row.mean(0) - expected).abs() < 4 * row.std(0) / math.sqrt(2000)).all()


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-24])
def test_t_is_never_zero_not_even_at_the_ends_of_what_a_generator_gives(monkeypatch, extreme):
    """1/t would be infinite there."""
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.full(shape, extreme))
    t, _ = forward_process(4, 3, generator("t"))
    assert (t > 0).all() and (t <= 1).all()


def test_tokens_are_masked_independently_with_probability_t():
    t, mask = forward_process(50_000, 3, generator("mask"))
    excess = mask.double() - t[:, None]
    pairs = [excess[:, 0] * excess[:, 1], excess[:, 0] * excess[:, 2], excess[:, 1] * excess[:, 2]]
    for sample in (*excess.T, *(excess * (t[:, None] - 0.5)).T, *pairs):
        assert sample.mean().abs() < 4 * sample.std() / math.sqrt(50_000)
    assert mask[t > 0.9999].all()


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_averages_to_the_exact_bound(seed):
    """The bound is the mean over all orders of decoding; the draws are the script's own."""
    policy = Pairwise(K=3, L=3, seed=seed)
    x_0, B = torch.tensor([[0, 2, 1]]), 500
    prompt = policy.encode(["1 2"])
    batches = []
    with torch.no_grad():
        for n in range(200):
            t, mask = forward_process(B, 3, generator("loss", seed, n))
            batches.append(elbo(policy, prompt[[0] * B], x_0.expand(B, 3), mask, t).double().mean())
    loss = torch.stack(batches)
    bound, se = any_order_bound(policy, prompt, x_0), loss.std().item() / math.sqrt(200)
    assert abs(loss.mean().item() - bound) < 4 * se
    assert se < 0.02 * abs(bound)


def test_sft_trains_the_padding_and_rl_stops_at_the_end():
    """A6: an answer of 3, its end and 4 of padding: 8 candidates to be masked, of which RL trains 4."""
    from models import tiny

    policy = tiny.build("tiny-math")
    policy.length = 8
    x_0 = policy.respond(["3 + 4"])
    assert x_0[0, 3:].tolist() == [policy.end_ids[0]] * 5
    masks = torch.stack([forward_process(4, policy.length, generator("canvas", n))[1] for n in range(100)])
    assert masks.any(0).all() and masks.shape[-1] == 8
    assert end_of_text(x_0, policy.end_ids).item() == 4


def test_the_held_out_bound_is_the_mean_of_the_exact_ones():
    """J3: 32 draws a pair; any micro-batch."""
    policy = Pairwise(K=3, L=3, scale=0.5)
    x_0, prompts = torch.tensor([[0, 2, 1], [1, 1, 0]]).repeat(100, 1), policy.encode(["1 2", "3"] * 100)
    exact = sum(any_order_bound(policy, prompts[[i]], x_0[[i]]) for i in range(2)) / (2 * 3)
    for size in (200, 7):
        args = argparse.Namespace(micro_batch=size, seed=0)
        ours = held_out_bound(policy, prompts, x_0, args, World(0, 1, torch.device("cpu")))
        assert ours == pytest.approx(exact, abs=0.03)


@pytest.fixture
def llada(tmp_path):
    return released_standins.llada(
        tmp_path / "model", config=released_standins.LLADA | {"max_sequence_length": 512}
    )


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "a red cube", "completion": "two dogs"},
        {"prompt": "a ball", "completion": "on a table"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_model_is_trained_on_pairs_of_ones_own_and_stored(tmp_path, llada, pairs, capsys):
    """Whatever its length, which the sampler settings of the default task need not fit; no score of a task
    that the pairs are not for."""
    argv = f"--model {llada} --data {pairs} --iterations 2 --batch 2 --out {tmp_path}/run"
    sft.main(argv.split())
    trained, before = (models.load(str(path)).state_dict() for path in (tmp_path / "run/model", llada))
    assert any(not torch.equal(trained[name], before[name]) for name in before)
    assert "bound on log p, held out" in capsys.readouterr().out


def test_what_cannot_be_trained_is_one_sentence(tmp_path, llada, pairs):
    (tmp_path / "numbers.jsonl").write_text('{"prompt": "1 + 1", "completion": 2}')
    for argv, message in (
        (f"--model {llada}", "--model .*: add --data"),
        (f"--data {pairs} --task tiny-geneval", "row 1: no picture"),
        ("--task gsm8k", "only for tiny-math and tiny-geneval"),
        ("--lora-rank 4 --length 8", "--lora-rank, --length: no effect with --model tiny"),
        ("--shard fsdp", "--shard: no effect with --model tiny"),
        ("--vq x/y", "--vq: no effect with --model tiny"),
        ("--reward correct", "--reward: no effect in sft.py"),
        (
            f"--model {llada} --data {tmp_path}/numbers.jsonl",
            "numbers.jsonl:1: prompt and completion must be",
        ),
        ("--model tiny:0", "--model tiny:0: accepted are"),
        ("--path-c 2", "--path-c: no effect on masked diffusion"),
        ("--task tiny-geneval --path mixture --path-c 2", "--path-c: no effect on the mixture path"),
        ("--task tiny-geneval --path metric --export llada", "--export llada: URSA has another layout"),
        (f"--model {llada} --data {pairs} --examples 9", "--examples: no effect with --data"),
    ):
        with pytest.raises(SystemExit, match=message):
            sft.main(["--out", f"{tmp_path}/run", "--iterations", "1", *argv.split()])


def test_pictures_are_encoded_once_and_captions_dropped_for_guidance(tmp_path, monkeypatch):
    """Pairs as a jsonl with PNG files; with every caption dropped, captions do not matter."""
    from PIL import Image

    from eval import tiny_geneval

    monkeypatch.setattr(sft, "CACHE", tmp_path / "cache")
    models.tiny.build("tiny-geneval").save(tmp_path / "base")
    trained = []
    for captions in ("kept", "other"):
        directory = tmp_path / captions
        directory.mkdir()
        lines = []
        for i, row in enumerate(tiny_geneval.base_rows(12, 0)):
            Image.fromarray(row["completion"].permute(1, 2, 0).numpy()).save(directory / f"{i}.png")
            caption = row["prompt"] if captions == "kept" else "a square"
            lines.append(json.dumps({"caption": caption, "image": f"{i}.png"}))
        (directory / "pairs.jsonl").write_text("\n".join(lines))
        argv = f"--model {tmp_path}/base --task tiny-geneval --data {directory}/pairs.jsonl --drop-prompt 1"
        sft.main([*argv.split(), *f"--iterations 2 --batch 4 --out {tmp_path}/run_{captions}".split()])
        trained.append(models.load(str(tmp_path / f"run_{captions}/model")).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(t.values() for t in trained), strict=True))
    assert len(list((tmp_path / "cache").iterdir())) == 2
