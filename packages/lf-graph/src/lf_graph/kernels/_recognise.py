"""Which modules compute what a fused operator computes. Structure proposes; a run on random numbers decides.

A run is of the module's own class, with small random parameters on the CPU in the place of its own: it costs the same
for every model, reads no weight, and is not fooled by weights of one or zero. torch's own classes need none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._fused_modules import (
    FusedGELUTanh,
    FusedLayerNorm,
    FusedRMSNorm,
    FusedSwiGLU,
    NormOutputs,
    Result,
)
from lf_graph.kernels._rows import MAX_WIDTH
from lf_graph.kernels.gelu import gelu_tanh_plain
from lf_graph.kernels.norm import layer_norm, rms_norm

_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """What takes the place of a module: the operator, the class, and its attributes beside the module's own."""

    operator: str
    kind: type[nn.Module]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Left:
    """Why a module that looks like one to exchange is not."""

    reason: str


Verdict = Recipe | Left | None


def guarded(module: nn.Module, found: Verdict) -> Verdict:
    """``found``, or what a replacement would lose."""
    if not isinstance(found, Recipe):
        return found
    # Children that a fused forward no longer calls.
    silent = [m for m in module.children() if not isinstance(m, nn.Linear)]
    for m in (module, *silent):
        if any(getattr(m, hooks) for hooks in _HOOKS):
            return Left(f"{type(m).__name__} has hooks: register them after use()")
        if "forward" in vars(m):
            return Left(f"the forward of this {type(m).__name__} was replaced")
    for name, parameter in module.named_parameters():
        if type(parameter) not in (nn.Parameter, Tensor):
            return Left(
                f"{name} is a {type(parameter).__name__}: call use() before the model is sharded or quantised"
            )
    return found


# -- norms ----------------------------------------------------------------------------------------------------


def norm(module: nn.Module, outputs: NormOutputs, implementation: Implementation) -> Verdict:
    """RMSNorm or LayerNorm over the last dimension, of torch or anybody else."""
    if isinstance(module, (nn.RMSNorm, nn.LayerNorm)) and type(module) in (nn.RMSNorm, nn.LayerNorm):
        if len(module.normalized_shape) != 1:
            return Left(
                f"normalises over {len(module.normalized_shape)} dimensions; the operators over the last"
            )
        kind = FusedRMSNorm if type(module) is nn.RMSNorm else FusedLayerNorm
        return _norm_recipe(
            module, module.normalized_shape[0], module.eps, (kind, "torch"), outputs, implementation
        )
    epsilon = next((e for n in _EPSILONS if isinstance(e := vars(module).get(n), float)), None)
    if epsilon is None or not _holds_only_rows(module):
        return None
    width = len(module.get_parameter("weight"))
    found = _probed_norm(module, width, epsilon)
    return (
        found
        if isinstance(found, Left)
        else _norm_recipe(module, width, epsilon, found, outputs, implementation)
    )


def _norm_recipe(
    module: nn.Module,
    width: int,
    epsilon: float | None,
    found: tuple[type[nn.Module], Result],
    outputs: NormOutputs,
    implementation: Implementation,
) -> Verdict:
    if width > MAX_WIDTH:
        return Left(f"rows of {width} do not fit the registers of a program ({MAX_WIDTH})")
    kind, result = found
    attributes = {
        "epsilon": epsilon,
        "result": result,
        "outputs": outputs,
        "implementation": implementation,
        # what torch's own norms have
        "normalized_shape": (width,),
        "eps": epsilon,
        "elementwise_affine": module._parameters.get("weight") is not None,
    }
    return Recipe("rms_norm" if kind is FusedRMSNorm else "layer_norm", kind, attributes)


def _holds_only_rows(module: nn.Module) -> bool:
    """Whether it has a weight [D], perhaps a bias [D], and nothing else."""
    held = {n: p for n, p in module._parameters.items() if p is not None}
    if module._modules or module._buffers or not {"weight"} <= set(held) <= {"weight", "bias"}:
        return False
    return all(p.shape == held["weight"].shape and p.dim() == 1 for p in held.values())


def _probed_norm(module: nn.Module, width: int, epsilon: float) -> tuple[type[nn.Module], Result] | Left:
    """Class and dtype of the result of a norm whose class is not torch's."""
    has_bias = module._parameters.get("bias") is not None
    weight = _random(width)
    bias = _random(width, seed=1) if has_bias else None
    rows = _random(2, 4, width, seed=2) + 0.5
    # From rows whose mean square is that of epsilon on: they tell one epsilon from another.
    x = rows * torch.tensor([math.sqrt(epsilon), 0.1, 1.0, 30.0], device="cpu")[:, None]

    def twin(training: bool) -> nn.Module:
        table: dict[str, nn.Parameter | None] = {"weight": nn.Parameter(weight)}
        if "bias" in module._parameters:
            table["bias"] = None if bias is None else nn.Parameter(bias)
        return _twin(module, training, _parameters=table)

    candidates: dict[type[nn.Module], Function] = {
        FusedLayerNorm: lambda x: layer_norm(x, weight, bias, epsilon, implementation="plain")
    }
    if not has_bias:
        candidates[FusedRMSNorm] = lambda x: rms_norm(x, weight, epsilon, implementation="plain")
    for kind, reference in candidates.items():
        if all(_same(twin(training), reference, x) for training in (True, False)):
            narrow = _run(twin(False), x.bfloat16())
            if isinstance(narrow, Tensor) and narrow.dtype in (torch.float32, torch.bfloat16):
                return kind, "input" if narrow.dtype == torch.bfloat16 else "promoted"
            return Left("does not take bfloat16 rows beside a float32 weight")
    return Left("rms_norm and layer_norm with its weight are not what it computes")


# -- gated branches -------------------------------------------------------------------------------------------


def gated(module: nn.Module, implementation: Implementation) -> Verdict:
    """A SwiGLU of two or three Linear modules and nothing else with parameters."""
    linears = {n: m for n, m in module._modules.items() if isinstance(m, nn.Linear)}
    others = [m for n, m in module._modules.items() if n not in linears and m is not None]
    alone = not any(p is not None for p in module._parameters.values()) and not module._buffers
    plain = all(not [*m.parameters(), *m.buffers(), *m.children()] for m in others)
    if not alone or not plain or len(linears) not in (2, 3):
        return None
    proposals = list(_proposals(linears))
    for names in proposals:
        if all(_is_gated(module, linears, names, training) for training in (True, False)):
            return Recipe("swiglu", FusedSwiGLU, {"projections": names, "implementation": implementation})
    return Left("down(silu(gate(x)) * up(x)) is not what it computes") if proposals and others else None


def _proposals(linears: dict[str, nn.Linear]) -> Iterator[tuple[str, str | None, str]]:
    """(gate, up or None, down) whose shapes fit."""
    for down, last in linears.items():
        width, inner = last.out_features, last.in_features
        first = [n for n in linears if n != down]
        if len(first) == 2:
            if all((linears[n].in_features, linears[n].out_features) == (width, inner) for n in first):
                yield from ((gate, up, down) for gate, up in itertools.permutations(first))
        elif (linears[first[0]].in_features, linears[first[0]].out_features) == (width, 2 * inner):
            yield first[0], None, down


def _is_gated(
    module: nn.Module, linears: dict[str, nn.Linear], names: tuple[str, str | None, str], training: bool
) -> bool:
    last = linears[names[2]]
    width = 8
    inner = width if last.in_features == last.out_features else 12
    sizes = {names[0]: (width, inner), names[1]: (width, inner), names[2]: (inner, width)}
    if names[1] is None:
        sizes[names[0]] = (width, 2 * inner)
    small = {n: _linear(*sizes[n], m.bias is not None, seed) for seed, (n, m) in enumerate(linears.items())}
    gate, up, down = small[names[0]], names[1] and small[names[1]], small[names[2]]

    def reference(x: Tensor) -> Tensor:
        first, second = (gate(x), up(x)) if isinstance(up, nn.Module) else gate(x).chunk(2, -1)
        out: Tensor = down(F.silu(first) * second)
        return out

    twin = _twin(module, training, _modules={**module._modules, **small})
    return _same(twin, reference, _random(2, 5, width, seed=9))


# -- activations ----------------------------------------------------------------------------------------------


def gelu(module: nn.Module, implementation: Implementation) -> Verdict:
    """GELU by tanh, as a module without parameters."""
    if "gelu" not in type(module).__name__.lower() or [
        *module.parameters(),
        *module.buffers(),
        *module.children(),
    ]:
        return None
    x = torch.linspace(-12, 12, 481, device="cpu", dtype=torch.float32)
    twins = (_twin(module, training) for training in (True, False))
    if all(_same(twin, lambda x: gelu_tanh_plain(x, None, 0.0, None), x, atol=4e-6) for twin in twins):
        return Recipe("gelu_tanh", FusedGELUTanh, {"implementation": implementation})
    return Left("is not the GELU by tanh (that of erf differs from it by up to 5e-4)")


# -- runs -----------------------------------------------------------------------------------------------------


def _twin(module: nn.Module, training: bool, **tables: Any) -> nn.Module:
    """The same object with other tables of parameters or children."""
    twin = type(module).__new__(type(module))
    vars(twin).update({**vars(module), **tables, "training": training})
    return twin


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _linear(inputs: int, outputs: int, bias: bool, seed: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=torch.float32)
    made.weight = nn.Parameter(_random(outputs, inputs, seed=seed) / math.sqrt(inputs))
    if bias:
        made.bias = nn.Parameter(_random(outputs, seed=seed + 10))
    return made


def _run(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """What it returns; None if it raises, whatever that is: the code is not ours."""
    try:
        with torch.random.fork_rng(devices=()), torch.autocast("cpu", enabled=False), torch.enable_grad():
            return function(x)
    except Exception:
        return None


def _same(module: nn.Module, reference: Function, x: Tensor, atol: float = 1e-5) -> bool:
    """Whether values and the gradient of x agree in float32."""
    found = [_with_gradient(f, x) for f in (module, reference)]
    if found[0] is None or found[1] is None:
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=atol) for a, b in zip(*found, strict=True)
    )


def _with_gradient(function: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, Tensor] | None:
    x = x.detach().clone().requires_grad_()
    out = _run(function, x)
    if not isinstance(out, Tensor) or out.shape != x.shape or not out.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(out, x, _random(*out.shape, seed=5), allow_unused=True)
    return None if gradient is None else (out.detach(), gradient)
