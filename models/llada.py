"""LLaDA: text by masked diffusion, on transformers' Llama with every position seeing every position."""

import functools
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common import end_of_text
from models import released, weights
from models.policy import Policy, Prompt

# MMaDA's own: one line break after a header, LLaDA has two; outside {{ }} jinja would drop the last
MMADA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n' }}"
)


class LlamaPolicy(Policy):
    """What LLaDA and MMaDA share: a bidirectional ``LlamaForCausalLM`` (``backbone``) and its tokenizer."""

    def __init__(self, backbone, tokenizer) -> None:
        super().__init__()
        backbone.config.is_causal = False
        # transformers gives this row no gradient, but LLaDA pads with its end of text, which must learn
        backbone.get_input_embeddings().padding_idx = None
        self.backbone, self.tokenizer = backbone, tokenizer

    def trunk(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids, mask [B, S] -> final-norm states [B, S, D]; no position attends to one where mask is False."""
        # get_decoder finds the trunk under a LoRA wrapper too
        return self.backbone.get_decoder()(
            input_ids=ids, attention_mask=None if mask.all() else mask, use_cache=False
        ).last_hidden_state

    def gradient_checkpointing(self) -> None:
        """Recompute each block in the backward pass; transformers' own switch acts in train mode only, and
        scores are taken in eval mode."""
        for block in self.backbone.get_decoder().layers:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def settings(self) -> dict:
        """What policy.json holds: ``kind`` and the constructor's keywords."""
        raise NotImplementedError

    def save(self, path: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """transformers' layout (config, safetensors, tokenizer) and policy.json; ``state`` is the
        backbone's gathered state dict, where its own parameters are sharded."""
        from transformers.utils import logging

        logging.disable_progress_bar()  # of the one shard that is written
        path = Path(path)
        self.backbone.save_pretrained(path, state_dict=state and dict(state))  # it empties what it is given
        self.tokenizer.save_pretrained(path)
        (path / "policy.json").write_text(json.dumps(self.settings(), indent=1))

    def export_llada(self, path: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """The released layout: config, tensor names, tokenizer; ``state`` as above."""
        released.write(path, self.backbone, self.tokenizer, self.prompt_mask_id, state)


class LLaDA(LlamaPolicy):
    """Responses of ``length`` tokens in the tokenizer's ids; K is every row of the head, ``mask_id``
    included.

    backbone: a ``LlamaForCausalLM``. tokenizer: a ``PreTrainedTokenizerFast``; where it has a chat
    template, a prompt is one user message. end_ids: every id that ends a text. max_prompt: tokens of the
    longest prompt allowed, None for what the context leaves beside the response.
    """

    def __init__(
        self,
        backbone,
        tokenizer,
        *,
        mask_id: int,
        end_ids: tuple[int, ...],
        length: int = 256,
        max_prompt: int | None = None,
    ) -> None:
        super().__init__(backbone, tokenizer)
        self.mask_id = self.prompt_mask_id = mask_id
        self.end_ids, self.length, self.max_prompt = tuple(end_ids), length, max_prompt
        self.vocab_size = backbone.config.vocab_size

    def hidden(self, prompt: Prompt, x_t: Tensor) -> Tensor:
        mask = torch.cat([prompt.mask, torch.ones_like(x_t, dtype=torch.bool)], 1)
        return self.trunk(torch.cat([prompt.ids, x_t], 1), mask)[:, prompt.ids.shape[1] :]

    def head(self, h: Tensor) -> Tensor:
        return self.backbone.get_output_embeddings()(h)

    def encode(self, texts: list[str]) -> Prompt:
        """Left-padded prompts; ValueError where one is longer than ``max_prompt``."""
        rows = [self._tokens(text) for text in texts]
        room = self.backbone.config.max_position_embeddings - self.length
        limit = room if self.max_prompt is None else min(self.max_prompt, room)
        longest = max(range(len(rows)), key=lambda i: len(rows[i]))
        if len(rows[longest]) > limit:
            raise ValueError(
                f"--max-prompt: a prompt has {len(rows[longest])} tokens, at most {limit} are accepted "
                f"beside --length {self.length} (it begins {texts[longest][:60]!r})"
            )
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.end_ids[0])
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.long)
            mask[i, width - len(row) :] = True
        return Prompt(ids, mask).to(self.backbone.device)

    def _tokens(self, text: str) -> list[int]:
        if not self.tokenizer.chat_template:
            return self.tokenizer(text)["input_ids"]
        message = [{"role": "user", "content": text}]
        chat = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        # the template writes its own begin
        return self.tokenizer(chat, add_special_tokens=False)["input_ids"]

    def unconditional(self, prompt: Prompt) -> Prompt:
        """LLaDA's empty prompt: every token of it masked."""
        return Prompt(torch.where(prompt.mask, self.mask_id, prompt.ids), prompt.mask)

    def decode(self, x_0: Tensor) -> list[str]:
        """The text before the first end id of each row of x_0 [B, L]."""
        length = end_of_text(x_0, self.end_ids).tolist()  # the end id included: it is a special token
        rows = [row[:n] for row, n in zip(x_0.tolist(), length, strict=True)]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def respond(self, completions: list[str]) -> Tensor:
        """x_0 [B, L]: each text, the end of its turn, end of text as padding; a longer text is cut at L."""
        turn = self.end_ids[-1] if self.tokenizer.chat_template else self.end_ids[0]  # <|eot_id|> in a chat
        x_0 = torch.full((len(completions), self.length), self.end_ids[0])
        for i, text in enumerate(completions):
            tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], turn][: self.length]
            x_0[i, : len(tokens)] = torch.tensor(tokens)
        return x_0.to(self.backbone.device)

    def settings(self) -> dict:
        names = ("mask_id", "end_ids", "length", "max_prompt")
        return {"kind": "llada"} | {name: getattr(self, name) for name in names}

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: str,
        length: int | None = None,
        max_prompt: int | None = None,
    ) -> "LLaDA":
        """A directory that ``save`` wrote, or LLaDA (or MMaDA, for text) as released."""
        backbone, tokenizer = load_llama(directory, dtype, device)
        if (directory / "policy.json").exists():
            settings = weights.read_json(directory / "policy.json")
            del settings["kind"]
        else:
            config = backbone.config.released
            if config["model_type"] == "mmada":
                tokenizer.chat_template = MMADA_CHAT
            ids = tokenizer.get_vocab()
            mask_id = config.get("mask_token_id", ids.get("<|mdm_mask|>"))
            if mask_id is None:
                raise ValueError(
                    f"{directory}: no mask_token_id in config.json, no <|mdm_mask|> in the tokenizer"
                )
            ends = (config["eos_token_id"], ids.get("<|eot_id|>"))
            settings = {"mask_id": mask_id, "end_ids": [i for i in dict.fromkeys(ends) if i is not None]}
        given = {"length": length, "max_prompt": max_prompt}
        return cls(backbone, tokenizer, **settings | {k: v for k, v in given.items() if v is not None})


def load_llama(directory: Path, dtype: torch.dtype, device: str):
    """(LlamaForCausalLM, tokenizer) of a directory in transformers' or the released layout, in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if not (directory / "tokenizer.json").exists():
        raise ValueError(f"{directory}: no tokenizer.json")
    if weights.read_json(directory / "config.json").get("model_type") == "llama":
        config, table = LlamaConfig.from_pretrained(directory), {}
    else:
        config = released.read_config(directory / "config.json")
        table = released.names(config.num_hidden_layers)
    with torch.device("meta"):
        backbone = LlamaForCausalLM(config)
    weights.fill(backbone, directory, dtype, device, lambda name: table.get(name, name))
    backbone.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # its tables are in no checkpoint
    return backbone.eval(), PreTrainedTokenizerFast.from_pretrained(directory)
