"""Serves rewards over HTTP: ``python -m eval.reward_server --reward hpsv3 --port 8000``.

POST /<name>  {"id": "...", "rows": [{"prompt": ...}, ...], "images": [base64 PNG, ...]}
              or "completions": [text, ...] in place of the images
  200         {"id": "...", "scores": {"<name>": [float or null, ...], ...}}: null stands for NaN and infinity
  4xx, 5xx    {"error": "one sentence"}
GET /health   {"status": "ok", "rewards": [...], "versions": {...}}
"""

import argparse
import asyncio
import base64
import contextlib
import hmac
import importlib.metadata
import io
import json
import math
import os
import platform
import socket
from concurrent.futures import ThreadPoolExecutor

from eval.reward_client import RewardServersDown
from eval.rewards import Score, as_scores, load_reward, short_name

MAX_QUEUE = 256  # requests that wait for a reward


class Batcher:
    """Scores the requests of one reward in batches, one batch after the other, in a thread of its own."""

    def __init__(self, score: Score, max_batch: int, max_wait: float):
        self.score, self.max_batch, self.max_wait = score, max_batch, max_wait
        self.queue: asyncio.Queue = asyncio.Queue(MAX_QUEUE)  # of (rows, completions, future of the answer)
        self.thread = ThreadPoolExecutor(1)

    async def answer(self, rows: list[dict], completions: list) -> dict[str, list] | BaseException:
        """{component: n floats or None}, or what the reward raised. Raises asyncio.QueueFull."""
        future = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((rows, completions, future))
        return await future

    async def run(self):
        while True:
            batch = [await self.queue.get()]
            self._fill(batch)
            if self._size(batch) < self.max_batch:
                await asyncio.sleep(self.max_wait)
                self._fill(batch)
            loop = asyncio.get_running_loop()
            answers = await loop.run_in_executor(
                self.thread, self._answers, [request[:2] for request in batch]
            )
            for (_, _, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    def _size(self, batch: list) -> int:
        return sum(len(request[0]) for request in batch)

    def _fill(self, batch: list):
        while self._size(batch) < self.max_batch and not self.queue.empty():
            batch.append(self.queue.get_nowait())

    def _answers(self, batch: list[tuple[list[dict], list]]) -> list[dict[str, list] | BaseException]:
        rows = [row for request in batch for row in request[0]]
        completions = [completion for request in batch for completion in request[1]]
        try:
            scores = self._scores(rows, completions)
        except BaseException as error:  # also SystemExit: no reward may end the server
            if len(batch) > 1:  # the fault of one request is not the others'
                return [self._answers([request])[0] for request in batch]
            return [error]
        answers, start = [], 0
        for request_rows, _ in batch:
            stop = start + len(request_rows)
            answers.append({key: values[start:stop] for key, values in scores.items()})
            start = stop
        return answers

    def _scores(self, rows: list[dict], completions: list) -> dict[str, list]:
        scores: dict[str, list] = {}
        for i in range(0, len(rows), self.max_batch):
            part = rows[i : i + self.max_batch]
            answer = self.score(part, completions[i : i + self.max_batch])
            if i and scores.keys() != answer.keys():
                raise TypeError(f"components {', '.join(scores)}, then {', '.join(answer)}")
            for key, values in answer.items():
                values = as_scores(values, len(part)).tolist()
                scores.setdefault(key, []).extend(v if math.isfinite(v) else None for v in values)
        return scores


def read_request(body: bytes, max_pixels: int) -> tuple[str, list[dict], list]:
    """Id, rows and completions (strings, or uint8 pictures [3, H, W]) of a request.

    Raises ValueError with one sentence for anything malformed, and for pictures of more than ``max_pixels``
    together, before they are decompressed.
    """
    try:
        question = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None
    if not isinstance(question, dict) or not isinstance(question.get("id"), str):
        raise ValueError("an object with an id (a string) expected")
    rows = question.get("rows")
    if not isinstance(rows, list) or not all(
        isinstance(r, dict) and isinstance(r.get("prompt"), str) for r in rows
    ):
        raise ValueError("rows: a list of objects, each with a prompt (a string), expected")
    if ("completions" in question) == ("images" in question):
        raise ValueError("either completions or images expected")
    key = "completions" if "completions" in question else "images"
    answers = question[key]
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"{key}: a list of strings expected")
    if not rows or len(rows) != len(answers):
        raise ValueError(
            f"{len(rows)} rows for {len(answers)} {key}; one row for each, and at least one, expected"
        )
    return question["id"], rows, answers if key == "completions" else decode_pictures(answers, max_pixels)


def decode_pictures(images: list[str], max_pixels: int) -> list:
    """Base64 PNG -> uint8 tensors [3, H, W]. Raises ValueError."""
    import numpy as np
    import torch
    from PIL import Image

    pictures, pixels = [], 0
    for i, text in enumerate(images):
        try:
            picture = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
            pixels += picture.width * picture.height  # known from the header
            if pixels <= max_pixels:
                array = np.array(picture.convert("RGB"))
        except Image.DecompressionBombError:
            pixels = math.inf
        except Exception as error:  # a broken PNG ends in one of a dozen exceptions of pillow and zlib
            raise ValueError(f"picture {i} is not base64 of a PNG ({type(error).__name__})") from None
        if pixels > max_pixels:
            raise ValueError(f"pictures up to {i} have more than {max_pixels} pixels together")
        pictures.append(torch.from_numpy(array).permute(2, 0, 1))
    return pictures


def create_app(
    rewards: dict[str, Score],
    *,
    token: str | None = None,
    max_batch: int = 32,
    max_wait: float = 0.02,
    max_body: int = 32 << 20,
    max_pixels: int = 64 << 20,
):
    """The FastAPI application; ``max_wait`` in seconds, ``max_body`` in bytes."""
    from fastapi import Depends, FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException as AnyHTTPException
    from starlette.requests import ClientDisconnect

    batchers = {name: Batcher(score, max_batch, max_wait) for name, score in rewards.items()}
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        tasks = [asyncio.create_task(batcher.run()) for batcher in batchers.values()]
        yield
        for task in tasks:
            task.cancel()

    async def check_token(request: Request):
        given = request.headers.get("authorization", "").encode("latin-1")
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "wrong or no token; send Authorization: Bearer TOKEN")

    async def read_body(request: Request) -> bytes:
        parts, size = [], int(request.headers.get("content-length", 0))
        if size <= max_body:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > max_body:
                    break
                parts.append(part)
        if size > max_body:
            raise HTTPException(413, f"body larger than {max_body} bytes")
        return b"".join(parts)

    app = FastAPI(
        lifespan=lifespan,
        dependencies=[Depends(check_token)],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )

    @app.exception_handler(AnyHTTPException)
    async def one_sentence(request: Request, error: AnyHTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.get("/health")
    async def health():
        return {"status": "ok", "rewards": list(rewards), "versions": versions}

    @app.post("/{name}")
    async def score(name: str, request: Request):
        if name not in batchers:
            raise HTTPException(404, f"no reward {name!r} here; served: {', '.join(batchers)}")
        try:
            body = await read_body(request)
            request_id, rows, completions = await asyncio.to_thread(read_request, body, max_pixels)
            answer = await batchers[name].answer(rows, completions)
        except ClientDisconnect:
            raise HTTPException(400, "body cut short") from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except asyncio.QueueFull:
            raise HTTPException(503, f"more than {MAX_QUEUE} requests wait; try again later") from None
        if isinstance(answer, BaseException):
            # A judge behind this server that is down may be up behind another one.
            status = 503 if isinstance(answer, RewardServersDown) else 500
            return JSONResponse({"id": request_id, "error": f"{type(answer).__name__}: {answer}"}, status)
        return {"id": request_id, "scores": answer}

    return app


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(
        prog="python -m eval.reward_server", description="Serve rewards over HTTP."
    )
    parser.add_argument(
        "--reward", required=True, help="names, separated by commas, or path/to/file.py:function"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for other machines"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any free one, printed at start")
    parser.add_argument("--token", help="ask for Authorization: Bearer TOKEN; default $REWARD_TOKEN")
    parser.add_argument("--device", help="where the rewards run; default cuda if there is one")
    parser.add_argument("--max-batch", type=int, default=32, help="completions scored at a time")
    parser.add_argument("--max-wait", type=float, default=0.02, help="seconds to wait for a fuller batch")
    parser.add_argument("--max-body", type=int, default=32 << 20, help="bytes of a request")
    parser.add_argument("--max-pixels", type=int, default=64 << 20, help="of all pictures of a request")
    args = parser.parse_args(arguments)
    try:
        import uvicorn
        from fastapi import FastAPI  # noqa: F401
    except ImportError:
        raise SystemExit(
            "the reward server needs fastapi and uvicorn: pip install -r requirements.txt"
        ) from None
    token = os.environ.get("REWARD_TOKEN") if args.token is None else args.token
    if token == "":
        raise SystemExit("--token: empty; leave it out to serve without one")
    device = args.device or _default_device()
    try:
        rewards = {short_name(name): load_reward(name, device) for name in args.reward.split(",")}
    except ValueError as error:
        raise SystemExit(str(error)) from None
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listener = socket.create_server((args.host, args.port), family=family)
    except OSError as error:
        raise SystemExit(f"--host {args.host} --port {args.port}: {error.strerror}") from None
    host, port = listener.getsockname()[:2]
    if token is None and not host.startswith("127.") and host != "::1":
        print("no --token: whoever reaches this port can use the rewards", flush=True)
    print(f"{', '.join(rewards)} on http://{host}:{port}, device {device}", flush=True)
    app = create_app(
        rewards,
        token=token,
        max_batch=args.max_batch,
        max_wait=args.max_wait,
        max_body=args.max_body,
        max_pixels=args.max_pixels,
    )
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def _default_device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
