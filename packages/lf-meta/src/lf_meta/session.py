"""Everything one rank holds while it trains, put together in one readable order."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import lf_format as lff
import lf_iouring as lfi
from lf_meta import data, rundir
from lf_meta.checkpoint import (
    Checkpointer,
    Restored,
    collect_state,
    load_bundle,
    open_checkpointer,
    restore_state,
)
from lf_meta.config import Config
from lf_meta.dist import StopConsensus, World, choose_precision
from lf_meta.errors import CheckpointError, ConfigError, NoCheckpointError
from lf_meta.evaluate import EvalJob
from lf_meta.feed import Feed, Order, make_feed
from lf_meta.metrics import MetricsFile, StepMetrics
from lf_meta.models import build_model
from lf_meta.optim import apply_hyperparameters, make_optimizer
from lf_meta.seeding import seed_all
from lf_meta.signals import StopSignal

Autocast = Callable[[], AbstractContextManager[object]]


@dataclass
class Session:
    """One rank's training state; ``step`` counts finished optimizer steps."""

    config: Config
    run: rundir.RunDir
    world: World
    stop: StopConsensus
    model: nn.Module  # as the checkpoint sees it
    parallel: nn.Module  # as the loop calls it
    optimizer: torch.optim.Optimizer
    vocab_size: int
    feed: Feed
    eval_job: EvalJob | None
    autocast: Autocast
    checkpointer: Checkpointer | None  # on rank 0
    metrics_file: MetricsFile | None  # on rank 0
    ids_file: MetricsFile | None  # on every rank, when metrics.sample_ids is on
    metrics: StepMetrics = field(default_factory=StepMetrics)
    step: int = 0
    tokens_seen: int = 0
    saved_step: int = -1

    def save(self) -> None:
        """Checkpoint the finished step, once; returns when the state is copied."""
        if self.checkpointer is not None and self.saved_step != self.step:
            tensors, items = collect_state(self.model, self.optimizer)
            items["train"] = {
                "step": self.step,
                "tokens_seen": self.tokens_seen,
                "vocab_size": self.vocab_size,
            }
            items["data"] = self.feed.state_dict()
            items["config"] = self.config.to_dict()
            self.checkpointer.save(self.step, tensors, items)
        self.saved_step = self.step

    def restore(self, file: Path | None = None) -> tuple[str, ...]:
        """Load the newest good checkpoint on every rank, or the one in `file`, which every rank can read and which then
        becomes the run's newest; returns what there is to tell about it.

        Raises:
            CheckpointError: none can be read, it does not fit the run, or the run has a later one than `file` holds.
        """
        try:
            restored = self._load_newest() if file is None else load_bundle(file)
        except NoCheckpointError:
            self._cut_metrics(0)
            return ("nothing was saved yet: starting at step 0",)
        if file is not None:
            self.world.on_main(lambda: self._refuse_later(file, restored.step))
        restore_state(self.model, self.optimizer, restored)
        apply_hyperparameters(self.optimizer, self.config.optim)
        self._restore_position(restored.items["data"])
        self.step = self.saved_step = restored.items["train"]["step"]
        self.tokens_seen = restored.items["train"]["tokens_seen"]
        self._cut_metrics(self.step)
        if file is not None and self.checkpointer is not None and self.step not in self.checkpointer.steps():
            self.saved_step = -1
            self.save()
        return restored.notes

    def _refuse_later(self, file: Path, step: int) -> None:
        """What is saved from now on must be the newest, or the next resume would take something else."""
        later = [s for s in self.checkpointer.steps() if s > step] if self.checkpointer is not None else []
        if later:
            raise CheckpointError(
                f"{file} holds step {step}, and the run has checkpoints of later steps {later}: resume without --file, "
                "or move the run's checkpoints away"
            )

    def _load_newest(self) -> Restored:
        if self.checkpointer is not None:
            return self.checkpointer.load(None)
        reader = open_checkpointer(self.run.root, self.config.ckpt, read_only=True)
        try:
            return reader.load(None)
        finally:
            reader.close()

    def _cut_metrics(self, step: int) -> None:
        """Forget what was logged after ``step``, also by ranks that this run no longer has."""
        if self.world.is_main:
            for path in (self.run.metrics, *self.run.root.glob("ids-rank-*.jsonl")):
                MetricsFile(path).truncate_after(step)

    def _restore_position(self, state: dict[str, object]) -> None:
        try:
            self.feed.load_state_dict(state)
        except lfi.StateError as e:
            raise ConfigError("data", f"the checkpoint belongs to another order of samples: {e}") from e


def autocast_for(config: Config, device: torch.device) -> Autocast:
    """A context factory for the forward pass."""
    if choose_precision(config.device, device) == "fp32":
        return nullcontext
    return functools.partial(torch.autocast, device.type, torch.bfloat16)


def make_model(config: Config, vocab_size: int, device: torch.device) -> nn.Module:
    """Build the configured model on ``device`` with weights that depend on run.seed alone."""
    seed_all(config.run.seed)
    with device:
        return build_model(config.model.name, config.model.size, vocab_size, config.model.args)


def _open_data(config: Config, run: rundir.RunDir, world: World) -> tuple[lff.Dataset, lff.Dataset | None]:
    found = world.on_main(lambda: data.prepare(config.data, config.run.seed, run.data))
    if world.is_main:
        print(found.note, flush=True)
    vocab = config.model.vocab_size
    train = data.open_split(found.train, vocab)
    held_out = None if found.eval is None else data.open_split(found.eval, vocab or train.vocab_size)
    return train, held_out


def _keep_tokenizer(config: Config, run: rundir.RunDir, train: lff.Dataset) -> None:
    """Store the tokenizer in the run if it is the one the data was made with (ids may come from elsewhere)."""
    tokenizer = lff.load_tokenizer(config.data.tokenizer or "bytes")
    if tokenizer.info == train.tokenizer:
        rundir.write_tokenizer(run, tokenizer)


def _configure_torch(config: Config) -> None:
    if config.device.threads:
        torch.set_num_threads(config.device.threads)
    if config.device.deterministic:
        # cuBLAS reads it when its first handle is made; the value is torch's own documentation's
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _check_batch(config: Config, world: World) -> None:
    pieces = world.size * config.batch.accum
    if config.batch.size % pieces:
        raise ConfigError(
            "batch.size",
            f"{config.batch.size} records cannot be cut into {world.size} ranks x {config.batch.accum} micro-batches",
        )


@contextmanager
def open_session(config: Config, run: rundir.RunDir, world: World, signal: StopSignal) -> Iterator[Session]:
    """Set up one rank inside an entered ``world``; everything opened is closed again in reverse order.

    Raises:
        ConfigError, DataError: before anything is trained.
    """
    _check_batch(config, world)
    _configure_torch(config)
    with ExitStack() as stack:
        train, held_out = _open_data(config, run, world)
        stack.callback(train.close)
        if held_out is not None:
            stack.callback(held_out.close)
        if world.is_main:
            _keep_tokenizer(config, run, train)
        vocab_size = config.model.vocab_size or train.vocab_size
        model = make_model(config, vocab_size, world.device)
        order = Order(config.batch.size, seed=config.run.seed)
        feed = make_feed(train, config.loader, order, world)
        stack.callback(feed.close)
        autocast = autocast_for(config, world.device)
        checkpointer = _open_store(config, run, world)
        if checkpointer is not None:
            stack.callback(checkpointer.close)
        yield Session(
            config,
            run,
            world,
            StopConsensus(world, signal),
            model,
            world.wrap(model),
            make_optimizer(model, config.optim),
            vocab_size,
            feed,
            _eval_job(config, held_out, autocast),
            autocast,
            checkpointer,
            MetricsFile(run.metrics) if world.is_main else None,
            MetricsFile(run.sample_ids(world.rank)) if config.metrics.sample_ids else None,
        )


def _open_store(config: Config, run: rundir.RunDir, world: World) -> Checkpointer | None:
    """The store on rank 0, which alone writes; a store that cannot be opened stops every rank."""
    opened: list[Checkpointer] = []
    world.on_main(lambda: opened.append(open_checkpointer(run.root, config.ckpt)))
    return opened[0] if opened else None


def _eval_job(config: Config, held_out: lff.Dataset | None, autocast: Autocast) -> EvalJob | None:
    if held_out is None:
        return None
    return EvalJob(held_out, config.loader, config.batch.size, config.eval.batches, autocast)
