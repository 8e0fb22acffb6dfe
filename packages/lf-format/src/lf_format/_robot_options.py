"""What preprocess_robot is asked for, checked, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass

from lf_format._container import WriteReport
from lf_format._errors import FormatError
from lf_format._layout import PROFILE_LFG
from lf_format._options import CodecOptions
from lf_format._schema import TokenizerInfo
from lf_format._tokenizers import Tokenizer


@dataclass(frozen=True)
class RobotReport:
    """What `preprocess_robot` did.

    Attributes:
        version: of the data set.
        episodes, frames: written; one record a frame.
        cameras: field names of the cameras written.
        skipped_cameras: (feature, reason).
        dropped_episodes: (episode_index, reason).
        notes: anything else that is not in the output as it was in the input.
        output: train.lfg.
        eval: eval.lfg, None when nothing was held out.
        eval_episodes: episode_index of the episodes in it.
        tokenizer: of the field `tokens`, None without.
    """

    version: str
    episodes: int
    frames: int
    cameras: tuple[str, ...]
    skipped_cameras: tuple[tuple[str, str], ...]
    dropped_episodes: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]
    output: WriteReport
    eval: WriteReport | None
    eval_episodes: tuple[int, ...]
    tokenizer: TokenizerInfo | None


@dataclass(frozen=True)
class RobotOptions:
    """Arguments of preprocess_robot; checked when made."""

    size: tuple[int, int] | None
    horizon: int
    relative: tuple[str, ...]
    tokenizer: Tokenizer | None
    eval_episodes: frozenset[int]
    eval_fraction: float
    seed: int
    workers: int
    codec: CodecOptions
    resume: bool | None

    def __post_init__(self) -> None:
        self.codec.check_profile(PROFILE_LFG)
        if self.horizon < 1 or self.workers < 1:
            found = (self.horizon, self.workers)
            raise FormatError("action_horizon and num_workers", expected=">= 1", found=found)
        if not 0 <= self.eval_fraction < 1:
            raise FormatError("eval_fraction", expected="0 <= fraction < 1", found=self.eval_fraction)
        if self.eval_fraction and self.eval_episodes:
            raise FormatError("eval_fraction excludes eval_episodes", found=sorted(self.eval_episodes))
