"""The built-in policies are the classes of the big ones."""

import pytest
import torch

from eval import tiny_geneval, tiny_math
from models import load, tiny
from models.llada import LLaDA
from models.mmada import MMaDA


def test_built_in_policies_are_the_classes_of_the_8b_models():
    text, image = tiny.build("tiny-math"), tiny.build("tiny-geneval")
    assert type(text) is LLaDA and type(image) is MMaDA
    for policy in (text, image):
        assert type(policy.backbone).__name__ == "LlamaForCausalLM" and not policy.backbone.config.is_causal
    assert text.length == tiny_math.LENGTH and image.length == tiny_geneval.SIDE**2
    assert image.vocab_size == 49 * tiny.VARIANTS == len(image.codebook)


def test_text_survives_respond_and_decode():
    policy, rows = tiny.build("tiny-math"), tiny_math.rows("test")[:50]
    solutions = [r["solution"] for r in rows]
    assert policy.decode(policy.respond(solutions)) == solutions


@pytest.mark.parametrize("variants", [1, 2, 8])
def test_pictures_survive_the_codebook_and_each_shade_has_its_code(variants):
    rows = tiny_geneval.base_rows(40, 0)
    policy = tiny.build("tiny-geneval", variants=variants)
    codes = policy.respond([r["completion"] for r in rows])
    pictures = policy.decode(codes)
    assert torch.equal(policy.vq.encode(pictures), codes)
    shown = [tiny_geneval.detect(p) for p in pictures]
    assert shown == [tiny_geneval.detect(r["completion"]) for r in rows]
    assert len(codes.unique()) > 20 * variants**0.5


def test_weights_come_from_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    a, b, c = tiny.build("tiny-math", 0), tiny.build("tiny-math", 0), tiny.build("tiny-math", 1)
    assert torch.rand(1) == expected
    same = [torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True)]
    other = [torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True) if x.dim() > 1]
    assert all(same) and not any(other)


def test_both_survive_save_and_load(tmp_path):
    for task in ("tiny-math", "tiny-geneval"):
        policy = tiny.build(task)
        policy.save(tmp_path / task)
        again = load(str(tmp_path / task))
        assert type(again) is type(policy)
        for name, tensor in policy.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name])


def test_word_that_the_world_does_not_know_is_the_unknown_token():
    policy = tiny.build("tiny-math")
    assert policy.encode(["ann has 3 zebras gets 1 ?"]).ids[0, 3] == policy.tokenizer.unk_token_id


@pytest.mark.parametrize("source", ["tiny:x", "tiny:0", "tiny", "tiny:-1"])
def test_image_tokenizer_of_no_number_of_shades_is_one_sentence(source):
    with pytest.raises(ValueError, match=f"--vq {source}: accepted are tiny:<shades of a patch>"):
        tiny.load_vq(source)


def test_length_that_the_pictures_do_not_have_is_one_sentence(tmp_path):
    tiny.build("tiny-geneval").save(tmp_path)
    with pytest.raises(ValueError, match="--length 9: the pictures of tiny:1 have 16 codes"):
        load(str(tmp_path), length=9)
