"""sft.py --path mixture|metric: the base of uniform diffusion."""

import json

import pytest
import torch

import sft
from common import generator, uniform_path
from models import load, tiny


def test_times_are_those_of_the_path_and_spread_over_the_batch():
    """One t in each B-th of the training times, none at 1, where the metric path has no noise left."""
    B = 8
    t = torch.stack([sft.uniform_process(B, 3, generator("t", n), 1.0)[0] for n in range(200)])
    assert t.min() >= 0 and t.max() < 1
    u = t.double() / 0.999  # sigma = 1 - 0.999 u
    assert torch.equal((u * B).floor().sort(-1).values, torch.arange(8.0).double().expand(200, B))
    shifted = sft.uniform_process(B, 3, generator("t", 0), 3.0)[0]
    torch.testing.assert_close(shifted, t[0] / (t[0] + 3 * (1 - t[0])))


@pytest.mark.parametrize("kind", ["mixture", "metric"])
def test_loss_is_the_cross_entropy_of_every_token_of_x_1(kind):
    """Noise or not, no time input: the public training loss of URSA."""
    policy = tiny.build("tiny-geneval", path=kind)
    path, _ = uniform_path(policy)
    prompt, K, L = policy.encode(["a red square", "a square"]), policy.vocab_size, policy.length
    x_1 = torch.randint(K, (2, L), generator=generator("x"))
    t, u = sft.uniform_process(2, L, generator("noise"), 1.0)
    logits = policy(prompt, path.corrupt(x_1, t, u)).view(2, L, K)
    expected = -torch.nn.functional.cross_entropy(logits.mT, x_1, reduction="none").sum(-1)
    torch.testing.assert_close(sft.uniform_log_prob(policy, path, prompt, x_1, u, t), expected)


def test_base_is_stored_with_the_path_it_was_trained_on(tmp_path):
    few = "--task tiny-geneval --iterations 2 --examples 40 --batch 4 --eval-prompts 2".split()
    sft.main([*few, "--path", "metric", "--path-alpha", "0.7", "--out", str(tmp_path / "run")])
    policy = load(str(tmp_path / "run/model"))
    assert policy.path_settings == tiny.PATHS["metric"] | {"alpha": 0.7}
    path, shift = uniform_path(policy)
    assert (path.alpha, path.c, path.power, shift) == (0.7, 3.0, 1, 1.0)


def test_path_of_another_kind_of_model_is_refused():
    for built, asked in (("mask", "metric"), ("metric", "mask")):
        args = sft.flags(["--task", "tiny-geneval", "--path", asked])
        with pytest.raises(ValueError, match=f"--path {asked}"):
            sft.objective(args, tiny.build("tiny-geneval", path=built))


def test_a_stored_uniform_model_is_trained_on_pictures_of_ones_own(tmp_path, monkeypatch):
    """URSA is stored in its released layout, so this is the command for the released checkpoint too."""
    from PIL import Image

    from eval import tiny_geneval

    monkeypatch.setattr(sft, "CACHE", tmp_path / "cache")
    tiny.build("tiny-geneval", path="metric").save(tmp_path / "base")
    lines = []
    for i, row in enumerate(tiny_geneval.base_rows(6, 0)):
        Image.fromarray(row["completion"].permute(1, 2, 0).numpy()).save(tmp_path / f"{i}.png")
        lines.append(json.dumps({"caption": row["prompt"] or "a square", "image": f"{i}.png"}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    argv = f"--model {tmp_path}/base --task tiny-geneval --data {tmp_path}/pairs.jsonl --path metric"
    sft.main([*argv.split(), *f"--iterations 2 --batch 4 --out {tmp_path}/run".split()])
    before, after = (load(str(tmp_path / name)).state_dict() for name in ("base", "run/model"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
