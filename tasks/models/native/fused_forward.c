/* What is between the matrix products of a layer, forward and backward, in float32: sums with a norm, the norm and
 * rotation of heads, gates. By torch each is several passes over memory; here it is one.
 *
 * P positions, H hidden size, D size of a head. Rows are one after another, so the bits of a position depend on no other
 * but in gradients of weights, which are added in the order of positions.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "vectors.h"

enum { BLOCK = 64 }; /* positions whose gradients of a weight are added in float32, before they are added in float64 */

INLINE float inverse_root(const float *row, int64_t size, float epsilon) {
    Vector squares = {0};
    for (int64_t at = 0; at < size; at += WIDTH) {
        const Vector x = load_first(row + at, size - at);
        squares += x * x;
    }
    return 1 / sqrtf(sum_of(squares) / size + epsilon);
}

INLINE void scale_row(const float *row, const float *weight, float inverse, float *to, int64_t size) {
    for (int64_t at = 0; at < size; at += WIDTH) {
        const int64_t left = size - at;
        store_first(to + at, load_first(weight + at, left) * (load_first(row + at, left) * inverse), left);
    }
}

/* d_row += the gradient through a norm, of `d_out`; `sums` gets the weight's. */
INLINE void norm_back(
    const float *row, const float *weight, float inverse, const float *d_out, float *d_row, float *sums, int64_t size
) {
    Vector products = {0};
    for (int64_t at = 0; at < size; at += WIDTH) {
        const int64_t left = size - at;
        const Vector d = load_first(d_out + at, left), scaled = load_first(row + at, left) * inverse;
        products += d * load_first(weight + at, left) * scaled;
        store_first(sums + at, load_first(sums + at, left) + d * scaled, left);
    }
    const float mean = sum_of(products) / size;
    for (int64_t at = 0; at < size; at += WIDTH) {
        const int64_t left = size - at;
        const Vector scaled = load_first(row + at, left) * inverse;
        const Vector d = load_first(d_out + at, left) * load_first(weight + at, left);
        store_first(d_row + at, load_first(d_row + at, left) + inverse * (d - scaled * mean), left);
    }
}

INLINE void add_block(double *total, float *sums, int64_t size) {
    for (int64_t at = 0; at < size; at++) {
        total[at] += sums[at];
        sums[at] = 0;
    }
}

/* sum [P, H] = x + added, and out = weight · sum / its root mean square. Without `added` the sum is x, not written. */
void add_norm(
    int64_t positions, int64_t size, float epsilon, const float *x, const float *added, const float *weight, float *sum,
    float *out, float *inverse
) {
    for (int64_t p = 0; p < positions; p++) {
        const float *row = x + p * size;
        if (added) {
            for (int64_t at = 0; at < size; at += WIDTH) {
                const int64_t left = size - at, here = p * size + at;
                store_first(sum + here, load_first(x + here, left) + load_first(added + here, left), left);
            }
            row = sum + p * size;
        }
        inverse[p] = inverse_root(row, size, epsilon);
        scale_row(row, weight, inverse[p], out + p * size, size);
    }
}

/* d_x [P, H]: of the sum, which may have a gradient d_sum of its own. d_weight [H]. Not 0 where memory is wanting. */
int add_norm_back(
    int64_t positions, int64_t size, const float *sum, const float *weight, const float *inverse, const float *d_out,
    const float *d_sum, float *d_x, float *d_weight
) {
    float *sums = calloc(size, sizeof *sums);
    double *total = calloc(size, sizeof *total);
    if (sums && total) {
        for (int64_t p = 0; p < positions; p++) {
            float *row = d_x + p * size;
            if (d_sum) memcpy(row, d_sum + p * size, size * sizeof *row);
            else memset(row, 0, size * sizeof *row);
            norm_back(sum + p * size, weight, inverse[p], d_out + p * size, row, sums, size);
            if (p % BLOCK == BLOCK - 1) add_block(total, sums, size);
        }
        add_block(total, sums, size);
        for (int64_t at = 0; at < size; at++) d_weight[at] = total[at];
    }
    const int failed = !sums || !total;
    free(sums);
    free(total);
    return failed;
}

/* One kind of heads within the rows of a product: its first column, how many, and what norms and turns them. */
typedef struct {
    int64_t column, heads;
    const float *weight;      /* [D], or none: no norm */
    float *values, *inverse;  /* [P, heads, D] and [P, heads] */
    const float *d_values;    /* the gradient of what came out */
    float *d_weight;          /* [D] */
} Heads;

/* As fused_forward.py fills it. `product` [P, columns]; cosine and sine [P, D]. */
typedef struct {
    int64_t positions, columns, size;
    float epsilon;
    const float *product, *cosine, *sine;
    float *d_product;
    Heads queries, keys;
} Turn;

/* to = x · cosine + (the halves of x changed, the first negated) · sine */
INLINE void turn(const float *x, const float *cosine, const float *sine, float *to, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t at = 0; at < half; at++) {
        const float low = x[at], high = x[at + half];
        to[at] = low * cosine[at] - high * sine[at];
        to[at + half] = high * cosine[at + half] + low * sine[at + half];
    }
}

INLINE void turn_back(const float *d, const float *cosine, const float *sine, float *to, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t at = 0; at < half; at++) {
        const float low = d[at], high = d[at + half];
        to[at] = low * cosine[at] + high * sine[at + half];
        to[at + half] = high * cosine[at + half] - low * sine[at];
    }
}

static void turn_heads(const Turn *all, const Heads *kind, float *normed) {
    const int64_t size = all->size;
    for (int64_t p = 0; p < all->positions; p++)
        for (int64_t h = 0; h < kind->heads; h++) {
            const float *row = all->product + p * all->columns + kind->column + h * size;
            const int64_t number = p * kind->heads + h;
            if (kind->weight) {
                kind->inverse[number] = inverse_root(row, size, all->epsilon);
                scale_row(row, kind->weight, kind->inverse[number], normed, size);
                row = normed;
            }
            turn(row, all->cosine + p * size, all->sine + p * size, kind->values + number * size, size);
        }
}

static void turn_heads_back(const Turn *all, const Heads *kind, float *d_normed, float *sums, double *total) {
    const int64_t size = all->size;
    memset(sums, 0, size * sizeof *sums);
    memset(total, 0, size * sizeof *total);
    for (int64_t p = 0; p < all->positions; p++) {
        for (int64_t h = 0; h < kind->heads; h++) {
            const int64_t at = p * all->columns + kind->column + h * size, number = p * kind->heads + h;
            float *to = kind->weight ? d_normed : all->d_product + at;
            turn_back(kind->d_values + number * size, all->cosine + p * size, all->sine + p * size, to, size);
            if (!kind->weight) continue;
            memset(all->d_product + at, 0, size * sizeof(float));
            norm_back(
                all->product + at, kind->weight, kind->inverse[number], d_normed, all->d_product + at, sums, size
            );
        }
        if (p % BLOCK == BLOCK - 1) add_block(total, sums, size);
    }
    add_block(total, sums, size);
    if (kind->weight)
        for (int64_t at = 0; at < size; at++) kind->d_weight[at] = total[at];
}

int turn_all(const Turn *all, int is_backward) {
    float *space = malloc(2 * all->size * sizeof *space);
    double *total = malloc(all->size * sizeof *total);
    const int failed = !space || !total;
    if (!failed) {
        for (int kind = 0; kind < 2; kind++) {
            const Heads *heads = kind ? &all->keys : &all->queries;
            if (is_backward) turn_heads_back(all, heads, space, space + all->size, total);
            else turn_heads(all, heads, space);
        }
    }
    free(space);
    free(total);
    return failed;
}

INLINE Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

/* out [P, I] = gate · sigmoid(gate) · up, of rows [P, 2·I] in which the gates come first */
void gate(int64_t positions, int64_t size, const float *both, float *out) {
    for (int64_t p = 0; p < positions; p++)
        for (int64_t at = 0; at < size; at += WIDTH) {
            const int64_t left = size - at;
            const Vector x = load_first(both + 2 * p * size + at, left), up = load_first(both + (2 * p + 1) * size + at, left);
            store_first(out + p * size + at, x * sigmoid(x) * up, left);
        }
}

void gate_back(int64_t positions, int64_t size, const float *both, const float *d_out, float *d_both) {
    for (int64_t p = 0; p < positions; p++)
        for (int64_t at = 0; at < size; at += WIDTH) {
            const int64_t left = size - at, gates = 2 * p * size + at, ups = gates + size;
            const Vector x = load_first(both + gates, left), up = load_first(both + ups, left);
            const Vector d = load_first(d_out + p * size + at, left), s = sigmoid(x);
            store_first(d_both + ups, d * x * s, left);
            store_first(d_both + gates, d * up * s * (1.0f + x * (1.0f - s)), left);
        }
}
