"""URSA against the public URSATransformer3DModel and its rollout."""

import json
from pathlib import Path

import pytest
import released_standins
import torch
from conftest import shared
from safetensors.torch import load_file, save_file
from torch import nn
from toys import Recorded, recorded_noise

import models
import samplers
from common import MetricPath
from models.ibq import IBQ
from models.policy import Prompt
from models.ursa import URSA, Rotary, load_qwen3, positions, qwen3, scheduler_settings
from samplers import euler

GOLDEN = Path(__file__).parent.parent / "golden"
L, K = 24, 64


class Grey(nn.Module):
    """A stand-in image tokenizer: code k is a grey pixel."""

    def __init__(self):
        super().__init__()
        self.source = "tiny:1"
        self.codebook = torch.randn(K, 4, generator=torch.Generator().manual_seed(0))

    def decode(self, codes):
        return (codes * 4).to(torch.uint8)[:, None].expand(-1, 3, -1, -1)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.WordLevel({"<pad>": 0, "<bov>": 1, "a": 2, "red": 3, "cat": 4}, unk_token=None))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>")


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "ursa_tiny.safetensors")


@pytest.fixture(scope="module")
def ursa():
    backbone = load_qwen3(shared("golden/ursa_tiny"), torch.float32, "cpu")
    vq = IBQ.load(shared("golden/ibq_tiny"))
    return URSA(backbone, None, vq, grid=(1, 4, 6), bov_id=290, pad_id=280, text_length=12)


@pytest.fixture
def small():
    """Made from scratch, weights from a seed."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = qwen3(K, vocab_size=5 + K, **sizes, **heads).eval()
    path = {"path": "metric", "alpha": 0.9, "c": 3.0, "shift": 1.0, "power": 1}
    layout = dict(grid=(1, 4, 4), bov_id=1, pad_id=0, text_length=5)
    return URSA(backbone, tokenizer(), Grey(), path_settings=path, **layout)


def prompt_of(ids):
    return Prompt(ids, ids != 280)


def test_logits_equal_the_public_ones(ursa, golden):
    x_t = golden["latents"].flatten(1)
    logits = ursa(prompt_of(golden["txt_ids"]), x_t).view(3, L, K)
    torch.testing.assert_close(logits, golden["logits_latent"], atol=2e-5, rtol=0)
    codes = golden["target_codes"]
    log_p = ursa(prompt_of(golden["txt_ids"]), x_t, target=codes).view(3, L)
    torch.testing.assert_close(log_p, golden["target_logps"], atol=2e-5, rtol=0)


def test_guided_logits_equal_the_public_ones(ursa, golden):
    """guidance_scale s is w = s - 1."""
    x_t = golden["cfg_input_ids"][:3, -L:] - 300
    prompt, null = prompt_of(golden["cfg_input_ids"][:3, :12]), prompt_of(golden["cfg_input_ids"][3:, :12])
    for w, name in ((6.0, "cfg_z_scale7"), (0.0, "cfg_z_after_trunc")):
        logits = ursa(prompt, x_t, null=null, cfg=w).view(3, L, K)
        torch.testing.assert_close(logits, golden[name], atol=2e-4, rtol=0)
    assert torch.equal(null.ids, golden["neg_ids"])


def test_positions_equal_the_public_ones(golden):
    assert torch.equal(positions(12, (1, 4, 6)), golden["rope_pos"])
    assert torch.equal(positions(5, (3, 2, 3))[5:], golden["rope_pos_blocks_2x3x2x3_shift5"][0])
    rotary = Rotary(positions(12, (1, 4, 6)), 32, 1e6)
    cos, sin = rotary(torch.zeros(1), torch.arange(37)[None])
    expected = golden["rope_weight"][0, :, 0]  # [37, 16, 2, 2]
    torch.testing.assert_close(cos[0, :, :16], expected[..., 0, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[0, :, 16:], expected[..., 1, 0], atol=1e-5, rtol=0)


def test_text_padding_is_attended(ursa, golden):
    x_t = golden["latents"].flatten(1)[2:]
    other = golden["txt_ids"][2:].clone()
    other[0, 0] = 5
    change = ursa(prompt_of(other), x_t) - ursa(prompt_of(golden["txt_ids"][2:]), x_t)
    assert change.abs().max() > 0.1


@pytest.mark.parametrize("network", ["recorded", "ours"])
def test_rollout_is_reproduced_draw_by_draw(network, request, monkeypatch):
    """The sampler on the recorded noise, with the recorded logits of each state and with our network's."""
    g = load_file(GOLDEN / "ursa_rollout.safetensors")
    policy = Recorded(g["logits"]) if network == "recorded" else request.getfixturevalue("ursa")
    u = g["r_x1"], g["u_jump"], g["r_jump"]
    monkeypatch.setattr(samplers, "uniform", recorded_noise(g["latents_init"].flatten(1), K, *u))
    prompt, path = prompt_of(g["txt_ids"]), MetricPath(g["codebook"], 0.9, 3.0)
    public = dict(path=path, rate="instantaneous", keep_trajectory=True)
    out = euler(policy, prompt, [None] * 3, steps=10, **public)
    assert [t for _, t in out.trajectory] == pytest.approx(g["t"].tolist(), abs=1e-12)
    for k in range(10):
        assert torch.equal(out.trajectory[k][0], g["x_t"][k]) and torch.equal(out.x_1[k], g["x1"][k])
    assert torch.equal(out.x_0, g["x1"][9])
    if network == "ours":
        for x_t, logits in zip(g["x_t"], g["logits"], strict=True):
            torch.testing.assert_close(policy(prompt, x_t).view(3, L, K), logits, atol=2e-5, rtol=0)
        frames = policy.vq.pixels(out.x_0.view(3, 4, 6))
        torch.testing.assert_close(frames, g["frames"], atol=1e-4, rtol=0)


def test_encode_pads_left_to_a_fixed_length_and_cuts_the_tail(small):
    prompt = small.encode(["red cat", "a red cat a red cat", ""])
    assert prompt.ids.tolist() == [[0, 0, 0, 3, 4], [2, 3, 4, 2, 3], [0] * 5]
    assert prompt.mask.tolist() == [[False] * 3 + [True] * 2, [True] * 5, [False] * 5]
    null = small.unconditional(prompt)
    assert torch.equal(null.ids, torch.zeros(3, 5, dtype=torch.long))


def test_rows_do_not_see_each_other(small):
    prompt = small.encode(["red cat", "a cat"])
    x_t = torch.randint(K, (2, 16), generator=torch.Generator().manual_seed(1))
    both = small(prompt, x_t).view(2, 16, K)
    torch.testing.assert_close(small(prompt[1:], x_t[1:]).view(1, 16, K), both[1:], atol=1e-6, rtol=0)


def test_samples_decode_to_images(small):
    prompt = small.encode(["red cat"])
    path = MetricPath(small.codebook, 0.9, 3.0)
    null = small.unconditional(prompt)
    out = euler(small, prompt, [torch.Generator().manual_seed(0)], steps=2, path=path, cfg=2.0, null=null)
    assert small.decode(out.x_0).shape == (1, 3, 4, 4)


def test_saved_policy_loads_again_in_the_released_layout(small, tmp_path, monkeypatch):
    from models import tiny

    monkeypatch.setattr(tiny, "load_vq", lambda source: Grey())
    small.save(tmp_path)
    assert json.loads((tmp_path / "scheduler/scheduler_config.json").read_text())["alpha"] == 0.9
    prompt = small.encode(["red cat"])
    x_t = torch.arange(16)[None]
    again = models.load(str(tmp_path))
    assert torch.equal(again(again.encode(["red cat"]), x_t), small(prompt, x_t))
    assert again.path_settings == small.path_settings and again.grid == small.grid
    assert torch.equal(again.codebook, small.codebook)
    wider = models.load(str(tmp_path), length=25, max_prompt=7)
    assert wider.grid == (1, 5, 5) and wider.encode(["a"]).ids.shape == (1, 7)
    with pytest.raises(ValueError, match="--length 26"):
        models.load(str(tmp_path), length=26)


def test_released_checkpoint_without_our_file(tmp_path):
    """No policy.json: everything is read from the four released folders."""
    released = models.load(str(released_standins.ursa(tmp_path)), length=25)
    assert released.path_settings == {"path": "metric", "alpha": 0.7, "c": 5.0, "shift": 2.0, "power": 1}
    layout = released.bov_id, released.pad_id, released.text_vocab, released.text_length, released.length
    assert layout == (62, 61, 64, 320, 25)
    table = torch.load(tmp_path / "scheduler/scheduler_model.pth", weights_only=True)["path.emb"]
    assert torch.equal(released.codebook, table) and not torch.equal(released.codebook, released.vq.codebook)
    assert released.vq.stride == 2
    images = released.decode(torch.zeros(1, 25, dtype=torch.long))
    assert images.shape == (1, 3, 10, 10) and released.respond(images).shape == (1, 25)


def test_path_settings_are_never_guessed(tmp_path):
    """An alpha of null is the mixture, as in the public class; without one the file names no path."""
    assert scheduler_settings(tmp_path) == {}
    file = tmp_path / "scheduler_config.json"
    file.write_text('{"shift": 1.5}')
    assert scheduler_settings(tmp_path) == {"shift": 1.5}
    file.write_text('{"alpha": null, "c": null, "shift": 1.5}')
    assert scheduler_settings(tmp_path) == {"path": "mixture", "power": 1, "shift": 1.5}
    file.write_text('{"alpha": 0.7, "c": 5, "shift": null}')
    assert scheduler_settings(tmp_path) == {"path": "metric", "power": 1, "alpha": 0.7, "c": 5}


@pytest.mark.parametrize(
    ("known", "stored"),
    [
        ({"path": "mixture", "shift": 1.5}, {"alpha": None, "shift": 1.5}),
        # --path mixture on a checkpoint of the metric path
        ({"path": "mixture", "alpha": 0.7, "c": 5.0, "shift": 1.5}, {"alpha": None, "c": 5.0, "shift": 1.5}),
        ({"path": "metric", "alpha": 0.7, "c": 5.0, "shift": 1.5}, {"alpha": 0.7, "c": 5.0, "shift": 1.5}),
        ({"shift": 1.5}, {"shift": 1.5}),
        ({}, None),
    ],
)
def test_saved_scheduler_file_says_what_is_known_of_the_path(small, tmp_path, known, stored):
    small.path_settings = known
    small.save(tmp_path)
    file = tmp_path / "scheduler/scheduler_config.json"
    if stored is None:
        assert not file.exists()
    else:
        said = json.loads(file.read_text())
        assert said.pop("_class_name") == "KineticOptimalScheduler" and said == stored
        assert scheduler_settings(file.parent).get("path") == known.get("path")


def test_a_table_that_is_none_is_one_sentence(tmp_path):
    file = released_standins.ursa(tmp_path) / "scheduler/scheduler_model.pth"
    for wrong in ({"emb": torch.eye(64)}, [1, 2], {"path.emb": torch.ones(3)}):
        torch.save(wrong, file)
        with pytest.raises(ValueError, match=f"^{file}: expected a matrix of codes .* 'path.emb' of a dict"):
            models.load(str(tmp_path))
    file.write_text("not a torch file")
    with pytest.raises(ValueError, match=f"^{file}: cannot be read as a torch file of nothing but tensors"):
        models.load(str(tmp_path))


def test_head_dim_is_128_where_the_config_has_none(tmp_path):
    """As released: 2 heads of 128 over a hidden size of 32."""
    sizes = dict(vocab_size=20, num_key_value_heads=1, **released_standins.SMALL)
    save_file(qwen3(8, head_dim=128, **sizes).state_dict(), tmp_path / "model.safetensors")
    config = sizes | {"rope_theta": 1e6, "lm_head_size": 8, "lm_vocab_size": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    backbone = load_qwen3(tmp_path, torch.float32, "cpu")
    attention = backbone.get_decoder().layers[0].self_attn
    assert (backbone.config.head_dim, attention.q_proj.out_features) == (128, 256)


def test_bfloat16_keeps_the_positions_whole(small):
    """bfloat16 cannot hold 257; the table is of integers."""
    table = positions(300, (1, 2, 2))
    assert torch.equal(Rotary(table, 16, 1e4).to(torch.bfloat16).table, table)


def test_a_config_of_another_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="vocab_size"):
        load_qwen3(tmp_path, torch.float32, "cpu")
