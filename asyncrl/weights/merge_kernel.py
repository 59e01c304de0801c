"""The sum of base weights and an adapter in one pass over a GPU's memory.

Each program holds one tile of one module's weight: it multiplies its rows of B by its columns of A,
adds its tile of W in float32 and stores what that is rounded to. Nothing else is read or written; a
product and a sum, one after the other, move three times as much. cuBLAS has one call for this too
(`baddbmm`), but rounds the product to 16 bits before it is added (seen with torch 2.11 on an H200).
"""

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS, _RANKS = 64, 128, 32


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    base: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    rank: tl.constexpr,
    rows_at_once: tl.constexpr,
    columns_at_once: tl.constexpr,
    ranks_at_once: tl.constexpr,
) -> None:
    module = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * rows_at_once + tl.arange(0, rows_at_once)
    columns = tl.program_id(0) * columns_at_once + tl.arange(0, columns_at_once)
    are_rows, are_columns = rows < num_rows, columns < num_columns
    a += module * rank * num_columns
    b += module * num_rows * rank
    total = tl.zeros((rows_at_once, columns_at_once), tl.float32)
    for first in range(0, rank, ranks_at_once):
        ranks = first + tl.arange(0, ranks_at_once)
        left = tl.load(
            b + rows[:, None] * rank + ranks[None, :],
            mask=are_rows[:, None] & (ranks < rank)[None, :],
            other=0.0,
        )
        right = tl.load(
            a + ranks[:, None] * num_columns + columns[None, :],
            mask=(ranks < rank)[:, None] & are_columns[None, :],
            other=0.0,
        )
        total += tl.dot(left, right, input_precision="ieee")
    place = (
        module * num_rows * num_columns
        + rows[:, None].to(tl.int64) * num_columns
        + columns[None, :]
    )
    are_there = are_rows[:, None] & are_columns[None, :]
    weight = tl.load(base + place, mask=are_there, other=0.0).to(tl.float32)
    tl.store(out + place, (weight + scale * total).to(out.dtype.element_ty), mask=are_there)


def merge(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale * B A in the type of `base`: summed in float32, rounded once.

    `base` [M, out, in], `a` [M, rank, in] and `b` [M, out, rank] lie contiguous on the present GPU;
    `a` and `b` are of one type.
    """
    num_modules, num_rows, num_columns = base.shape
    out = torch.empty_like(base)
    grid = (triton.cdiv(num_columns, _COLUMNS), triton.cdiv(num_rows, _ROWS), num_modules)
    rank = a.shape[1]
    _merge[grid](base, a, b, out, scale, num_rows, num_columns, rank, _ROWS, _COLUMNS, _RANKS)
    return out
