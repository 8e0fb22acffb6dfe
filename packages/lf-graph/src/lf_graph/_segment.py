"""Pieces that follow each other without a break, captured as a forward and a backward graph each.

Values between pieces are named edges at fixed addresses: an output of one piece is the input of the next without a
copy. A value used by several pieces gets its gradients summed inside the graphs, in reverse order of use. Each
piece's backward hands the gradients of its parameters to a :class:`~lf_graph._gradients.GradientSink`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lf_graph._backend import Backend, Graph, Position
from lf_graph._early import handing_over
from lf_graph._errors import GraphError
from lf_graph._gradients import Collect, GradientSink
from lf_graph._names import names_behind
from lf_graph._pool import GraphPool
from lf_graph._recorder import refusing

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Piece:
    """A function or module that becomes two small graphs: forward and backward.

    Attributes:
        fn: takes the input values in order, returns a tensor or a tuple of tensors.
        inputs: names of the values it takes; empty means the outputs of the element before it.
        outputs: names of what it returns; empty means one value with a name of its own.
        name: for errors, statistics and NVTX ranges.
        checkpoint: keep only the inputs, and compute the forward again inside the backward graph, with the
                same random numbers.
        owners: modules that ``fn`` uses, when it is neither a module nor a method of one; default: those found
            behind it (that it encloses, or reads as globals of its file).
    """

    fn: Callable[..., Any]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    name: str = ""
    checkpoint: bool = False
    owners: tuple[nn.Module, ...] = ()

    def modules(self) -> list[nn.Module]:
        """The modules whose buffers, modes and parameters ``fn`` uses."""
        owner = getattr(self.fn, "__self__", self.fn)
        if isinstance(owner, nn.Module):
            return [owner]
        return list(self.owners) or list(names_behind(self.fn).roots.values())


@dataclass
class _Run:
    """One execution of a piece with gradient boundaries around it."""

    piece: Piece
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)

    def forward(self, autocast: Autocast) -> None:
        torch.clear_autocast_cache()  # inside a caller's autocast, casts of the warm-up would be read for ever
        with autocast():
            result = self.piece.fn(*self.inputs)
        torch.clear_autocast_cache()
        self.outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        if strange := [type(o).__name__ for o in self.outputs if not isinstance(o, Tensor)]:
            name = self.piece.name
            raise GraphError(f"{name} returned {strange}: a piece gives one tensor, or a tuple of tensors")

    def forward_without_saving(self, autocast: Autocast) -> None:
        """The forward of a checkpointed piece: its outputs want a gradient, but nothing is kept for it."""
        with torch.no_grad():
            self.forward(autocast)
        trained = any(p.requires_grad for m in self.piece.modules() for p in m.parameters())
        if trained or any(t.requires_grad for t in self.inputs):
            self.outputs = [
                o.requires_grad_() if o.is_floating_point() or o.is_complex() else o for o in self.outputs
            ]


def leaves_behind(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Leaf tensors other than ``inputs`` that ``outputs`` were computed from and that want a gradient, each once."""
    known = {id(t) for t in inputs}
    found = {id(o): o for o in outputs if o.is_leaf and o.requires_grad and id(o) not in known}
    seen: set[Any] = set()
    stack = [o.grad_fn for o in outputs if o.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            found.setdefault(id(leaf), leaf)
        stack += [n for n, _ in node.next_functions if n is not None]
    return list(found.values())


@dataclass
class Captured:
    """One piece after capture; ``random`` when its forward draws random numbers."""

    piece: Piece
    random: bool = False
    forward: Graph | None = None
    backward: Graph | None = None
    position: Position | None = None


class Segment:
    """Captured pieces; see :meth:`capture`.

    Args:
        pieces: in order of execution, with their names resolved.
        outputs: names of the values that leave the segment.
        pool: memory for everything captured.
        autocast: context factory for the forwards.
    """

    def __init__(
        self, pieces: Sequence[Piece], outputs: Sequence[str], pool: GraphPool, autocast: Autocast
    ) -> None:
        self.pieces, self.output_names, self.pool, self.autocast = list(pieces), list(outputs), pool, autocast
        self.backend: Backend = pool.backend
        self.captured: list[Captured] = []
        self.values: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self.seeds: dict[str, Tensor] = {}
        self._runs: list[_Run] = []
        self._random: list[bool] = []
        self.copies: list[tuple[str, tuple[int, ...]]] = []  # gradients that a backward copies: why, shape

    # -- eager, before the capture ---------------------------------------------------------------------------

    def warm_up(self, values: dict[str, Tensor], runs: int = 2) -> list[Tensor]:
        """Run forward and backward eagerly, so that everything lazy happens now.

        Returns:
            The parameters that got a gradient, each once.
        """
        found = Collect()
        for _ in range(runs):
            self._run_eagerly(values, found)
        return found.parameters

    def dry_run(self, values: dict[str, Tensor]) -> None:
        """Run forward and backward once, refusing what a graph cannot hold: a failed capture costs more.

        Raises:
            GraphCaptureError: naming operator, file and line.
        """
        self._run_eagerly(values, Collect(), refusing)

    def _run_eagerly(
        self, values: dict[str, Tensor], sink: GradientSink, mode: Autocast = nullcontext
    ) -> None:
        self._begin(values)
        self._random = []
        for piece in self.pieces:
            before = self.backend.rng_position()
            with mode():
                self._forward(piece)
            self._random.append(not _same_position(before, self.backend.rng_position()))
        self.make_seeds()
        self.grads = dict(self.seeds)
        for run in reversed(self._runs):
            with mode():
                self._backward(run, sink)
        self._runs = []

    # -- capture ----------------------------------------------------------------------------------------------

    def capture_forward(self, values: dict[str, Tensor]) -> None:
        """Capture every piece's forward on the given static inputs, in order."""
        self._begin(values)
        for piece, random in zip(self.pieces, self._random, strict=True):
            with self.backend.named(f"capture {piece.name}"):
                graph, _ = self.backend.capture(lambda p=piece: self._forward(p), self.pool.handle)  # type: ignore[misc]
            self.captured.append(Captured(piece, random=random, forward=graph))

    def capture_backward(self, sink: GradientSink) -> None:
        """Capture every piece's backward in reverse order; ``seeds`` hold the gradients of the outputs."""
        self.copies = []
        self.grads = dict(self.seeds)
        for captured, run in zip(reversed(self.captured), reversed(self._runs), strict=True):
            if any(n in self.grads for n in captured.piece.outputs):
                captured.backward = self._capture_backward(run, sink)
        self._runs.clear()

    def _capture_backward(self, run: _Run, sink: GradientSink) -> Graph:
        position = self.backend.rng_position()
        graph, _ = self.backend.capture(lambda: self._backward(run, sink), self.pool.handle)
        self.backend.set_rng_position(position)
        return graph

    def make_seeds(self) -> None:
        """Allocate the gradients that enter from outside, one for each output that wants one; all ones."""
        wanted = [(n, self.values[n]) for n in self.output_names]
        self.seeds = {n: torch.ones_like(v) for n, v in wanted if v.requires_grad}

    # -- replay -----------------------------------------------------------------------------------------------

    def replay_forward(self) -> None:
        """Replay the forwards in order."""
        for captured in self.captured:
            if captured.piece.checkpoint and captured.random:
                captured.position = self.backend.rng_position()
            if captured.forward is not None:
                with self.backend.named(captured.piece.name):
                    captured.forward.replay()

    def replay_backward(self) -> None:
        """Replay the backwards in reverse order."""
        for captured in reversed(self.captured):
            if captured.backward is not None:
                self._replay_one_backward(captured, captured.backward)

    def _replay_one_backward(self, captured: Captured, graph: Graph) -> None:
        with self.backend.named(f"{captured.piece.name}.backward"):
            if captured.position is None:
                graph.replay()
                return
            now = self.backend.rng_position()
            self.backend.set_rng_position(captured.position)  # the recomputed forward draws the same numbers
            graph.replay()
            self.backend.set_rng_position(now)

    def graphs(self) -> list[Graph]:
        """All graphs."""
        return [g for c in self.captured for g in (c.forward, c.backward) if g is not None]

    def made(self) -> list[Tensor]:
        """The values that the pieces' forwards wrote."""
        return [self.values[n] for p in self.pieces for n in p.outputs]

    def close(self) -> None:
        """Free the graphs and the tensors between them."""
        for graph in self.graphs():
            graph.close()
        self.captured, self.values, self.grads, self.seeds = [], {}, {}, {}
        self._runs = []

    # -- one piece, eagerly or under capture ---------------------------------------------------------------------

    def _begin(self, values: dict[str, Tensor]) -> None:
        self.values = dict(values)
        self._runs = []

    def _forward(self, piece: Piece) -> None:
        run = _Run(piece, [_boundary(self.values[n]) for n in piece.inputs])
        if piece.checkpoint:
            run.forward_without_saving(self.autocast)
        else:
            run.forward(self.autocast)
        if len(run.outputs) != len(piece.outputs):
            raise GraphError(f"{piece.name} returned {len(run.outputs)} values, named {list(piece.outputs)}")
        self.values |= dict(zip(piece.outputs, run.outputs, strict=True))
        self._runs.append(run)

    def _backward(self, run: _Run, sink: GradientSink) -> None:
        piece = run.piece
        if piece.checkpoint:
            run.forward(self.autocast)
        named = zip(piece.outputs, run.outputs, strict=True)
        pairs = [(o, self.grads[n]) for n, o in named if n in self.grads and o.requires_grad]
        if not pairs:
            return
        outputs, grads = [o for o, _ in pairs], [g for _, g in pairs]
        inputs = [t for t in run.inputs if t.requires_grad]
        parameters = leaves_behind(outputs, inputs)
        with handing_over(parameters, sink, self._own) as taken:
            found = torch.autograd.grad(outputs, inputs + parameters, grads, allow_unused=True)
        names = [n for n, t in zip(piece.inputs, run.inputs, strict=True) if t.requires_grad]
        for name, grad in zip(names, found[: len(inputs)], strict=True):
            if grad is not None:
                self._add_edge(name, grad)
        pairs = [(p, g) for p, g in zip(parameters, found[len(inputs) :], strict=True) if id(p) not in taken]
        used = [(p, g) for p, g in pairs if g is not None]
        if used:
            sink.take([p for p, _ in used], [self._own(g) for _, g in used])

    def _add_edge(self, name: str, grad: Tensor) -> None:
        known = self.grads.get(name)
        if known is None:
            self.grads[name] = self._own(grad)
        elif known is self.seeds.get(name):
            self.grads[name] = known + grad  # what comes from outside is read again by the next replay
        else:
            known.add_(grad)

    def _own(self, grad: Tensor) -> Tensor:
        """``grad`` in memory that no edge uses: an addition hands one tensor to both of its inputs."""
        taken = {g.untyped_storage()._cdata for g in self.grads.values()}
        if grad.layout is not torch.strided:
            raise GraphError(
                f"a gradient of shape {list(grad.shape)} is {grad.layout}, and a graph has dense gradients at fixed "
                "addresses: build nn.Embedding with sparse=False, or keep it in an Eager element"
            )
        if not grad.is_contiguous():
            self.copies.append(("not contiguous", tuple(grad.shape)))
            return grad.contiguous()
        if grad.untyped_storage()._cdata in taken:
            self.copies.append(("shared with another edge", tuple(grad.shape)))
            return grad.clone()
        return grad


def _boundary(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _same_position(a: Position, b: Position) -> bool:
    if isinstance(a.value, Tensor):
        return torch.equal(a.value, b.value)
    return bool(a.value == b.value)
