"""What is left of host and container, read from trees laid out like those of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from lf_ckpt.free_memory import available_memory

GIB = 1 << 30


def lay(root: Path, files: dict[str, str]) -> tuple[str, str]:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return str(root / "proc"), str(root / "cgroup")


HOST = {"proc/meminfo": f"MemTotal: {80 * 1024**2} kB\nMemAvailable:   {64 * 1024**2} kB\n"}


def test_without_a_limit_it_is_the_hosts(tmp_path: Path) -> None:
    tree = {"proc/self/cgroup": "0::/a\n", "cgroup/a/memory.max": "max\n", "cgroup/a/memory.current": "5\n"}
    assert available_memory(*lay(tmp_path, HOST | tree)) == 64 * GIB


def test_a_v2_group_leaves_limit_minus_use_plus_inactive_cache(tmp_path: Path) -> None:
    tree = {
        "proc/self/cgroup": "0::/\n",
        "cgroup/memory.max": f"{8 * GIB}\n",
        "cgroup/memory.current": f"{7 * GIB}\n",
        "cgroup/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file 9\n",
    }
    assert available_memory(*lay(tmp_path, HOST | tree)) == 3 * GIB


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    tree = {
        "proc/self/cgroup": "0::/pod/box\n",
        "cgroup/pod/box/memory.max": f"{16 * GIB}\n",
        "cgroup/pod/box/memory.current": "0\n",
        "cgroup/pod/memory.max": f"{4 * GIB}\n",
        "cgroup/pod/memory.current": f"{GIB}\n",
    }
    assert available_memory(*lay(tmp_path, HOST | tree)) == 3 * GIB


def test_a_v1_group_is_found_by_its_path_or_as_the_root_of_the_mount(tmp_path: Path) -> None:
    limits = {"memory.limit_in_bytes": f"{2 * GIB}\n", "memory.usage_in_bytes": f"{GIB}\n"}
    stat = {"memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n"}
    for place in ("cgroup/memory/docker/x", "cgroup/memory"):
        tree = {f"{place}/{name}": text for name, text in (limits | stat).items()}
        tree["proc/self/cgroup"] = "3:cpuset:/\n4:memory,hugetlb:/docker/x\n0::/\n"
        root = tmp_path / place.replace("/", "-")
        assert available_memory(*lay(root, HOST | tree)) == GIB + GIB // 2


@pytest.mark.parametrize("junk", ["", "max", "-1", "1e9", "\xb2", "no number\n"])
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, junk: str) -> None:
    tree = {
        "proc/self/cgroup": f"{junk}\n0::/\n::\n",
        "cgroup/memory.max": junk,
        "cgroup/memory.current": junk,
    }
    assert available_memory(*lay(tmp_path, HOST | tree)) == 64 * GIB
    assert available_memory(str(tmp_path / "none"), str(tmp_path / "none")) is None


def test_an_overdrawn_group_leaves_nothing(tmp_path: Path) -> None:
    tree = {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "10\n", "cgroup/memory.current": "20\n"}
    assert available_memory(*lay(tmp_path, HOST | tree)) == 0


def test_this_machine_says_something() -> None:
    free = available_memory()
    assert free is not None
    assert free > 0
