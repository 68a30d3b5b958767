/* Attention of packed trees, forward and backward, in float32: each branch sees its own path alone (TreePlan).
 *
 * torch's kernel needs rectangles of queries by keys with a mask, and most of its calls are small. Here ROWS rows, the
 * queries of all heads that share a key, are the lanes of vectors, and the keys are walked through: scores are [T, ROWS],
 * so a softmax is vectors alone, and no query meets keys beyond the end of its panel. Every sum has one order, and a
 * key head belongs to one thread, so the bits depend on neither the number of threads nor what else is in the row.
 *
 * D size of a query's or key's head, V of a value's, T positions of a path; rows are queries, then heads of one key.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "products.h"

enum {
    ROWS = 32,         /* of a block */
    PANEL = 2 * WIDTH, /* of them, with one end of what they see */
    CHUNK = 64,        /* keys of which backward holds everything in the first caches */
    AHEAD = 8,         /* positions: what is asked for before it is read */
    MAX_THREADS = 64,
};

typedef struct {
    float *data;
    int64_t head, position; /* steps, in floats */
} Heads;

/* As tree_attention.py fills it. `branches` [B, 4]: first position, new positions, start in `paths`, length of it. */
typedef struct {
    int64_t num_keys, group, key_size, value_size, num_positions, num_branches, longest;
    const int64_t *branches, *paths;
    Heads query, key, value, output;
    float *log_sums; /* [key heads · group, positions], of the softmax */
    Heads d_output, d_query, d_key, d_value;
    float scale;
} Attention;

typedef struct {
    const Attention *all;
    int64_t head, prefix, length, num_new, start; /* of the branch */
    const int64_t *path;
    int64_t key_width, value_width;            /* sizes up to a whole vector */
    float *keys, *values, *d_keys, *d_values;  /* of the path: [T, D or V] */
    float *query, *query_T, *d_output, *d_output_T, *result; /* of the block: [ROWS, D] and [D, ROWS] */
    float *scores, *d_scores;                  /* [T, ROWS] and [CHUNK, ROWS] */
    int64_t first, num_rows;                   /* of the block: a query of the branch, and its rows */
    int32_t last[ROWS];                        /* that each row sees */
    float log_sum[ROWS], inverse[ROWS], delta[ROWS];
} Work;

static int64_t up_to(int64_t count, int64_t whole) { return (count + whole - 1) / whole * whole; }

/* Ask for what is read soon: rows of a tensor are too far apart for the processor to guess the next. */
INLINE void fetch(const float *from, int64_t size) {
    for (int64_t d = 0; d < size; d += 16) __builtin_prefetch(from + d);
}

/* Of position `at` of the path. */
INLINE float *place_of(const Work *own, Heads heads, int64_t at) {
    return heads.data + own->head * heads.head + own->path[at] * heads.position;
}

static void gather(const Work *own, Heads from, int64_t size, int64_t width, float *to) {
    for (int64_t at = 0; at < own->length; at++, to += width) {
        const float *values = place_of(own, from, at);
        if (at + AHEAD < own->length) fetch(place_of(own, from, at + AHEAD), size);
        for (int64_t d = 0; d < size; d += WIDTH) store(to + d, load_first(values + d, size - d));
    }
}

static void scatter(const Work *own, const float *from, int64_t size, int64_t width, Heads to) {
    for (int64_t at = 0; at < own->length; at++, from += width) {
        float *sum = place_of(own, to, at);
        if (at + AHEAD < own->length) fetch(place_of(own, to, at + AHEAD), size);
        for (int64_t d = 0; d < size; d += WIDTH)
            store_first(sum + d, load_first(sum + d, size - d) + load(from + d), size - d);
    }
}

/* Of a row of the block, in a tensor of all heads. */
static float *row_of(const Work *own, Heads heads, int64_t row) {
    const int64_t group = own->all->group, position = own->start + own->first + row / group;
    return heads.data + (own->head * group + row % group) * heads.head + position * heads.position;
}

/* The block's rows times `factor`, and the same transposed, where lanes without a row are 0. */
static void pack(const Work *own, Heads from, int64_t size, int64_t width, float factor, float *rows, float *rows_T) {
    for (int64_t first = 0; first < ROWS; first += WIDTH) {
        const float *given[WIDTH];
        for (int64_t lane = 0; lane < WIDTH; lane++)
            given[lane] = first + lane < own->num_rows ? row_of(own, from, first + lane) : 0;
        for (int64_t d = 0; d < size; d += WIDTH) {
            Vector square[WIDTH];
            for (int64_t lane = 0; lane < WIDTH; lane++) {
                square[lane] = given[lane] ? load_first(given[lane] + d, size - d) * factor : fill(0);
                store(rows + (first + lane) * width + d, square[lane]);
            }
            transpose(square);
            for (int64_t lane = 0; lane < WIDTH; lane++) store(rows_T + (d + lane) * ROWS + first, square[lane]);
        }
    }
}

/* Ask for the rows of the next block. */
static void fetch_next(const Work *own, Heads from, int64_t size) {
    for (int64_t row = own->num_rows; row < 2 * own->num_rows; row++)
        if (own->first + row / own->all->group < own->num_new) fetch(row_of(own, from, row), size);
}

/* Take up the block that starts at query `first` of the branch. */
static void begin_block(Work *own, int64_t first) {
    const int64_t group = own->all->group, at_most = ROWS / group, left = own->num_new - first;
    own->first = first;
    own->num_rows = (left < at_most ? left : at_most) * group;
    for (int64_t row = 0; row < ROWS; row++) own->last[row] = (int32_t)(own->prefix + first + row / group);
    pack(own, own->all->query, own->all->key_size, own->key_width, own->all->scale, own->query, own->query_T);
    fetch_next(own, own->all->query, own->all->key_size);
}

/* Keys that the panel's rows see: all of those before it, at least one. */
static int64_t end_of(const Work *own, int64_t panel) {
    const int64_t beyond = panel + PANEL < own->num_rows ? panel + PANEL : own->num_rows;
    return own->last[beyond - 1] + 1;
}

static int64_t lanes_of(const Work *own, int64_t panel) {
    return own->num_rows - panel > WIDTH ? PANEL : WIDTH;
}

INLINE Mask is_seen(const Work *own, int64_t key, int64_t row) {
    Mask last;
    memcpy(&last, own->last + row, sizeof last);
    const Mask zero = {0};
    return zero + (int32_t)key <= last;
}

/* Scores of WIDTH rows to weights that are not yet divided by their sum. */
static void soften(Work *own, int64_t row, int64_t end) {
    float *scores = own->scores + row;
    Vector top = fill(-INFINITY), sum = fill(0);
    for (int64_t key = 0; key < end; key++) {
        Vector score = load(scores + key * ROWS);
        if (key > own->last[row]) {
            score = choose(is_seen(own, key, row), score, fill(-INFINITY));
            store(scores + key * ROWS, score);
        }
        top = larger(score, top);
    }
    for (int64_t key = 0; key < end; key++) {
        const Vector weight = exponential(load(scores + key * ROWS) - top);
        store(scores + key * ROWS, weight);
        sum += weight;
    }
    for (int lane = 0; lane < WIDTH; lane++) {
        own->inverse[row + lane] = 1 / sum[lane];
        own->log_sum[row + lane] = top[lane] + logf(sum[lane]);
    }
}

static void forward_block(Work *own) {
    const Attention *all = own->all;
    for (int64_t panel = 0; panel < own->num_rows; panel += PANEL) {
        const int64_t end = end_of(own, panel), lanes = lanes_of(own, panel);
        const int64_t rows = own->num_rows - panel < PANEL ? own->num_rows - panel : PANEL;
        multiply(end, lanes, all->key_size, own->keys, own->key_width, 1, own->query_T + panel, ROWS,
                 own->scores + panel, ROWS, 0);
        for (int64_t row = panel; row < panel + lanes; row += WIDTH) soften(own, row, end);
        for (int64_t from = 0; from < end; from += CHUNK)
            multiply(rows, own->value_width, end - from < CHUNK ? end - from : CHUNK, own->scores + from * ROWS + panel,
                     1, ROWS, own->values + from * own->value_width, own->value_width,
                     own->result + panel * own->value_width, own->value_width, from > 0);
    }
    for (int64_t row = 0; row < own->num_rows; row++) {
        float *output = row_of(own, all->output, row);
        for (int64_t d = 0; d < all->value_size; d++)
            output[d] = own->result[row * own->value_width + d] * own->inverse[row];
        *row_of(own, (Heads){all->log_sums, all->num_positions, 1}, row) = own->log_sum[row];
    }
}

/* Weights, and the gradient of the scores before `scale`, of keys `from` to `end` of a panel. */
static void slopes(Work *own, int64_t panel, int64_t from, int64_t end) {
    const Attention *all = own->all;
    const int64_t lanes = lanes_of(own, panel);
    float *scores = own->scores + panel, *d_scores = own->d_scores + panel;
    multiply(end - from, lanes, all->key_size, own->keys + from * own->key_width, own->key_width, 1,
             own->query_T + panel, ROWS, scores, ROWS, 0);
    multiply(end - from, lanes, all->value_size, own->values + from * own->value_width, own->value_width, 1,
             own->d_output_T + panel, ROWS, d_scores, ROWS, 0);
    for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
        const int64_t row = panel + lane;
        const Vector log_sum = load(own->log_sum + row), delta = load(own->delta + row);
        for (int64_t key = from; key < end; key++) {
            const int64_t at = (key - from) * ROWS + lane;
            Vector weight = exponential(load(scores + at) - log_sum);
            if (key > own->last[row]) weight = choose(is_seen(own, key, row), weight, fill(0));
            store(scores + at, weight);
            store(d_scores + at, weight * (load(d_scores + at) - delta));
        }
    }
}

/* What each panel's rows add to the gradients of keys and values `from` to `to`, rows beyond whose end a key is left
 * out.
 */
static void add_to_keys(Work *own, int64_t from, int64_t to) {
    for (int64_t panel = 0, key = from; panel < own->num_rows && key < to; panel += PANEL) {
        const int64_t end = end_of(own, panel), beyond = end < to ? end : to, rows = own->num_rows - panel;
        const int64_t at = (key - from) * ROWS + panel;
        if (beyond <= key) continue;
        multiply(beyond - key, own->key_width, rows, own->d_scores + at, ROWS, 1, own->query + panel * own->key_width,
                 own->key_width, own->d_keys + key * own->key_width, own->key_width, 1);
        multiply(beyond - key, own->value_width, rows, own->scores + at, ROWS, 1,
                 own->d_output + panel * own->value_width, own->value_width, own->d_values + key * own->value_width,
                 own->value_width, 1);
        key = beyond;
    }
}

static void begin_backward(Work *own) {
    const Attention *all = own->all;
    pack(own, all->d_output, all->value_size, own->value_width, 1, own->d_output, own->d_output_T);
    fetch_next(own, all->d_output, all->value_size);
    fetch_next(own, all->output, all->value_size);
    for (int64_t row = 0; row < own->num_rows; row++) {
        const float *output = row_of(own, all->output, row), *d_output = own->d_output + row * own->value_width;
        Vector sum = fill(0);
        for (int64_t d = 0; d < all->value_size; d += WIDTH)
            sum += load_first(output + d, all->value_size - d) * load(d_output + d);
        own->delta[row] = sum_of(sum);
        own->log_sum[row] = *row_of(own, (Heads){all->log_sums, all->num_positions, 1}, row);
    }
}

static void backward_block(Work *own) {
    const Attention *all = own->all;
    begin_backward(own);
    const int64_t length = own->last[own->num_rows - 1] + 1;
    for (int64_t from = 0; from < length; from += CHUNK) {
        const int64_t to = from + CHUNK < length ? from + CHUNK : length;
        for (int64_t panel = 0; panel < own->num_rows; panel += PANEL) {
            const int64_t end = end_of(own, panel) < to ? end_of(own, panel) : to;
            const int64_t rows = own->num_rows - panel < PANEL ? own->num_rows - panel : PANEL;
            if (end <= from) continue;
            slopes(own, panel, from, end);
            multiply(rows, own->key_width, end - from, own->d_scores + panel, 1, ROWS,
                     own->keys + from * own->key_width, own->key_width, own->result + panel * own->key_width,
                     own->key_width, from > 0);
        }
        add_to_keys(own, from, to);
    }
    for (int64_t row = 0; row < own->num_rows; row++) {
        float *d_query = row_of(own, all->d_query, row);
        for (int64_t d = 0; d < all->key_size; d++) d_query[d] = own->result[row * own->key_width + d] * all->scale;
    }
}

static void attend_branch(Work *own, const int64_t *branch, int is_backward) {
    const Attention *all = own->all;
    own->start = branch[0], own->num_new = branch[1], own->path = all->paths + branch[2], own->length = branch[3];
    own->prefix = own->length - own->num_new;
    gather(own, all->key, all->key_size, own->key_width, own->keys);
    gather(own, all->value, all->value_size, own->value_width, own->values);
    if (is_backward) {
        memset(own->d_keys, 0, 4 * own->length * own->key_width);
        memset(own->d_values, 0, 4 * own->length * own->value_width);
    }
    for (int64_t first = 0; first < own->num_new; first += ROWS / all->group) {
        begin_block(own, first);
        (is_backward ? backward_block : forward_block)(own);
    }
    if (is_backward) {
        scatter(own, own->d_keys, all->key_size, own->key_width, all->d_key);
        scatter(own, own->d_values, all->value_size, own->value_width, all->d_value);
    }
}

/* Room for a thread's work in one piece; 0 where there is not enough memory. */
static float *begin_work(Work *own, const Attention *all) {
    memset(own, 0, sizeof *own);
    own->all = all;
    own->key_width = up_to(all->key_size, WIDTH), own->value_width = up_to(all->value_size, WIDTH);
    const int64_t longest = all->longest, keys = longest * own->key_width, values = longest * own->value_width;
    const int64_t block = ROWS * (own->key_width > own->value_width ? own->key_width : own->value_width);
    struct { float **part; int64_t size; } parts[] = {
        {&own->keys, keys}, {&own->values, values}, {&own->d_keys, keys}, {&own->d_values, values},
        {&own->query, block}, {&own->query_T, block}, {&own->d_output, block}, {&own->d_output_T, block},
        {&own->result, block}, {&own->scores, longest * ROWS}, {&own->d_scores, CHUNK * ROWS},
    };
    const int num_parts = sizeof parts / sizeof *parts;
    int64_t size = 16;
    for (int at = 0; at < num_parts; at++) size += up_to(parts[at].size, 16);
    float *memory = calloc(size, 4);
    float *next = memory + (-(uintptr_t)memory / 4) % 16; /* to a line of the cache */
    for (int at = 0; at < num_parts && memory; at++) *parts[at].part = next, next += up_to(parts[at].size, 16);
    return memory;
}

typedef struct {
    const Attention *all;
    int64_t first, step; /* of the key heads that a thread does */
    int is_backward, has_failed;
} Share;

static void *attend_heads(void *given) {
    Share *share = given;
    Work own;
    float *memory = begin_work(&own, share->all);
    share->has_failed = !memory;
    for (int64_t branch = 0; memory && branch < share->all->num_branches; branch++)
        for (own.head = share->first; own.head < share->all->num_keys; own.head += share->step)
            attend_branch(&own, share->all->branches + 4 * branch, share->is_backward);
    free(memory);
    return 0;
}

/* 0, or 1 where there is not enough memory. In the caller's thread, and in others if it asks for them. */
int attend(const Attention *all, int is_backward, int num_threads) {
    pthread_t threads[MAX_THREADS];
    Share shares[MAX_THREADS];
    int has_started[MAX_THREADS] = {0}, has_failed = 0;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_threads > all->num_keys) num_threads = (int)all->num_keys;
    for (int at = num_threads - 1; at >= 0; at--) {
        shares[at] = (Share){all, at, num_threads, is_backward, 0};
        has_started[at] = at && !pthread_create(&threads[at], 0, attend_heads, &shares[at]);
        if (!has_started[at]) attend_heads(&shares[at]);
    }
    for (int at = 0; at < num_threads; at++) {
        if (has_started[at]) pthread_join(threads[at], 0);
        has_failed |= shares[at].has_failed;
    }
    return has_failed;
}
