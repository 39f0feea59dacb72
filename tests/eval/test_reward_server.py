"""A real reward server in a process of its own, and the client that trains with it."""

import base64
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.reward_client import RewardClient, RewardServersDown
from eval.reward_server import decode_pictures, main
from eval.rewards import Rewards
from eval.task import Task

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

HTTP = httpx.Client(timeout=20, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
ROOT = Path(__file__).resolve().parents[2]
TOKEN = "open-sesame"
MAX_BODY, MAX_PIXELS, MAX_BATCH = 200_000, 10_000, 8
LIMITS = ["--max-body", str(MAX_BODY), "--max-pixels", str(MAX_PIXELS), "--max-batch", str(MAX_BATCH)]
GIVEN = """
import sys, time
from eval.reward_client import RewardServersDown

def echo(rows, completions):  # a number that no other request has, and how many were scored with it
    time.sleep(0.005)
    return {"echo": [float(row["prompt"]) for row in rows], "batch": [len(rows)] * len(rows)}

def moods(rows, completions):
    if "raise" in completions:
        raise TypeError("no mood today")
    if "exit" in completions:
        sys.exit(3)
    if "down" in completions:
        raise RewardServersDown("no judge answers")
    return {"moods": [{"none": None, "nan": float("nan")}.get(mood, 1.0) for mood in completions]}

def short(rows, completions):
    return {"short": [1.0] * (len(rows) - 1)}

def mean(rows, completions):
    return {"mean": [c.double().mean() for c in completions], "height": [c.shape[1] for c in completions]}
"""


class Server:
    """``python -m eval.reward_server`` on a free port of the loopback."""

    def __init__(self, directory: Path, rewards: str, *flags: str):
        file = directory / "given.py"
        file.write_text(GIVEN)
        names = ",".join(f"{file}:{name}" for name in rewards.split(","))
        command = [
            sys.executable,
            "-m",
            "eval.reward_server",
            "--reward",
            names,
            "--port",
            "0",
            "--device",
            "cpu",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command + list(flags), cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.url = None

    def started(self) -> "Server":
        self.url = self.process.stdout.readline().partition(" on ")[2].partition(",")[0]
        assert self.url.startswith("http://127.0.0.1:")
        return self

    def kill(self):
        self.process.kill()  # kill -9
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("served")
    servers = [Server(directory, "echo,moods,short,mean", "--token", TOKEN, *LIMITS) for _ in range(2)]
    try:
        yield [server.started() for server in servers]
    finally:
        for server in servers:
            server.kill()


def client(servers, name, **settings) -> RewardClient:
    urls = "|".join(f"{server.url}/{name}" for server in servers)
    return RewardClient(urls, **{"token": TOKEN, "retries": 2, "backoff": 0.05, "timeout": 20, **settings})


def post(server, path, body, token=TOKEN):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    response = httpx.post(
        f"{server.url}{path}", content=content, headers=headers, timeout=20, trust_env=False
    )
    return response.status_code, response.json()


def question(*completions, **other):
    rows = [{"prompt": "1"} for _ in completions]
    return {"id": "q", "rows": rows, "completions": list(completions), **other}


def png(width, height, data=None) -> str:
    """Base64 of a grey PNG; with ``data`` only its header has that size."""

    def part(kind, content):
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(b"\0" * (width + 1) * height) if data is None else data
    file = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", data) + part(b"IEND", b"")
    return base64.b64encode(file).decode()


def images(*pictures):
    return {"id": "q", "rows": [{"prompt": "p"} for _ in pictures], "images": list(pictures)}


def alive(server):
    return post(server, "/echo", question("x")) == (200, {"id": "q", "scores": {"echo": [1.0], "batch": [1]}})


# Under load


def test_96_concurrent_requests_each_get_their_own_scores_in_batches(servers):
    echo = client(servers, "echo", chunk=1)

    def ask(i):
        prompts = [i, i + 0.25, i + 0.5]
        answer = echo([{"prompt": str(p)} for p in prompts], ["x"] * 3)
        return answer["echo"] == prompts, max(answer["batch"])

    with ThreadPoolExecutor(32) as pool:
        right, batches = zip(*pool.map(ask, range(96)), strict=True)
    assert all(right) and len(right) == 96
    assert 1 < max(batches) <= MAX_BATCH


def test_raw_concurrent_requests_of_other_sizes_each_get_their_own_scores(servers):
    def ask(i):
        prompts = [i + j / 32 for j in range(1 + i % (2 * MAX_BATCH))]  # some larger than a batch
        body = {
            "id": str(i),
            "rows": [{"prompt": str(p)} for p in prompts],
            "completions": [""] * len(prompts),
        }
        status, answer = post(servers[0], "/echo", body)
        return status == 200 and answer["id"] == str(i) and answer["scores"]["echo"] == prompts

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(ask, range(64)))


def test_kill_9_in_the_middle_loses_and_mixes_no_answer(tmp_path):
    pair = [Server(tmp_path, "echo") for _ in range(2)]
    try:
        echo = client([server.started() for server in pair], "echo", chunk=1)
        answered = threading.Semaphore(0)

        def ask(i):
            answer = echo([{"prompt": str(i)}, {"prompt": str(-i)}], ["x"] * 2)
            answered.release()
            return answer["echo"] == [i, -i]

        with ThreadPoolExecutor(64) as pool:
            asked = [pool.submit(ask, i) for i in range(192)]
            for _ in range(40):
                answered.acquire()
            pair[0].kill()
            killed = time.monotonic()
            assert not all(future.done() for future in asked)
            assert all(future.result() for future in asked)
            assert time.monotonic() - killed < 15  # none waits for its time-out of 20 s
        pair[1].kill()
        with pytest.raises(RewardServersDown, match="^--reward echo: no reward server answers [^\n]*$"):
            echo([{"prompt": "1"}], ["x"])
    finally:
        for server in pair:
            server.kill()


# What a server refuses


@pytest.mark.parametrize(
    "path, body, status, reason",
    [
        ("/echo", b"\xff\x00 not json", 400, "not JSON"),
        ("/echo", b"[" * 100_000, 400, "not JSON"),
        ("/echo", b"", 400, "not JSON"),
        ("/echo", [1], 400, "an id"),
        ("/echo", question("x", id=7), 400, "an id"),
        ("/echo", question("x", rows=[]), 400, "0 rows for 1 completions"),
        ("/echo", question("x", rows=[{"caption": "p"}]), 400, "a prompt"),
        ("/echo", question("x", completions=[5]), 400, "a list of strings"),
        ("/echo", question("x", completions="x"), 400, "a list of strings"),
        ("/echo", question(), 400, "at least one"),
        ("/echo", question("x", images=["x"]), 400, "either completions or images"),
        ("/echo", {"id": "q", "rows": [{"prompt": "p"}]}, 400, "either completions or images"),
        ("/mean", images("no base64!"), 400, "picture 0 is not base64 of a PNG"),
        ("/mean", images(png(4, 4), "bm90IGEgcG5n"), 400, "picture 1 is not base64 of a PNG"),
        ("/mean", images(png(4, 4)[:60]), 400, "picture 0 is not base64 of a PNG"),
        ("/mean", images(png(4, 4, b"no zlib")), 400, "picture 0 is not base64 of a PNG"),
        ("/nothing", question("x"), 404, "no reward 'nothing' here; served: echo"),
        ("/a/b", question("x"), 404, "Not Found"),
    ],
)
def test_malformed_request_is_refused_in_one_sentence_and_the_server_lives(
    servers, path, body, status, reason
):
    got, answer = post(servers[0], path, body)
    assert got == status and reason in answer["error"] and "\n" not in answer["error"]
    assert alive(servers[0])


def test_client_tells_that_its_request_is_too_large(servers):
    with pytest.raises(RuntimeError, match="body larger than 200000 bytes"):
        client(servers, "echo")([{"prompt": "1"}], ["x" * 5_000_000])


def test_oversized_body_is_refused_before_it_is_read(servers):
    host, _, port = servers[0].url.removeprefix("http://").partition(":")
    head = f"POST /echo HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"
    for rest in (
        f"Content-Length: {10**12}\r\n\r\n".encode(),  # announced, not sent
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % 10**9 + b" " * (MAX_BODY + 1),  # one byte over
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head.encode() + rest)
            answer = b""
            while b"}" not in answer and (part := connection.recv(4096)):
                answer += part
        assert answer.startswith(b"HTTP/1.1 413") and b"body larger than 200000 bytes" in answer
    assert alive(servers[0])


@pytest.mark.parametrize(
    "pictures",
    [
        [png(60_000, 60_000, zlib.compress(b"\0" * 10_000_000))],  # 10 GB in RGB
        [png(12_000, 12_000, zlib.compress(b"\0" * 1_000))],  # pillow itself would only warn
        [png(101, 100)],
        [png(50, 100), png(51, 100)],
    ],
)
def test_picture_bomb_is_refused_by_its_header(servers, pictures):
    start = time.monotonic()
    status, answer = post(servers[0], "/mean", images(*pictures))
    assert status == 400 and "more than 10000 pixels together" in answer["error"]
    assert time.monotonic() - start < 2 and alive(servers[0])


def test_picture_bomb_is_not_decompressed(monkeypatch):
    def load(self):
        raise AssertionError("decompressed")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(ValueError, match="picture 0 is not"):  # this one would have been
        decode_pictures([png(4, 4)], 16)
    with pytest.raises(ValueError, match="more than 15 pixels together"):
        decode_pictures([png(4, 4)], 15)


def test_pictures_of_the_allowed_size_are_scored(servers):
    status, answer = post(servers[0], "/mean", images(png(100, 50), png(50, 100)))
    assert status == 200 and answer["scores"] == {"mean": [0.0, 0.0], "height": [50.0, 100.0]}


@pytest.mark.parametrize("token", [None, "open-sesam", "open-sesame!", "öffne dich"])
def test_wrong_token_is_refused(servers, token):
    headers = {} if token is None else {"Authorization": f"Bearer {token}".encode()}
    for method, path in (("POST", "/echo"), ("GET", "/health")):
        answer = HTTP.request(method, servers[0].url + path, headers=headers)
        assert answer.status_code == 401 and "token" in answer.json()["error"]
    with pytest.raises(RewardServersDown, match="status 401, wrong or no token"):
        client(servers, "echo", token="wrong")


def test_token_may_come_from_the_environment(servers, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    assert client(servers, "echo", token=None)([{"prompt": "5"}], ["x"])["echo"] == [5]


def test_server_listens_on_the_loopback_address_only(servers):
    port = int(servers[0].url.rpartition(":")[2])
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=1)


def test_health_names_rewards_and_versions(servers):
    """Report row M7: the pins of a reward's environment are told."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = HTTP.get(f"{servers[0].url}/health", headers=headers).json()
    assert answer["status"] == "ok" and answer["rewards"] == ["echo", "moods", "short", "mean"]
    assert answer["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--reward", "nothing"], "--reward nothing: unknown; accepted: clip"),
        (["--reward", "absent.py:f"], "no such file"),
        (["--reward", f"{__file__}:png", "--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000"),
    ],
)
def test_server_that_cannot_start_says_why_in_one_sentence(flags, reason):
    with pytest.raises(SystemExit, match=f"^[^\n]*{reason}[^\n]*$"):
        main([*flags, "--device", "cpu"])


# Faults of a reward


@pytest.mark.parametrize(
    "path, completion, reason",
    [
        ("/moods", "raise", "TypeError: no mood today"),
        ("/moods", "exit", "SystemExit: 3"),
        ("/short", "x", "1 numbers expected"),
    ],
)
def test_a_raising_reward_is_a_500_with_the_reason_and_the_server_lives(servers, path, completion, reason):
    status, answer = post(servers[0], path, question(completion))
    assert status == 500 and reason in answer["error"] and answer["id"] == "q"
    assert alive(servers[0])


def test_a_judge_that_is_down_behind_a_server_is_a_server_down(servers):
    assert post(servers[0], "/moods", question("down"))[0] == 503
    with pytest.raises(RewardServersDown, match="no judge answers"):
        client(servers, "moods", retries=0)([{"prompt": "p"}], ["down"])


def test_the_fault_of_one_request_does_not_reach_those_of_its_batch(servers):
    with ThreadPoolExecutor(16) as pool:
        moods = ["raise" if i == 5 else "fine" for i in range(16)]
        statuses = list(pool.map(lambda mood: post(servers[0], "/moods", question(mood))[0], moods))
    assert statuses == [500 if mood == "raise" else 200 for mood in moods]


def scored_by(servers, name, strict=False, modality="text"):
    task = Task("toy", modality, None, lambda rows, c: {"own": np.ones(len(rows))}, {"own": 1.0}, "own")
    urls = "|".join(f"{server.url}/{name}" for server in servers)
    return Rewards(task, f"own=1,{urls}=2", strict=strict, token=TOKEN, timeout=20)


def test_none_and_nan_of_a_server_are_errors(servers):
    """Report row M7."""
    rows = [{"prompt": "p"}] * 3
    rewards = scored_by(servers, "moods")
    with pytest.warns(UserWarning, match="2 of 3 scores of moods are None, NaN or infinite"):
        components = rewards.components(rows, ["none", "fine", "nan"])
    assert components["moods"].tolist() == [0, 1, 0] and rewards.errors == 2
    assert rewards.total(components).tolist() == [1, 3, 1]
    with pytest.raises(ValueError, match="2 of 3 scores"):
        scored_by(servers, "moods", strict=True).components(rows, ["none", "fine", "nan"])


def test_a_reward_that_raises_in_a_server_is_counted_and_not_asked_again(servers):
    rewards = scored_by(servers, "moods")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.monotonic()
        assert rewards.components([{"prompt": "p"}], ["raise"])["moods"].tolist() == [0]
    assert rewards.errors == 1 and time.monotonic() - start < 1
    with pytest.raises(RuntimeError, match="no mood today"):
        scored_by(servers, "moods", strict=True).components([{"prompt": "p"}], ["raise"])


# The client


def test_pictures_arrive_bit_for_bit_and_in_order(servers):
    generator = torch.Generator().manual_seed(0)
    pictures = [
        torch.randint(256, (3, 20 + i, 30), generator=generator, dtype=torch.uint8) for i in range(11)
    ]
    rewards = scored_by(servers, "mean", modality="image")
    components = rewards.components([{"prompt": "p"}] * 11, pictures)
    assert components["mean"].tolist() == [picture.double().mean().item() for picture in pictures]
    assert components["height"].tolist() == [20 + i for i in range(11)]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "1", "I;16"])
def test_png_of_any_mode_becomes_a_uint8_picture(mode):
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (5, 4)).save(file, "PNG")
    (picture,) = decode_pictures([base64.b64encode(file.getvalue()).decode()], 20)
    assert picture.shape == (3, 4, 5) and picture.dtype == torch.uint8


@pytest.mark.parametrize("picture", [torch.zeros(3, 4, 4), torch.zeros(4, 4, 3, dtype=torch.uint8)])
def test_other_pictures_than_uint8_3_h_w_are_refused(servers, picture):
    with pytest.raises(TypeError, match=r"a uint8 picture \[3, H, W\] expected"):
        client(servers, "mean")([{"prompt": "p"}], [picture])


@pytest.mark.parametrize(
    "url", ["http://", "http:///x", "http://host:1", "http://a/x|b/x", "http://a/x|http://b/y"]
)
def test_malformed_reward_url_is_refused(url):
    with pytest.raises(ValueError, match="^--reward http"):
        RewardClient(url)


def test_client_stops_at_once_when_no_server_is_there_or_none_has_the_reward(servers):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RewardServersDown, match="ConnectError"):
        RewardClient(f"http://127.0.0.1:{port}/echo")
    with pytest.raises(RewardServersDown, match="serves echo, moods, short, mean, not clip"):
        client(servers, "clip")


class Stub:
    """A reward server in this process that answers ``reply(question) -> (status, answer)``."""

    def __init__(self, reply):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send(200, {"rewards": ["echo"]})

            def do_POST(self):
                self.send(*reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

            def send(self, status, answer):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


def right(question):
    return 200, {"id": question["id"], "scores": {"echo": [float(row["prompt"]) for row in question["rows"]]}}


def test_the_answer_to_another_request_is_never_taken():
    with Stub(lambda question: (200, right(question)[1] | {"id": "another"})) as stub:
        with pytest.raises(RewardServersDown, match="answered another request"):
            client([stub], "echo", retries=1)([{"prompt": "1"}], ["x"])


def test_another_number_of_scores_is_an_error():
    with Stub(lambda question: (200, right(question)[1] | {"scores": {"echo": [1.0, 2.0]}})) as stub:
        with pytest.raises(RuntimeError, match="did not answer 1 scores"):
            client([stub], "echo")([{"prompt": "1"}], ["x"])


def test_busy_server_is_asked_again_after_a_pause():
    replies = iter([(503, {"error": "busy"}), (502, "a proxy's own page")])
    with Stub(lambda question: next(replies, None) or right(question)) as stub:
        start = time.monotonic()
        assert client([stub], "echo")([{"prompt": "7"}], ["x"]) == {"echo": [7]}
        assert time.monotonic() - start > 0.05 + 0.1


def test_hanging_server_is_left_for_the_other_and_then_asked_last():
    asked = []
    go = threading.Event()

    def hang(question):
        asked.append(question["id"])
        go.wait(10)
        return right(question)

    with Stub(hang) as hanging, Stub(right) as working:
        echo = client([hanging, working], "echo", timeout=0.3, chunk=8)
        for i in range(6):
            assert echo([{"prompt": str(i)}], ["x"]) == {"echo": [i]}
        go.set()
    assert len(asked) == 1


def test_servers_take_turns():
    asked = {"a": 0, "b": 0}

    def count(name):
        def reply(question):
            asked[name] += 1
            return right(question)

        return reply

    with Stub(count("a")) as a, Stub(count("b")) as b:
        client([a, b], "echo", chunk=2)([{"prompt": str(i)} for i in range(16)], ["x"] * 16)
    assert asked == {"a": 4, "b": 4}


STUB_OF_ANOTHER_ENVIRONMENT = """
import json
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"rewards": ["echo"]})
    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = {"echo": [float(row["prompt"]) for row in question["rows"]]}
        self.answer({"id": question["id"], "scores": scores})
    def answer(self, answer):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_a_reward_in_another_interpreter_with_other_packages_needs_http_and_json_only():
    """Report row M7."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    command = [python, "-I", "-S", "-c", STUB_OF_ANOTHER_ENVIRONMENT]  # not even site-packages
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/echo"
        echo = RewardClient(url, token=TOKEN)
        assert echo([{"prompt": str(i)} for i in range(20)], ["x"] * 20) == {"echo": list(range(20))}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
