"""A plan: every buffer of one backward pass, when it lives, and where parameter gradients lie in an arena."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ._offsets import Span, aligned, peak_bytes
from ._policy import Policy

Kind = Literal["parameter", "activation", "temporary", "saved"]
Method = Literal["dry run", "real run", "graph walk"]
Count = Literal["buffer", "slot"]
GRADIENTS: tuple[Kind, ...] = ("parameter", "activation", "temporary")
LASTING: tuple[Kind, ...] = ("parameter", "activation")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One buffer, however many tensors view it.

    Attributes:
        name: of the parameter, else of the autograd node or operator that allocated it.
        kind: "parameter" (ends as a parameter's gradient), "activation" (gradient that outlives the step that made
            it), "temporary" (gone within its step) or "saved" (by the forward pass, for the backward pass).
        nbytes: bytes asked for.
        start, end: first and last step at which it lives; a step is the execution of one autograd node.
        born, died: the same in moments, which are finer: allocations and releases, counted. It no longer lives
            at `died`.
    """

    name: str
    kind: Kind
    nbytes: int
    start: int
    end: int
    born: int
    died: int

    @property
    def steps(self) -> int:
        """Steps from the one that made it to the last that needs it; 0 if that is the same."""
        return self.end - self.start

    @property
    def span(self) -> Span:
        """Bytes and moments."""
        return Span(self.nbytes, self.born, self.died)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the gradient of a parameter lies in the arena, from the step that completes it to the one that ends it."""

    name: str
    offset: int
    nbytes: int
    start: int
    end: int

    @property
    def span(self) -> Span:
        """Bytes and steps."""
        return Span(self.nbytes, self.start, self.end + 1)


@dataclass(frozen=True, slots=True)
class Slots:
    """How many inputs of autograd nodes of one kind wait for so many steps: the count without merged aliases."""

    kind: Kind
    steps: int
    count: int


@dataclass(frozen=True)
class Plan:
    """The memory of one backward pass, predicted. Bytes are those asked for, before an allocator rounds them.

    Attributes:
        key: hash of the autograd graph with its shapes, of the sizes of what is saved, of the policy and of torch's
            version. A custom function whose backward pass alone has changed keeps it.
        graph: hash of the autograd graph alone.
        method: "dry run" (the pass ran on fake tensors), "real run", or "graph walk" (only the graph of a loss was
            read: saved tensors and temporaries are unknown, and what shares memory is inferred).
        policy: what becomes of parameter gradients.
        torch_version, device: what it holds for.
        steps: autograd nodes executed.
        forward_peak_bytes: highest level of the forward pass above its start; 0 if not known.
        lifetimes: one per buffer.
        placements: offsets of the parameter gradients in the arena, in the order they are complete. Gradients of
            one bucket lie side by side.
        slots: lifetimes counted per node input instead of per buffer.
        origin: where this object comes from; no part of the plan.
    """

    key: str
    graph: str
    method: Method
    policy: Policy
    torch_version: str
    device: str
    steps: int
    forward_peak_bytes: int
    lifetimes: tuple[Lifetime, ...]
    placements: tuple[Placement, ...]
    slots: tuple[Slots, ...]
    origin: str = field(default="made", compare=False)

    def peak(self, *kinds: Kind) -> int:
        """The most bytes that buffers of these kinds take at one moment of the backward pass."""
        return peak_bytes(one.span for one in self._of(kinds))

    def total(self, *kinds: Kind) -> int:
        """Bytes of all buffers of these kinds, as if none were reused."""
        return sum(one.nbytes for one in self._of(kinds))

    @cached_property
    def parameter_peak_bytes(self) -> int:
        """The most bytes of parameter gradients at one moment."""
        return self.peak("parameter")

    @cached_property
    def gradient_peak_bytes(self) -> int:
        """The most bytes allocated by the backward pass at one moment: gradients of all kinds and temporaries."""
        return self.peak(*GRADIENTS)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that the forward pass leaves behind; the backward pass frees them as it goes."""
        return self.total("saved")

    @cached_property
    def backward_peak_bytes(self) -> int:
        """Highest level of the backward pass above the level before the forward pass: gradients and what is saved."""
        return self.peak("saved", *GRADIENTS)

    @property
    def step_peak_bytes(self) -> int:
        """Highest level of forward and backward pass above the level before them."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    @cached_property
    def arena_bytes(self) -> int:
        """Size of the storage that holds all parameter gradients at their offsets."""
        return max((aligned(one.offset + one.nbytes) for one in self.placements), default=0)

    @cached_property
    def arena_bound_bytes(self) -> int:
        """No arena can be smaller: bytes of parameter gradients that are complete and needed at one step."""
        return peak_bytes(one.span for one in self.placements)

    @property
    def reuse(self) -> float:
        """Share of the parameter gradients' bytes that the arena does without, 0 to 1."""
        total = sum(one.nbytes for one in self.placements)
        return max(0.0, 1 - self.arena_bytes / total) if total else 0.0

    def share_below(self, steps: int, count: Count = "buffer", kinds: Iterable[Kind] = LASTING) -> float:
        """Share of lifetimes shorter than so many steps, 0 to 1.

        Args:
            steps: a lifetime of 0 ends in the step that began it.
            count: "buffer" counts memory, each buffer once; "slot" counts every input of every node, so that a
                gradient passed on unchanged counts again. Shares over slots are always the rosier ones.
            kinds: which lifetimes; by default all gradients but those that are gone within a step.
        """
        wanted = set(kinds)
        if count == "slot":
            lives = [(one.steps, one.count) for one in self.slots if one.kind in wanted]
        else:
            lives = [(one.steps, 1) for one in self.lifetimes if one.kind in wanted]
        below = sum(times for life, times in lives if life < steps)
        return below / max(1, sum(times for _, times in lives))

    def __str__(self) -> str:
        from ._report import describe

        return describe(self)

    def _of(self, kinds: Iterable[Kind]) -> list[Lifetime]:
        wanted = set(kinds)
        return [one for one in self.lifetimes if one.kind in wanted]
