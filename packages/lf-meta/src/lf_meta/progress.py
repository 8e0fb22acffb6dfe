"""What a person sees while training: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

from lf_meta.metrics import Row


class Progress:
    """Loss, tokens/s and data-wait share after each log interval; silent on ranks other than 0."""

    def __init__(self, step: int, last: int, enabled: bool) -> None:
        self._enabled, self._last = enabled, last
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=last, initial=step, unit="step", dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, rows: list[Row]) -> None:
        """Report the newest rows; the loss shown is their mean weighted by tokens."""
        tokens = sum(r["tokens"] for r in rows)
        loss = sum(r["loss"] * r["tokens"] for r in rows) / max(tokens, 1)
        last = rows[-1]
        text = f"loss {loss:.4f}  {last['tokens_per_s']:,.0f} tok/s  data wait {last['wait_pct']:.1f} %"
        if self._bar is not None:
            self._bar.update(last["step"] - self._bar.n)
            self._bar.set_postfix_str(text)
        else:
            self.note(f"step {last['step']}/{self._last}  {text}  lr {last['lr']:.2e}")

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)
