"""Fused operators in somebody's model: its modules are exchanged for ones of the same parameters and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import nn

from lf_graph.kernels._checks import require_module
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._fused_modules import FUSED, NormOutputs, in_place_of
from lf_graph.kernels._recognise import Left, Recipe, Verdict, gated, gelu, guarded, norm


@dataclass(frozen=True)
class UseReport:
    """What :func:`use` did. It can be undone, by :meth:`undo` or by leaving ``with use(model):``.

    Attributes:
        exchanged: dotted path of each exchanged module to the operator it runs; "" is the whole model.
        left: path of each module that looked like one to exchange to the reason why it was not.
    """

    exchanged: dict[str, str]
    left: dict[str, str]
    _back: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)

    def undo(self) -> None:
        """Puts the modules back, with the parameters, hooks and mode that their replacements have by now.

        What took the place of a replacement since then stays. A second call does nothing.
        """
        while self._back:
            self._back.pop()()

    def __enter__(self) -> UseReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{len(self.exchanged)} exchanged, {len(self.left)} left alone"]
        for table in (self.exchanged, self.left):
            groups: dict[str, list[str]] = {}
            for path, what in table.items():
                groups.setdefault(what, []).append(path or "(the model)")
            lines += [f"  {what}: {_listed(paths)}" for what, paths in groups.items()]
        return "\n".join(lines)


def use(
    model: nn.Module,
    *,
    norms: bool = True,
    activations: bool = True,
    attention: bool = False,
    norm_outputs: NormOutputs = "same",
    implementation: Implementation = "auto",
) -> UseReport:
    """Exchanges modules of ``model``, in place, for modules that run the operators of ``lf_graph.kernels``.

    A module qualifies by what it computes: it is one of torch's own, or a run of its class on random numbers gives
    what the operator gives, with its gradient. So it finds the norms and the gated branches of transformers' Llama,
    Qwen and Mistral, and those of models it has never seen. Functions inside a forward (``F.silu``, rotary positions)
    are not modules, and stay.

    Parameters stay the same objects: an optimizer made before keeps them, ties and ``requires_grad`` hold, and the keys
    of ``state_dict`` do not change. Call it before DistributedDataParallel or after it, but before hooks, sharding or
    quantisation are put on those modules. Copies and pickles of the model keep the exchange. A second call finds
    nothing to do.

    Args:
        model: changed in place, on any device.
        norms: RMSNorm and LayerNorm over the last dimension.
        activations: SwiGLU branches (``down(silu(gate(x)) * up(x))``, gate and up apart or packed), and GELU by tanh.
        attention: for models of transformers, :func:`register_attention` and ``model.set_attn_implementation``.
        norm_outputs: dtype of the norms under autocast. "same" as before. "autocast": autocast's own, which spares
            matrix products their casts and changes nothing where the norms feed nothing else; where a norm is part of
            the residual stream (post-norm models), it would round that.
        implementation: of all the operators; "auto" is Triton on a GPU, and torch elsewhere.

    Returns:
        What was exchanged and what was left, and the way back.

    Raises:
        OperandError: the model is no module.
        ValueError: an unknown ``norm_outputs``.
        GraphError: ``attention=True``, and transformers is missing, or too old.
    """
    require_module("use", "model", model)
    if norm_outputs not in ("same", "autocast"):
        raise ValueError(f"use: norm_outputs={norm_outputs!r}: same or autocast")

    def verdict(module: nn.Module) -> Verdict:
        found = norm(module, norm_outputs, implementation) if norms else None
        if activations:
            found = found or gated(module, implementation) or gelu(module, implementation)
        return guarded(module, found)

    report = UseReport({}, {})
    if attention:
        _exchange_attention(model, implementation, report)
    _exchange_modules(model, verdict, report)
    return report


def _exchange_modules(model: nn.Module, verdict: Callable[[nn.Module], Verdict], report: UseReport) -> None:
    places = list(_places(model))
    # One verdict, and one replacement, for a module that is in several places.
    modules = {id(module): module for *_, module in places if not isinstance(module, FUSED)}
    verdicts = {key: verdict(module) for key, module in modules.items()}
    made = {
        key: in_place_of(modules[key], v.kind, v.attributes)
        for key, v in verdicts.items()
        if isinstance(v, Recipe)
    }
    for path, parent, name, module in places:
        found = verdicts.get(id(module))
        if isinstance(found, Left):
            report.left[path] = found.reason
        elif isinstance(found, Recipe) and parent is None:
            report.left[path] = f"is the model itself: call lf_graph.kernels.{found.operator} in its place"
        elif isinstance(found, Recipe) and parent is not None:
            parent.register_module(name, made[id(module)])
            report.exchanged[path] = found.operator
            report._back.append(_Place(parent, name, module, made[id(module)]).restore)


@dataclass(frozen=True)
class _Place:
    """Where a module was, and what is there now."""

    parent: nn.Module
    name: str
    before: nn.Module
    after: nn.Module

    def restore(self) -> None:
        if self.parent._modules.get(self.name) is self.after:
            self.before.training = self.after.training
            self.parent.register_module(self.name, self.before)


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, str, nn.Module]]:
    """(path, parent, name, module) of every place in the tree, the root first."""
    yield "", None, "", model
    for path, parent in model.named_modules():
        for name, module in parent._modules.items():
            if module is not None:
                yield f"{path}.{name}" if path else name, parent, name, module


def _exchange_attention(model: nn.Module, implementation: Implementation, report: UseReport) -> None:
    from lf_graph.kernels import _transformers

    found: dict[str, Any] = _transformers.models_in(model)
    if not found:
        report.left[""] = "attention=True is for models of transformers, of which there is none"
    for path, inner in found.items():
        back = _transformers.exchange(inner, implementation)
        if back is None:
            report.left[path] = f"{type(inner).__name__} does not let its attention be set"
        else:
            report.exchanged[path] = "attention"
            report._back.append(back)


def _listed(paths: list[str]) -> str:
    """Paths of a list of blocks as one: layers.*.norm (24)."""
    groups: dict[str, int] = {}
    for path in paths:
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        groups[pattern] = groups.get(pattern, 0) + 1
    return ", ".join(f"{pattern} ({count})" if count > 1 else pattern for pattern, count in groups.items())
