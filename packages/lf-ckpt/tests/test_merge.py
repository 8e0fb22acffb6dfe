"""Who writes what of a step, decided from what every rank says it holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt.boxes import Box, cover_problem, whole
from lf_ckpt.manifest import BlobEntry, DataFile, Manifest, Placed, unsharded
from lf_ckpt.merge import Layout, Part, entries, merge
from lf_ckpt.ranked import owner_of, seen_by, stored_name


def rows(name: str, total: int, begin: int, end: int) -> Part:
    return Part(name, "F32", (total, 4), Box((begin, 0), (end - begin, 4)))


def full(name: str, *shape: int, dtype: str = "F32") -> Part:
    return Part(name, dtype, shape, whole(shape))


def layout(
    *parts: Part, tied: dict[str, Part] | None = None, aliases: dict[str, str] | None = None
) -> Layout:
    return Layout(parts, tuple((tied or {}).values()), aliases or {}, ())


def test_shards_stay_with_their_ranks_and_replicas_go_where_there_is_least() -> None:
    merged = merge(
        [
            layout(rows("w", 10, 0, 7), full("a", 5), full("b", 6)),
            layout(rows("w", 10, 7, 10), full("a", 5), full("b", 6)),
        ]
    )

    assert merged.writes == ((0,), (0, 1, 2))
    assert [(name, parts) for name, _, _, parts in merged.tensors] == [
        ("w", ((0, Box((0, 0), (7, 4))), (1, Box((7, 0), (3, 4))))),
        ("a", ((1, whole((5,))),)),
        ("b", ((1, whole((6,))),)),
    ]


def test_replicas_spread_by_bytes() -> None:
    names = [f"t{i}" for i in range(12)]
    parts = [full(name, 100 * (i + 1)) for i, name in enumerate(names)]
    merged = merge([layout(*parts)] * 4)
    loads = [sum(parts[i].nbytes for i in numbers) for numbers in merged.writes]

    assert sum(loads) == sum(part.nbytes for part in parts)
    assert max(loads) - min(loads) <= max(part.nbytes for part in parts)


def test_a_mesh_with_replicas_writes_each_shard_once() -> None:
    """HSDP: ranks 0 and 2 hold the first half, 1 and 3 the second."""
    low, high = layout(rows("w", 8, 0, 4)), layout(rows("w", 8, 4, 8))
    merged = merge([low, high, low, high])

    ((_, _, _, parts),) = merged.tensors
    assert cover_problem((8, 4), [box for _, box in parts]) is None
    assert sorted(sum(map(len, merged.writes[r::2])) for r in (0, 1)) == [1, 1]


def test_empty_shards_are_nobodys_and_an_empty_tensor_is_somebodys() -> None:
    empty = full("none", 0, 3)
    cuts = [(0, 1), (1, 2), (2, 2)]
    merged = merge([layout(rows("w", 2, begin, end), empty) for begin, end in cuts])

    assert [len(parts) for _, _, _, parts in merged.tensors] == [2, 1]
    assert sum(map(len, merged.writes)) == 3


def test_names_that_only_some_ranks_have_are_kept() -> None:
    merged = merge([layout(full("stage0", 3)), layout(full("stage1", 3))])
    assert [name for name, *_ in merged.tensors] == ["stage0", "stage1"]
    assert merged.writes == ((0,), (0,))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (full("w", 3, 4), "rank 1 has F32"),
        (full("w", 2, 4, dtype="BF16"), "BF16"),
        (rows("w", 2, 0, 0), "no whole tensor"),
        (rows("w", 2, 0, 1), "no whole tensor"),
    ],
)
def test_parts_that_contradict_each_other_or_leave_a_hole_are_refused(other: Part, words: str) -> None:
    with pytest.raises(lf_ckpt.CkptError, match=words):
        merge([layout(rows("w", 2, 0, 1)), layout(other)])


def test_a_tie_that_every_rank_has_is_kept_also_where_the_shard_is_empty() -> None:
    a, b = rows("a", 1, 0, 1), rows("b", 1, 0, 1)
    nothing = layout(rows("a", 1, 1, 1), rows("b", 1, 1, 1))
    merged = merge([layout(a, tied={"b": b}, aliases={"b": "a"}), nothing])

    assert merged.aliases == {"b": "a"}
    assert [name for name, *_ in merged.tensors] == ["a"]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_tie_that_one_rank_lacks_is_stored_as_two_tensors(swapped: bool) -> None:
    a, b = [rows("a", 2, 0, 1), rows("a", 2, 1, 2)], [rows("b", 2, 0, 1), rows("b", 2, 1, 2)]
    other = layout(b[1], tied={"a": a[1]}, aliases={"a": "b"}) if swapped else layout(a[1], b[1])
    merged = merge([layout(a[0], tied={"b": b[0]}, aliases={"b": "a"}), other])

    assert merged.aliases == {}
    assert [name for name, *_ in merged.tensors] == ["a", "b"]
    assert [sorted(numbers) for numbers in merged.writes] == [[0, 1], [0, 1]]


def test_a_layout_survives_json() -> None:
    tied = rows("b", 2, 0, 1)
    one = Layout((rows("a", 2, 0, 1), full("s")), (tied,), {"b": "a"}, (("rng", 5),))
    assert Layout.from_json(one.as_json()) == one


cuts = st.lists(st.integers(0, 9), min_size=2, max_size=4).map(sorted)


@given(st.lists(cuts, min_size=1, max_size=4), st.integers(1, 3))
def test_every_element_is_written_once_and_files_hold_streams_in_manifest_order(
    tensors: list[list[int]], replicas: int
) -> None:
    """Ranks hold consecutive rows of every tensor, some empty, and each such rank exists `replicas` times."""
    world = max(len(cut) + 1 for cut in tensors)
    layouts = []
    for rank in range(world):
        parts = []
        for i, cut in enumerate(tensors):
            edges = [0, *cut, 9, *[9] * world]
            parts.append(rows(f"t{i}", 9, edges[rank], edges[rank + 1]))
        layouts.append(layout(*parts))
    layouts *= replicas
    merged = merge(layouts)
    counts = [[1] * len(numbers) for numbers in merged.writes]
    found, _ = entries(merged, counts)

    for entry in found:
        assert cover_problem(entry.shape, [shard.box for shard in entry.shards]) is None
    for rank, numbers in enumerate(merged.writes):
        own = [(t.name, s.box) for t in found for s in t.shards if s.placed.file == rank]
        assert own == [(layouts[rank].parts[i].name, layouts[rank].parts[i].box) for i in numbers]
        assert [s.placed.first for t in found for s in t.shards if s.placed.file == rank] == list(
            range(len(own))
        )


def test_names_kept_per_rank() -> None:
    name = stored_name(["rng", "loader"], 3)
    given_names = ["rng", "rng.torch", "rng/cuda", "loader", "rngx", "model.rng", "loader2"]
    wanted = [
        "rank-3/rng",
        "rank-3/rng.torch",
        "rank-3/rng/cuda",
        "rank-3/loader",
        "rngx",
        "model.rng",
        "loader2",
    ]
    assert [name(n) for n in given_names] == wanted
    owned = {"rank-3/rng": 3, "rank-03/x": None, "rng": None, "rank-/x": None, "rank-0/a/b": 0}
    assert {n: owner_of(n) for n in owned} == owned


def test_a_rank_sees_its_own_values_under_their_plain_names() -> None:
    files = tuple(DataFile(f"rank-{r}.lfckpt", 0, 0, "") for r in range(2))
    place = Placed(0, 0, 0)
    step = Manifest(
        "", 1, "1", 0, None, files,
        tuple(unsharded(n, "F32", (0,), place) for n in ("w", "rank-0/rng.torch", "rank-1/rng.torch")),
        {"tied": "w", "rank-1/again": "rank-1/rng.torch"},
        (BlobEntry("rank-0/rng", 0, place), BlobEntry("rank-1/rng", 0, place)),
        {"epoch": 1, "rank-0/loader": "a", "rank-1/loader": "b"}, {},
    )  # fmt: skip

    one = seen_by(step, 1)
    assert [t.name for t in one.tensors] == ["w", "rng.torch"]
    assert one.aliases == {"tied": "w", "again": "rng.torch"}
    assert [b.name for b in one.blobs] == ["rng"]
    assert one.items == {"epoch": 1, "loader": "b"}
    assert [t.name for t in seen_by(step, 2).tensors] == ["w"]
