"""``infer --serve`` and ``update``: what answers, what is refused, and 1,000 requests during 10 exchanges."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lf_ckpt
from lf_meta import rundir
from lf_meta.dist import World
from lf_meta.infer import Sampling
from lf_meta.jobs import generate_text
from lf_meta.serve import Served, Server
from lf_meta.signals import StopSignal
from lf_meta.update import UpdateError, update_server

pytestmark = pytest.mark.xdist_group("serve")
STEPS = (4, 8, 12)


@dataclass
class Trained:
    """A run with three checkpoints, each in a file too."""

    root: Path
    cli: Any

    def file(self, step: int) -> Path:
        return self.root.parent.parent / f"{step}.lfckpt"


def perturbed(state: Any, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and items of a checkpoint, with noise in the weights."""
    generator = torch.Generator().manual_seed(seed)
    noisy = {
        n: t + torch.randn(t.shape, generator=generator) if n.startswith("model.") else t
        for n, t in state.tensors.items()
    }
    return noisy, dict(state.items)


def save_as(file: Path, step: int, state: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
    """A checkpoint in a file of its own."""
    with lf_ckpt.open(file.with_suffix(".store")) as store:
        store.save(step, *state)
        store.wait()
        lf_ckpt.export_file(store, step, file)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, make_cli: Callable[[Path], Any]) -> Iterator[Trained]:
    cli = make_cli(tmp_path_factory.mktemp("serve"))
    small = ["model.args.layers=1", "model.args.hidden=32", "model.args.ffn=48", "model.args.heads=2"]
    small += [
        "data.max_len=64",
        "batch.size=8",
        "eval.every=0",
        "ckpt.keep=9",
        "optim.warmup=1",
        "optim.lr=0.05",
    ]
    cli.run("train", "run.name=r", f"run.steps={STEPS[0]}", f"ckpt.every={STEPS[0]}", *small)
    made = Trained(cli.folder / "runs" / "r", cli)
    with lf_ckpt.open(made.root / "ckpt", read_only=True) as store:
        lf_ckpt.export_file(store, STEPS[0], made.file(STEPS[0]))
    for step in STEPS[1:]:  # so far apart that their texts differ
        save_as(made.file(step), step, perturbed(lf_ckpt.load_file(made.file(STEPS[0])), step))
    yield made
    cli.clean_up()


@pytest.fixture
def server(trained: Trained) -> Iterator[Server]:
    run = rundir.find(trained.root)
    config = rundir.read_config(run)
    with (
        World.from_environment(config.device, config.dist) as world,
        Server(Served(run, config, world, 4), "127.0.0.1", 0) as made,
    ):
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(url: str, body: object) -> tuple[int, dict[str, Any]]:
    """Status and answer of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def health(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/health", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_a_thousand_requests_during_ten_updates_are_all_answered_by_one_set_of_weights(
    server: Server, trained: Trained
) -> None:
    prompts = [f"{word} " for word in ("Python", "class", "def", "import")]
    sampling = Sampling(tokens=3, temperature=0.8, top_k=40, seed=5)
    cold = {s: [generate_text(trained.root, p, sampling, trained.file(s)) for p in prompts] for s in STEPS}
    assert len({tuple(texts) for texts in cold.values()}) == len(STEPS), "these weights cannot be told apart"
    begun = threading.Event()

    def request(i: int) -> tuple[int, int, dict[str, Any]]:
        if i == 20:
            begun.set()
        body = {"prompt": prompts[i % len(prompts)], "tokens": 3, "seed": 5}
        return i, *ask(f"{server.url}/generate", body)

    def exchange() -> list[dict[str, Any]]:
        begun.wait(60)
        return [update_server(trained.file(STEPS[(i + 1) % len(STEPS)]), server.url) for i in range(10)]

    with ThreadPoolExecutor(9) as pool:
        exchanged = pool.submit(exchange)
        answers = list(pool.map(request, range(1000)))

    names = {u["step"]: u["weights"] for u in exchanged.result()}
    assert [status for _, status, _ in answers] == [200] * 1000
    assert all(a["text"] == cold[a["step"]][i % len(prompts)] for i, _, a in answers)
    assert all(a["weights"] == names[a["step"]] for _, _, a in answers)
    assert len(set(names.values())) == len(STEPS)
    assert {a["step"] for _, _, a in answers} == set(STEPS)
    assert health(server) == {"step": 8, "weights": names[8], "requests": 1000, "updates": 10}


def test_what_cannot_be_taken_is_refused_with_its_reason_and_the_old_weights_answer(
    server: Server, trained: Trained, tmp_path: Path
) -> None:
    before = health(server)
    damaged = bytearray(trained.file(8).read_bytes())
    damaged[5000] ^= 1  # in the first tensor
    (tmp_path / "damaged.lfckpt").write_bytes(damaged)
    state = lf_ckpt.load_file(trained.file(8))
    heads = json.loads(json.dumps(dict(state.items)))
    heads["config"]["model"]["args"]["heads"] = 4
    wide = dict(state.tensors)
    name = next(n for n in sorted(wide) if n.startswith("model."))
    wide[name] = wide[name].new_zeros(3, 3)
    save_as(tmp_path / "heads.lfckpt", 13, (dict(state.tensors), heads))
    odd: dict[str, dict[str, Any]] = {
        "untrained": {"train": {}},
        "listed": {"config": [1]},
        "modelled": {"config": {"model": [2]}},
        "counted": {"train": {**state.items["train"], "vocab_size": "3"}},
    }
    for file, items in odd.items():
        save_as(tmp_path / f"{file}.lfckpt", 13, (dict(state.tensors), {**state.items, **items}))
    whole = dict(state.tensors)
    whole[name] = whole[name].to(torch.int8)
    save_as(tmp_path / "whole.lfckpt", 13, (whole, dict(state.items)))
    save_as(
        tmp_path / "nan.lfckpt",
        13,
        ({**state.tensors, name: state.tensors[name] * float("nan")}, dict(state.items)),
    )
    save_as(tmp_path / "wide.lfckpt", 13, (wide, dict(state.items)))

    for file, reason in (
        ("damaged", "hash"),
        ("heads", "model.args is"),
        ("wide", "size mismatch"),
        ("absent", "cannot be read"),
        *((file, "holds no checkpoint of a run") for file in odd),
        ("whole", "int8, where the model has"),
        ("nan", "not finite"),
        ("zero\0byte", "null byte"),
    ):
        with pytest.raises(UpdateError, match=f"(?s)goes on with its weights.*{reason}"):
            update_server(tmp_path / f"{file}.lfckpt", server.url)

    assert health(server) == before


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("generate", {"prompt": ""}, 400, "prompt"),
        ("generate", {"tokens": 3}, 400, "prompt"),
        ("generate", {"prompt": "a", "tokens": 0}, 400, "tokens"),
        ("generate", {"prompt": "a", "tokens": True}, 400, "tokens"),
        ("generate", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("generate", b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        ("generate", {"prompt": "a", "seed": 2**63}, 400, "seed"),
        ("generate", {"prompt": "a", "top_p": 0.5}, 400, "top_p"),
        ("generate", b"\xff{", 400, "body"),
        ("generate", b"[" * 100_000, 400, "body"),
        ("generate", b" " * (1 << 20) + b" ", 413, "at most"),
        ("update", {"model": 3}, 400, "model"),
        ("nowhere", {}, 404, "no such path"),
    ],
)
def test_what_is_no_request_is_refused(
    server: Server, path: str, body: object, status: int, reason: str
) -> None:
    got, answer = ask(f"{server.url}/{path}", body)

    assert (got, reason in answer["error"]) == (status, True), (got, answer)
    assert ask(f"{server.url}/generate", {"prompt": "a", "tokens": 1})[0] == 200


@pytest.mark.parametrize(
    "said", [b"", b"nonsense\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n[]", b"HTTP/1.0 200 OK\r\n\r\n3"]
)
def test_another_server_is_told_from_ours(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody is there, and nobody is asked
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            taken, _ = other.accept()
            with taken:
                taken.recv(65536)
                taken.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UpdateError, match="does not answer as"):
            update_server(Path("x"), f"http://127.0.0.1:{other.getsockname()[1]}")
        thread.join(60)


@pytest.mark.parametrize("server", ["http://[::1", "http://", "http://a b", "ftp://x", "x"])
def test_an_address_that_is_none_is_a_named_error(server: str) -> None:
    with pytest.raises(UpdateError, match=r"does not answer as|an address such as"):
        update_server(Path("x"), server)


def test_broken_connections_cost_nobody_an_answer(server: Server) -> None:
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    for raw in (b"", b"\x00\xff\r\n\r\n", b"POST /generate HTTP/1.0\r\nContent-Length: 9\r\n\r\n{"):
        with socket.create_connection(address) as s:
            s.sendall(raw)

    assert ask(f"{server.url}/generate", {"prompt": "a", "tokens": 1})[0] == 200


def test_the_commands_serve_update_and_end_with_a_signal(
    trained: Trained, until: Callable[..., None]
) -> None:
    out = trained.cli.folder / "out"
    already = out.read_text()
    process = trained.cli.start("infer", str(trained.root), "--serve", "--port", "0", "--step", "4")
    until(lambda: "POST http" in out.read_text()[len(already) :], process)
    url = out.read_text()[len(already) :].split("POST ")[1].split("/generate")[0]

    told = trained.cli.run("update", "--model", str(trained.file(12)), "--server", url)
    assert told.startswith("step 12, weights ")
    taken = trained.cli.run("infer", str(trained.root), "--serve", "--port", url.rsplit(":", 1)[1], code=2)
    assert "choose another --port" in taken

    process.terminate()
    assert process.wait(60) == 143
    refused = trained.cli.run("update", "--model", str(trained.file(12)), "--server", url, code=1)
    assert "does not answer" in refused


def test_a_stop_waits_for_the_text_that_is_being_written(trained: Trained, capsys: Any) -> None:
    from lf_meta.serve import serve_run

    with StopSignal() as signal:
        thread = threading.Thread(
            target=lambda: codes.append(serve_run(trained.root, "127.0.0.1", port, 4, signal))
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        codes: list[int] = []
        thread.start()
        url = f"http://127.0.0.1:{port}"
        answers: list[tuple[int, dict[str, Any]]] = []
        _wait_for(url)
        asking = threading.Thread(
            target=lambda: answers.append(ask(f"{url}/generate", {"prompt": "a", "tokens": 300}))
        )
        asking.start()
        _until_connected(url)
        signal.signum = 15
        asking.join(60)
        thread.join(60)

    assert codes == [15]
    assert "stopped by signal 15 after 1 requests" in capsys.readouterr().out
    assert answers[0][0] == 200


def _wait_for(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            threading.Event().wait(0.05)
    pytest.fail("the server did not come")


def _until_connected(url: str) -> None:
    """A request that came later is answered: the one before has been taken."""
    urllib.request.urlopen(f"{url}/health", timeout=60).close()
