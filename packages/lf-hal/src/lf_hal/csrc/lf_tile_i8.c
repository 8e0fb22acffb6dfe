/* Tiles over panels of int8. */
#include "lf_widen.h"

#define LF_STORED int8_t
#define LF_WIDEN lf_load_i8
#define LF_TILE_ROWS lf_tile_rows_i8
#include "lf_tile.h"
