"""Plans as JSON with a version and a checksum. The reader takes any bytes and gives a plan or a PlanError."""

import hashlib
import json
from bisect import bisect_left
from dataclasses import asdict, astuple, fields
from heapq import heappop, heappush
from typing import Any, TypeVar, get_args

from ._errors import PlanError
from ._plan import Kind, Lifetime, Method, Placement, Plan, Slots
from ._policy import Policy

FORMAT = "lf-memory gradient plan"
VERSION = 1
MOST_BYTES = 64 << 20  # a plan of 100,000 buffers takes 8 MiB
MOST = 1 << 62  # no count or size is larger
KINDS, METHODS = get_args(Kind), get_args(Method)
Row = TypeVar("Row", Lifetime, Placement, Slots)


def to_text(plan: Plan) -> str:
    """The plan with format, version and SHA-256 of the plan's own text."""
    body = {name: getattr(plan, name) for name in _plain_fields()}
    body["policy"] = asdict(plan.policy)
    for name in ("lifetimes", "placements", "slots"):
        body[name] = [astuple(row) for row in getattr(plan, name)]
    head = {"format": FORMAT, "version": VERSION, "sha256": _checksum(body)}
    return json.dumps({**head, "plan": body}, separators=(",", ":"))


def from_text(data: bytes) -> Plan:
    """The plan in the bytes of a file.

    Raises:
        PlanError: these bytes are not a plan of this version, complete and consistent.
    """
    if len(data) > MOST_BYTES:
        raise PlanError(f"more than {MOST_BYTES >> 20} MiB are no plan")
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not JSON ({type(error).__name__})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError("not a gradient plan")
    if document.get("version") != VERSION or isinstance(document["version"], bool):
        raise PlanError(
            f"version {str(document.get('version'))[:20]} of the format; this is version {VERSION}"
        )
    body = document.get("plan")
    if not isinstance(body, dict) or document.get("sha256") != _checksum(body):
        raise PlanError("the checksum does not fit: the file is damaged")
    return _plan_of(body)


def _plan_of(body: dict[str, Any]) -> Plan:
    """A plan whose every value has its type and range; a checksum alone does not say who computed it."""
    expected = {*_plain_fields(), "policy", "lifetimes", "placements", "slots"}
    if set(body) != expected:
        raise PlanError(f"fields {sorted(set(body) ^ expected)[:5]} are missing or unknown")
    for name in ("key", "graph", "torch_version", "device"):
        _text(body[name], name)
    _one_of(body["method"], METHODS, "method")
    steps = _count(body["steps"], "steps")
    _count(body["forward_peak_bytes"], "forward_peak_bytes")
    lifetimes = _rows(body["lifetimes"], Lifetime, "lifetimes")
    placements = _rows(body["placements"], Placement, "placements")
    slots = _rows(body["slots"], Slots, "slots")
    for one in lifetimes:
        if not (one.start <= one.end < max(1, steps) and one.born < one.died):
            raise PlanError(f"the lifetime of {one.name[:80]} ends before it begins, or after the last step")
    _check_placements(placements, steps)
    plain = {name: body[name] for name in _plain_fields()}
    return Plan(
        **plain, policy=_policy(body["policy"]), lifetimes=lifetimes, placements=placements, slots=slots
    )


def _policy(value: Any) -> Policy:
    if not isinstance(value, dict) or set(value) != {one.name for one in fields(Policy)}:
        raise PlanError("the policy has missing or unknown fields")
    if not isinstance(value["mode"], str):
        raise PlanError("the mode is no text")
    return Policy(**value)


def _check_placements(placements: tuple[Placement, ...], steps: int) -> None:
    """An arena trusts this: no two gradients that live at one time share a byte."""
    for one in placements:
        if not one.start <= one.end < max(1, steps):
            raise PlanError(f"the placement of {one.name[:80]} ends before it begins, or after the last step")
    if len({one.name for one in placements}) != len(placements):
        raise PlanError("a parameter is placed twice")
    _check_apart(placements)


def _check_apart(placements: tuple[Placement, ...]) -> None:
    """Those that live are kept by offset: as they are apart, a new one can only overlap its neighbours."""
    alive: list[tuple[int, int, str]] = []  # offset, end of the bytes, name
    ends: list[tuple[int, int]] = []  # a heap: last step, offset
    for one in sorted(placements, key=lambda placement: placement.start):
        while ends and ends[0][0] < one.start:
            del alive[bisect_left(alive, (heappop(ends)[1],))]
        at, stop = bisect_left(alive, (one.offset,)), one.offset + one.nbytes
        for low, high, name in alive[max(0, at - 1) : at + 1]:
            if one.offset < high and low < stop:
                raise PlanError(f"the gradients of {name[:80]} and {one.name[:80]} overlap")
        if one.nbytes:
            alive.insert(at, (one.offset, stop, one.name))
            heappush(ends, (one.end, one.offset))


def _rows(value: Any, row: type[Row], what: str) -> tuple[Row, ...]:
    columns = fields(row)
    if not isinstance(value, list):
        raise PlanError(f"{what} is no list")
    for cells in value:
        if not isinstance(cells, list) or len(cells) != len(columns):
            raise PlanError(f"a row of {what} has not {len(columns)} values")
        for column, cell in zip(columns, cells, strict=True):
            _cell(cell, column.name, what)
    return tuple(row(*cells) for cells in value)


def _cell(value: Any, column: str, what: str) -> None:
    if column == "name":
        _text(value, f"name in {what}")
    elif column == "kind":
        _one_of(value, KINDS, f"kind in {what}")
    else:
        _count(value, f"{column} in {what}")


def _text(value: Any, what: str) -> None:
    if not isinstance(value, str) or len(value) > 4096:
        raise PlanError(f"{what} is no text of at most 4096 characters")


def _one_of(value: Any, choices: tuple[str, ...], what: str) -> None:
    if value not in choices:
        raise PlanError(f"{what} is none of {', '.join(choices)}")


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST:
        raise PlanError(f"{what} is no whole number from 0 to 2^62")
    return value


def _checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _plain_fields() -> tuple[str, ...]:
    return "key", "graph", "method", "torch_version", "device", "steps", "forward_peak_bytes"
