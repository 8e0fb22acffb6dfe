"""What the commands do, callable from Python too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import torch

from lf_meta import data, rundir
from lf_meta.checkpoint import Restored, digest, load_bundle, open_checkpointer
from lf_meta.config import Config
from lf_meta.config_load import flatten
from lf_meta.dist import World, choose_precision
from lf_meta.errors import CheckpointError, ConfigError, DataError, RunError
from lf_meta.evaluate import EvalJob
from lf_meta.feed import describe
from lf_meta.infer import Sampling, generate
from lf_meta.loop import Outcome, train
from lf_meta.metrics import MetricsFile
from lf_meta.plot import plot_loss
from lf_meta.rundir import RunDir
from lf_meta.session import Session, autocast_for, make_model, open_session
from lf_meta.signals import StopSignal

SAMPLE_PROMPT = "The "
Chosen: TypeAlias = int | Path | None
"""Which checkpoint of a run: a step, the newest good one (None), or a file that was exported from the run's store."""


def start_run(config: Config, signal: StopSignal) -> int:
    """Create a run folder and train; returns the stop signal or 0."""
    with World.from_environment(config.device, config.dist) as world:
        made = world.on_main(lambda: rundir.create(config))
        named = config.anchored().model_copy(
            update={"run": config.run.model_copy(update={"name": made.root.name})}
        )
        if world.is_main:
            rundir.write_config(made, named)
            print(f"run {made.root}", flush=True)
        try:
            return _run(named, made, world, signal, _refuse_used_store)
        except (ConfigError, DataError):
            if world.is_main and not made.metrics.exists():
                shutil.rmtree(made.root, ignore_errors=True)  # nothing was trained: the name stays free
            raise


def resume_run(config: Config, run: RunDir, signal: StopSignal, file: Path | None = None) -> int:
    """Continue a run from its newest good checkpoint, or from one in a file; returns the stop signal or 0."""
    with World.from_environment(config.device, config.dist) as world:
        return _run(config, run, world, signal, lambda session: _restore(session, file))


def _run(
    config: Config, run: RunDir, world: World, signal: StopSignal, begin: Callable[[Session], None]
) -> int:
    with ExitStack() as stack:
        world.on_main(lambda: stack.enter_context(rundir.hold(run)))
        session = stack.enter_context(open_session(config, run, world, signal))
        if world.is_main:
            _introduce(session)
        begin(session)
        outcome = train(session)
        if world.is_main:
            _finish(session, outcome)
    return outcome.signum


def _refuse_used_store(s: Session) -> None:
    """A new run must not mix its steps with another's."""

    def check() -> None:
        if s.checkpointer is not None and (steps := s.checkpointer.steps()):
            raise ConfigError(
                "ckpt.dir", f"{s.config.ckpt.dir} holds checkpoints of another run (steps {list(steps)})"
            )

    s.world.on_main(check)


def _introduce(s: Session) -> None:
    parameters = sum(p.numel() for p in s.model.parameters())
    precision = choose_precision(s.config.device, s.world.device)
    print(
        f"{s.config.model.name} {s.config.model.size}: {parameters:,} parameters on {s.world.device} in {precision}, "
        f"{s.world.size} rank(s); loader: {describe(s.feed)}",
        flush=True,
    )


def _restore(s: Session, file: Path | None) -> None:
    notes = s.restore(file)
    if s.world.is_main:
        for note in notes:
            print(f"checkpoint: {note}", flush=True)
        print(f"resumed at step {s.step}", flush=True)
        _journal(s)
        rundir.write_config(s.run, s.config)


def _journal(s: Session) -> None:
    """Keep in the metrics which settings a resume changed, and on how many ranks it goes on."""
    before, after = (flatten(c.to_dict()) for c in (rundir.read_config(s.run), s.config))
    changed = {k: [before.get(k), v] for k, v in after.items() if before.get(k) != v}
    event = {"event": "resume", "step": s.step, "ranks": s.world.size, "changed": changed}
    MetricsFile(s.run.metrics).append([event])


def _finish(s: Session, outcome: Outcome) -> None:
    root = s.run.root
    plot_loss(MetricsFile(s.run.metrics).rows(), s.run.plot, root.name)
    if outcome.signum:
        print(f"stopped by signal {outcome.signum} after step {outcome.step}, which is saved")
        print(f"next: loongforge resume {root}")
        return
    if s.run.tokenizer.exists() and hasattr(s.model, "logits"):
        text = continue_text(s.model, s.run, s.config, s.world, SAMPLE_PROMPT, Sampling())
        print(f"sample after step {outcome.step}:\n{SAMPLE_PROMPT}{text}\n")
    print(f"wrote {s.run.plot} and {s.run.metrics}")
    print(f'next: loongforge infer {root} --prompt "Python "')


def _restored(run: RunDir, config: Config, chosen: Chosen) -> Restored:
    if isinstance(chosen, Path):
        return load_bundle(chosen)
    store = open_checkpointer(run.root, config.ckpt, read_only=True)
    try:
        return store.load(chosen)
    finally:
        store.close()


def load_model(run: RunDir, config: Config, world: World, chosen: Chosen) -> tuple[torch.nn.Module, Restored]:
    """The run's model with the weights of a checkpoint, in eval mode on the world's device.

    Raises:
        CheckpointError: the checkpoint cannot be read, or its tensors have other names or shapes than the model's.
    """
    restored = _restored(run, config, chosen)
    weights = {n.removeprefix("model."): t for n, t in restored.tensors.items() if n.startswith("model.")}
    model = make_model(config, restored.items["train"]["vocab_size"], world.device)
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:
        raise CheckpointError(
            f"checkpoint of step {restored.step} does not fit the model of {run.root}: {e}"
        ) from e
    return model.eval(), restored


def _check_same_data(paths: data.DataPaths, restored: Restored) -> None:
    train = data.open_split(paths.train, None)
    found, expected = train.fingerprint, restored.items["data"]["fingerprint"]
    train.close()
    if found != expected:
        raise DataError(
            f"{paths.train}: the run was trained on other data (fingerprint {expected}, here {found})"
        )


def evaluate_run(path: str | Path, step: Chosen, overrides: Sequence[str] = ()) -> str:
    """Evaluate a checkpoint on the whole eval split; returns one line to print."""
    run = rundir.find(path)
    config = rundir.read_config(run, list(overrides))
    with World.from_environment(config.device, config.dist) as world:
        paths = data.find(config.data, run.data)
        if paths is None or paths.eval is None:
            raise DataError(f"{path}: its eval split is not there (or data.eval_fraction was 0)")
        model, restored = load_model(run, config, world, step)
        _check_same_data(paths, restored)
        dataset = data.open_split(paths.eval, config.model.vocab_size)
        job = EvalJob(dataset, config.loader, config.batch.size, 0, autocast_for(config, world.device))
        result = job.run(model, world, lambda: 0)
        dataset.close()
    assert result is not None
    return (
        f"step {restored.step}: eval loss {result.loss:.4f} nats per token, perplexity {result.perplexity:.2f}, "
        f"{result.tokens} tokens"
    )


def generate_text(path: str | Path, prompt: str, sampling: Sampling, step: Chosen = None) -> str:
    """Continue ``prompt`` with a checkpoint's model; returns the new text only."""
    run = rundir.find(path)
    config = rundir.read_config(run)
    with World.from_environment(config.device, config.dist) as world:
        model, _ = load_model(run, config, world, step)
        return continue_text(model, run, config, world, prompt, sampling)


def continue_text(
    model: torch.nn.Module, run: RunDir, config: Config, world: World, prompt: str, sampling: Sampling
) -> str:
    """What the model writes behind ``prompt``, with the run's tokenizer and window.

    Raises:
        RunError: the model has no ``logits``, the run no tokenizer, or the prompt no token.
    """
    if not hasattr(model, "logits"):
        raise RunError(f"{config.model.name} has no method logits(tokens), which generating text needs")
    tokenizer = rundir.read_tokenizer(run)
    ids = torch.from_numpy(tokenizer.encode(prompt)).to(world.device, torch.int64)
    if not ids.numel():
        raise RunError("the prompt is empty: give at least one character")
    with autocast_for(config, world.device)():
        return tokenizer.decode(generate(model, ids, sampling, config.data.max_len))


def run_digest(path: str | Path, step: Chosen) -> tuple[int, str]:
    """(step, sha256) of a checkpoint."""
    run = rundir.find(path)
    restored = _restored(run, rundir.read_config(run), step)
    return restored.step, digest(restored)
