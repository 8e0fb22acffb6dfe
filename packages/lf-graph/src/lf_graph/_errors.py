"""Errors of lf-graph. Each carries what happened as attributes and says what to do."""

from __future__ import annotations

_SHOWN = 6  # differences in a message; all of them are in the attribute


class GraphError(Exception):
    """Base of everything this package raises on purpose."""


class GraphCaptureError(GraphError):
    """A function cannot be captured.

    Attributes:
        op: the operation, such as ``aten._local_scalar_dense`` (``.item()``).
        where: ``file:line`` of the user's code that called it, or "" when it is not known.
        why: the reason, one sentence.
        fix: what to write instead.
    """

    def __init__(self, op: str, where: str, why: str, fix: str) -> None:
        self.op, self.where, self.why, self.fix = op, where, why, fix
        place = f" at {where}" if where else ""
        super().__init__(f"{op}{place}: {why}; {fix}")


class SignatureError(GraphError):
    """A replay was called with inputs that the graph was not captured for; lists each difference as old -> new.

    Attributes:
        differences: all of them, each as ``path: old -> new``; the message shows the first six.
        fix: what to do instead.
    """

    def __init__(
        self,
        name: str,
        differences: list[str],
        fix: str = "call it as it was captured, pad to these shapes (lf_graph.Buckets), or capture once more",
    ) -> None:
        self.name, self.differences, self.fix = name, differences, fix
        shown = differences[:_SHOWN] + [f"{len(differences) - _SHOWN} more"] * (len(differences) > _SHOWN)
        super().__init__(f"{name} was captured for another call: {'; '.join(shown)}; {fix}")


class AddressError(GraphError):
    """Memory a graph uses by address was replaced (a parameter, a gradient, a buffer, or state of the optimizer).

    The message names it. Write in place (``copy_``, ``load_state_dict`` without ``assign``), or capture anew.
    """


class StaleReplayError(GraphError):
    """A backward came after its forward's saved tensors were overwritten by another replay in its pool.

    Run each backward before the next forward, or give the second chain a pool of its own.
    """


class BudgetError(GraphError):
    """A capture would exceed the byte budget of its pool; raised before it is made, with the bytes in the message."""


class ShardedParameterError(GraphError):
    """A parameter or buffer of a module to capture is spread over ranks: its address is not that of its values.

    Attributes:
        parameter: its dotted name.
        kind: how it is spread.
    """

    def __init__(self, parameter: str, kind: str) -> None:
        self.parameter, self.kind = parameter, kind
        super().__init__(
            f"{parameter} is {kind}, and a graph can only read plain tensors at fixed addresses: use "
            "DistributedDataParallel, or a Chain of Pieces over plain tensors with the all-gather and the "
            "reduce-scatter as Eager elements between them"
        )


class ClosedError(GraphError):
    """Use before the first capture, or after ``close()``: capture, or make a new object."""


class OperandError(GraphError, TypeError):
    """An operator, or a function over models, was given an object of another kind; the message names it.

    Attributes:
        operator: what was called.
        name: the argument.
    """

    def __init__(self, operator: str, name: str, given: object, wanted: str) -> None:
        self.operator, self.name = operator, name
        super().__init__(f"{operator}: {name} is a {type(given).__name__}: give {wanted}")


class NotTunedError(GraphError):
    """A kernel is not tuned yet, tuning at first use is on, and a capture cannot hold the benchmarks.

    Attributes:
        kernel: its name among the tunables.
        key: what would have to be tuned.
    """

    def __init__(self, kernel: str, key: tuple[int | str | bool, ...]) -> None:
        self.kernel, self.key = kernel, key
        super().__init__(
            f"{kernel} is not tuned for {key}, and tuning cannot run inside a capture: run it once before (a warm-up "
            "does), call lf_graph.tune.run() before, or turn tuning at first use off"
        )
