"""``capture``: one function or module with any arguments as one forward and one backward graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lf_graph._backend import backend_for
from lf_graph._chain import Chain
from lf_graph._errors import BudgetError, GraphCaptureError, GraphError, SignatureError
from lf_graph._members import buffers_as_they_were
from lf_graph._modes import require_no_inference_mode
from lf_graph._names import names_behind
from lf_graph._parallel import require_local
from lf_graph._pool import GraphPool
from lf_graph._registry import NotCopied, forget, register
from lf_graph._sandbox import buffers_of, restored
from lf_graph._segment import Autocast, Piece
from lf_graph._static import Signature, TensorSpec, require_constants, signature_of, tensors_of
from lf_graph._stats import GraphStats


class Captured(NotCopied):
    """A captured call; made by :func:`capture`."""

    def __init__(
        self, fn: Callable[..., Any], chain: Chain, signature: Signature, outputs: Signature, reason: str = ""
    ) -> None:
        self._fn, self._chain, self._signature, self._outputs = fn, chain, signature, outputs
        self._reason, self._eager = reason, 0
        forget(chain)  # its statistics and its end are this object's
        register(self)

    @property
    def reason(self) -> str:
        """Why calls run eagerly (``fallback="eager"`` was given and the capture failed); "" for replays."""
        return self._reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay with new tensors; differentiable.

        Raises:
            SignatureError: anything but tensor values differs from the captured call: shapes, dtypes, devices,
                Python numbers, structure.
            AddressError, ClosedError, StaleReplayError: as a :class:`Chain`.
        """
        if self._reason:
            self._eager += 1
            with self._chain.autocast():
                return self._fn(*args, **kwargs)
        differences = self._signature.differences(signature_of(args, kwargs))
        if differences:
            raise SignatureError(self._chain.name, differences)
        found = self._chain(*tensors_of(args, kwargs))
        return self._outputs.filled(found if isinstance(found, tuple) else (found,))[0][0]

    @property
    def static_inputs(self) -> list[Tensor]:
        """See :attr:`Chain.static_inputs`; in the order of the call's tensors."""
        return self._chain.static_inputs

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters whose gradients are added in place to ``.grad`` by the backward graph."""
        return self._chain.parameters

    def stats(self) -> GraphStats:
        """Counts and bytes so far."""
        return replace(self._chain.stats(), eager=self._eager, reason=self._reason)

    def close(self) -> None:
        """Free the graphs."""
        self._chain.close()
        forget(self)

    def __enter__(self) -> Captured:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def capture(
    fn: Callable[..., Any],
    *args: Any,
    modules: Sequence[nn.Module] = (),
    name: str = "",
    autocast: Autocast | None = None,
    pool: GraphPool | None = None,
    max_bytes: int | None = None,
    copy_outputs: bool = True,
    checkpoint: bool = False,
    fallback: Literal["error", "eager"] = "error",
    **kwargs: Any,
) -> Captured:
    """Capture ``fn(*args, **kwargs)``, forward and backward; everything that is not a tensor is frozen into it.

    Args:
        fn: a module or function; returns any nesting of tensors and constants.
        args, kwargs: a sample call; tensors that want a gradient get one.
        modules: modules ``fn`` uses, whose buffers are left as they were; default: those found behind it.
        name: for errors and statistics.
        autocast, pool, max_bytes, copy_outputs: see :class:`Chain`.
        checkpoint: see :class:`Piece`.
        fallback: "eager" lets the result run ``fn`` as it is, with any arguments, when it cannot be captured or does
            not fit; :attr:`Captured.reason` and ``stats().eager`` tell.

    Returns:
        A function of the same arguments.

    Raises:
        GraphCaptureError: naming operation, file and line. Nothing stays allocated.
        BudgetError: the graphs would need more memory than allowed.
        ShardedParameterError: a parameter behind ``fn`` is spread over ranks.
        GraphError: no tensor among the arguments, or an unknown ``fallback``.
    """
    if fallback not in ("error", "eager"):
        raise GraphError(f'fallback={fallback!r}: it is "error" or "eager"')
    require_constants(args, kwargs)
    require_no_inference_mode(name or "capture")
    tensors = tensors_of(args, kwargs)
    if not tensors:
        raise GraphError("capture needs at least one tensor argument, which says on which device to capture")
    signature = signature_of(args, kwargs)
    owners = tuple(modules) or tuple(names_behind(fn, args, kwargs).roots.values())
    require_local(owners)
    flat = _Flat(fn, signature)
    backend = backend_for(tensors[0].device)
    with restored(backend, buffers_of(owners)), buffers_as_they_were(owners), torch.no_grad():
        flat.learn_outputs(tensors)
    assert flat.outputs is not None
    inputs = tuple(f"in{i}" for i in range(len(tensors)))
    outputs = tuple(f"out{i}" for i, x in enumerate(flat.outputs.leaves) if isinstance(x, TensorSpec))
    name = name or getattr(fn, "__name__", type(fn).__name__)
    if not outputs:
        raise GraphError(
            f"{name} returned no tensor, and a graph computes nothing else: return what is computed"
        )
    piece = Piece(flat, inputs, outputs, name, checkpoint=checkpoint, owners=owners)
    chain = Chain(
        [piece],
        inputs,
        outputs,
        name=name,
        autocast=autocast,
        pool=pool,
        max_bytes=max_bytes,
        copy_outputs=copy_outputs,
    )
    reason = _try(chain, tensors, fallback == "eager")
    return Captured(fn, chain, signature, flat.outputs, reason)


def _try(chain: Chain, tensors: Sequence[Tensor], forgive: bool) -> str:
    """Capture; returns why it was not possible, if that is to be forgiven."""
    try:
        chain.capture(*tensors)
    except (GraphCaptureError, BudgetError) as e:
        if not forgive:
            raise
        return f"{type(e).__name__}: {e}"
    return ""


class _Flat:
    """``fn`` as a function of tensors that returns a tuple of tensors."""

    def __init__(self, fn: Callable[..., Any], signature: Signature) -> None:
        self.fn, self.signature = fn, signature
        self.outputs: Signature | None = None

    def learn_outputs(self, tensors: Sequence[Tensor]) -> None:
        """Run once to see what comes back."""
        self.outputs = signature_of((self._call(tensors),), {})

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_of((self._call(tensors),), {}))

    def _call(self, tensors: Sequence[Tensor]) -> Any:
        args, kwargs = self.signature.filled(tensors)
        return self.fn(*args, **kwargs)
