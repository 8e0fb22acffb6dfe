"""Retention rules as data: JSON for configuration files (both ways) and one line of text for the command line. Pure.

{"version": 1, "keep": [{"last": 3}, {"every": 1000}, {"every_seconds": 3600},
                        {"best": {"metric": "loss", "count": 2, "mode": "min"}},
                        {"phases": [[0, 5], [1000, 20]]}, {"any": [...]}, {"all": [...]}]}

last:3,every:1000,every_seconds:3600,best:loss:2:min,phases:0/5:1000/20
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .retention import AllOf, AnyOf, Best, Every, EverySeconds, Last, Phases, PolicyError, Rule

VERSION: Final = 1
_NAMES: Final = "last, every, every_seconds, best, phases, any, all"


def keep_as_json(rules: Sequence[Rule]) -> dict[str, Any]:
    """Plain data for rules of this package; PolicyError for a rule of your own, which has no name here."""
    return {"version": VERSION, "keep": [_as_json(rule) for rule in rules]}


def keep_from_json(data: Any) -> tuple[Rule, ...]:
    """Inverse of `keep_as_json`; a bare list of rules (as one writes it in YAML) is taken too.

    PolicyError names the first entry that is no rule.
    """
    if isinstance(data, Mapping):
        _only(data, {"version", "keep"}, "keep")
        if data.get("version") != VERSION:
            raise PolicyError(f"keep: version {data.get('version')!r}; this lf-ckpt reads {VERSION}")
        data = data.get("keep")
    return tuple(_from_json(entry, f"keep[{i}]") for i, entry in enumerate(_list(data, "keep")))


def parse_keep(text: str) -> tuple[Rule, ...]:
    """Rules from `last:3,every:1000,best:loss:2:min,...`; PolicyError for anything else."""
    return tuple(_from_text(part.strip()) for part in text.split(","))


def _as_json(rule: Rule) -> dict[str, Any]:
    match rule:
        case Last(count):
            return {"last": count}
        case Every(steps):
            return {"every": steps}
        case EverySeconds(seconds):
            return {"every_seconds": seconds}
        case Best(metric, count, mode):
            return {"best": {"metric": metric, "count": count, "mode": mode}}
        case Phases(phases):
            return {"phases": [list(pair) for pair in phases]}
        case AnyOf(rules):
            return {"any": [_as_json(part) for part in rules]}
        case AllOf(rules):
            return {"all": [_as_json(part) for part in rules]}
    raise PolicyError(f"{rule!r}: only rules of lf_ckpt have a JSON form")


def _from_json(entry: Any, where: str) -> Rule:
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise PolicyError(f"{where}: {entry!r} is no rule; write one of {_NAMES} with its value")
    [(name, value)] = entry.items()
    build = _BUILD.get(name)
    if build is None:
        raise PolicyError(f"{where}: no rule {name!r}; there are {_NAMES}")
    try:
        return build(value, f"{where}.{name}")
    except RecursionError as error:
        raise PolicyError(f"{where}: rules are nested too deeply") from error


def _best(value: Any, where: str) -> Rule:
    if not isinstance(value, Mapping) or "metric" not in value:
        raise PolicyError(f"{where}: give metric, and count and mode if you like")
    _only(value, {"metric", "count", "mode"}, where)
    return Best(**value)


def _phases(value: Any, where: str) -> Rule:
    return Phases(tuple(tuple(_list(pair, where)) for pair in _list(value, where)))


def _parts(value: Any, where: str) -> tuple[Rule, ...]:
    return tuple(_from_json(entry, f"{where}[{i}]") for i, entry in enumerate(_list(value, where)))


_BUILD: Final[Mapping[Any, Callable[[Any, str], Rule]]] = {
    "last": lambda value, _: Last(value),
    "every": lambda value, _: Every(value),
    "every_seconds": lambda value, _: EverySeconds(value),
    "best": _best,
    "phases": _phases,
    "any": lambda value, where: AnyOf(_parts(value, where)),
    "all": lambda value, where: AllOf(_parts(value, where)),
}


def _from_text(part: str) -> Rule:
    name, *values = part.split(":")
    try:
        if name in ("last", "every", "every_seconds") and len(values) == 1:
            return _from_json({name: int(values[0])}, part)
        if name == "best" and 1 <= len(values) <= 3:
            count = int(values[1]) if len(values) > 1 else 1
            return _best({"metric": values[0], "count": count, "mode": (values[2:] or ["min"])[0]}, part)
        if name == "phases" and values:
            return _phases([[int(n) for n in pair.split("/")] for pair in values], part)
    except PolicyError:
        raise
    except ValueError as error:
        raise PolicyError(f"{part!r}: {error}") from error
    raise PolicyError(
        f"{part!r} is no rule; write last:3 every:1000 every_seconds:3600 best:loss:2:min phases:0/5:1000/20"
    )


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise PolicyError(f"{where}: {value!r} where a list belongs")
    return value


def _only(value: Mapping[Any, Any], names: set[str], where: str) -> None:
    unknown = [key for key in value if key not in names]
    if unknown:
        raise PolicyError(f"{where}: unknown key {unknown[0]!r}; there are {', '.join(sorted(names))}")
