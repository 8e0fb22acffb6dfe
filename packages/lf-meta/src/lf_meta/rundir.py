"""The folder of one run: its names, its creation, and finding it again."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

import lf_format as lff
from lf_meta.config import Config, load_config
from lf_meta.config_load import flatten, read_file
from lf_meta.errors import ConfigError, RunError

# what weights, sample order and checkpoints of a run depend on
_FIXED_DATA = tuple(f"data.{key}" for key in ("path", "tokenizer", "max_len", "eval_fraction"))
FIXED = ("run.name", "run.seed", "model.", "batch.size", "ckpt.backend", "ckpt.dir", *_FIXED_DATA)


@dataclass(frozen=True)
class RunDir:
    """Paths inside ``runs/NAME``."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def data(self) -> Path:
        """Packed data, unless data.path was packed already."""
        return self.root / "data"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.root / "metrics.jsonl"

    def sample_ids(self, rank: int) -> Path:
        """One JSON object a step: which records this rank was given."""
        return self.root / f"ids-rank-{rank}.jsonl"

    @property
    def plot(self) -> Path:
        """The loss curve."""
        return self.root / "loss.png"

    @property
    def tokenizer(self) -> Path:
        """What ``infer`` needs to turn ids into text."""
        return self.root / "tokenizer.json"


def create(config: Config) -> RunDir:
    """Make a new folder; an unnamed run gets the next free number.

    Raises:
        RunError: run.name exists already.
    """
    parent = Path(config.run.dir)
    if config.run.name is not None:
        return _make(parent / config.run.name)
    prefix = f"{config.model.name.replace(':', '.')}-{config.model.size}"
    taken = (parent / f"{prefix}-{n:03d}" for n in itertools.count(1))
    return _make(next(path for path in taken if not path.exists()))


def _make(root: Path) -> RunDir:
    try:
        root.mkdir(parents=True)
    except FileExistsError:
        raise RunError(
            f"{root} exists: continue it with `loongforge resume {root}`, or choose another run.name"
        ) from None
    except OSError as e:
        raise RunError(f"cannot create {root}: {e}") from e
    return RunDir(root)


def write_config(run: RunDir, config: Config) -> None:
    """Save the resolved configuration; a kill in between leaves the old one."""
    temporary = run.root / ".config.tmp"
    temporary.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False), encoding="utf-8")
    os.replace(temporary, run.config)


@contextmanager
def hold(run: RunDir) -> Iterator[None]:
    """Be the one process that trains this run; the kernel lets go when it dies.

    Raises:
        RunError: another process holds it.
    """
    with (run.root / ".lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise RunError(f"{run.root} is being trained by another process") from e
        yield


def find(path: str | Path) -> RunDir:
    """An existing run.

    Raises:
        RunError: no config.yaml there.
    """
    run = RunDir(Path(path))
    if not run.config.exists():
        raise RunError(f"{path} is not a run: it has no config.yaml")
    return run


def read_config(run: RunDir, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """The run's configuration with overrides applied.

    Raises:
        RunError: the file is not whole.
        ConfigError: an override changes what the run's checkpoints and sample order depend on.
    """
    if not set(read_file(str(run.config))) >= {"run", "model", "data", "ckpt"}:
        raise RunError(f"{run.config} is not a whole configuration; take the copy from a checkpoint")
    before, after = load_config(str(run.config)), load_config(str(run.config), overrides)
    changes = {k: v for k, v in flatten(after.to_dict()).items() if flatten(before.to_dict()).get(k) != v}
    for key, value in changes.items():
        if key.startswith(FIXED):
            raise ConfigError(key, f"cannot become {value!r} in a run that has begun: start a new run")
    return after


def write_tokenizer(run: RunDir, tokenizer: lff.Tokenizer) -> None:
    """Keep the tokenizer with the run."""
    run.tokenizer.write_text(tokenizer.dumps(), encoding="utf-8")


def read_tokenizer(run: RunDir) -> lff.Tokenizer:
    """The tokenizer a run was trained with.

    Raises:
        RunError: the run has none (its data was given as ids).
    """
    try:
        return lff.loads_tokenizer(run.tokenizer.read_text(encoding="utf-8"))
    except lff.FormatError as e:
        raise RunError(f"{run.tokenizer}: {e}") from e
    except FileNotFoundError:
        raise RunError(
            f"{run.root} has no tokenizer: its data was packed from ids, so ids cannot become text"
        ) from None
