"""Rewrites of graphs: each pass is a pure function from a graph to an equal one, and has a switch."""

from lf_hal.passes.batch_norm import fold_affine, fold_batch_norm, lower_batch_norm
from lf_hal.passes.fuse import fuse_conv, fuse_linear, fuse_multiply_add, fuse_residual
from lf_hal.passes.pipeline import (
    ConflictingSwitchesError,
    Optimized,
    PassOptions,
    Step,
    optimize,
    optimize_and_report,
)
from lf_hal.passes.simplify import fold_constants, simplify
from lf_hal.passes.store import WEIGHTS_DTYPES, store_weights
from lf_hal.passes.tile import TileError, tile_products

__all__ = [
    "WEIGHTS_DTYPES",
    "ConflictingSwitchesError",
    "Optimized",
    "PassOptions",
    "Step",
    "TileError",
    "fold_affine",
    "fold_batch_norm",
    "fold_constants",
    "fuse_conv",
    "fuse_linear",
    "fuse_multiply_add",
    "fuse_residual",
    "lower_batch_norm",
    "optimize",
    "optimize_and_report",
    "simplify",
    "store_weights",
    "tile_products",
]
