"""MMaDA: images by masked diffusion, a Llama whose vocabulary ends in the codes of an image tokenizer."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from models.image import ImagePolicy
from models.llada import load_llama
from models.magvitv2 import MAGVITv2
from models.policy import Prompt

# constructor keyword -> the token's name; MMaDA's own ones took the place of LLaDA's reserved tokens
SPECIAL = {
    "token_mask_id": ("<|mdm_mask|>",),
    "begin_id": ("<|startoftext|>",),
    "end_id": ("<|endoftext|>",),
    "t2i_id": ("<|t2i|>", "<|reserved_token_4|>"),
    "soi_id": ("<|soi|>", "<|reserved_token_0|>"),
    "eoi_id": ("<|eoi|>", "<|reserved_token_1|>"),
    "pad_id": ("[iPAD]", "<|reserved_token_9|>"),
}
RELEASED_VQ = "showlab/magvitv2"


class MMaDA(ImagePolicy):
    """Images of N = ``num_vq_tokens`` codes out of K = ``codebook_size``; x_t holds codes, and K for [M].

    The row is ``[pad..] <|t2i|> begin text end`` (the prompt: max_text + 1 positions) ``<|soi|> image x N
    <|eoi|>``; padding is hidden. Code k is row ``image_offset`` + k of the backbone's vocabulary;
    ``token_mask_id`` and the other ``*_id`` are rows too. max_text: text positions, begin and end included;
    a longer text is cut.

    ``save`` needs the vq's ``source``: a directory, a hub id, or a name that begins with "tiny".
    """

    VQ = MAGVITv2

    def __init__(
        self,
        backbone,
        tokenizer,
        vq,
        *,
        token_mask_id: int,
        begin_id: int,
        end_id: int,
        t2i_id: int,
        soi_id: int,
        eoi_id: int,
        pad_id: int,
        codebook_size: int,
        num_vq_tokens: int,
        image_offset: int,
        max_text: int = 256,
    ) -> None:
        super().__init__(backbone, tokenizer, vq)
        rows = backbone.config.vocab_size
        if image_offset + codebook_size > rows:
            raise ValueError(f"{codebook_size} image codes from row {image_offset} on, but only {rows} rows")
        if getattr(vq, "length", num_vq_tokens) != num_vq_tokens:
            raise ValueError(f"--length {num_vq_tokens}: the pictures of {vq.source} have {vq.length} codes")
        self.token_mask_id = self.prompt_mask_id = token_mask_id
        self.begin_id, self.end_id = begin_id, end_id
        self.t2i_id, self.soi_id, self.eoi_id, self.pad_id = t2i_id, soi_id, eoi_id, pad_id
        self.vocab_size = self.mask_id = codebook_size
        self.length, self.image_offset, self.max_text = num_vq_tokens, image_offset, max_text

    def hidden(self, prompt: Prompt, x_t: Tensor) -> Tensor:
        image = torch.where(x_t == self.mask_id, self.token_mask_id, x_t + self.image_offset)
        image = F.pad(F.pad(image, (1, 0), value=self.soi_id), (0, 1), value=self.eoi_id)
        mask = torch.cat([prompt.mask, torch.ones_like(image, dtype=torch.bool)], 1)
        return self.trunk(torch.cat([prompt.ids, image], 1), mask)[:, -1 - x_t.shape[1] : -1]

    def head(self, h: Tensor) -> Tensor:
        """Of the codes' rows only."""
        codes = slice(self.image_offset, self.image_offset + self.vocab_size)
        return F.linear(h, self.backbone.get_output_embeddings().weight[codes])

    def encode(self, texts: list[str]) -> Prompt:
        """Left-padded to max_text + 1; a longer text keeps its head and the end id."""
        rows = []
        for text in texts:
            tokens = self.tokenizer(text)["input_ids"]
            if tokens[:1] != [self.begin_id]:
                tokens = [self.begin_id, *tokens]
            rows.append([self.t2i_id, *tokens][: self.max_text] + [self.end_id])
        return self.left_padded(rows, self.max_text + 1)

    def settings(self) -> dict:
        if not hasattr(self.vq, "source"):
            raise ValueError(f"{type(self.vq).__name__} has no source: a checkpoint could not find it again")
        ids = {name: getattr(self, name) for name in (*SPECIAL, "image_offset", "max_text")}
        sizes = {"codebook_size": self.vocab_size, "num_vq_tokens": self.length}
        return {"kind": "mmada", "vq": self.vq.source, **sizes, **ids}

    @staticmethod
    def read(directory: Path, dtype: torch.dtype, device: str) -> dict:
        backbone, tokenizer = load_llama(directory, dtype, device)
        return {"backbone": backbone, "tokenizer": tokenizer}

    @staticmethod
    def released_settings(directory: Path, parts: dict) -> dict:
        config, vocab = parts["backbone"].config.released, parts["tokenizer"].get_vocab()
        absent = [name for name in ("codebook_size", "num_vq_tokens") if not config.get(name)]
        if absent:
            raise ValueError(
                f"{directory}/config.json: {', '.join(absent)} missing, so it is no MMaDA for images"
            )
        ids = {
            keyword: next((vocab[name] for name in names if name in vocab), None)
            for keyword, names in SPECIAL.items()
        }
        unknown = [" or ".join(SPECIAL[keyword]) for keyword, i in ids.items() if i is None]
        if unknown:
            raise ValueError(f"{directory}: the tokenizer has no {', no '.join(unknown)}")
        sizes = {name: config[name] for name in ("codebook_size", "num_vq_tokens")}
        return {"vq": RELEASED_VQ, "image_offset": len(parts["tokenizer"]), **sizes, **ids}

    @staticmethod
    def sizes(length: int | None, max_prompt: int | None) -> dict:
        return {"num_vq_tokens": length, "max_text": max_prompt}
