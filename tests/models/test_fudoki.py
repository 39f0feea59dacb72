"""FUDOKI against the public MultiModalityCausalLM and its solver."""

import json
import logging
from pathlib import Path

import pytest
import released_standins
import torch
from conftest import shared
from safetensors.torch import load_file
from torch import nn
from toys import Recorded, recorded_noise

import models
import samplers
from common import MetricPath
from models.fudoki import FUDOKI, PATH, Backbone, load_backbone, read_table
from models.janus_vq import PREFIX, JanusVQ
from models.policy import Prompt
from samplers import euler

GOLDEN = Path(__file__).parent.parent / "golden"
L, K = 16, 64
IDS = dict(bos_id=1, begin_id=101, end_id=103, pad_id=104, uncond_id=115)


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "fudoki_tiny.safetensors")


@pytest.fixture(scope="module")
def fudoki(golden):
    backbone = load_backbone(shared("golden/fudoki_tiny"), torch.float32, "cpu")
    return FUDOKI(backbone, tokenizer(), None, codebook=golden["codebook"], length=L, max_text=14, **IDS)


@pytest.fixture(scope="module")
def small():
    """Made from scratch, weights from a seed."""
    from transformers import LlamaConfig

    config = LlamaConfig(vocab_size=120, is_causal=False, **released_standins.SMALL)
    vq = JanusVQ({name.removeprefix(PREFIX): t for name, t in released_standins.janus_vq().items()})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        backbone = Backbone(config, codes=K, code_dim=8, head_dim=24).eval()
        for p in backbone.parameters():
            p.normal_(p.dim() == 1, 0.3)
        table = torch.randn(K, 8)
    return FUDOKI(backbone, tokenizer(), vq, codebook=table, length=L, max_text=14, **IDS)


def tokenizer():
    """Words and the special tokens at the ids of the recorded rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"User:": 50, "Assistant:": 51, "red": 52, "cat": 53, "<bos>": 1, "<pad>": 104}
    words |= {"<begin_of_image>": 101, "<end_of_image>": 103}
    fast = Tokenizer(models.WordLevel(words, unk_token=None))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", bos_token="<bos>")


@pytest.fixture(scope="module")
def rows(golden):
    """The recorded rows as prompts and codes: text moved to the right, padding to the left."""
    prompts, x_t = [], []
    for ids, image in zip(golden["x"], golden["image_token_mask"].bool(), strict=True):
        prompts.append(ids[: int(image.int().argmax())])
        x_t.append(ids[image])
    width = max(map(len, prompts))
    ids = torch.full((2, width), 104)
    mask = torch.zeros(2, width, dtype=torch.bool)
    for i, row in enumerate(prompts):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, True
    return Prompt(ids, mask), torch.stack(x_t)


def image_rows(golden, name):
    return torch.stack([z[m] for z, m in zip(golden[name], golden["image_token_mask"].bool(), strict=True)])


def test_logits_equal_the_public_ones_in_a_batch_of_two(fudoki, golden, rows):
    """The public code is right for one sample only: of a batch the last one keeps its image embeddings."""
    prompt, x_t = rows
    logits = fudoki(prompt, x_t).view(2, L, K)
    torch.testing.assert_close(logits, image_rows(golden, "img_logits"), atol=2e-5, rtol=0)
    public = image_rows(golden, "official_batch2_img_logits")
    assert (logits[0] - public[0]).abs().max() > 1
    torch.testing.assert_close(logits[1], public[1], atol=2e-5, rtol=0)


def test_guidance_equals_the_public_one(fudoki, golden, rows):
    prompt, x_t = rows
    null = fudoki.unconditional(prompt)
    logits = fudoki(null, x_t).view(2, L, K)
    torch.testing.assert_close(logits, image_rows(golden, "uncond_img_logits"), atol=2e-5, rtol=0)
    p = fudoki(prompt, x_t, null=null, cfg=5.0).softmax(-1).view(2, L, K)
    torch.testing.assert_close(p, image_rows(golden, "cfg5_img_probs"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("network", ["recorded", "ours"])
def test_solver_is_reproduced_draw_by_draw(network, golden, rows, request, monkeypatch):
    """The sampler on the recorded noise, with the recorded probabilities of each state and our network's."""
    states, probs, drawn = (golden[f"solver.{name}"] for name in ("x_t", "probs", "x_1"))
    policy = Recorded(probs.log()[:, None]) if network == "recorded" else request.getfixturevalue("fudoki")
    u = (golden[f"solver.{name}"][:, None] for name in ("r_x1", "u_jump", "r_jump"))
    monkeypatch.setattr(samplers, "uniform", recorded_noise(states[:1], K, *u))
    prompt = rows[0][:1]
    null = prompt if network == "recorded" else policy.unconditional(prompt)
    path = MetricPath(golden["codebook"], PATH["alpha"], PATH["c"], PATH["power"])
    public = dict(path=path, rate="instantaneous", keep_trajectory=True)
    out = euler(policy, prompt, [None], steps=8, null=null, cfg=5.0, **public)
    assert [t for _, t in out.trajectory] == [k / 8 for k in range(8)]
    for k in range(8):
        assert torch.equal(out.trajectory[k][0][0], states[k]) and torch.equal(out.x_1[k][0], drawn[k])
    assert torch.equal(out.x_0, golden["solver.final_codes"])
    if network == "ours":
        for x_t, p in zip(states, probs, strict=True):
            ours = policy(prompt, x_t[None], null=null, cfg=5.0).softmax(-1)
            torch.testing.assert_close(ours, p, atol=1e-5, rtol=0)


def test_padding_is_hidden(small, rows):
    prompt, x_t = rows
    logits = small(prompt, x_t)
    other = Prompt(torch.where(prompt.mask, prompt.ids, 7), prompt.mask)
    assert torch.equal(small(other, x_t), logits)
    shown = Prompt(other.ids, torch.ones_like(other.mask))
    assert (small(shown, x_t) - logits).abs().max() > 0.1
    alone = Prompt(prompt.ids[:1, -7:], prompt.mask[:1, -7:])  # the shorter row without any padding
    torch.testing.assert_close(small(alone, x_t[:1]), logits[:L], atol=2e-5, rtol=0)


def test_prompt_is_janus_chat(small):
    prompt = small.encode([" red cat ", "cat"])
    assert prompt.ids.tolist() == [[1, 50, 52, 53, 51, 101], [104, 1, 50, 53, 51, 101]]
    null = small.unconditional(prompt)
    assert null.ids.tolist() == [[1, 115, 115, 115, 115, 101], [104, 1, 115, 115, 115, 101]]
    with pytest.raises(ValueError, match="--max-prompt: a prompt has 14 tokens, at most 12"):
        small.encode(["cat", "red " * 10])


def test_saved_policy_loads_again(small, tmp_path):
    small.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "multi_modality"
    again = models.load(str(tmp_path))
    prompt, x_t = small.encode(["red cat"]), torch.arange(L)[None]
    assert torch.equal(again(again.encode(["red cat"]), x_t), small(prompt, x_t))
    assert torch.equal(again.codebook, small.codebook) and again.path_settings == PATH
    assert torch.equal(again.decode(x_t), small.decode(x_t))
    assert torch.equal(again.respond(again.decode(x_t)), small.respond(small.decode(x_t)))
    generators = [torch.Generator().manual_seed(0)]
    path = MetricPath(again.codebook, 0.9, 3.0, 2)
    assert euler(again, prompt, generators, steps=2, path=path).x_0.shape == (1, L)


def test_released_checkpoint_without_our_file(tmp_path, monkeypatch, caplog):
    """As released: the understanding half is passed over, the table is a pickled nn.Embedding, and nothing is
    said of a config that transformers does not know."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # to caplog
    path = released_standins.fudoki(tmp_path)
    released = models.load(str(path), length=L, max_prompt=9)
    assert caplog.text == ""
    assert (released.bos_id, released.begin_id, released.end_id, released.pad_id) == (60, 62, 63, 61)
    assert (released.uncond_id, released.max_text, released.path_settings) == (100015, 11, PATH)
    stored = load_file(path / "model.safetensors")
    table = stored["gen_vision_model.quantize.embedding.weight"]
    assert torch.equal(released.codebook, table) and torch.equal(released.vq.codebook, table)
    for name, value in released.backbone.state_dict().items():
        assert torch.equal(value, stored[name])
    (path / "image_embedding.pt").unlink()
    with pytest.raises(ValueError, match="image_embedding.pt: no such file"):
        models.load(str(path))


def test_a_table_that_is_none_is_one_sentence(tmp_path):
    """Of no foreign class either: only tensors, and the nn.Embedding of the release, are unpickled."""
    file = tmp_path / "image_embedding.pt"
    for wrong in ({"emb": torch.eye(3)}, {"weight": 3}, [1, 2], torch.ones(3)):
        torch.save(wrong, file)
        with pytest.raises(ValueError, match=f"^{file}: expected a matrix of codes .* 'weight' of a dict"):
            read_table(file)
    torch.save(nn.Linear(2, 2), file)
    with pytest.raises(ValueError, match=f"^{file}: cannot be .* nothing but tensors .UnpicklingError"):
        read_table(file)
    file.write_text("not a torch file")
    with pytest.raises(ValueError, match=f"^{file}: cannot be read as a torch file of nothing but tensors"):
        read_table(file)


def test_gradients_reach_every_part():
    """Built from scratch, as a small world would."""
    from transformers import LlamaConfig

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=120, is_causal=False, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = Backbone(config, codes=9, code_dim=4, head_dim=12)
    policy = FUDOKI(backbone, tokenizer(), None, codebook=torch.eye(9), length=4, **IDS)
    x = torch.tensor([[1, 2, 3, 8]])
    policy(policy.encode(["cat"]), x, target=x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.parameters())
