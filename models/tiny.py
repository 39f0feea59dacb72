"""The built-in policies: the classes of the 8B models with small configurations, for the two worlds of
eval/tiny_*.py."""

import torch
from torch import Tensor, nn

from models.policy import Policy

SIZE = dict(
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    initializer_range=0.08,  # transformers' 0.02 is for widths of thousands
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # rows are 50 tokens, not thousands
)
TEXT_SPECIAL = ("<end>", "<mask>", "<unk>")
IMAGE_SPECIAL = ("<pad>", "<mask>", "<begin>", "<end>", "<t2i>", "<soi>", "<eoi>", "<unk>")
VARIANTS = 1  # near-equal shades of each patch: codebook size / 49
PATHS = {  # what a uniform-diffusion base says of its path
    "mixture": {"path": "mixture", "shift": 1.0},
    "metric": {"path": "metric", "alpha": 0.9, "c": 3.0, "power": 1, "shift": 1.0},
}


class Patches(nn.Module):
    """The image tokenizer of tiny-geneval: code c is patch c // variants of the world, each variant in a
    slightly other shade. ``codebook`` [K, 12]: the mean colours of the quarters of each patch, centred."""

    def __init__(self, variants: int = VARIANTS):
        super().__init__()
        from eval.tiny_geneval import PATCH, SIDE, patches

        self.side, self.patch, self.source = SIDE, PATCH, f"tiny:{variants}"
        self.length = SIDE**2
        drawn = torch.from_numpy(patches()).float().repeat_interleave(variants, 0)  # [K, 16, 16, 3]
        g = torch.Generator().manual_seed(variants)
        shade = torch.rand(len(drawn), 1, 1, 3, generator=g) * 16 - 8
        drawn = (drawn + shade).round().clamp(0, 255)
        quarters = drawn.unflatten(1, (2, -1)).unflatten(3, (2, -1)).mean((2, 4)).flatten(1)
        self.register_buffer("drawn", drawn, persistent=False)
        self.register_buffer("codebook", quarters / 255 - 0.5, persistent=False)

    def encode(self, images: Tensor) -> Tensor:
        """uint8 images [B, 3, 64, 64] -> codes [B, 16]: the nearest patch and shade of each cell."""
        from eval.tiny_geneval import cells

        return torch.cat(
            [torch.cdist(cells(i[None]), self.drawn.flatten(1)[None]).argmin(-1) for i in images]
        )

    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, 16] -> uint8 images [B, 3, 64, 64]."""
        cells = self.drawn[codes].to(torch.uint8).view(-1, self.side, self.side, self.patch, self.patch, 3)
        return cells.permute(0, 5, 1, 3, 2, 4).reshape(len(cells), 3, self.side * self.patch, -1)


def load_vq(source: str) -> Patches:
    """``tiny:<variants>``; ValueError for anything else."""
    variants = source.removeprefix("tiny:")
    if not variants.isdecimal() or int(variants) < 1:
        raise ValueError(f"--vq {source}: accepted are tiny:<shades of a patch>, a hub id, a directory")
    return Patches(int(variants))


def tokenizer(words: tuple[str, ...], special: tuple[str, ...]):
    """A word-level tokenizer over blank-separated words; ids in the order special, words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate((*special, *words))}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token=special[0],
        eos_token="<end>",
        mask_token="<mask>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def llama(vocab_size: int, seed: int):
    """transformers' Llama at the size of SIZE, weights from ``seed``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=128,
        is_causal=False,
        tie_word_embeddings=False,
        **SIZE,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # transformers initialises from the global generator; its state is restored
        return LlamaForCausalLM(config).eval()


def ursa(seed: int, variants: int, path: str) -> Policy:
    """URSA on Qwen3 at the size of SIZE, for tiny-geneval by uniform diffusion along ``path``."""
    from eval.tiny_geneval import WORDS
    from models.ursa import URSA, qwen3

    text, vq = tokenizer(WORDS, IMAGE_SPECIAL), Patches(variants)
    pad_id, bov_id = text.convert_tokens_to_ids(["<pad>", "<soi>"])
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # as in llama
        # three axes share the frequencies, and each must tell neighbours of a 4 x 4 grid apart
        rope = {"rope_type": "default", "rope_theta": 10.0}
        sizes = SIZE | dict(head_dim=32, vocab_size=len(text) + len(vq.codebook), rope_parameters=rope)
        backbone = qwen3(len(vq.codebook), **sizes).eval()
    layout = dict(grid=(1, vq.side, vq.side), bov_id=bov_id, pad_id=pad_id, text_length=12)
    return URSA(backbone, text, vq, path_settings=PATHS[path], **layout)


def build(task: str, seed: int = 0, variants: int = VARIANTS, path: str = "mask") -> Policy:
    """An untrained policy for a built-in world; ``path``: mask, or for tiny-geneval mixture or metric."""
    if path != "mask":
        if task != "tiny-geneval" or path not in PATHS:
            raise ValueError(f"--path {path}: only for --task tiny-geneval, and one of {', '.join(PATHS)}")
        return ursa(seed, variants, path)
    if task == "tiny-math":
        from eval.tiny_math import LENGTH, WORDS
        from models.llada import LLaDA

        text = tokenizer(WORDS, TEXT_SPECIAL)
        end_id, mask_id = text.convert_tokens_to_ids(["<end>", "<mask>"])
        return LLaDA(llama(len(text), seed), text, mask_id=mask_id, end_ids=(end_id,), length=LENGTH)
    if task == "tiny-geneval":
        from eval.tiny_geneval import WORDS
        from models.mmada import MMaDA

        text, vq = tokenizer(WORDS, IMAGE_SPECIAL), Patches(variants)
        ids = dict(zip(IMAGE_SPECIAL, text.convert_tokens_to_ids(list(IMAGE_SPECIAL)), strict=True))
        return MMaDA(
            llama(len(text) + len(vq.codebook), seed),
            text,
            vq,
            token_mask_id=ids["<mask>"],
            begin_id=ids["<begin>"],
            end_id=ids["<end>"],
            t2i_id=ids["<t2i>"],
            soi_id=ids["<soi>"],
            eoi_id=ids["<eoi>"],
            pad_id=ids["<pad>"],
            codebook_size=len(vq.codebook),
            num_vq_tokens=vq.side**2,
            image_offset=len(text),
            max_text=12,
        )
    raise ValueError(
        f"--model tiny: there is no built-in model for --task {task}, only for tiny-math and tiny-geneval"
    )
