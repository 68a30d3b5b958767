/* Products of small matrices in float32, whose sums have one order: a tile of the result stays in registers. */
#ifndef TURNWISE_PRODUCTS_H
#define TURNWISE_PRODUCTS_H

#include <stdint.h>

#include "vectors.h"

#if defined(__x86_64__) && !defined(__AVX2__)
#error "tiles fill the registers of AVX2: with SSE they go through memory, so torch computes"
#endif

enum { TILE = 6 }; /* rows of it: with two vectors each 12 of AVX2's 16 registers */

/* c [rows, vectors] = or += a·b over k, `rows` and `vectors` known to the compiler. */
INLINE void tile(const int rows, const int vectors, int64_t k, const float *a, int64_t a_row, int64_t a_k,
                 const float *b, int64_t b_row, float *c, int64_t c_row, int is_added) {
    Vector sum[TILE][2];
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int at = 0; at < vectors; at++) sum[row][at] = is_added ? load(c + row * c_row + at * WIDTH) : fill(0);
    for (; k; k--, a += a_k, b += b_row) {
        Vector right[2];
#pragma GCC unroll 2
        for (int at = 0; at < vectors; at++) right[at] = load(b + at * WIDTH);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++) {
            Vector left = fill(a[row * a_row]);
#pragma GCC unroll 2
            for (int at = 0; at < vectors; at++) sum[row][at] += left * right[at];
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int at = 0; at < vectors; at++) store(c + row * c_row + at * WIDTH, sum[row][at]);
}

#define ROWS_OF(rows)                                                                                                 \
    case rows:                                                                                                        \
        tile(rows, vectors, k, a, a_row, a_k, b, b_row, c, c_row, is_added);                                          \
        break;

INLINE void column(const int vectors, int64_t m, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b,
                   int64_t b_row, float *c, int64_t c_row, int is_added) {
    for (; m >= TILE; m -= TILE, a += TILE * a_row, c += TILE * c_row)
        tile(TILE, vectors, k, a, a_row, a_k, b, b_row, c, c_row, is_added);
    switch (m) { ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) }
}

/* c [m, n] = or += a·b, a [m, k] with any steps, b [k, n]; n is of whole vectors. */
__attribute__((unused)) static void multiply(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b,
                     int64_t b_row, float *c, int64_t c_row, int is_added) {
    for (; n > WIDTH; n -= 2 * WIDTH, b += 2 * WIDTH, c += 2 * WIDTH)
        column(2, m, k, a, a_row, a_k, b, b_row, c, c_row, is_added);
    if (n > 0) column(1, m, k, a, a_row, a_k, b, b_row, c, c_row, is_added);
}

#endif
