"""What a dry run found: findings, and the report that holds them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from lf_graph._errors import GraphCaptureError

Severity = Literal["error", "warning"]

Kind = Literal[
    "host_read",  # a value of the device is read by Python: .item(), bool(), tolist()
    "data_dependent_shape",  # the shape of a result depends on values: nonzero, masks, unique
    "host_to_device",  # a copy or a constant from pageable memory
    "device_to_host",  # a copy to the host, which waits for the device
    "synchronize",  # any other wait for the device, or a call that a capture forbids
    "cpu_tensor",  # a tensor of the host among the operands of a device operator
    "wrong_device",  # tensors on more than one device, or not on the current one
    "side_stream",  # work on a stream that the capture has to be told of
    "generator",  # a random generator that a graph does not advance
    "host_random",  # Python's or NumPy's random numbers
    "rng_state",  # the state of the device's generator is read or set
    "frozen_argument",  # a Python number given as an argument
    "changes_between_calls",  # two runs did not do the same
    "attribute_write",  # Python state of a module that a replay does not change
    "buffer_replaced",  # a buffer became another tensor
    "parameter_replaced",  # a parameter got other memory
    "hook",  # Python code that a replay does not run
    "wrapped",  # sharded, data, tensor or pipeline parallel
    "double_backward",  # create_graph=True
    "reentrant",  # a checkpoint that starts a backward of its own inside the backward
    "stopped",  # the dry run ended at a finding
]


@dataclass(frozen=True)
class Finding:
    """One thing that cannot be captured, or that a graph would freeze.

    Attributes:
        kind: what sort of thing it is.
        op: the operator or call, such as ``aten.nonzero`` or ``torch.cuda.synchronize``.
        where: ``file:line`` of the user's code; in the backward of an operator, the line of its forward.
        why: the reason, one sentence.
        fix: what to write instead.
        severity: ``error`` when a capture fails or a replay computes something else, ``warning`` when it may.
        module: dotted name of the submodule that was running, "" outside of all.
    """

    kind: Kind
    op: str
    where: str
    why: str
    fix: str
    severity: Severity = "error"
    module: str = ""

    def error(self) -> GraphCaptureError:
        """The finding as an exception."""
        return GraphCaptureError(self.op, self.where, self.why, self.fix)


@dataclass(frozen=True)
class Parameters:
    """Names of the trainable parameters: those that got a gradient, and those that got none."""

    used: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What :func:`lf_graph.check` found.

    Attributes:
        findings: errors and warnings in the order of the run, structure first; a line that several submodules run
            has one finding for each of them, and one row in the printed table.
        operations: operators of one forward and backward.
        random: whether a random generator was used.
        parameters: which trainable parameters got a gradient; both empty without a backward.
    """

    findings: tuple[Finding, ...]
    operations: int
    random: bool
    parameters: Parameters

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(f for f in self.findings if f.severity == "error")

    def raise_errors(self) -> None:
        """Raise the first error.

        Raises:
            GraphCaptureError: there is one.
        """
        if self.errors:
            raise self.errors[0].error()

    def to_json(self) -> str:
        """The report as JSON; ``version`` changes with the meaning of a field."""
        return json.dumps({"version": 1, "ok": self.ok, **asdict(self)}, indent=1)

    def __str__(self) -> str:
        return "\n".join([_headline(self), *_table(_grouped(self.findings))])


def _headline(report: Report) -> str:
    rows = _grouped(report.findings)
    errors = sum(f.severity == "error" for f in rows)
    warnings = len(rows) - errors
    counts = (
        f"{_count(errors, 'error')}, {_count(warnings, 'warning')}" if report.findings else "nothing found"
    )
    parts = [f"{counts} in {_count(report.operations, 'operation')}"]
    parts += ["uses random numbers"] if report.random else []
    unused = report.parameters.unused
    parts += [f"no gradient for {', '.join(unused)}"] if unused else []
    return "; ".join(parts)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _grouped(findings: tuple[Finding, ...]) -> list[Finding]:
    """Findings with one row for the submodules that run the same line."""
    groups: dict[Finding, list[str]] = {}
    for f in findings:
        groups.setdefault(replace(f, module=""), []).append(f.module)
    return [replace(f, module=_modules(names)) for f, names in groups.items()]


def _modules(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _table(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    rows: list[tuple[str, ...]] = [("severity", "kind", "operation", "where", "module")]
    rows += [(f.severity, f.kind, f.op, _short(f.where), f.module) for f in findings]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    for line, finding in zip(range(len(findings), 0, -1), reversed(findings), strict=True):
        lines[line + 1 : line + 1] = [f"    why: {finding.why}", f"    fix: {finding.fix}"]
    return lines


def _short(where: str) -> str:
    """A path below the working directory, relative to it."""
    here = os.getcwd() + os.sep
    return where.removeprefix(here)
