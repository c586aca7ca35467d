/* Included before every file of a library that is compiled here. gcc 12 says of the instruction that loads the shape of matrix
   tiles that it reads 8 bytes, where it reads 64: it drops the stores before it, and the next tile instruction is an illegal one. */
#pragma once
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" ::"m"(*(const char(*)[64])(config)))
#endif
