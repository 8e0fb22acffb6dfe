"""Add up the closing lines of all pytest runs in a log and print one: ``N passed, N failed, N skipped``."""

import re
import sys
from pathlib import Path

COUNT = r"\d+ (?:passed|failed|skipped|errors?|xfailed|xpassed|deselected|warnings?)"
LINE = re.compile(rf"^=* ?((?:{COUNT}(?:, )?)+) in [\d.]+s")


def count(log: str) -> dict[str, int]:
    """Totals of passed, failed (with errors) and skipped."""
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    for line in log.splitlines():
        found = LINE.match(re.sub(r"\x1b\[[0-9;]*m", "", line))
        for number, word in re.findall(r"(\d+) (\w+)", found[1] if found else ""):
            key = "failed" if word.startswith("error") else word
            if key in totals:
                totals[key] += int(number)
    return totals


if __name__ == "__main__":
    totals = count(Path(sys.argv[1]).read_text(errors="replace"))
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**totals))
    sys.exit(0 if totals["passed"] and not totals["failed"] else 1)
