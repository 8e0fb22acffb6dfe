"""Random ids for the benchmarks of lf-iouring alone, as .loongbin for us and as an array for torch."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

import lf_format

VOCAB = 50_257


def prepare(root: Path, records: int, length: int) -> None:
    """`records` records of `length` uint16 ids: tokens.bin raw, tokens.loongbin."""
    info = lf_format.TokenizerInfo("random", "00")
    rng = np.random.default_rng(0)
    with (
        open(root / "tokens.bin", "wb") as raw,
        lf_format.Writer(
            root / "tokens.loongbin", vocab_size=VOCAB, tokenizer=info, buckets=(length,)
        ) as writer,
    ):
        for first in range(0, records, 4096):
            rows = rng.integers(0, VOCAB, (min(4096, records - first), length), dtype=np.uint16)
            raw.write(rows.tobytes())
            for row in rows:
                writer.append(row)


class Rows:
    """Map-style data set over a memmap whose __getitems__ gathers a whole batch at once."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens = np.memmap(path, np.uint16, "r").reshape(-1, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.from_numpy(self.tokens[indices])


def keep(batch: torch.Tensor) -> torch.Tensor:
    """A collate function that has nothing to do."""
    return batch


def heading(info: dict[str, Any]) -> str:
    """Machine and versions in one line."""
    return (
        f"{info['cores']} x {info['cpu']}, Linux {info['kernel']}, load {info['load']:.1f}; "
        f"Python {info['python']}, torch {torch.__version__}, numpy {np.__version__}; {info['date']}"
    )
