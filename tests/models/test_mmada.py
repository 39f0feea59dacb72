"""MMaDA: prompt layout and logits against the recorded ones, texts and images, checkpoints."""

import json
from pathlib import Path

import pytest
import released_standins
import torch
from conftest import shared
from safetensors.torch import load_file

import models
from models.mmada import MMaDA
from models.policy import Prompt

LAYOUT = json.loads((Path(__file__).parent.parent / "golden/mmada_prompt_layout.json").read_text())
N, K = 16, 64


class Squares:
    """An image tokenizer that is only named."""

    source = "tiny:squares"


@pytest.fixture(autouse=True)
def squares(monkeypatch):
    monkeypatch.setattr("models.mmada.MMaDA.load_vq", lambda source, device: Squares())


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return released_standins.mmada(tmp_path_factory.mktemp("mmada"))


@pytest.fixture
def policy(released):
    return models.load(released, max_prompt=5)


@pytest.fixture
def golden(tmp_path):
    config = json.loads(shared("golden/mmada_tiny/config.json").read_text())
    weights = load_file(shared("golden/mmada_tiny/model.safetensors"))
    path = released_standins.mmada(tmp_path, config=config, weights=weights)
    return models.load(path, max_prompt=12), load_file(shared("golden/mmada_tiny/reference.safetensors"))


class Blanks:
    """The recorded layout's tokenizer: splits at blanks, word i has id base + i."""

    def __init__(self, base):
        self.base = base

    def __call__(self, text):
        return {"input_ids": [self.base + LAYOUT["toy_tokenizer"]["words"].index(w) for w in text.split()]}


def laid_out(case, backbone) -> MMaDA:
    ids = LAYOUT[f"special_ids_{case['ids']}"]
    named = {
        "token_mask_id": "mask",
        "begin_id": "bos",
        "end_id": "eos",
        "t2i_id": "<|t2i|>",
        "soi_id": "<|soi|>",
        "eoi_id": "<|eoi|>",
        "pad_id": "[iPAD]",
    }
    ids = {keyword: next(i for key, i in ids.items() if name in key) for keyword, name in named.items()}
    backbone.config.vocab_size = 126349 + K  # only the layout is looked at
    return MMaDA(
        backbone,
        Blanks(case["word_base"]),
        Squares(),
        codebook_size=K,
        num_vq_tokens=case["num_image_tokens"],
        image_offset=case["len_tokenizer"],
        max_text=case["max_text_len_argument"],
        **ids,
    )


def seen_by_the_trunk(policy, prompt, x_t):
    """(ids, mask) of the rows that the trunk is given."""
    rows = []

    def trunk(ids, mask):
        rows.append((ids, mask))
        return torch.zeros(*ids.shape, 1)

    policy.trunk = trunk
    policy.hidden(prompt, x_t)
    del policy.trunk
    return rows[0]


@pytest.mark.parametrize("case", [c for c in LAYOUT["cases"] if c["task"] == "t2i_gen"])
def test_the_row_is_laid_out_as_recorded(policy, case):
    """Padding, truncation and the unconditional prompt: golden mmada_tiny/prompt_layout.json."""
    laid = laid_out(case, policy.backbone)
    prompt = laid.encode(case["prompts"])
    masked = torch.full((2, laid.length), laid.mask_id)
    for row, name in ((prompt, ""), (laid.unconditional(prompt), "uncond_")):
        ids, mask = seen_by_the_trunk(laid, row, masked)
        assert ids.tolist() == case[f"{name}input_ids"]
        assert mask.int().tolist() == case[f"{name}attention_mask"]


def test_logits_with_hidden_padding_equal_the_recorded_ones(golden):
    policy, ref = golden
    prompt = Prompt(ref["input_ids"][:, :13], ref["attention_mask"][:, :13].bool())
    tokens = ref["input_ids"][:, 14:30]
    x_t = torch.where(tokens == 180, K, tokens - 190)
    assert torch.equal(seen_by_the_trunk(policy, prompt, x_t)[0], ref["input_ids"])
    logits = policy(prompt, x_t).view(2, N, K)
    torch.testing.assert_close(logits, ref["logits_with_bias"][:, 14:30, 190:254], rtol=0, atol=2e-5)


def test_the_unconditional_row_keeps_the_text_length_and_the_image(policy):
    """D1: not cut by the image's length (16; the text's is 6); guidance does not move an empty prompt."""
    prompt = policy.encode(["a red cube", ""])
    null = policy.unconditional(prompt)
    assert null.ids.shape == prompt.ids.shape == (2, 6)
    x_t = torch.arange(2 * N).view(2, N) * 2
    (ids, _), (ids_null, _) = (seen_by_the_trunk(policy, row, x_t) for row in (prompt, null))
    assert torch.equal(ids[:, 6:], ids_null[:, 6:])
    plain = policy(prompt, x_t).view(2, N, K)
    guided = policy(prompt, x_t, null=null, cfg=7.0).view(2, N, K)
    torch.testing.assert_close(guided[1], plain[1], rtol=0, atol=1e-4)
    assert (guided[0] - plain[0]).abs().max() > 1e-2


def test_the_head_is_over_the_codes_only(policy):
    x_t = torch.full((1, N), K)
    prompt = policy.encode(["a red cube"])
    rows = policy.backbone.lm_head(policy.hidden(prompt, x_t)[0])[:, 190:254]
    torch.testing.assert_close(policy(prompt, x_t), rows)
    assert policy.vocab_size == policy.mask_id == K and policy.prompt_mask_id == 180


def test_padding_is_hidden_by_length_not_by_id(policy):
    """A2: the mask does not follow from the padding id, which may end a text as well."""
    policy.pad_id = policy.end_id
    prompt = policy.encode(["a"])
    assert prompt.mask.tolist() == [[False, False, True, True, True, True]]


def test_special_ids_come_from_the_reserved_tokens(policy):
    ids = released_standins.MMADA_IDS
    assert policy.soi_id == ids["<|reserved_token_0|>"] and policy.t2i_id == ids["<|reserved_token_4|>"]
    assert policy.image_offset == 190 and policy.length == N


def test_a_saved_policy_loads_bit_equal_with_its_image_tokenizer(tmp_path, policy):
    policy.save(tmp_path)
    again = models.load(tmp_path)
    assert again.settings() == policy.settings() and again.settings()["vq"] == "tiny:squares"
    prompt, x_t = policy.encode(["a red cube"]), torch.full((1, N), K)
    torch.testing.assert_close(again(prompt, x_t), policy(prompt, x_t), rtol=0, atol=0)


def test_export_gives_the_released_names_and_config_bit_equal(tmp_path, released, policy):
    policy.export_llada(tmp_path)
    there, back = (load_file(path / "model.safetensors") for path in (released, tmp_path))
    assert there.keys() == back.keys() and all(torch.equal(there[name], back[name]) for name in there)
    assert json.loads((tmp_path / "config.json").read_text()) == released_standins.MMADA


def test_text_responses_are_lladas_with_one_line_break_after_a_header(released):
    text = models.load(released, modality="text", length=8)
    assert (text.vocab_size, text.mask_id, text.end_ids) == (264, 180, (161, 189))
    words = text.tokenizer.convert_tokens_to_ids
    chat = text.encode(["a red cube"]).ids[0].tolist()
    assert chat == [
        *words(
            ["<|startoftext|>", "<|start_header_id|>", "user", "<|end_header_id|>", "\n", "a", "red", "cube"]
        ),
        *words(["<|eot_id|>", "<|start_header_id|>", "assistant", "<|end_header_id|>", "\n"]),
    ]


def test_a_checkpoint_without_image_tokens_is_refused(tmp_path):
    config = {k: v for k, v in released_standins.MMADA.items() if k != "num_vq_tokens"}
    with pytest.raises(ValueError, match="num_vq_tokens missing"):
        models.load(released_standins.mmada(tmp_path / "a", config=config))
    with pytest.raises(ValueError, match="128 image codes from row 190 on, but only 264 rows"):
        models.load(
            released_standins.mmada(tmp_path / "c", config=released_standins.MMADA | {"codebook_size": 128})
        )
    ids = {name: i for name, i in released_standins.MMADA_IDS.items() if name != "<|reserved_token_0|>"}
    words = released_standins.tokenizer(ids, 190)
    with pytest.raises(ValueError, match=r"no <\|soi\|> or <\|reserved_token_0\|>"):
        models.load(released_standins.write(tmp_path / "b", released_standins.MMADA, words))
