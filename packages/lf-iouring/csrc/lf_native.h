#ifndef LF_NATIVE_H
#define LF_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#include "lf_native.cdef"

#endif
