"""A vision-language model asked about pictures: behind an OpenAI-compatible endpoint, or local.

transformers' processors of these models need torchvision, so image processor (PIL) and tokenizer are used
apart, and the image placeholder is expanded here.
"""

import base64
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from eval.reward_model import pretrained, pretrained_model

Judge = Callable[[list[str], list], list[str]]  # (questions, PIL images) -> answers

GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # placeholders of a picture: its grid of patches, merged
FEATURES = ("llava_onevision",)  # placeholders of a picture: as many as the features it gives


def plain(text: str, tokenizer) -> str:
    """The text without the tokenizer's special tokens, so that a caption cannot pose as a placeholder."""
    specials = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    for token in specials:
        text = text.replace(token, "")
    return text


def chat(question: str, tokenizer) -> str:
    """The prompt of one turn with one picture before the question, up to where the answer begins."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    except ValueError as error:
        raise ValueError(f"{tokenizer.name_or_path}: the tokenizer has no chat template") from error


def encode(
    texts: list[str], pictures: list, tokenizer, image_processor, model, side: str
) -> dict[str, Tensor]:
    """Inputs of ``model`` for prompts with one placeholder each, padded on ``side``, on the model's device.

    Raises ValueError for a prompt that does not have exactly one placeholder.
    """
    images = image_processor(pictures, return_tensors="pt").to(model.device)
    if "image_grid_thw" in images:
        counts = (images["image_grid_thw"].prod(-1) // image_processor.merge_size**2).tolist()
    else:
        features = model.get_image_features(**images.to(model.dtype)).pooler_output
        counts = [len(feature) for feature in features]
    placeholder = tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    for text in texts:
        if text.count(placeholder) != 1:
            raise ValueError(
                f"{text.count(placeholder)} image placeholders {placeholder} in a prompt, expected 1"
            )
    expanded = [text.replace(placeholder, placeholder * n) for text, n in zip(texts, counts, strict=True)]
    tokens = tokenizer(
        expanded, padding=True, padding_side=side, add_special_tokens=False, return_tensors="pt"
    ).to(model.device)
    inputs = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], **images}
    if "image_grid_thw" in images:  # the rotary positions follow the grid where this is 1
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    return inputs


def local_judge(
    name: str,
    device: str = "cpu",
    *,
    dtype: torch.dtype | None = None,
    max_tokens: int = 512,
    batch: int = 8,
) -> Judge:
    """Greedy answers of a transformers model, whose class ``config.model_type`` chooses.

    dtype: bfloat16 on a GPU, float32 elsewhere. Raises ValueError for a model type that is not supported and
    for weights that do not fit.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    kind = pretrained(AutoConfig, name).model_type
    if kind not in GRID + FEATURES:
        raise ValueError(
            f"{name}: model type {kind!r} is not supported locally; accepted: {', '.join(GRID + FEATURES)}, "
            "or any model behind an OpenAI-compatible endpoint"
        )
    tokenizer = pretrained(AutoTokenizer, name)
    image_processor = pretrained(AutoImageProcessor, name, backend="pil")
    dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    model = pretrained_model(AutoModelForImageTextToText, name, dtype=dtype).to(device)

    @torch.no_grad()
    def answer(questions: list[str], pictures: list) -> list[str]:
        answers = []
        for i in range(0, len(questions), batch):
            prompts = [chat(plain(question, tokenizer), tokenizer) for question in questions[i : i + batch]]
            inputs = encode(prompts, pictures[i : i + batch], tokenizer, image_processor, model, "left")
            tokens = model.generate(
                **inputs, do_sample=False, max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id
            )
            new = tokens[:, inputs["input_ids"].shape[1] :]
            answers += tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers

    return answer


def endpoint_judge(
    url: str,
    model: str,
    *,
    key: str | None = None,
    max_tokens: int = 512,
    timeout: float = 120.0,
    retries: int = 4,
    backoff: float = 1.0,
    workers: int = 32,
) -> Judge:
    """Greedy answers from ``url``/chat/completions (vLLM, SGLang, ...), ``workers`` requests at a time.

    A request that fails to connect, times out (seconds) or is answered 429 or 5xx is sent again, ``retries``
    times at most, after ``backoff``, 2 ``backoff``, ... seconds; then RewardServersDown. Any other refusal is
    a ValueError with the server's words.
    """
    try:
        import httpx
    except ImportError as error:
        raise ValueError("a VLM endpoint needs httpx: pip install -r requirements.txt") from error
    from eval.reward_client import RewardServersDown

    address = url.rstrip("/") + "/chat/completions"
    client = httpx.Client(
        timeout=timeout,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        limits=httpx.Limits(max_connections=workers),
        trust_env=False,  # as for reward servers: a proxy for the internet does not know a cluster
    )

    def ask(question: str, picture) -> str:
        body = {
            "model": model,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": data_url(picture)}},
                        {"type": "text", "text": question},
                    ],
                }
            ],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        for attempt in range(retries + 1):
            if attempt:
                time.sleep(backoff * 2 ** (attempt - 1))
            try:
                response = client.post(address, json=body)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.status_code != 429 and response.status_code < 500:
                return _content(response, address)
            reason = f"HTTP {response.status_code}: {response.text[:200]}"
        raise RewardServersDown(f"{address}: no answer after {retries + 1} attempts ({reason})")

    def answer(questions: list[str], pictures: list) -> list[str]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(ask, questions, pictures))

    return answer


def data_url(picture) -> str:
    """A PIL image as a PNG data URL."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _content(response, address: str) -> str:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        content = None
    if response.status_code != 200 or not isinstance(content, str):
        raise ValueError(
            f"{address}: HTTP {response.status_code}, not a chat completion: {response.text[:200]}"
        )
    return content
