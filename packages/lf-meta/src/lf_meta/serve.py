"""``loongforge infer RUN --serve``: text over HTTP, from weights that ``loongforge update`` can exchange meanwhile.

    POST /generate  {"prompt": "Python ", "tokens": 40, ...}  ->  {"text", "step", "weights"}
    POST /update    {"model": "/path/STEP.lfckpt"}            ->  {"step", "weights", "previous"}; from here only
    GET  /health                                              ->  {"step", "weights", "requests", "updates"}

A request takes the weights once, when its turn comes, so its text is of one set of weights, named in the answer. New
weights are read, verified and checked beside the old ones (both are in memory for that time); the exchange is one
assignment. Texts are generated one at a time, in the order of a lock; what waits is held by its connection.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lf_meta import rundir
from lf_meta.checkpoint import Restored
from lf_meta.config import Config
from lf_meta.dist import World
from lf_meta.errors import CheckpointError, MetaError, RunError
from lf_meta.infer import Sampling
from lf_meta.jobs import Chosen, continue_text, load_model
from lf_meta.rundir import RunDir
from lf_meta.signals import StopSignal

LARGEST_BODY = 1 << 20
IDLE_S = 60.0


class GenerateRequest(BaseModel):
    """What ``POST /generate`` takes; the limits are those of the command line."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: str = Field(min_length=1)
    tokens: int = Field(default=200, ge=1, le=100_000)
    temperature: float = Field(default=0.8, ge=0, le=1000, allow_inf_nan=False)
    top_k: int = Field(default=40, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**63)

    def sampling(self) -> Sampling:
        """How the tokens are drawn."""
        temperature = self.temperature if self.temperature >= 1e-3 else 0.0
        return Sampling(self.tokens, temperature, self.top_k, self.seed)


class UpdateRequest(BaseModel):
    """What ``POST /update`` takes: a file on the server's machine that ``lf-ckpt export --lfckpt`` has written."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: Path = Field(strict=False)


@dataclass(frozen=True)
class Weights:
    """A model that answers, and what its answers are signed with.

    Attributes:
        step: training step of the checkpoint.
        name: first 16 hex digits of the sha256 over names, dtypes, shapes and bytes of the model's tensors.
    """

    model: torch.nn.Module
    step: int
    name: str


def weights_name(model: torch.nn.Module) -> str:
    """The name of :class:`Weights`: equal for equal bits."""
    h = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        host = tensor.detach().cpu().contiguous()
        h.update(f"{name} {host.dtype} {tuple(host.shape)}\n".encode())
        h.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:16]


class Served:
    """A run whose weights can be exchanged while it answers; all methods may be called from any thread."""

    def __init__(self, run: RunDir, config: Config, world: World, chosen: Chosen = None) -> None:
        self._run, self._config, self._world = run, config, world
        self._turn, self._counting, self._updating = threading.Lock(), threading.Lock(), threading.Lock()
        self._requests = self._updates = 0
        rundir.read_tokenizer(run)  # a run without one answers nobody, which is better known now
        self._weights = self._load(chosen)
        if not hasattr(self._weights.model, "logits"):
            raise RunError(f"{config.model.name} has no method logits(tokens), which generating text needs")

    @property
    def weights(self) -> Weights:
        """What the next request is answered with."""
        return self._weights

    def generate(self, request: GenerateRequest) -> dict[str, Any]:
        """The text behind a prompt, and the weights that wrote it."""
        with self._turn:
            weights = self._weights
            text = continue_text(
                weights.model, self._run, self._config, self._world, request.prompt, request.sampling()
            )
        with self._counting:
            self._requests += 1
        return {"text": text, "step": weights.step, "weights": weights.name}

    def update(self, file: Path) -> dict[str, Any]:
        """Exchange the weights for those in a file; on an error the old ones go on answering.

        Raises:
            CheckpointError: unreadable, damaged, of another model, or an update is under way.
        """
        if not self._updating.acquire(blocking=False):
            raise CheckpointError("another update is under way: ask again when it is done")
        try:
            new, previous = self._load(file), self._weights
            self._weights = new
            self._updates += 1
        finally:
            self._updating.release()
        return {"step": new.step, "weights": new.name, "previous": previous.name}

    def health(self) -> dict[str, Any]:
        """Counters, and which weights answer."""
        weights = self._weights
        counted = {"requests": self._requests, "updates": self._updates}
        return {"step": weights.step, "weights": weights.name, **counted}

    def _load(self, chosen: Chosen) -> Weights:
        model, restored = load_model(self._run, self._config, self._world, chosen)
        self._check_same_model(restored)
        _check_numbers(model, restored)
        return Weights(model, restored.step, weights_name(model))

    def _check_same_model(self, restored: Restored) -> None:
        """Equal shapes are not yet the same model: the number of heads, say, is in none of them."""
        ours = self._config.to_dict()["model"]
        theirs = restored.items.get("config", {}).get("model", ours)
        different = {k: (ours.get(k), v) for k, v in theirs.items() if ours.get(k) != v}
        if different:
            told = ", ".join(
                f"model.{k} is {there!r}, here {here!r}" for k, (here, there) in different.items()
            )
            raise CheckpointError(f"checkpoint of step {restored.step} is of another model: {told}")


def _check_numbers(model: torch.nn.Module, restored: Restored) -> None:
    """Weights that have lost a part on their way into the model, or answer nobody."""
    for name, taken in model.state_dict().items():
        given = restored.tensors[f"model.{name}"]
        if given.is_floating_point() != taken.is_floating_point() or given.is_complex() != taken.is_complex():
            raise CheckpointError(
                f"checkpoint of step {restored.step}: {name} is {given.dtype}, where the model has {taken.dtype}"
            )
        if taken.is_floating_point() and not bool(taken.isfinite().all()):
            raise CheckpointError(
                f"checkpoint of step {restored.step}: {name} holds values that are not finite"
            )


class _Handler(BaseHTTPRequestHandler):
    """One request on one connection."""

    server: Server
    timeout = IDLE_S
    server_version = "loongforge"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path != "/health":
            self._refuse(HTTPStatus.NOT_FOUND, f"no such path: {self.path}; there is GET /health")
        else:
            self._answer(HTTPStatus.OK, self.server.served.health())

    def do_POST(self) -> None:
        try:
            self._answer(HTTPStatus.OK, self._asked())
        except ValidationError as e:
            self._refuse(HTTPStatus.BAD_REQUEST, _problems(e))
        except _RequestError as e:
            self._refuse(e.status, str(e))
        except CheckpointError as e:
            self._refuse(HTTPStatus.CONFLICT, str(e))
        except MetaError as e:
            self._refuse(HTTPStatus.BAD_REQUEST, str(e))
        except (RuntimeError, OSError) as e:  # out of memory, a disk that fails: this request, not the server
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(e).__name__}: {e}")

    def _asked(self) -> dict[str, Any]:
        served, body = self.server.served, self._body()
        if self.path == "/generate":
            return served.generate(GenerateRequest.model_validate_json(body))
        if self.path != "/update":
            raise _RequestError(HTTPStatus.NOT_FOUND, f"no such path: {self.path}; POST /generate or /update")
        if not ipaddress.ip_address(self.client_address[0]).is_loopback:
            raise _RequestError(
                HTTPStatus.FORBIDDEN, "weights are exchanged from the server's own machine only"
            )
        return served.update(UpdateRequest.model_validate_json(body).model)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise _RequestError(HTTPStatus.LENGTH_REQUIRED, "Content-Length: the number of bytes is needed")
        size = int(length)
        if size > LARGEST_BODY:
            self.rfile.read(min(size, 8 * LARGEST_BODY))  # who still writes would not hear the answer
            raise _RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{size} bytes: at most {LARGEST_BODY}")
        body = self.rfile.read(size)
        if len(body) < size:
            raise _RequestError(HTTPStatus.BAD_REQUEST, f"the body ended after {len(body)} of {size} bytes")
        return body

    def _refuse(self, status: HTTPStatus, problem: str) -> None:
        self._answer(status, {"error": problem})

    def _answer(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # whoever asked is gone

    def log_message(self, format: str, *args: object) -> None:
        """Nothing for each request: /health counts them."""


class _RequestError(Exception):
    def __init__(self, status: HTTPStatus, problem: str) -> None:
        super().__init__(problem)
        self.status = status


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())


class Server(ThreadingHTTPServer):
    """A :class:`Served` on an address; ``server_close`` waits for the requests that have begun."""

    daemon_threads = False
    request_queue_size = 1024

    def __init__(self, served: Served, host: str, port: int) -> None:
        self.served = served
        try:
            super().__init__((host, port), _Handler)
        except OSError as e:
            raise RunError(
                f"cannot listen on {host} port {port}: {e.strerror or e}; choose another --port"
            ) from e

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke off is the client's matter."""


def serve_run(path: str | Path, host: str, port: int, chosen: Chosen, signal: StopSignal) -> int:
    """Answer for a run until a signal comes; returns it. What was asked before is answered first."""
    run = rundir.find(path)
    config = rundir.read_config(run)
    with World.from_environment(config.device, config.dist) as world:
        served = Served(run, config, world, chosen)
        with Server(served, host, port) as server:
            thread = threading.Thread(
                target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="lf-serve"
            )
            thread.start()
            print(f"step {served.weights.step} of {run.root}: POST {server.url}/generate", flush=True)
            try:
                while not signal.signum and thread.is_alive():
                    thread.join(0.1)
            finally:
                server.shutdown()
                thread.join()
        print(f"stopped by signal {signal.signum} after {served.health()['requests']} requests", flush=True)
    return signal.signum
