"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import lf_iouring as lfi
from lf_meta.errors import ReadError
from lf_meta.feed import Batch, to_micro_batches
from lf_meta.metrics import Row, StepRecord
from lf_meta.optim import accumulate, normalise_and_clip
from lf_meta.progress import Progress
from lf_meta.schedule import learning_rate
from lf_meta.seeding import seed_all
from lf_meta.session import Session


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``signum`` is the stop signal, or 0 when all steps are done."""

    step: int
    signum: int = 0


def train(s: Session) -> Outcome:
    """Run the remaining steps of a session.

    Every point where ranks could disagree (stop, eval, save) is decided by the step number or by
    ``s.stop.poll()``, which returns the same on all ranks.
    """
    config, last = s.config, s.config.run.steps
    signum = s.stop.poll()
    with Progress(s.step, last, s.world.is_main) as progress:
        if not signum and s.step and _due(s.step, config.eval.every, last) and not _evaluated(s):
            _evaluate(s, progress)  # the run was stopped in this evaluation
        batches = iter(s.feed)
        s.metrics.restart_clock()
        while s.step < last:
            if signum := s.stop.poll():
                break
            waited, batch = _next_batch(batches)
            s.metrics.add(_train_step(s, batch), waited)
            if s.ids_file is not None:
                s.ids_file.append([{"step": s.step + 1, "ids": batch.ids.tolist()}])
            batch.release()
            s.step += 1
            save, evaluate = _due(s.step, config.ckpt.every, last), _due(s.step, config.eval.every, last)
            if save or evaluate or _due(s.step, config.metrics.every, last):
                _report(s, progress)  # before a save: what is not finite must not be saved
            if save:
                s.save()
            if evaluate:
                _evaluate(s, progress)
        _report(s, progress)
        s.save()
    if s.checkpointer is not None:
        s.checkpointer.wait()
    s.stop.close()
    s.world.barrier()  # rank 0 may still have been writing: nobody leaves before the state is durable
    return Outcome(s.step, signum)


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _next_batch(batches: Iterator[Batch]) -> tuple[float, Batch]:
    start = time.perf_counter()
    try:
        batch = next(batches)
    except lfi.DataError as e:
        raise ReadError(str(e)) from e
    return time.perf_counter() - start, batch


def _train_step(s: Session, batch: Batch) -> StepRecord:
    """One optimizer step; nothing in here waits for the device."""
    optim = s.config.optim
    seed_all(s.config.run.seed, s.step, s.world.rank)
    floor = optim.lr * optim.min_lr_ratio
    lr = learning_rate(s.step, peak=optim.lr, floor=floor, warmup=optim.warmup, total=s.config.run.steps)
    for group in s.optimizer.param_groups:
        group["lr"] = lr
    s.optimizer.zero_grad(set_to_none=True)
    micro_batches = to_micro_batches(batch, s.config.batch.accum, s.world.device)
    totals = accumulate(s.parallel, micro_batches, s.world.no_sync, s.autocast)
    s.world.sum_(totals)
    norm = normalise_and_clip(s.model.parameters(), totals[1], s.world.size, optim.clip)
    s.optimizer.step()
    return StepRecord(s.step + 1, batch.epoch, lr, totals, norm)


def _report(s: Session, progress: Progress) -> None:
    """Bring the collected metrics to the host (all ranks, so that all of them stop on a non-finite loss)."""
    rows = s.metrics.flush()
    s.tokens_seen += sum(r["tokens"] for r in rows)
    if rows and s.metrics_file is not None:
        s.metrics_file.append(rows)
        progress.show(rows)


def _evaluate(s: Session, progress: Progress) -> None:
    if s.eval_job is None:
        return
    start = time.perf_counter()
    result = s.eval_job.run(s.model, s.world, s.stop.poll)
    if result is not None and s.metrics_file is not None:
        row: Row = {"step": s.step, "eval_loss": result.loss, "eval_tokens": result.tokens}
        s.metrics_file.append([row | {"eval_s": round(time.perf_counter() - start, 3)}])
        progress.note(f"step {s.step}: eval loss {result.loss:.4f} over {result.tokens} tokens")
    s.metrics.restart_clock()


def _evaluated(s: Session) -> bool:
    """Whether this step's evaluation is in the metrics; rank 0 knows and tells."""
    found = s.metrics_file is not None and any(
        r.get("step") == s.step and "eval_loss" in r for r in s.metrics_file.rows()
    )
    return bool(s.world.broadcast_object(found))
