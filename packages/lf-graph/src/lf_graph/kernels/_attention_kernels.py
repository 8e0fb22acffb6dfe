"""Flash attention over packed sequences as Triton kernels: forward, gradient of queries, gradient of keys and values.

The method is that of FlashAttention-2 (arXiv 2307.08691): online softmax in base 2, the log-sum-exp kept, scores
computed anew in the backward. What differs:

- Lengths and offsets are read from device memory; grids follow from capacities and the number of sequences alone.
- Packed sequence ``i`` takes the tile numbers from ``cu_seqlens[i] // BLOCK + i`` on. No two sequences share one, so a
  program finds its sequence by counting starts: no schedule kernel, and at most one empty tile a sequence.
- A tile also covers the unused rows between its sequence and the next one, and writes zeros there: no memset.
- Each gradient is summed by one program in a fixed order, the heads of a group too: no atomics, the same bits always.
  The price is seven matrix products in the backward instead of five.
- A head of 72 is computed as 64 + 16 columns (LOW, HIGH) instead of 128.

Rows in a kernel count from the start of their sequence. ``scale2`` is scale * log2(e). ``lse`` is the log-sum-exp in
base 2, and +inf for a query that sees no key or is none, so that its probabilities come out as 0.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
# Triton has no types; its compile-time arguments are in capitals.

from __future__ import annotations

from lf_graph.kernels._attention_tiles import add_product, find, head_product, load, place, span, store
from lf_graph.kernels._interpreter import tl, triton


@triton.jit
def _key_bounds(first, offset, keys, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(whole, stop): every query of the tile sees all keys before ``whole``, and none sees a key from ``stop`` on."""
    if CAUSAL:
        whole = tl.minimum(tl.maximum(first + offset + 1, 0), keys)
        stop = tl.minimum(tl.maximum(first + BLOCK_M + offset, 0), keys)
    else:
        whole = keys
        stop = keys
    return whole // BLOCK_N * BLOCK_N, stop


@triton.jit
def _visible(rows, columns, offset, keys, CAUSAL: tl.constexpr):
    """Which of these queries see which of these keys; bool [queries, keys]."""
    mask = (columns < keys)[None, :]
    if CAUSAL:
        mask = mask & (columns[None, :] <= rows[:, None] + offset)
    return mask


@triton.jit
def _attend(
    low, high, top, total, q_low, q_high, k, v, row_k, row_v, rows, begin, stop, offset, keys, scale2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys begin:stop: weighted sums of values, greatest score, sum of weights.

    Pointers advance, for a 64-bit ``at * row_k`` made LLVM split the edge around the loop, with the zeros of the sums
    on it: then ptxas serialises wgmma ("non wgmma instructions defining accumulator registers").
    """
    k += begin * row_k
    v += begin * row_v
    for at in range(begin, stop, BLOCK_N):
        lanes = tl.arange(0, BLOCK_N)
        limit = keys - at if MASKED else None
        k_low, k_high = load(k, lanes, row_k.to(tl.int32), limit, HEAD_DIM, LOW, HIGH)
        scores = head_product(q_low, q_high, k_low, k_high, HIGH)
        if MASKED:
            seen = _visible(rows, at + lanes, offset, keys, CAUSAL)
            scores = tl.where(seen, scores * scale2, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - -inf is NaN
            weights = tl.exp2(scores - shift[:, None])
        else:
            higher = tl.maximum(top, tl.max(scores, 1) * scale2)
            shift = higher
            weights = tl.exp2(scores * scale2 - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        low = low * shrink[:, None]
        if HIGH > 0:
            high = high * shrink[:, None]
        v_low, v_high = load(v, lanes, row_v.to(tl.int32), limit, HEAD_DIM, LOW, HIGH)
        low, high = add_product(low, high, weights, v_low, v_high, HIGH)
        top = higher
        k += BLOCK_N * row_k
        v += BLOCK_N * row_v
    return low, high, top, total


@triton.jit(do_not_specialize=["sequences", "pitch_q", "pitch_k", "capacity_q", "capacity_k"])
def forward(
    q, k, v, out, lse, offsets_q, offsets_k, sequences, pitch_q, pitch_k, capacity_q, capacity_k, heads, scale2,
    batch_q, row_q, head_q, batch_k, row_k, head_k, batch_v, row_v, head_v,
    LAYOUT_Q: tl.constexpr, LAYOUT_K: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: out, and lse [heads, capacity_q].

    Strides are in units of ALIGN elements, so that the compiler knows how wide loads can be.
    """
    # 64 bits: heads-first views put 2^31 elements between the first head and the last. Heads next to each other share
    # their keys in the L2 cache.
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tl.program_id(0) // heads
    if CAUSAL:
        tile = tl.num_programs(0) // heads - 1 - tile  # the longest rows first
    sequence, start, length, first, stop = find(
        tile, offsets_q, sequences, pitch_q, capacity_q, LAYOUT_Q, BLOCK_M, LANES
    )
    if (first < 0) | (first >= stop):
        return
    start_k, keys = span(sequence, offsets_k, pitch_k, capacity_k, LAYOUT_K)
    keys = tl.where(first < length, keys, 0)
    offset = keys - length  # the last query sees the last key
    lanes = tl.arange(0, BLOCK_M)
    rows = first + lanes
    origin = (start + first).to(tl.int64)
    q = place(q, sequence, start, first, head, batch_q, row_q, head_q, LAYOUT_Q, ALIGN)
    group = head // GROUP
    k = place(k, sequence, start_k, 0, group, batch_k, row_k, head_k, LAYOUT_K, ALIGN)
    v = place(v, sequence, start_k, 0, group, batch_v, row_v, head_v, LAYOUT_K, ALIGN)
    stride_q = row_q * ALIGN
    row_k = tl.cast(row_k * ALIGN, tl.int64)  # the length of a sequence times this may pass 2^31
    row_v = tl.cast(row_v * ALIGN, tl.int64)
    q_low, q_high = load(q, lanes, stride_q, length - first, HEAD_DIM, LOW, HIGH)
    low = tl.zeros([BLOCK_M, LOW], tl.float32)
    high = tl.zeros([BLOCK_M, HIGH if HIGH > 0 else 16], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    whole, end = _key_bounds(first, offset, keys, CAUSAL, BLOCK_M, BLOCK_N)
    low, high, top, total = _attend(
        low, high, top, total, q_low, q_high, k, v, row_k, row_v, rows, 0, whole, offset, keys, scale2,
        False, CAUSAL, HEAD_DIM, LOW, HIGH, BLOCK_N,
    )  # fmt: skip
    low, high, top, total = _attend(
        low, high, top, total, q_low, q_high, k, v, row_k, row_v, rows, whole, end, offset, keys, scale2,
        True, CAUSAL, HEAD_DIM, LOW, HIGH, BLOCK_N,
    )  # fmt: skip
    seen = (total > 0) & (rows < length)
    low = low / tl.where(seen, total, 1.0)[:, None]
    high = high / tl.where(seen, total, 1.0)[:, None]
    store(
        out + (origin * heads + head) * HEAD_DIM, lanes, heads * HEAD_DIM, length - first, stop - first, low, high,
        HEAD_DIM, LOW, HIGH,
    )  # fmt: skip
    found = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("inf"))
    tl.store(lse + head * capacity_q + origin + lanes, found, mask=rows < stop)


@triton.jit
def _pull_queries(
    low, high, q_low, q_high, g_low, g_high, log_sum, delta, k, v, row_k, row_v, rows, begin, stop, offset, keys,
    scale2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(low, high) + dS @ K over keys begin:stop, with dS = P * (dP - delta)."""
    k += begin * row_k
    v += begin * row_v
    for at in range(begin, stop, BLOCK_N):
        lanes = tl.arange(0, BLOCK_N)
        limit = keys - at if MASKED else None
        k_low, k_high = load(k, lanes, row_k.to(tl.int32), limit, HEAD_DIM, LOW, HIGH)
        v_low, v_high = load(v, lanes, row_v.to(tl.int32), limit, HEAD_DIM, LOW, HIGH)
        weights = tl.exp2(head_product(q_low, q_high, k_low, k_high, HIGH) * scale2 - log_sum[:, None])
        if MASKED:
            weights = tl.where(_visible(rows, at + lanes, offset, keys, CAUSAL), weights, 0.0)
        slopes = weights * (head_product(g_low, g_high, v_low, v_high, HIGH) - delta[:, None])
        low, high = add_product(low, high, slopes, k_low, k_high, HIGH)
        k += BLOCK_N * row_k
        v += BLOCK_N * row_v
    return low, high


@triton.jit
def _row_products(a_low, a_high, b_low, b_high, HIGH: tl.constexpr):
    """Sum of a * b over the head, fp32 [rows]."""
    total = tl.sum(a_low.to(tl.float32) * b_low.to(tl.float32), 1)
    if HIGH > 0:
        total += tl.sum(a_high.to(tl.float32) * b_high.to(tl.float32), 1)
    return total


@triton.jit(do_not_specialize=["sequences", "pitch_q", "pitch_k", "capacity_q", "capacity_k"])
def backward_queries(
    q, k, v, out, gradient, lse, terms, dq, offsets_q, offsets_k, sequences, pitch_q, pitch_k, capacity_q, capacity_k,
    heads, scale, scale2,
    batch_q, row_q, head_q, batch_k, row_k, head_k, batch_v, row_v, head_v, batch_g, row_g, head_g,
    LAYOUT_Q: tl.constexpr, LAYOUT_K: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head; and for ``backward_keys``, terms [heads, capacity_q, 2] = (-lse, delta).

    delta is the sum of out * gradient over the head.
    """
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tl.program_id(0) // heads
    if CAUSAL:
        tile = tl.num_programs(0) // heads - 1 - tile
    sequence, start, length, first, stop = find(
        tile, offsets_q, sequences, pitch_q, capacity_q, LAYOUT_Q, BLOCK_M, LANES
    )
    if (first < 0) | (first >= stop):
        return
    start_k, keys = span(sequence, offsets_k, pitch_k, capacity_k, LAYOUT_K)
    keys = tl.where(first < length, keys, 0)
    offset = keys - length
    lanes = tl.arange(0, BLOCK_M)
    rows = first + lanes
    origin = (start + first).to(tl.int64)
    q = place(q, sequence, start, first, head, batch_q, row_q, head_q, LAYOUT_Q, ALIGN)
    gradient = place(gradient, sequence, start, first, head, batch_g, row_g, head_g, LAYOUT_Q, ALIGN)
    group = head // GROUP
    k = place(k, sequence, start_k, 0, group, batch_k, row_k, head_k, LAYOUT_K, ALIGN)
    v = place(v, sequence, start_k, 0, group, batch_v, row_v, head_v, LAYOUT_K, ALIGN)
    stride_q = row_q * ALIGN
    stride_g = row_g * ALIGN
    row_k = tl.cast(row_k * ALIGN, tl.int64)
    row_v = tl.cast(row_v * ALIGN, tl.int64)
    own = (origin * heads + head) * HEAD_DIM
    valid = length - first
    q_low, q_high = load(q, lanes, stride_q, valid, HEAD_DIM, LOW, HIGH)
    g_low, g_high = load(gradient, lanes, stride_g, valid, HEAD_DIM, LOW, HIGH)
    o_low, o_high = load(out + own, lanes, heads * HEAD_DIM, valid, HEAD_DIM, LOW, HIGH)
    deltas = _row_products(o_low, o_high, g_low, g_high, HIGH)
    numbers = head * capacity_q + origin + lanes
    log_sum = tl.load(lse + numbers, mask=rows < length, other=float("inf"))
    tl.store(terms + numbers * 2, -log_sum, mask=rows < stop)
    tl.store(terms + numbers * 2 + 1, deltas, mask=rows < stop)
    low = tl.zeros([BLOCK_M, LOW], tl.float32)
    high = tl.zeros([BLOCK_M, HIGH if HIGH > 0 else 16], tl.float32)
    whole, end = _key_bounds(first, offset, keys, CAUSAL, BLOCK_M, BLOCK_N)
    low, high = _pull_queries(
        low, high, q_low, q_high, g_low, g_high, log_sum, deltas, k, v, row_k, row_v, rows, 0, whole, offset, keys,
        scale2, False, CAUSAL, HEAD_DIM, LOW, HIGH, BLOCK_N,
    )  # fmt: skip
    low, high = _pull_queries(
        low, high, q_low, q_high, g_low, g_high, log_sum, deltas, k, v, row_k, row_v, rows, whole, end, offset, keys,
        scale2, True, CAUSAL, HEAD_DIM, LOW, HIGH, BLOCK_N,
    )  # fmt: skip
    store(
        dq + own, lanes, heads * HEAD_DIM, valid, stop - first, low * scale, high * scale, HEAD_DIM, LOW, HIGH
    )


@triton.jit
def _terms_of(terms, lanes, limit, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """-lse and delta of queries, fp32 [BLOCK_M] each; 0 from ``limit`` on.

    Loaded together, WIDTH / 2 times over: a load of fewer elements than the program has threads is one that Triton 3.6
    lets every thread do by itself for all it needs, element by element (on sm_90, BLOCK_M 64, 8 warps: 128
    instructions instead of 4).
    """
    places = lanes[:, None] * 2 + (tl.arange(0, WIDTH) // (WIDTH // 2))[None, :]
    found = tl.load(terms + places, mask=(lanes < limit)[:, None], other=0.0)
    if WIDTH > 2:
        found = tl.max(tl.reshape(found, [BLOCK_M, 2, WIDTH // 2]), 2)
    return tl.split(found)


@triton.jit
def _pull_keys(
    dk_low, dk_high, dv_low, dv_high, k_low, k_high, v_low, v_high, q, gradient, terms, row_q, row_g, columns,
    begin, stop, offset, length, scale2,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK_M: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """dK + dS^T @ Q and dV + P^T @ dO over queries begin:stop.

    Queries past the sequence come as zeros, -lse and gradient included: P is 1 and adds nothing. Keys past it give
    numbers to their own rows only, where zeros are stored in the end: neither needs a mask.
    """
    q += begin * row_q
    gradient += begin * row_g
    terms += begin * 2
    for at in range(begin, stop, BLOCK_M):
        lanes = tl.arange(0, BLOCK_M)
        limit = length - at
        q_low, q_high = load(q, lanes, row_q.to(tl.int32), limit, HEAD_DIM, LOW, HIGH)
        minus_lse, deltas = _terms_of(terms, lanes, limit, BLOCK_M, TERMS)
        weights = tl.exp2(head_product(k_low, k_high, q_low, q_high, HIGH) * scale2 + minus_lse[None, :])
        if MASKED:
            weights = tl.where(columns[:, None] <= (at + lanes + offset)[None, :], weights, 0.0)
        g_low, g_high = load(gradient, lanes, row_g.to(tl.int32), limit, HEAD_DIM, LOW, HIGH)
        dv_low, dv_high = add_product(dv_low, dv_high, weights, g_low, g_high, HIGH)
        slopes = weights * (head_product(v_low, v_high, g_low, g_high, HIGH) - deltas[None, :])
        dk_low, dk_high = add_product(dk_low, dk_high, slopes, q_low, q_high, HIGH)
        q += BLOCK_M * row_q
        gradient += BLOCK_M * row_g
        terms += BLOCK_M * 2
    return dk_low, dk_high, dv_low, dv_high


@triton.jit
def _query_bounds(
    first, offset, length, keys, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(begin, whole): no query before ``begin`` sees a key of the tile, each from ``whole`` on sees all of them."""
    if CAUSAL:
        begin = tl.minimum(tl.maximum(first - offset, 0), length) // BLOCK_M * BLOCK_M
        last = tl.minimum(first + BLOCK_N, keys) - 1
        whole = tl.minimum(tl.maximum(last - offset, 0), length)
        return begin, tl.maximum(begin, (whole + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    else:  # noqa: RET505
        return 0, 0


@triton.jit(do_not_specialize=["sequences", "pitch_q", "pitch_k", "capacity_q", "capacity_k"])
def backward_keys(
    q, k, v, gradient, terms, dk, dv, offsets_q, offsets_k, sequences, pitch_q, pitch_k, capacity_q, capacity_k,
    kv_heads, scale, scale2,
    batch_q, row_q, head_q, batch_k, row_k, head_k, batch_v, row_v, head_v, batch_g, row_g, head_g,
    LAYOUT_Q: tl.constexpr, LAYOUT_K: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one key-value head, summed over the queries of its group."""
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    tile = tl.program_id(0) // kv_heads
    sequence, start, keys, first, stop = find(
        tile, offsets_k, sequences, pitch_k, capacity_k, LAYOUT_K, BLOCK_N, LANES
    )
    if (first < 0) | (first >= stop):
        return
    start_q, length = span(sequence, offsets_q, pitch_q, capacity_q, LAYOUT_Q)
    length = tl.where(first < keys, length, 0)
    offset = keys - length
    lanes = tl.arange(0, BLOCK_N)
    columns = first + lanes
    origin = (start + first).to(tl.int64)
    k = place(k, sequence, start, first, head, batch_k, row_k, head_k, LAYOUT_K, ALIGN)
    v = place(v, sequence, start, first, head, batch_v, row_v, head_v, LAYOUT_K, ALIGN)
    stride_k = row_k * ALIGN
    stride_v = row_v * ALIGN
    stride_q = tl.cast(row_q * ALIGN, tl.int64)
    stride_g = tl.cast(row_g * ALIGN, tl.int64)
    valid = keys - first
    k_low, k_high = load(k, lanes, stride_k, valid, HEAD_DIM, LOW, HIGH)
    v_low, v_high = load(v, lanes, stride_v, valid, HEAD_DIM, LOW, HIGH)
    dk_low = tl.zeros([BLOCK_N, LOW], tl.float32)
    dk_high = tl.zeros([BLOCK_N, HIGH if HIGH > 0 else 16], tl.float32)
    dv_low = tl.zeros([BLOCK_N, LOW], tl.float32)
    dv_high = tl.zeros([BLOCK_N, HIGH if HIGH > 0 else 16], tl.float32)
    begin, whole = _query_bounds(first, offset, length, keys, CAUSAL, BLOCK_M, BLOCK_N)
    for member in range(GROUP):
        query_head = head * GROUP + member
        q_head = place(q, sequence, start_q, 0, query_head, batch_q, row_q, head_q, LAYOUT_Q, ALIGN)
        g_head = place(gradient, sequence, start_q, 0, query_head, batch_g, row_g, head_g, LAYOUT_Q, ALIGN)
        terms_head = terms + (query_head * capacity_q + start_q) * 2
        if CAUSAL:
            dk_low, dk_high, dv_low, dv_high = _pull_keys(
                dk_low, dk_high, dv_low, dv_high, k_low, k_high, v_low, v_high, q_head, g_head, terms_head,
                stride_q, stride_g, columns, begin, tl.minimum(whole, length), offset, length, scale2,
                True, HEAD_DIM, LOW, HIGH, BLOCK_M, TERMS,
            )  # fmt: skip
        # At least once, if for nothing: the zeros of a loop that is skipped came between the last wgmma and its wait,
        # and ptxas serialised all of them.
        dk_low, dk_high, dv_low, dv_high = _pull_keys(
            dk_low, dk_high, dv_low, dv_high, k_low, k_high, v_low, v_high, q_head, g_head, terms_head,
            stride_q, stride_g, columns, whole, tl.maximum(length, 1), offset, length, scale2,
            False, HEAD_DIM, LOW, HIGH, BLOCK_M, TERMS,
        )  # fmt: skip
    own = (origin * kv_heads + head) * HEAD_DIM
    pitch = kv_heads * HEAD_DIM
    store(dk + own, lanes, pitch, valid, stop - first, dk_low * scale, dk_high * scale, HEAD_DIM, LOW, HIGH)
    store(dv + own, lanes, pitch, valid, stop - first, dv_low, dv_high, HEAD_DIM, LOW, HIGH)
