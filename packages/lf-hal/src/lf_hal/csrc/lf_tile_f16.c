/* Tiles over panels of IEEE half precision. */
#include "lf_widen.h"

#define LF_STORED uint16_t
#define LF_WIDEN lf_load_f16
#define LF_TILE_ROWS lf_tile_rows_f16
#include "lf_tile.h"
