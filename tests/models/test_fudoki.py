"""FUDOKI against the public MultiModalityCausalLM, its VQ and its solver."""

import json
import shutil

import pytest
import torch
from conftest import shared
from safetensors.torch import load_file
from torch import nn

from common import MetricPath
from models.fudoki import FUDOKI, PATH, Backbone, load_backbone, read_table
from models.janus_vq import JanusVQ
from models.policy import Prompt
from samplers import draw, euler, euler_times

L, K = 16, 64
IDS = dict(bos_id=1, begin_id=101, end_id=103, pad_id=104, uncond_id=115)


@pytest.fixture(scope="module")
def golden():
    return load_file(shared("golden/fudoki_tiny/reference.safetensors"))


@pytest.fixture(scope="module")
def vq():
    state = load_file(shared("golden/fudoki_tiny/gen_vision_model.safetensors"))
    return JanusVQ({name.removeprefix("gen_vision_model."): value for name, value in state.items()})


@pytest.fixture(scope="module")
def fudoki(vq):
    backbone = load_backbone(shared("golden/fudoki_tiny"), torch.float32, "cpu")
    return FUDOKI(backbone, tokenizer(), vq, codebook=vq.codebook, length=L, max_text=14, **IDS)


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


def test_solver_is_reproduced_draw_by_draw(fudoki, golden, rows):
    path, times = MetricPath(fudoki.codebook, PATH["alpha"], PATH["c"], PATH["power"]), euler_times(8)
    prompt = rows[0][:1]
    null, x_t = fudoki.unconditional(prompt), golden["solver.x_t"][:1]
    for k in range(8):
        assert torch.equal(x_t[0], golden["solver.x_t"][k])
        with torch.no_grad():
            logits = fudoki(prompt, x_t, null=null, cfg=5.0)
        torch.testing.assert_close(logits.softmax(-1), golden["solver.probs"][k], atol=1e-5, rtol=0)
        x_1 = draw(logits, golden["solver.r_x1"][k])[None]
        assert torch.equal(x_1[0], golden["solver.x_1"][k])
        if k < 7:
            u = torch.stack([golden["solver.u_jump"][k], golden["solver.r_jump"][k].clamp(min=0)])[:, None]
            x_t = path.jump(x_t, x_1, times[k], times[k + 1], u, integrated=False)
    assert torch.equal(x_1, golden["solver.final_codes"])


def test_image_tokenizer_equals_the_public_one(vq, golden):
    torch.testing.assert_close(vq.pixels(golden["vq.codes"]), golden["vq.decoded"], atol=2e-5, rtol=0)
    codes = vq.quantize(golden["vq.image"])
    assert torch.equal(codes, golden["vq.encoded_indices"].flatten(1))
    images = vq.decode(golden["vq.codes"])
    assert images.dtype == torch.uint8 and images.shape == (2, 3, 8, 8)


def test_padding_is_hidden(fudoki, rows):
    prompt, x_t = rows
    other = Prompt(torch.where(prompt.mask, prompt.ids, 7), prompt.mask)
    assert torch.equal(fudoki(other, x_t), fudoki(prompt, x_t))
    alone = Prompt(prompt.ids[:1, -7:], prompt.mask[:1, -7:])  # the shorter row without any padding
    torch.testing.assert_close(fudoki(alone, x_t[:1]), fudoki(prompt, x_t)[:L], atol=2e-5, rtol=0)


def test_prompt_is_janus_chat(fudoki):
    prompt = fudoki.encode([" red cat ", "cat"])
    assert prompt.ids.tolist() == [[1, 50, 52, 53, 51, 101], [104, 1, 50, 53, 51, 101]]
    null = fudoki.unconditional(prompt)
    assert null.ids.tolist() == [[1, 115, 115, 115, 115, 101], [104, 1, 115, 115, 115, 101]]
    with pytest.raises(ValueError, match="--max-prompt: a prompt has 14 tokens, at most 12"):
        fudoki.encode(["cat", "red " * 10])


def test_saved_policy_loads_again(fudoki, tmp_path):
    import models

    fudoki.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "multi_modality"
    again = models.load(str(tmp_path))
    prompt, x_t = fudoki.encode(["red cat"]), torch.arange(L)[None]
    assert torch.equal(again(again.encode(["red cat"]), x_t), fudoki(prompt, x_t))
    assert torch.equal(again.codebook, fudoki.codebook) and again.path_settings == PATH
    assert torch.equal(again.decode(x_t), fudoki.decode(x_t))
    assert torch.equal(again.respond(again.decode(x_t)), fudoki.respond(fudoki.decode(x_t)))
    generators = [torch.Generator().manual_seed(0)]
    path = MetricPath(again.codebook, 0.9, 3.0, 2)
    assert euler(again, prompt, generators, steps=2, path=path).x_0.shape == (1, L)


def test_released_checkpoint_without_our_file(fudoki, tmp_path):
    """As released: the understanding half is passed over, the table is a pickled nn.Embedding."""
    from safetensors.torch import save_file

    import models

    state = load_file(shared("golden/fudoki_tiny/model.safetensors"))
    state |= load_file(shared("golden/fudoki_tiny/gen_vision_model.safetensors"))
    state |= {"vision_model.x": torch.zeros(1), "aligner.x": torch.zeros(1)}
    state |= {"gen_vision_model.quantize.codebook_used": torch.zeros(8)}
    save_file(state, tmp_path / "model.safetensors")
    tokenizer().save_pretrained(tmp_path)
    shutil.copy(shared("golden/fudoki_tiny/config.json"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "multi_modality"}
    (tmp_path / "config.json").chmod(0o644)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="image_embedding.pt"):
        models.load(str(tmp_path))
    torch.save(nn.Embedding.from_pretrained(fudoki.codebook), tmp_path / "image_embedding.pt")
    released = models.load(str(tmp_path), length=L, max_prompt=9)
    assert (released.bos_id, released.begin_id, released.end_id, released.pad_id) == (1, 101, 103, 104)
    assert (released.uncond_id, released.max_text, released.path_settings) == (100015, 11, PATH)
    prompt, x_t = fudoki.encode(["cat"]), torch.arange(L)[None]
    assert torch.equal(released(prompt, x_t), fudoki(prompt, x_t))
    assert torch.equal(released.codebook, fudoki.codebook)


def test_table_unpickles_no_foreign_code(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "image_embedding.pt")
    with pytest.raises(Exception, match="weights_only|Unsupported"):
        read_table(tmp_path / "image_embedding.pt")


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
