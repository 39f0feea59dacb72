"""Scores from reward servers (eval/reward_server.py): ``http://a:8000/hpsv3``, several with ``|`` between."""

import base64
import io
import itertools
import json
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

CONNECT_SECONDS = 5.0
DOWN_SECONDS = 30.0  # how long a server that failed is asked last
MAX_WAIT_SECONDS = 30.0


class RewardServersDown(RuntimeError):
    """No server of a reward answers; the scripts save a checkpoint and stop."""


class RewardClient:
    """``client(rows, completions)`` -> {component: list of n floats or None}, n = len(rows).

    The n completions (all strings, or all uint8 pictures [3, H, W]) go to the servers in turn, ``chunk`` to a
    request. A server that cannot be reached, is busy, takes longer than ``timeout`` seconds or answers
    another request's id is left for the next one; after ``retries`` further rounds, with waits of ``backoff``
    seconds that double, and at once at construction, RewardServersDown is raised. RuntimeError carries the
    reason of a server whose reward raised or that refused the request. The token, default $REWARD_TOKEN, is
    sent to every server.
    """

    def __init__(
        self,
        urls: str,
        *,
        timeout: float = 120.0,
        token: str | None = None,
        retries: int = 5,
        backoff: float = 1.0,
        chunk: int = 8,
    ):
        try:
            import httpx
        except ImportError:
            raise ImportError("reward servers need httpx: pip install -r requirements.txt") from None
        self.servers = [url.strip().rstrip("/") for url in urls.split("|")]
        names = set()
        for server in self.servers:
            base, _, name = server.rpartition("/")
            if not server.startswith(("http://", "https://")) or base.endswith("/") or not name:
                raise ValueError(f"--reward {urls}: {server!r} is no reward; accepted: http://host:port/name")
            names.add(name)
        if len(names) > 1:
            raise ValueError(f"--reward {urls}: servers of one reward give it one name, got {sorted(names)}")
        self.name = names.pop()
        self.retries, self.backoff, self.chunk = retries, backoff, chunk
        token = token or os.environ.get("REWARD_TOKEN")
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # A new connection for each request: httpx 0.28 may close an idle one of its pool that another
            # thread has just been given.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # a proxy for the internet does not know the machines of a cluster
        )
        self._turn = itertools.count()
        self._down: dict[str, float] = {}  # server -> when it failed last
        self._in_turn(self._check, rounds=1)

    def __call__(self, rows: list[dict], completions: list) -> dict[str, list]:
        chunks = [
            (rows[i : i + self.chunk], completions[i : i + self.chunk])
            for i in range(0, len(rows), self.chunk)
        ]
        with ThreadPoolExecutor(
            2 * len(self.servers)
        ) as pool:  # one request is scored while the next travels
            answers = list(pool.map(self._score, chunks))
        return {key: [value for answer in answers for value in answer[key]] for key in answers[0]}

    def _score(self, chunk: tuple[list[dict], list]) -> dict[str, list]:
        rows, completions = chunk
        question = {"id": uuid.uuid4().hex, "rows": rows}
        if all(isinstance(completion, str) for completion in completions):
            question["completions"] = completions
        else:
            question["images"] = [base64.b64encode(_png(image)).decode() for image in completions]
        body = json.dumps(question).encode()
        return self._in_turn(
            lambda server: self._post(server, question["id"], body, len(rows)), self.retries + 1
        )

    def _in_turn(self, ask, rounds: int):
        """The answer of the first server that gives one; those that failed lately are asked last."""
        reasons = {}
        for attempt in range(rounds):
            if attempt:
                time.sleep(min(self.backoff * 2 ** (attempt - 1), MAX_WAIT_SECONDS))
            first = next(self._turn) % len(self.servers)
            order = self.servers[first:] + self.servers[:first]
            soon = time.monotonic() - DOWN_SECONDS
            for server in sorted(order, key=lambda s: self._down.get(s, soon) > soon):
                try:
                    answer = ask(server)
                    self._down.pop(server, None)
                    return answer
                except ConnectionError as error:
                    self._down[server] = time.monotonic()
                    reasons[server] = f"{server}: {error}"
        raise RewardServersDown(
            f"--reward {self.name}: no reward server answers ({'; '.join(reasons.values())})"
        )

    def _check(self, server: str):
        served = self._request("GET", server.rpartition("/")[0] + "/health")["rewards"]
        if self.name not in served:
            raise ConnectionError(f"serves {', '.join(served)}, not {self.name}")

    def _post(self, server: str, request_id: str, body: bytes, n: int) -> dict[str, list]:
        answer = self._request("POST", server, content=body, headers={"Content-Type": "application/json"})
        if answer.get("id") != request_id:
            raise ConnectionError("answered another request")
        scores = answer.get("scores")
        if not isinstance(scores, dict) or any(len(values) != n for values in scores.values()):
            raise RuntimeError(f"{server}: did not answer {n} scores a component")
        return scores

    def _request(self, method: str, url: str, **content) -> dict:
        """The JSON of an answer; ConnectionError where another server may do better, else RuntimeError."""
        import httpx

        try:
            response = self._http.request(method, url, **content)
        except httpx.HTTPError as error:
            raise ConnectionError(f"{type(error).__name__} {error}".strip()) from error
        try:
            answer = response.json()
            reason = answer.get("error")
        except (ValueError, AttributeError):
            raise ConnectionError(f"status {response.status_code}, not the JSON of a reward server") from None
        if response.status_code in (400, 413, 500):
            raise RuntimeError(f"{url}: {reason}")
        if response.status_code != 200:
            raise ConnectionError(f"status {response.status_code}, {reason}")
        return answer


def _png(image) -> bytes:
    """A uint8 picture [3, H, W] as PNG."""
    from PIL import Image

    if str(image.dtype) != "torch.uint8" or image.ndim != 3 or len(image) != 3:
        raise TypeError(f"a uint8 picture [3, H, W] expected, got {image.dtype} {list(image.shape)}")
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).cpu().numpy()).save(file, "PNG", compress_level=1)
    return file.getvalue()
