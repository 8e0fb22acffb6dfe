"""All passes in order, each with its switch, and a report of what each of them did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from lf_hal.lir.errors import LirError
from lf_hal.lir.graph import Graph
from lf_hal.lir.rewrite import remove_dead
from lf_hal.lir.verify import verify
from lf_hal.passes.batch_norm import fold_affine, lower_batch_norm
from lf_hal.passes.fuse import fuse_conv, fuse_linear, fuse_multiply_add, fuse_residual
from lf_hal.passes.simplify import fold_constants, simplify

__all__ = ["ConflictingSwitchesError", "Optimized", "PassOptions", "Step", "optimize", "optimize_and_report"]


class ConflictingSwitchesError(LirError):
    """Two switches that say the opposite. Attribute ``switches``: both."""

    def __init__(self, switches: tuple[str, str]) -> None:
        self.switches = switches
        super().__init__(f"--{switches[0]} and --{switches[1]} say the opposite: give one of them")


@dataclass(frozen=True)
class PassOptions:
    """Which passes run; all do by default.

    Attributes:
        remove_dead: drop ops and weights that no output needs.
        simplify: drop ops that move nothing, join moves in a row.
        fold_constants: compute what depends on no input and no weight.
        lower_batch_norm: batch norm to one multiply-add per element. There is no kernel for what stays.
        fold_affine: that multiply-add into the weights of the convolution before it.
        fuse_conv: convolution, per-channel multiply-add and activation as one op.
        fuse_residual: convolution, sum with another array (a shortcut) and activation as one op.
        fuse_linear: linear and activation as one op.
        cache_line_padding: memory is laid out so that neighbours do not fall on the same sets of a cache.
        enable_vma_fusion: a product and a sum as one multiply-add (``--enable-vma-fusion``, ``--disable-vma``).
    """

    remove_dead: bool = True
    simplify: bool = True
    fold_constants: bool = True
    lower_batch_norm: bool = True
    fold_affine: bool = True
    fuse_conv: bool = True
    fuse_residual: bool = True
    fuse_linear: bool = True
    enable_vma_fusion: bool = True
    cache_line_padding: bool = True

    @classmethod
    def from_switches(cls, switches: Iterable[str]) -> PassOptions:
        """Options from names of the command line, with or without their dashes; others than these two pass by.

        Raises:
            ConflictingSwitchesError: both of them.
        """
        names = {s.lstrip("-") for s in switches}
        if {"enable-vma-fusion", "disable-vma"} <= names:
            raise ConflictingSwitchesError(("enable-vma-fusion", "disable-vma"))
        return cls(enable_vma_fusion="disable-vma" not in names)

    @classmethod
    def none(cls) -> PassOptions:
        """Every pass off."""
        return cls(**dict.fromkeys((f.name for f in fields(cls)), False))


PASSES: tuple[tuple[str, Callable[[Graph], Graph]], ...] = (
    ("remove_dead", remove_dead),
    ("simplify", simplify),
    ("fold_constants", fold_constants),
    ("lower_batch_norm", lower_batch_norm),
    ("fold_affine", fold_affine),
    ("fuse_conv", fuse_conv),
    ("fuse_residual", fuse_residual),
    ("fuse_linear", fuse_linear),
    ("enable_vma_fusion", fuse_multiply_add),
)
"""By the names of their options, in the order in which they run."""


@dataclass(frozen=True)
class Step:
    """What one pass did: kinds of ops of which there are fewer or more after it, and by how many.

    ``ran`` is False where it was switched off.
    """

    name: str
    ran: bool
    fewer: tuple[tuple[str, int], ...] = ()
    more: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        if not self.ran:
            return f"{self.name}: off"
        changes = [f"-{n} {kind}" for kind, n in self.fewer] + [f"+{n} {kind}" for kind, n in self.more]
        return f"{self.name}: {', '.join(changes) or 'nothing to do'}"


@dataclass(frozen=True)
class Optimized:
    """A graph, and one step for every pass."""

    graph: Graph
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def optimize(graph: Graph, options: PassOptions | None = None) -> Graph:
    """``graph`` after all passes that are on; same inputs, same number of outputs, equal up to rounding.

    Raises:
        InvalidGraphError: ``graph`` is not sound.
    """
    return optimize_and_report(graph, options).graph


def optimize_and_report(graph: Graph, options: PassOptions | None = None) -> Optimized:
    """As :func:`optimize`, and what each pass did."""
    verify(graph)
    chosen = options or PassOptions()
    steps = []
    for name, run in PASSES:
        if not getattr(chosen, name):
            steps.append(Step(name, False))
            continue
        after = run(graph)
        old, new = (Counter(op.kind for op in g.ops) for g in (graph, after))
        steps.append(Step(name, True, _sorted(old - new), _sorted(new - old)))
        graph = after
    verify(graph)
    return Optimized(graph, tuple(steps))


def _sorted(found: Counter[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(found.items()))
