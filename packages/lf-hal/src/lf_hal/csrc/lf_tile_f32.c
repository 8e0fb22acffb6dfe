/* Tiles over panels of float32. */
#include "lf_vec.h"

#define LF_STORED float
#define LF_WIDEN lf_load
#define LF_TILE_ROWS lf_tile_rows_f32
#include "lf_tile.h"
