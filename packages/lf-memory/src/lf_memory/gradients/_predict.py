"""predict: the memory of a backward pass before it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ._errors import PlanError
from ._fake import FakeWorld
from ._losses import Models, check_runs, models_of, named_parameters
from ._plan import Plan
from ._policy import BUCKET_BYTES, Mode, Policy
from ._real import RealWorld
from ._run import read_graph, run_step
from ._store import Store

INSTEAD = 'predict(..., tensors="real") runs a real step, and predict(loss) reads the graph of a real loss'


def predict(
    fn: Callable[..., Any] | torch.Tensor,
    *args: Any,
    model: Models | None = None,
    mode: Mode = "fused",
    bucket_bytes: int = BUCKET_BYTES,
    accumulation: int = 1,
    tensors: Literal["fake", "real"] = "fake",
    device: torch.device | str | None = None,
    dag_cache_path: str | Path | None = None,
    rebuild: bool = False,
) -> Plan:
    """Predict every buffer of a backward pass, when it lives, and where parameter gradients may lie.

    The function and the backward pass run once on fake tensors (no memory, no arithmetic, no kernel): the real
    engine, the real formulas, hooks, checkpoints and custom functions. The model, its gradients and the random state
    stay as they are. Temporaries inside a kernel are not seen; `verify` measures what they amount to.

    Some functions do not do with fake tensors what they do with real ones: they need values, or look whether a tensor
    is fake (transformers then makes a mask it otherwise leaves out). For those `tensors="real"` runs one real step.

    Args:
        fn: returns the loss, a scalar tensor; several losses, or an object with a `loss`, will do. Usually a module.
            A loss tensor whose graph exists is not run: its graph is read, and what shares memory is inferred.
        args: arguments for `fn`; tensors real, fake, or on the meta device. Only shapes and types count.
        model: the module or modules that `fn` trains, unless `fn` is that module.
        mode: what becomes of a parameter's gradient when it is complete, see Policy: "fused", "bucket", "all-alive".
        bucket_bytes: size of a bucket of mode "bucket".
        accumulation: micro-batches of a step; beyond 1 gradients of earlier ones live throughout.
        tensors: "real" runs a step of the real model instead, which takes its memory and time; parameters, gradients,
            buffers and random state are afterwards as before.
        device: the device that meta tensors stand for.
        dag_cache_path: a file for this plan, or a directory for any number. Read if it holds the plan of this very
            graph; else, also if it is damaged, the plan is made anew and written there. JSON, whatever its name.
        rebuild: make the plan anew in any case.

    Returns:
        The plan. `plan.origin` says whether it came from the cache, and if not, why not.

    Raises:
        PlanError: the function needs values, trains what `model` does not hold, or cannot be planned.
    """
    policy = Policy(mode, bucket_bytes, accumulation)
    if isinstance(fn, torch.Tensor):
        models = models_of(lambda: None, model)
        return read_graph(fn, {id(one): name for name, one in named_parameters(models)}, policy)
    models = models_of(fn, model)
    check_runs(fn, models)
    store = None if dag_cache_path is None else Store(dag_cache_path, rebuild)
    if tensors == "real":
        real = RealWorld(models, args)
        return real.run(lambda: run_step(fn, real, policy, "real run", store))
    if tensors != "fake":
        raise PlanError(f"tensors is {tensors!r}: give fake or real")
    fake = FakeWorld(models, args, device)
    with _explained():
        return fake.run(lambda: run_step(fn, fake, policy, "dry run", store))


@contextmanager
def _explained() -> Iterator[None]:
    """Errors that real tensors would not have caused say what to do."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PlanError(
            f"the function needs values of tensors, fake ones have none ({error}): {INSTEAD}"
        ) from error
    except NotImplementedError as error:
        raise PlanError(f"an operator does not run on fake tensors ({error}): {INSTEAD}") from error
    except PlanError:
        raise
    except RuntimeError as error:
        error.add_note(f"This was a run on fake tensors. If real ones do not fail: {INSTEAD}")
        raise
