"""models/policy.py on a policy whose hidden states and head are plain tables."""

import math

import pytest
import torch
from torch import nn

from models import policy as module
from models.policy import Policy, Prompt

K, D = 5, 4


class Toy(Policy):
    """Row l sees the sum of its prompt and its own token; counts the calls and the rows of the head."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed, self.out = nn.Embedding(K, D, dtype=dtype), nn.Linear(D, K, dtype=dtype)
        self.length, self.vocab_size = 6, K
        self.head_rows, self.hidden_rows = [], []

    def hidden(self, prompt, x_t):
        self.hidden_rows.append(len(x_t))
        return self.embed(x_t) * (1 + (self.embed(prompt.ids) * prompt.mask[..., None]).sum(1, keepdim=True))

    def head(self, h):
        self.head_rows.append(len(h))
        return self.out(h)


@pytest.fixture
def toy():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Toy()


@pytest.fixture
def batch():
    noise = torch.Generator().manual_seed(1)
    ids = torch.randint(K, (3, 4), generator=noise)
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    x_t = torch.randint(K, (3, 6), generator=noise)
    where = torch.rand(3, 6, generator=noise) < 0.5
    return Prompt(ids, mask), x_t, where


def test_where_picks_positions_in_row_major_order(toy, batch):
    prompt, x_t, where = batch
    everywhere = toy(prompt, x_t).view(3, 6, K)
    torch.testing.assert_close(toy(prompt, x_t, where=where), everywhere[where], rtol=0, atol=0)


def test_target_gives_the_log_probability_of_the_target(toy, batch):
    prompt, x_t, where = batch
    x_0 = (x_t + 1) % K
    expected = toy(prompt, x_t).log_softmax(-1).view(3, 6, K).gather(2, x_0[..., None])[..., 0]
    torch.testing.assert_close(toy(prompt, x_t, where=where, target=x_0), expected[where])
    torch.testing.assert_close(toy(prompt, x_t, target=x_0), expected.flatten())


def test_chunks_change_neither_value_nor_gradient(toy, batch, monkeypatch):
    prompt, x_t, where = batch
    results = []
    for chunk in (2048, 3):
        monkeypatch.setattr(module, "CHUNK", chunk)
        toy.zero_grad()
        logp = toy(prompt, x_t, where=where, target=x_t, null=prompt[[2, 2, 2]], cfg=1.5)
        logp.sum().backward()
        z = toy(prompt, x_t, where=where, null=prompt[[2, 2, 2]], cfg=1.5)
        results.append((z, logp, toy.embed.weight.grad.clone(), toy.out.weight.grad.clone()))
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many)


def test_head_sees_the_scored_positions_only(toy, batch, monkeypatch):
    """M8: rows of logits = scored positions, and never more at once than a chunk."""
    prompt, x_t, where = batch
    monkeypatch.setattr(module, "CHUNK", 4)
    toy(prompt, x_t, where=where, target=x_t)
    assert sum(toy.head_rows) == where.sum() and max(toy.head_rows) == 4


def test_no_position_at_all_still_calls_the_head(toy, batch):
    prompt, x_t, _ = batch
    nowhere = torch.zeros_like(x_t, dtype=torch.bool)
    assert toy(prompt, x_t, where=nowhere).shape == (0, K)
    logp = toy(prompt, x_t, where=nowhere, target=x_t)
    logp.sum().backward()
    assert logp.shape == (0,) and toy.head_rows[:2] == [0, 0]
    assert toy.out.weight.grad.abs().sum() == 0


def test_guidance_is_one_plus_w_conditional_minus_w_unconditional():
    """D4: c = [2, 0], u = [1, 0], w = 3 gives 5; w = 0 is the conditional alone."""
    prompt = Prompt(torch.tensor([[1]]), torch.ones(1, 1, dtype=torch.bool))
    null = Prompt(torch.tensor([[0]]), prompt.mask)

    class Two(Policy):
        vocab_size = 2

        def hidden(self, prompt, x_t):
            return (1.0 + prompt.ids)[..., None].expand(-1, x_t.shape[1], 1)

        def head(self, h):
            return torch.cat([h, 0 * h], -1)

    x_t = torch.zeros(1, 1, dtype=torch.long)
    assert Two()(prompt, x_t, null=null, cfg=3.0).tolist() == [[5.0, 0.0]]
    assert Two()(prompt, x_t, null=null, cfg=0.0).tolist() == [[2.0, 0.0]]
    logp = Two()(prompt, x_t, target=x_t, null=null, cfg=3.0)
    assert logp.item() == pytest.approx(5 - math.log(math.exp(5) + 1), abs=1e-6)


def test_both_guidance_rows_go_in_one_batch_and_both_get_gradient(toy, batch):
    """D2: the unconditional branch is part of the policy that is scored."""
    prompt, x_t, where = batch
    null = Prompt(torch.full_like(prompt.ids, 4), prompt.mask)
    x_t = x_t.clamp(max=3)
    prompt = Prompt(prompt.ids.clamp(max=3), prompt.mask)
    toy(prompt, x_t, where=where, target=x_t, null=null, cfg=2.0).sum().backward()
    assert toy.hidden_rows == [6]
    assert toy.embed.weight.grad[4].abs().sum() > 0  # token 4 occurs in the unconditional prompt only


def test_guidance_without_an_unconditional_prompt_is_an_error(toy, batch):
    prompt, x_t, _ = batch
    with pytest.raises(ValueError, match="null"):
        toy(prompt, x_t, cfg=1.0)


def test_log_softmax_of_bfloat16_logits_is_taken_in_float32():
    """E3: 126,464 equal bfloat16 logits give -ln 126464 = -11.7478 within 1e-3."""

    class Flat(Policy):
        def hidden(self, prompt, x_t):
            return torch.zeros(*x_t.shape, 1, dtype=torch.bfloat16)

        def head(self, h):
            return h.expand(-1, 126464)

    prompt = Prompt(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool))
    logp = Flat()(prompt, torch.zeros(1, 2, dtype=torch.long), target=torch.tensor([[0, 126463]]))
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, torch.full((2,), -11.7478), rtol=0, atol=1e-3)


def test_prompt_masking_never_touches_padding(batch):
    prompt, _, _ = batch
    u = torch.linspace(0, 1, 12).view(3, 4)
    half = prompt.masked(0.5, u, 9)
    assert torch.equal(half.ids == 9, (u < 0.5) & prompt.mask)
    assert torch.equal(prompt.masked(1.1, u, 9).ids[~prompt.mask], prompt.ids[~prompt.mask])
    assert torch.equal(half.mask, prompt.mask)


def test_prompt_batches_as_a_tensor_does(batch):
    prompt, _, _ = batch
    twice = prompt.repeat_interleave(2)
    assert len(prompt) == 3 and len(twice) == 6
    assert torch.equal(twice.ids[::2], prompt.ids) and torch.equal(twice[1::2].mask, prompt.mask)
    assert torch.equal(prompt[[2, 0]].ids, prompt.ids[[2, 0]])
