"""python -m lf_memory.gradients report module:callable

The callable takes nothing and returns (fn, args) or (fn, args, model), as `predict` takes them. It is called under a
FakeTensorMode, so that a model of any size takes no memory; with --verify once more for real.
"""

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ._errors import PlanError
from ._json import VERSION
from ._losses import Models
from ._plan import Plan
from ._policy import BUCKET_BYTES, MODES
from ._predict import predict
from ._report import summary
from ._verify import Verification, verify

_NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    "<frozen ",
    str(Path(importlib.__file__).parent),
)
Case = tuple[Callable[..., Any], Sequence[Any], Models | None]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m lf_memory.gradients", description="Gradient memory of a model."
    )
    report = top.add_subparsers(dest="command", required=True).add_parser(
        "report", help="predict the memory of a backward pass, for each mode"
    )
    report.add_argument("case", metavar="module:callable", help="returns (fn, args) or (fn, args, model)")
    report.add_argument("--mode", choices=MODES, nargs="+", default=list(MODES))
    report.add_argument(
        "--bucket-bytes", type=int, default=BUCKET_BYTES, help="size of a bucket (%(default)s)"
    )
    report.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step (%(default)s)")
    report.add_argument("--device", default="cpu", help="where the model is made (%(default)s)")
    report.add_argument("--dag-cache-path", help="a file, or a directory, that keeps plans")
    report.add_argument("--rebuild-dag", action="store_true", help="make plans anew")
    report.add_argument("--verify", action="store_true", help="run a real step and measure it")
    report.add_argument("--real", action="store_true", help="predict by a real step instead of fake tensors")
    report.add_argument("--json", action="store_true", help="print JSON")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with the cause on stderr; with --verify, 2 if a peak is off by more than 5 %."""
    options = parser().parse_args(arguments)
    try:
        plans = [_plan(options, mode) for mode in options.mode]
        checks = [_check(options, plan) for plan in plans] if options.verify else []
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        blame = _blame(error)
        if not blame:
            raise
        print(f"error: {options.case} raised {blame}", file=sys.stderr)
        return 1
    print(_json(plans, checks) if options.json else _text(plans, checks))
    return 0 if all(check.within(0.05) for check in checks) else 2


def _blame(error: Exception) -> str:
    """What the user's code raised and where; "" if none of it was running, so that the fault is ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
    if not theirs:
        return ""
    last = theirs[-1]
    return f"{type(error).__name__}: {error}\n  at {last.filename}:{last.lineno}, in {last.name}: {last.line}"


def load(case: str) -> Case:
    """What module:callable returns."""
    module, _, name = case.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"{case!r} is not found ({error}): give module:callable") from error
    found = make()
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[1], (tuple, list)):
        raise PlanError(f"{case} returns {type(found).__name__}: return (fn, args) or (fn, args, model)")
    return found[0], found[1], found[2] if len(found) == 3 else None


def _plan(options: argparse.Namespace, mode: Any) -> Plan:
    fakes = nullcontext() if options.real else FakeTensorMode(allow_non_fake_inputs=True)
    with fakes, torch.device(options.device):
        fn, args, model = load(options.case)
    return predict(
        fn,
        *args,
        model=model,
        mode=mode,
        bucket_bytes=options.bucket_bytes,
        accumulation=options.accumulation,
        tensors="real" if options.real else "fake",
        dag_cache_path=options.dag_cache_path,
        rebuild=options.rebuild_dag,
    )


def _check(options: argparse.Namespace, plan: Plan) -> Verification:
    with torch.device(options.device):
        fn, args, model = load(options.case)
    return verify(plan, fn, *args, model=model)


def _text(plans: Iterable[Plan], checks: Iterable[Verification]) -> str:
    parts = [f"{plan}\n({plan.origin})" for plan in plans]
    parts += [f"One step, {check.plan.policy.mode}:\n{check}" for check in checks]
    return "\n\n".join(parts)


def _json(plans: Iterable[Plan], checks: Iterable[Verification]) -> str:
    verified = [
        {
            "mode": one.plan.policy.mode,
            "measured": vars(one.measured),
            "ratio": one.ratio(),
            "same_graph": one.same_graph,
        }
        for one in checks
    ]
    document = {"version": VERSION, "plans": [summary(plan) for plan in plans], "verified": verified}
    return json.dumps(document, indent=1)


if __name__ == "__main__":
    sys.exit(main())
