"""LLaDA: logits against the recorded ones, padding, texts, checkpoints in both layouts."""

import copy
import json

import pytest
import released_standins
import torch
from conftest import shared
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import models
from models.llada import LLaDA
from models.policy import Prompt


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """(policy with the recorded weights, recorded tensors)."""
    config = json.loads(shared("golden/llada_tiny/config.json").read_text())
    weights = load_file(shared("golden/llada_tiny/model.safetensors"))
    path = released_standins.llada(tmp_path_factory.mktemp("golden"), config=config, weights=weights)
    return models.load(path), load_file(shared("golden/llada_tiny/reference.safetensors"))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return released_standins.llada(tmp_path_factory.mktemp("llada"))


@pytest.fixture
def policy(released):
    return models.load(released, length=8)


@pytest.fixture
def batch(policy):
    """Prompts of unlike length and a half-masked response."""
    x_t = torch.randint(240, (2, 8), generator=torch.Generator().manual_seed(0))
    x_t[:, ::2] = policy.mask_id
    return policy.encode(["a red cube", "two small dogs on a table"]), x_t


def same_weights(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# logits


def test_plain_logits_equal_the_recorded_ones(golden):
    policy, ref = golden
    ids = ref["input_ids"]
    prompt = Prompt(ids[:, :10], torch.ones(3, 10, dtype=torch.bool))
    logits = policy(prompt, ids[:, 10:]).view(3, 14, -1)
    torch.testing.assert_close(logits, ref["logits"][:, 10:], rtol=0, atol=2e-5)


def test_padding_is_hidden_as_a_key_only(golden):
    policy, ref = golden
    ids = ref["input_ids"]
    prompt = Prompt(ids[:, :10], ref["attention_mask"][:, :10].bool())
    logits = policy(prompt, ids[:, 10:]).view(3, 14, -1)
    torch.testing.assert_close(logits, ref["logits_bias_keyonly_bool"][:, 10:], rtol=0, atol=2e-5)


def test_cross_entropy_and_gradients_equal_the_recorded_ones(golden):
    policy, ref = golden
    policy.zero_grad()
    nothing = Prompt(ref["input_ids"][:, :0], torch.ones(3, 0, dtype=torch.bool))
    where = ref["mask_positions"].bool()
    targets = ref["ce_targets"]
    if targets.dim() == 1:
        targets = torch.zeros_like(ref["input_ids"]).masked_scatter(where, targets)
    loss = -policy(nothing, ref["input_ids"], where=where, target=targets).mean()
    loss.backward()
    torch.testing.assert_close(loss, ref["ce_loss"].view(()), rtol=0, atol=1e-5)
    trunk = policy.backbone.model
    ours = {
        "wte": trunk.embed_tokens.weight.grad[[0, 1, 2, 255]],
        "q_proj": trunk.layers[0].self_attn.q_proj.weight.grad,
        "ff_norm": trunk.layers[1].post_attention_layernorm.weight.grad,
        "ln_f": trunk.norm.weight.grad,
    }
    for name, grad in ours.items():
        (recorded,) = (t for key, t in ref.items() if key.startswith("grad_") and name in key)
        torch.testing.assert_close(grad, recorded, rtol=0, atol=2e-6)


def test_a_padded_row_gives_what_it_gives_alone(policy):
    """A1: with padding hidden the row agrees within 1e-5, with padding visible it differs by over 1e-3."""
    x_t = torch.full((2, 8), policy.mask_id)
    both = policy.encode(["a red cube on a table", "dogs"])
    assert both.mask.logical_not().any()
    alone = Prompt(both.ids[1:, both.mask[1]], torch.ones(1, int(both.mask[1].sum()), dtype=torch.bool))
    hidden = policy(both, x_t).view(2, 8, -1)[1]
    torch.testing.assert_close(hidden, policy(alone, x_t[1:]), rtol=0, atol=1e-5)
    visible = policy(Prompt(both.ids, torch.ones_like(both.mask)), x_t).view(2, 8, -1)[1]
    assert (visible - hidden).abs().max() > 1e-3


def test_a_wholly_padded_prompt_gives_finite_logits_and_gradients(policy):
    """A4: no row of attention is without a key."""
    prompt = policy.encode(["a red cube", "dogs"])
    prompt = Prompt(prompt.ids, prompt.mask & torch.tensor([[True], [False]]))
    logp = policy(prompt, torch.full((2, 8), policy.mask_id), target=torch.zeros(2, 8, dtype=torch.long))
    logp.sum().backward()
    assert logp.isfinite().all()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


def test_every_position_sees_what_follows_it(policy, batch):
    prompt, x_t = batch
    changed = x_t.clone()
    changed[:, -1] = 3
    before, after = (policy(prompt, x).view(2, 8, -1)[:, 0] for x in (x_t, changed))
    assert (before - after).abs().max() > 1e-4


def test_bfloat16_scores_in_float32(released, batch):
    prompt, x_t = batch
    half = models.load(released, length=8, dtype=torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())
    logp = half(prompt, x_t, target=x_t)
    assert logp.dtype == torch.float32
    logits = half(prompt, x_t)
    torch.testing.assert_close(logp, logits.log_softmax(-1).gather(1, x_t.view(-1, 1))[:, 0])


def test_the_end_of_text_row_learns_though_it_is_the_padding_id():
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=253,
    )
    words = released_standins.tokenizer(released_standins.LLADA_IDS, 256)
    policy = LLaDA(LlamaForCausalLM(config), words, mask_id=255, end_ids=(253,), length=4)
    x_t = torch.full((1, 4), 253)
    policy(policy.encode(["a"]), x_t, target=x_t).sum().backward()
    assert policy.backbone.model.embed_tokens.weight.grad[253].abs().sum() > 0


# memory


def test_gradient_checkpointing_keeps_gradients_and_recomputes_each_block(policy, batch):
    """M8: gradients equal within 1e-6, in eval mode, where scores are taken."""
    prompt, x_t = batch
    calls, grads = [], []
    for block in policy.backbone.model.layers:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(2):
        policy.zero_grad()
        policy(prompt, x_t, target=x_t).sum().backward()
        grads.append([p.grad.clone() for p in policy.parameters()])
        policy.gradient_checkpointing()
    assert len(calls) == 2 + 4  # two blocks: once, then once more in the backward pass
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_lora_wraps_the_seven_projections_of_the_backbone(policy, batch):
    peft = pytest.importorskip("peft")
    prompt, x_t = batch
    base = policy(prompt, x_t)
    seven = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    policy.backbone = peft.get_peft_model(policy.backbone, peft.LoraConfig(r=2, target_modules=seven))
    policy.eval()
    torch.testing.assert_close(policy(prompt, x_t), base, rtol=0, atol=0)
    up = [p for name, p in policy.named_parameters() if "lora_B" in name]
    assert len(up) == 2 * 7
    for p in up:
        torch.nn.init.constant_(p, 0.1)
    assert (policy(prompt, x_t) - base).abs().max() > 1e-3
    with policy.backbone.disable_adapter():
        torch.testing.assert_close(policy(prompt, x_t), base, rtol=0, atol=0)


# texts


def test_prompts_are_one_user_message_left_padded(policy):
    prompt = policy.encode(["a red cube", "dogs"])
    ids = released_standins.LLADA_IDS
    words = policy.tokenizer.convert_tokens_to_ids
    head = [ids["<|startoftext|>"], ids["<|start_header_id|>"], words("user"), ids["<|end_header_id|>"]]
    line = words("\n")
    tail = [ids["<|start_header_id|>"], words("assistant"), ids["<|end_header_id|>"], line, line]
    expected = [*head, line, line, *words(["a", "red", "cube"]), ids["<|eot_id|>"], *tail]
    assert prompt.ids[0].tolist() == expected
    assert prompt.mask.sum(1).tolist() == [len(expected), len(expected) - 2]
    assert prompt.mask[1].tolist() == [False, False] + [True] * (len(expected) - 2)


def test_prompts_are_plain_where_there_is_no_chat_template(policy):
    policy.tokenizer.chat_template = None
    ids = policy.tokenizer.convert_tokens_to_ids(["a", "red", "cube"])
    assert policy.encode(["a red cube"]).ids.tolist() == [ids]


def test_a_prompt_over_the_limit_is_an_error_that_names_the_flag(released):
    with pytest.raises(ValueError, match=r"--max-prompt: a prompt has 16 tokens, at most 14 "):
        models.load(released, length=8, max_prompt=14).encode(["a", "a red cube on"])
    with pytest.raises(ValueError, match="--max-prompt.*at most 2 "):
        models.load(released, length=126).encode(["a"])  # the context has 128 positions


def test_the_unconditional_prompt_is_all_masks(policy):
    prompt = policy.encode(["a red cube", "dogs"])
    null = policy.unconditional(prompt)
    assert torch.equal(null.mask, prompt.mask)
    assert torch.equal(null.ids == policy.mask_id, prompt.mask)


def test_text_is_cut_at_the_first_of_either_end(policy):
    a, red = policy.tokenizer.convert_tokens_to_ids(["a", "red"])
    x_0 = torch.tensor([[a, 254, red, 253], [a, red, 253, 254], [a, red, a, a], [253, a, a, a]])
    assert policy.decode(x_0) == ["a", "a red", "a red a a", ""]


def test_a_response_ends_its_turn_and_is_padded_with_end_of_text(policy):
    x_0 = policy.respond(["a red cube", "a " * 9])
    a, red, cube = policy.tokenizer.convert_tokens_to_ids(["a", "red", "cube"])
    assert x_0.tolist() == [[a, red, cube, 254, 253, 253, 253, 253], [a] * 8]
    assert policy.decode(x_0[:1]) == ["a red cube"]


def test_real_ids_give_both_ends_and_the_mask(tmp_path):
    """B3: 126081 and 126348 both end a text of LLaDA-8B-Instruct."""
    ids = {"<|startoftext|>": 126080, "<|endoftext|>": 126081, "<|mdm_mask|>": 126336, "<|eot_id|>": 126348}
    ids |= {"<|start_header_id|>": 126346, "<|end_header_id|>": 126347}
    config = released_standins.LLADA | {
        "d_model": 2,
        "n_heads": 1,
        "n_kv_heads": 1,
        "max_sequence_length": 512,
    }
    config |= {
        "vocab_size": 126464,
        "embedding_size": 126464,
        "eos_token_id": 126081,
        "mask_token_id": 126336,
    }
    words = released_standins.tokenizer(ids, 40)
    policy = models.load(released_standins.write(tmp_path, config, words))
    assert policy.end_ids == (126081, 126348)
    assert policy.mask_id == 126336 and policy.vocab_size == 126464
    assert policy.encode(["a"]).ids[0, 0] == 126080


# checkpoints


def test_sharded_and_single_files_load_alike(tmp_path, released):
    shards = released_standins.llada(tmp_path, shards=3)
    assert len(list(shards.glob("*.safetensors"))) == 3
    assert same_weights(models.load(shards), models.load(released))


def test_a_saved_policy_loads_bit_equal(tmp_path, policy, batch):
    policy.save(tmp_path)
    again = models.load(tmp_path)
    assert same_weights(again, policy) and again.settings() == policy.settings()
    assert not again.training
    torch.testing.assert_close(again(*batch), policy(*batch), rtol=0, atol=0)
    assert torch.equal(again.encode(["a red cube"]).ids, policy.encode(["a red cube"]).ids)


@pytest.mark.parametrize("through_save", [False, True])
def test_export_gives_the_released_names_and_config_bit_equal(tmp_path, released, through_save):
    policy = models.load(released)
    if through_save:
        policy.save(tmp_path / "ours")
        policy = models.load(tmp_path / "ours")
    policy.export_llada(tmp_path / "back")
    there, back = (load_file(path / "model.safetensors") for path in (released, tmp_path / "back"))
    assert there.keys() == back.keys() and all(torch.equal(there[name], back[name]) for name in there)
    assert json.loads((tmp_path / "back/config.json").read_text()) == released_standins.LLADA
    assert same_weights(models.load(tmp_path / "back"), policy)


def test_a_model_of_our_own_exports_the_whole_released_config(tmp_path, golden):
    policy, _ = golden
    config = policy.backbone.config
    kept, config.released = config.released, None
    policy.export_llada(tmp_path)
    config.released = kept
    written = json.loads((tmp_path / "config.json").read_text())
    classes = written.pop("auto_map")
    assert written == {name: value for name, value in kept.items() if name != "transformers_version"}
    assert classes["AutoModel"] == "GSAI-ML/LLaDA-8B-Instruct--modeling_llada.LLaDAModelLM"


def test_missing_and_unexpected_tensors_are_named(tmp_path):
    weights = released_standins.tensors(released_standins.LLADA)
    weights["model.transformer.extra.weight"] = weights.pop("model.transformer.blocks.1.ff_norm.weight")
    path = released_standins.llada(tmp_path, weights=weights)
    with pytest.raises(ValueError, match=r"layers\.1\.post_attention_layernorm\.weight.*extra\.weight"):
        models.load(path)


def test_of_many_missing_tensors_the_first_are_named_and_all_counted(tmp_path):
    kept = released_standins.tensors(released_standins.LLADA)
    path = released_standins.llada(
        tmp_path, weights={"model.transformer.wte.weight": kept["model.transformer.wte.weight"]}
    )
    with pytest.raises(
        ValueError, match=r"missing tensors ([\w.]+, ){3}\.\.\. \(\d\d\), unexpected tensors none$"
    ):
        models.load(path)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    path = released_standins.llada(tmp_path)
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"model.transformer.ln_f.weight": torch.ones(3)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"ln_f\.weight is \(3,\), the config asks \(32,\)"):
        models.load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"activation_type": "swiglu"}, "activation_type is 'swiglu', only 'silu'"),
        ({"weight_tying": True}, "weight_tying is True, only False"),
        ({"d_model": None}, "d_model missing"),
    ],
)
def test_a_config_of_another_network_is_refused(tmp_path, change, message):
    path = released_standins.llada(tmp_path, config=released_standins.LLADA | change, weights={})
    with pytest.raises(ValueError, match=message):
        models.load(path)


def test_save_takes_gathered_weights_and_leaves_them_be(tmp_path, policy):
    state = {name: t + 1 for name, t in policy.backbone.state_dict().items()}
    names = set(state)
    policy.save(tmp_path / "ours", state=state)
    policy.export_llada(tmp_path / "back", state=state)
    assert set(state) == names
    for path in ("ours", "back"):
        saved = models.load(tmp_path / path).backbone.state_dict()
        assert all(torch.equal(saved[name], state[name]) for name in names)


def test_a_copy_of_a_checkpointed_policy_computes_with_its_own_weights(policy, batch):
    policy.gradient_checkpointing()
    reference = copy.deepcopy(policy)
    before = policy(*batch)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(policy(*batch), before, rtol=0, atol=0)
    assert (reference(*batch) - before).abs().max() > 1e-2
