/* Vectors of WIDTH floats by the compiler's own vector types (GCC, clang), so that one source serves x86 and ARM. WIDTH
 * is 16 with AVX-512 and 8 elsewhere, where a compiler may take two registers for one; -DWIDTH=16 forces it anywhere.
 */
#ifndef TURNWISE_VECTORS_H
#define TURNWISE_VECTORS_H

#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* all is inlined: how a vector would be passed matters to nobody */

#ifndef WIDTH
#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
#endif

#define INLINE static inline __attribute__((always_inline, unused))

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef unsigned Bits __attribute__((vector_size(4 * WIDTH)));
typedef int Mask __attribute__((vector_size(4 * WIDTH))); /* of a comparison: -1 where it is true, 0 elsewhere */

INLINE Vector load(const float *from) {
    Vector found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void store(float *to, Vector values) { memcpy(to, &values, sizeof values); }

/* The first `count` floats, 0 beyond; a whole vector where there are as many or more. */
INLINE Vector load_first(const float *from, long count) {
    if (count >= WIDTH) return load(from);
    Vector found = {0};
    for (long lane = 0; lane < count; lane++) found[lane] = from[lane];
    return found;
}

INLINE void store_first(float *to, Vector values, long count) {
    if (count >= WIDTH) store(to, values);
    else
        for (long lane = 0; lane < count; lane++) to[lane] = values[lane];
}

INLINE Vector fill(float value) {
    const Vector zero = {0};
    return value - zero; /* not a sum: that is no copy of -0 */
}

INLINE Vector choose(Mask mask, Vector yes, Vector no) {
    return (Vector)((mask & (Mask)yes) | (~mask & (Mask)no));
}

INLINE Vector larger(Vector one, Vector other) { return choose(one > other, one, other); }

/* 0, 1, 2 … */
INLINE Mask count_up(void) {
#if WIDTH == 16
    return (Mask){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
    return (Mask){0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

/* Rows to columns, in place. At each step squares of `half` lanes change places across the diagonal. */
INLINE void transpose(Vector rows[WIDTH]) {
#ifdef __clang__ /* it has no shuffle by a vector of lanes */
    float at[WIDTH][WIDTH];
    for (int row = 0; row < WIDTH; row++) store(at[row], rows[row]);
    for (int row = 0; row < WIDTH; row++)
        for (int lane = 0; lane < WIDTH; lane++) rows[row][lane] = at[lane][row];
#else
#pragma GCC unroll 4
    for (int half = WIDTH / 2; half; half /= 2) {
        const Mask lanes = count_up(), is_low = (lanes & half) == 0;
        const Mask low = (lanes & is_low) | ((lanes - half + WIDTH) & ~is_low);
        const Mask high = ((lanes + half) & is_low) | ((lanes + WIDTH) & ~is_low);
#pragma GCC unroll 16
        for (int row = 0; row < WIDTH; row++)
            if (!(row & half)) {
                const Vector one = rows[row], other = rows[row + half];
                rows[row] = __builtin_shuffle(one, other, low);
                rows[row + half] = __builtin_shuffle(one, other, high);
            }
    }
#endif
}

/* Halves are added to halves: few roundings, and one order whatever the compiler. */
INLINE float sum_of(Vector values) {
    float lane[WIDTH];
    store(lane, values);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int at = 0; at < half; at++) lane[at] += lane[at + half];
    return lane[0];
}

INLINE float largest_of(Vector values) {
    float lane[WIDTH];
    store(lane, values);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int at = 0; at < half; at++) lane[at] = lane[at] > lane[at + half] ? lane[at] : lane[at + half];
    return lane[0];
}

/* e to the x, relative error below 1e-7; 0 below -87.3 and as at 88.3 above; NaN stays NaN. x = n·ln 2 + r with
 * |r| ≤ ln 2 / 2, and e^r by its Taylor series to r^7. Adding 1.5·2^23 rounds to the nearest n, which is then in the
 * low bits of the float.
 */
INLINE Vector exponential(Vector x) {
    const float shift = 12582912.0f;
    Mask is_zero = x < -87.3f;
    x = choose(x > 88.3f, fill(88.3f), x);
    Vector shifted = x * 1.44269504f + shift;
    Vector n = shifted - shift;
    Vector r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vector e = r * 1.98412698e-4f + 1.38888889e-3f;
    e = e * r + 8.33333333e-3f;
    e = e * r + 4.16666667e-2f;
    e = e * r + 1.66666667e-1f;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    Vector power = (Vector)(((Bits)shifted << 23) + 0x3f800000u);
    return (Vector)((Mask)(e * power) & ~is_zero);
}

#endif
