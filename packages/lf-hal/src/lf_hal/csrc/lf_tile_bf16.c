/* Tiles over panels of bfloat16. */
#include "lf_widen.h"

#define LF_STORED uint16_t
#define LF_WIDEN lf_load_bf16
#define LF_TILE_ROWS lf_tile_rows_bf16
#include "lf_tile.h"
