"""Everything lf-meta raises on purpose."""

from __future__ import annotations


class MetaError(Exception):
    """Base of lf-meta's errors; ``exit_code`` is what the command line returns for it."""

    exit_code = 1


class ConfigError(MetaError):
    """A setting is unknown, mistyped or impossible.

    Attributes:
        key: dotted path of the setting, e.g. ``optim.lr``.
    """

    exit_code = 2

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem = key, problem

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        return ConfigError, (self.key, self.problem)  # travels from rank 0 to the others


class DataError(MetaError):
    """The data cannot be used with this configuration (wrong vocabulary, empty split, unreadable file)."""

    exit_code = 2


class ReadError(MetaError):
    """A record could not be read, or is not as it was written; the message names file, record and offset."""


class CheckpointError(MetaError):
    """A checkpoint could not be written or read back; earlier ones are intact."""


class NoCheckpointError(CheckpointError):
    """The run has not saved anything yet (or not the step that was asked for)."""

    exit_code = 2


class RunError(MetaError):
    """A run directory is missing, unfinished or already in use."""

    exit_code = 2


class NonFiniteLossError(MetaError):
    """The loss or its gradient became NaN or infinite; no checkpoint was written at or after ``step``.

    Attributes:
        step: first step whose loss or gradient norm was not finite.
    """

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        super().__init__(
            f"loss at step {step} is {loss}, gradient norm {grad_norm}: the last checkpoint is from before it; "
            "lower optim.lr or raise optim.warmup and resume"
        )
        self.step = step
