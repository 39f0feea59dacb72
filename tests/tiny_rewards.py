"""Tiny random checkpoints of the picture rewards, and a stand-in HTTP server; nothing is downloaded."""

import contextlib
import http.server
import json
import math
import threading
from pathlib import Path

import torch
from torch import Tensor

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(directory: Path, chat_template: str | None = CHATML, ends: bool = False):
    """A tokenizer of bytes, its special tokens from 256 on; ends: <|endoftext|> closes each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 256)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|endoftext|>", additional_special_tokens=list(SPECIALS)
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return tokenizer


def random_weights(shapes: dict[str, list[int]], seed: int) -> dict[str, Tensor]:
    """Weights of the golden files: normal / sqrt(fan in), drawn in the order of the names; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else 100
        center = float("norm" in name.lower() and name.endswith("weight"))
        weights[name] = torch.randn(shape, generator=generator) / fan_in**0.5 + center
    return weights


def save_clip(directory: Path) -> str:
    """A CLIP of 32 pixels and 20 tokens, with its tokenizer and image processor -> the directory."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    save_tokenizer(directory, ends=True)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config = CLIPConfig(
        text_config=dict(size, vocab_size=263, max_position_embeddings=20, eos_token_id=256),
        vision_config=dict(size, image_size=32, patch_size=8),
        projection_dim=12,
    )
    redraw(CLIPModel(config)).save_pretrained(directory)
    pixels = {"height": 32, "width": 32}
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=pixels).save_pretrained(directory)
    return str(directory)


VLM_TEXT = dict(
    vocab_size=263,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=256,
    bos_token_id=None,
    eos_token_id=258,
)
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
VLM_IDS = dict(image_token_id=261, video_token_id=262, vision_start_token_id=259, vision_end_token_id=260)


def tiny_vlm(kind: str):
    """A tiny model of a model type, and its image processor."""
    import transformers as t

    small = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    if kind == "qwen2_vl":
        vision = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2)
        config = t.Qwen2VLConfig(
            text_config=dict(VLM_TEXT, rope_parameters=MROPE), vision_config=vision, **VLM_IDS
        )
        return t.Qwen2VLForConditionalGeneration(config), t.Qwen2VLImageProcessorPil(size=small)
    if kind == "qwen2_5_vl":
        vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32)
        config = t.Qwen2_5_VLConfig(
            text_config=dict(VLM_TEXT, rope_parameters=MROPE), vision_config=vision, **VLM_IDS
        )
        return t.Qwen2_5_VLForConditionalGeneration(config), t.Qwen2VLImageProcessorPil(size=small)
    if kind == "qwen3_vl":
        vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32)
        vision |= dict(patch_size=14, num_position_embeddings=16, deepstack_visual_indexes=[0])
        text = dict(VLM_TEXT, rope_parameters=MROPE, head_dim=16)
        config = t.Qwen3VLConfig(text_config=text, vision_config=vision, **VLM_IDS)
        return t.Qwen3VLForConditionalGeneration(config), t.Qwen2VLImageProcessorPil(size=small)
    vision = dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=64, image_size=28)
    vision |= dict(num_hidden_layers=2, num_attention_heads=2, patch_size=14, vision_use_head=False)
    grid = [[28, 28], [28, 56], [56, 28]]
    config = t.LlavaOnevisionConfig(
        text_config=dict(VLM_TEXT, model_type="qwen2"),
        vision_config=vision,
        image_token_index=261,
        video_token_index=262,
        image_grid_pinpoints=grid,
    )
    processor = t.LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=grid)
    return t.LlavaOnevisionForConditionalGeneration(config), processor


def save_vlm(directory: Path, kind: str) -> str:
    """The tiny model of a kind, its tokenizer and its image processor -> the directory."""
    save_tokenizer(directory)
    model, processor = tiny_vlm(kind)
    redraw(model).save_pretrained(directory)
    processor.save_pretrained(directory)
    return str(directory)


def redraw(model, seed: int = 0):
    """The model with weights that are large enough for scores to differ."""
    model.load_state_dict(random_weights({name: v.shape for name, v in model.state_dict().items()}, seed))
    return model


def picture(height: int, width: int, slope: int = 3) -> Tensor:
    """A uint8 picture [3, height, width] with structure in both directions."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return (torch.stack([x * slope, y * 2, (x + y) * slope]) % 256).to(torch.uint8)


@contextlib.contextmanager
def stand_in(answer):
    """A server on loopback -> its address; ``answer(path, body, headers) -> (status, object or text)``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size)) if size else None
            status, reply = answer(self.path, body, self.headers)
            content = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
