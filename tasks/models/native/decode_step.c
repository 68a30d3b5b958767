/* The forward of a small Llama, Qwen 2 or Qwen 3 over packed positions of many rows, and the tokens that rows write, step
 * by step until one of them has ended its turn. The Hugging Face model is the definition:
 * tasks/engines/transformers/check.py compares the log-probs with its forward before any episode.
 *
 * Positions go through all layers BLOCK at a time, so that their activations stay in a core's cache; a position sees all
 * before it in its row, which are in the KV cache or earlier in the block. The order of every sum is the same whatever
 * shares the block, so the bits of a log-prob do not depend on the batch.
 *
 * Letters: P positions, H hidden size, I intermediate size, Q query heads, K key-value heads, D head size, T positions of
 * a row, V vocabulary.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "products.h"

#define BLOCK 36
#define PANEL (2 * WIDTH) /* outputs of a matrix that lie side by side */
#define MAX_QUERIES 2     /* that read a key once */

typedef struct {
    const float *weight, *bias; /* packed [out, in]; a bias may be missing */
} Linear;

typedef struct {
    const float *input_norm, *query_norm, *key_norm, *after_norm; /* those of query and key may be missing */
    Linear query, key, value, output, gate, up, down;
} Layer;

typedef struct {
    int64_t num_layers, hidden, intermediate, query_heads, key_heads, head_size, vocabulary;
    float epsilon, scaling;
    const float *embedding, *last_norm, *head;
    const float *cosine, *sine; /* [T, D] */
    const Layer *layers;
} Model;

typedef struct {
    float **keys, **values; /* of each layer, [S, K, T, D] */
    int64_t capacity;       /* T */
} Cache;

/* NumPy's PCG64, as tasks/rollouts/seeds.py draws from it: to make one from a seed takes NumPy 15 to 40 µs, and every
 * turn has its own. Sources: M. E. O'Neill, PCG (2014), setseq-128 with XSL-RR; NumPy, `SeedSequence` and `PCG64`.
 */
typedef struct {
    uint64_t state[2], increment[2]; /* low half first */
} Generator;

typedef unsigned __int128 Wide;

static Wide wide(const uint64_t halves[2]) { return (Wide)halves[1] << 64 | halves[0]; }

static void split(Wide number, uint64_t halves[2]) { halves[0] = (uint64_t)number, halves[1] = (uint64_t)(number >> 64); }

static uint32_t hash_word(uint32_t word, uint32_t *factor, uint32_t next) {
    word ^= *factor;
    *factor *= next;
    word *= *factor;
    return word ^ word >> 16;
}

static Wide step_generator(Wide state, Wide increment) {
    return state * ((Wide)0x2360ED051FC65DA4u << 64 | 0x4385DF649FCCF645u) + increment;
}

static Generator seed_generator(uint64_t seed) {
    uint32_t pool[4] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, factor = 0x43b0d7e5u, words[8];
    for (int at = 0; at < 4; at++) pool[at] = hash_word(pool[at], &factor, 0x931e8875u);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++)
            if (from != to) {
                uint32_t mixed = 0xca01f9ddu * pool[to] - 0x4973f715u * hash_word(pool[from], &factor, 0x931e8875u);
                pool[to] = mixed ^ mixed >> 16;
            }
    factor = 0x8b51f9ddu;
    for (int at = 0; at < 8; at++) words[at] = hash_word(pool[at % 4], &factor, 0x58f38dedu);
    uint64_t numbers[4];
    for (int at = 0; at < 4; at++) numbers[at] = (uint64_t)words[2 * at + 1] << 32 | words[2 * at];
    Wide start = (Wide)numbers[0] << 64 | numbers[1], increment = ((Wide)numbers[2] << 64 | numbers[3]) << 1 | 1;
    Generator made;
    split(step_generator(increment + start, increment), made.state);
    split(increment, made.increment);
    return made;
}

/* in [0, 1) */
static double next_number(Generator *generator) {
    Wide state = step_generator(wide(generator->state), wide(generator->increment));
    split(state, generator->state);
    uint64_t mixed = (uint64_t)(state >> 64) ^ (uint64_t)state;
    int turns = (int)(state >> 122);
    mixed = mixed >> turns | mixed << (-turns & 63);
    return (double)(mixed >> 11) / 9007199254740992.0;
}

void draw(uint64_t seed, int64_t count, double *numbers) {
    Generator generator = seed_generator(seed);
    for (int64_t at = 0; at < count; at++) numbers[at] = next_number(&generator);
}

/* A row whose turn is under way. */
typedef struct {
    int64_t fed, num_ids; /* positions in the cache; the ids that come after them, one at least */
    const int64_t *ids;
    int64_t written, room;          /* tokens of the turn so far, and at most */
    int64_t num_ends;
    const int64_t *ends;  /* tokens that complete it */
    uint64_t seed;        /* of the numbers that tokens are drawn with */
    Generator generator;
    int64_t *tokens; /* [room], out */
    float *logps;    /* [room], out, nats under the distribution sampled from */
} Row;

/* What is read at once, after copies of what others have read. */
typedef struct {
    int64_t num_copies, num_rows;
    const int64_t *copies; /* from a slot, to a slot, so many positions; [copies, 3] */
    Row *const *rows;
    const int64_t *slots; /* of each row */
} Pass;

/* All passes but the last read the rows' ids up to their last; in the last one, rows write. */
typedef struct {
    const Model *model;
    const Cache *cache;
    int64_t num_passes;
    const Pass *passes;
    int64_t max_steps;           /* tokens that each row may write now */
    double temperature, top_p;   /* a temperature of 0: the likeliest */
    float *memory;               /* floats, as `memory_of` says */
    int64_t num_ended, *ended;   /* out, numbers of the last pass's rows whose turn is complete; [rows] */
} Job;

/* Of a pass, the next position. */
typedef struct {
    int64_t row, position;
} Cursor;

typedef struct {
    int64_t count, num_asked;
    int64_t ids[BLOCK], places[BLOCK], slots[BLOCK];
    int64_t asked[BLOCK], askers[BLOCK]; /* positions that get a token after them, rising, and the numbers of their rows */
    float *hidden, *normed, *query, *key, *value, *gate, *up, *logits; /* a row per position */
    float *scores, *order, *sums; /* the sums are doubles */
} Block;

#define CHUNK (8 * WIDTH) /* of a distribution, whose probabilities are summed apart */
typedef double Doubles __attribute__((vector_size(8 * WIDTH)));

/* Four sums at once: of lanes in halves, then across the four. */
typedef float Four __attribute__((vector_size(16)));

INLINE Four fold(Vector values) {
    Four parts[WIDTH / 4];
    memcpy(parts, &values, sizeof values);
#if WIDTH == 16
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
#else
    return parts[0] + parts[1];
#endif
}

INLINE Four sums_of(Vector a, Vector b, Vector c, Vector d) {
    Four p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    Four pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
    Four rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
    return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

/* to[r][c] = from[r] · other[c] for R rows and four others. Each sum has the same order whatever R is. */
INLINE void dots(const int R, const float *from, const float *others, int64_t depth, float *to, int64_t to_stride) {
    Vector sum[MAX_QUERIES][4] = {{{0}}};
    int64_t at = 0;
    for (; at + WIDTH <= depth; at += WIDTH)
        for (int c = 0; c < 4; c++) {
            Vector other = load(others + c * depth + at);
            for (int r = 0; r < R; r++) sum[r][c] += load(from + r * depth + at) * other;
        }
    if (at < depth)
        for (int c = 0; c < 4; c++)
            for (int r = 0; r < R; r++)
                sum[r][c] += load_first(from + r * depth + at, (int)(depth - at)) *
                             load_first(others + c * depth + at, (int)(depth - at));
    for (int r = 0; r < R; r++) {
        Four sums = sums_of(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        memcpy(to + r * to_stride, &sums, sizeof sums);
    }
}

static float dot(const float *one, const float *other, int64_t count) {
    Vector sum = {0};
    int64_t at = 0;
    for (; at + WIDTH <= count; at += WIDTH) sum += load(one + at) * load(other + at);
    if (at < count) sum += load_first(one + at, (int)(count - at)) * load_first(other + at, (int)(count - at));
    return sums_of(sum, sum, sum, sum)[0];
}

/* Floats of a matrix of [out, depth] as `pack` lays it out: panels of PANEL outputs, in each a row per input. */
int64_t packed_size(int64_t out, int64_t depth) { return (out + PANEL - 1) / PANEL * PANEL * depth; }

void pack(const float *weight, int64_t out, int64_t depth, float *to) {
    for (int64_t first = 0; first < out; first += PANEL, to += PANEL * depth)
        for (int64_t column = 0; column < PANEL; column++)
            for (int64_t at = 0; at < depth; at++)
                to[at * PANEL + column] = first + column < out ? weight[(first + column) * depth + at] : 0.0f;
}

/* One row times four panels: with one panel the processor would wait for each sum. */
static void times_panels(const float *row, const float *panels, int64_t depth, float *to) {
    Vector sum[8] = {{0}};
    for (int64_t at = 0; at < depth; at++)
        for (int part = 0; part < 8; part++)
            sum[part] += row[at] * load(panels + (part / 2 * depth + at) * PANEL + part % 2 * WIDTH);
    for (int part = 0; part < 8; part++) store(to + part * WIDTH, sum[part]);
}

/* to [rows, out] = from [rows, depth] · weightᵀ + bias. Each sum goes through the inputs in order, whatever the rows. */
static void apply(Linear layer, const float *from, float *to, int64_t rows, int64_t depth, int64_t out) {
    int64_t at = 0;
    for (; rows == 1 && at + 4 * PANEL <= out; at += 4 * PANEL)
        times_panels(from, layer.weight + at * depth, depth, to + at);
    for (; at + PANEL <= out; at += PANEL)
        column(2, rows, depth, from, depth, 1, layer.weight + at * depth, PANEL, to + at, out, 0);
    if (at < out) {
        float rest[BLOCK * PANEL];
        column(2, rows, depth, from, depth, 1, layer.weight + at * depth, PANEL, rest, PANEL, 0);
        for (int64_t row = 0; row < rows; row++)
            memcpy(to + row * out + at, rest + row * PANEL, 4 * (size_t)(out - at));
    }
    for (int64_t row = 0; layer.bias && row < rows; row++)
        for (at = 0; at < out; at++) to[row * out + at] += layer.bias[at];
}

/* to = from / sqrt(mean(from²) + epsilon) · weight, of rows of `size`; `to` may be `from` */
static void normalise(const float *from, const float *weight, float *to, int64_t rows, int64_t size, float epsilon) {
    for (int64_t row = 0; row < rows; row++, from += size, to += size) {
        float factor = 1.0f / sqrtf(dot(from, from, size) / (float)size + epsilon);
        for (int64_t at = 0; at < size; at++) to[at] = weight[at] * (from[at] * factor);
    }
}

/* Each head's halves turn by the angles of the position's place; `count` heads per position. */
static void rotate(const Model *model, float *heads, int64_t count, const Block *block) {
    int64_t size = model->head_size, half = size / 2;
    for (int64_t number = 0; number < block->count * count; number++, heads += size) {
        const float *cosine = model->cosine + block->places[number / count] * size;
        const float *sine = model->sine + block->places[number / count] * size;
        for (int64_t at = 0; at < half; at++) {
            float one = heads[at], other = heads[at + half];
            heads[at] = one * cosine[at] - other * sine[at];
            heads[at + half] = other * cosine[at + half] + one * sine[at + half];
        }
    }
}

/* scores[r][t] = query r · key of position t · scaling, of R queries. The values, which are read next, are asked for. */
INLINE void score(const int R, const float *query, const float *keys, const float *values, int64_t length, int64_t size,
                  float scaling, float *scores, int64_t stride) {
    int64_t at = 0;
    for (; at + 4 <= length; at += 4) {
        for (int64_t line = 0; line < 4 * size; line += 16) __builtin_prefetch(values + at * size + line);
        dots(R, query, keys + at * size, size, scores + at, stride);
    }
    for (; at < length; at++)
        for (int r = 0; r < R; r++) scores[r * stride + at] = dot(query + r * size, keys + at * size, size);
    for (int r = 0; r < R; r++)
        for (at = 0; at < length; at++) scores[r * stride + at] *= scaling;
}

static float largest_in(const float *scores, int64_t length) {
    Vector largest = fill(-INFINITY);
    int64_t at = 0;
    for (; at + WIDTH <= length; at += WIDTH) largest = larger(load(scores + at), largest);
    float found = largest_of(largest);
    for (; at < length; at++) found = scores[at] > found ? scores[at] : found;
    return found;
}

/* e to the (score − largest), in place; their sum */
static float exponentiate(float *scores, int64_t length, float largest) {
    Vector sum = {0};
    int64_t at = 0;
    for (; at + WIDTH <= length; at += WIDTH) {
        Vector found = exponential(load(scores + at) - largest);
        store(scores + at, found);
        sum += found;
    }
    if (at < length) {
        int count = (int)(length - at);
        Vector found = exponential(load_first(scores + at, count) - largest);
        store_first(scores + at, found, count);
        sum += load_first(scores + at, count);
    }
    return sums_of(sum, sum, sum, sum)[0];
}

/* to[r] [size] = Σ weights[r][t] · values[t] · factor[r], of R rows of weights. `ahead` is asked for, what is read next. */
INLINE void mix(const int R, const float *weights, int64_t stride, const float *values, const float *ahead,
                int64_t length, int64_t size, const float *factor, float *to) {
    int64_t at = 0;
    for (; at + 4 * WIDTH <= size; at += 4 * WIDTH) {
        Vector sum[MAX_QUERIES][4] = {{{0}}};
        for (int64_t t = 0; t < length; t++) {
            for (int64_t line = 0; line < 4 * WIDTH; line += 16) __builtin_prefetch(ahead + t * size + at + line);
            for (int part = 0; part < 4; part++) {
                Vector value = load(values + t * size + at + part * WIDTH);
                for (int r = 0; r < R; r++) sum[r][part] += weights[r * stride + t] * value;
            }
        }
        for (int r = 0; r < R; r++)
            for (int part = 0; part < 4; part++) store(to + r * size + at + part * WIDTH, sum[r][part] * factor[r]);
    }
    for (; at < size; at += WIDTH) {
        int count = size - at < WIDTH ? (int)(size - at) : WIDTH;
        for (int r = 0; r < R; r++) {
            Vector sum = {0};
            for (int64_t t = 0; t < length; t++)
                sum += weights[r * stride + t] * load_first(values + t * size + at, count);
            store_first(to + r * size + at, sum * factor[r], count);
        }
    }
}

/* What R queries of one key-value head see, in their place. */
INLINE void see(const int R, float *query, const float *keys, const float *values, const float *ahead, int64_t length,
                int64_t size, float scaling, float *scores, int64_t stride) {
    float factor[MAX_QUERIES];
    score(R, query, keys, values, length, size, scaling, scores, stride);
    for (int r = 0; r < R; r++) {
        float *own = scores + r * stride;
        factor[r] = 1.0f / exponentiate(own, length, largest_in(own, length));
    }
    mix(R, scores, stride, values, ahead, length, size, factor, query);
}

/* The positions' keys and values into the cache. */
static void keep(const Model *model, const Cache *cache, int64_t layer, const Block *block) {
    int64_t size = model->head_size, heads = model->key_heads;
    for (int64_t number = 0; number < block->count * heads; number++) {
        int64_t row = block->slots[number / heads] * heads + number % heads;
        int64_t start = (row * cache->capacity + block->places[number / heads]) * size;
        memcpy(cache->keys[layer] + start, block->key + number * size, 4 * (size_t)size);
        memcpy(cache->values[layer] + start, block->value + number * size, 4 * (size_t)size);
    }
}

/* Where the cache has what a block's position has seen, by number: the position and one of its key-value heads. */
INLINE int64_t place_of(const Model *model, const Cache *cache, const Block *block, int64_t number) {
    int64_t row = block->slots[number / model->key_heads] * model->key_heads + number % model->key_heads;
    return row * cache->capacity * model->head_size;
}

/* What each position sees, in place of its query. */
static void attend(const Model *model, const Cache *cache, int64_t layer, const Block *block) {
    int64_t size = model->head_size, heads = model->key_heads, group = model->query_heads / heads;
    int64_t count = block->count * heads, stride = cache->capacity;
    for (int64_t number = 0; number < count; number++) {
        int64_t length = block->places[number / heads] + 1, place = place_of(model, cache, block, number), member = 0;
        const float *keys = cache->keys[layer] + place, *values = cache->values[layer] + place;
        int64_t next = number + 1 < count ? place_of(model, cache, block, number + 1) : place;
        const float *ahead = cache->keys[layer] + next;
        float *query = block->query + number * group * size;
        for (; member + 2 <= group; member += 2)
            see(2, query + member * size, keys, values, ahead, length, size, model->scaling, block->scores, stride);
        if (member < group)
            see(1, query + member * size, keys, values, ahead, length, size, model->scaling, block->scores, stride);
    }
}

static void add(float *to, const float *from, int64_t count) {
    for (int64_t at = 0; at < count; at++) to[at] += from[at];
}

/* gate · sigmoid(gate) · up, in place of gate */
static void activate(float *gate, const float *up, int64_t count) {
    int64_t at = 0;
    for (; at + WIDTH <= count; at += WIDTH) {
        Vector given = load(gate + at);
        store(gate + at, given / (1.0f + exponential(-given)) * load(up + at));
    }
    if (at < count) {
        int rest = (int)(count - at);
        Vector given = load_first(gate + at, rest);
        store_first(gate + at, given / (1.0f + exponential(-given)) * load_first(up + at, rest), rest);
    }
}

/* Go on with the asked positions alone. */
static void narrow(const Model *model, Block *block) {
    int64_t hidden = model->hidden;
    for (int64_t number = 0; number < block->num_asked; number++) {
        int64_t from = block->asked[number];
        memmove(block->hidden + number * hidden, block->hidden + from * hidden, 4 * (size_t)hidden);
        memmove(block->normed + number * hidden, block->normed + from * hidden, 4 * (size_t)hidden);
        block->places[number] = block->places[from];
        block->slots[number] = block->slots[from];
    }
    block->count = block->num_asked;
}

/* Of the last layer only the asked positions are read, but the keys and values of all. */
static void run_layer(const Model *model, const Cache *cache, int64_t number, Block *block) {
    const Layer *layer = model->layers + number;
    int64_t size = model->head_size, queries = model->query_heads, keys = model->key_heads, hidden = model->hidden;
    normalise(block->hidden, layer->input_norm, block->normed, block->count, hidden, model->epsilon);
    apply(layer->key, block->normed, block->key, block->count, hidden, keys * size);
    apply(layer->value, block->normed, block->value, block->count, hidden, keys * size);
    if (layer->key_norm) normalise(block->key, layer->key_norm, block->key, block->count * keys, size, model->epsilon);
    rotate(model, block->key, keys, block);
    keep(model, cache, number, block);
    if (number == model->num_layers - 1) narrow(model, block);
    int64_t count = block->count;
    apply(layer->query, block->normed, block->query, count, hidden, queries * size);
    if (layer->query_norm)
        normalise(block->query, layer->query_norm, block->query, count * queries, size, model->epsilon);
    rotate(model, block->query, queries, block);
    attend(model, cache, number, block);
    apply(layer->output, block->query, block->normed, count, queries * size, hidden);
    add(block->hidden, block->normed, count * hidden);
    normalise(block->hidden, layer->after_norm, block->normed, count, hidden, model->epsilon);
    apply(layer->gate, block->normed, block->gate, count, hidden, model->intermediate);
    apply(layer->up, block->normed, block->up, count, hidden, model->intermediate);
    activate(block->gate, block->up, count * model->intermediate);
    apply(layer->down, block->gate, block->normed, count, model->intermediate, hidden);
    add(block->hidden, block->normed, count * hidden);
}

/* e to the (logit / temperature − largest), in place, with the sum of each chunk in `sums`; the sum of all */
static double weigh(float *logits, int64_t count, float temperature, float largest, double *sums) {
    double total = 0;
    for (int64_t first = 0; first < count; first += CHUNK) {
        Doubles sum = {0};
        for (int64_t at = first; at < first + CHUNK && at < count; at += WIDTH) {
            int rest = count - at < WIDTH ? (int)(count - at) : WIDTH;
            Vector given = rest == WIDTH ? load(logits + at) : load_first(logits + at, rest);
            Vector found = exponential(given / temperature - largest);
            store_first(logits + at, found, rest);
            sum += __builtin_convertvector(rest == WIDTH ? found : load_first(logits + at, rest), Doubles);
        }
        double own = 0;
        for (int lane = 0; lane < WIDTH; lane++) own += sum[lane];
        total += sums[first / CHUNK] = own;
    }
    return total;
}

static int is_smaller(const void *one, const void *other) {
    float a = *(const float *)one, b = *(const float *)other;
    return (a < b) - (a > b);
}

/* Leave out what is not in the smallest set of likeliest tokens whose share reaches `top_p`; the sum of the others. */
static double cut_tail(float *weights, int64_t count, double total, double top_p, float *order, double *sums) {
    if (!(total > 0)) return total; /* with a NaN they have no order */
    memcpy(order, weights, 4 * (size_t)count);
    qsort(order, (size_t)count, sizeof *order, is_smaller);
    double before = 0, left = 0;
    int64_t kept = 0;
    while (kept < count && before < top_p * total) before += (double)order[kept++];
    float least = order[kept - 1];
    int64_t num_least = 0; /* of those as likely as the last one, which are kept from the first on */
    for (int64_t at = 0; at < kept; at++) num_least += order[at] == least;
    for (int64_t at = 0; at < count; at++) {
        if (at % CHUNK == 0) sums[at / CHUNK] = 0;
        if (weights[at] < least || (weights[at] == least && num_least-- <= 0)) weights[at] = 0;
        sums[at / CHUNK] += (double)weights[at];
        left += (double)weights[at];
    }
    return left;
}

/* One token by inverse CDF, as tasks/rollouts/sampling.py has it; the likeliest at temperature 0. */
static int64_t sample(float *logits, int64_t count, const Job *job, double noise, const Block *block, float *logp) {
    float temperature = (float)job->temperature, largest = largest_in(logits, count);
    double *sums = (double *)block->sums;
    int64_t token = 0;
    *logp = 0.0f;
    if (temperature == 0) {
        while (token < count - 1 && logits[token] != largest) token++;
        return token;
    }
    double total = weigh(logits, count, temperature, largest / temperature, sums), before = 0;
    if (job->top_p < 1) total = cut_tail(logits, count, total, job->top_p, block->order, sums);
    double sought = noise * total;
    int64_t chunk = 0, last = (count - 1) / CHUNK;
    while (chunk < last && before + sums[chunk] <= sought) before += sums[chunk++];
    token = chunk * CHUNK;
    int64_t end = token + CHUNK < count ? token + CHUNK : count;
    for (; token < end - 1; token++)
        if ((before += (double)logits[token]) > sought) break;
    *logp = (float)log((double)logits[token] / total);
    return token;
}

/* Whether that completes the turn. */
static int write_token(Row *row, int64_t token, float logp) {
    row->tokens[row->written] = token;
    row->logps[row->written] = logp;
    row->ids = row->tokens + row->written++;
    row->num_ids = 1;
    for (int64_t number = 0; number < row->num_ends; number++)
        if (row->ends[number] == token) return 1;
    return row->written == row->room;
}

/* Final norm, output matrix and a token for the asked positions, which are all that the last layer left. */
static void answer(Job *job, const Pass *pass, Block *block) {
    const Model *model = job->model;
    int64_t vocabulary = model->vocabulary;
    normalise(block->hidden, model->last_norm, block->normed, block->count, model->hidden, model->epsilon);
    apply((Linear){model->head, NULL}, block->normed, block->logits, block->count, model->hidden, vocabulary);
    for (int64_t at = 0; at < block->count; at++) {
        Row *row = pass->rows[block->askers[at]];
        if (!row->written) row->generator = seed_generator(row->seed);
        float logp;
        double noise = next_number(&row->generator);
        int64_t token = sample(block->logits + at * vocabulary, vocabulary, job, noise, block, &logp);
        if (write_token(row, token, logp)) job->ended[job->num_ended++] = block->askers[at];
    }
}

/* Divide `memory` among the arrays of a block; the floats that takes. */
static int64_t lay_out(const Model *model, int64_t capacity, float *memory, Block *block) {
    int64_t queries = model->query_heads * model->head_size, keys = model->key_heads * model->head_size;
    struct {
        float **array;
        int64_t size;
    } parts[] = {
        {&block->hidden, BLOCK * model->hidden},      {&block->normed, BLOCK * model->hidden},
        {&block->query, BLOCK * queries},             {&block->key, BLOCK * keys},
        {&block->value, BLOCK * keys},                {&block->gate, BLOCK * model->intermediate},
        {&block->up, BLOCK * model->intermediate},    {&block->logits, BLOCK * model->vocabulary},
        {&block->scores, MAX_QUERIES * capacity},     {&block->order, model->vocabulary},
        {&block->sums, 2 * (model->vocabulary / CHUNK + 1)},
    };
    int64_t end = 0;
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) {
        *parts[part].array = memory + end;
        end += (parts[part].size + 15) / 16 * 16;
    }
    return end;
}

/* Floats of `memory` that a job needs. */
int64_t memory_of(const Model *model, int64_t capacity) {
    Block block;
    return lay_out(model, capacity, NULL, &block);
}

/* The start of one row becomes that of another. */
static void copy_rows(const Model *model, const Cache *cache, const Pass *pass) {
    int64_t a_head = cache->capacity * model->head_size, heads = model->key_heads;
    for (int64_t number = 0; number < pass->num_copies; number++) {
        const int64_t *copy = pass->copies + 3 * number;
        for (int64_t part = 0; part < model->num_layers * heads; part++) {
            int64_t layer = part / heads, head = part % heads;
            int64_t from = (copy[0] * heads + head) * a_head, to = (copy[1] * heads + head) * a_head;
            size_t size = 4 * (size_t)(copy[2] * model->head_size);
            memcpy(cache->keys[layer] + to, cache->keys[layer] + from, size);
            memcpy(cache->values[layer] + to, cache->values[layer] + from, size);
        }
    }
}

/* The next positions of a pass: of rows that write all their ids, else those before the last. Whether there are any. */
static int take_positions(const Pass *pass, int writes, Cursor *cursor, Block *block) {
    block->count = block->num_asked = 0;
    while (cursor->row < pass->num_rows && block->count < BLOCK) {
        Row *row = pass->rows[cursor->row];
        int64_t end = row->num_ids - !writes;
        for (; cursor->position < end && block->count < BLOCK; cursor->position++, block->count++) {
            block->ids[block->count] = row->ids[cursor->position];
            block->places[block->count] = row->fed + cursor->position;
            block->slots[block->count] = pass->slots[cursor->row];
        }
        if (cursor->position < end) break;
        row->fed += end, row->ids += end, row->num_ids -= end;
        if (writes) {
            block->asked[block->num_asked] = block->count - 1;
            block->askers[block->num_asked++] = cursor->row;
        }
        cursor->row++, cursor->position = 0;
    }
    return block->count > 0;
}

static void run_pass(Job *job, const Pass *pass, int writes, Block *block) {
    const Model *model = job->model;
    Cursor cursor = {0};
    while (take_positions(pass, writes, &cursor, block)) {
        for (int64_t at = 0; at < block->count; at++) {
            const float *embedded = model->embedding + block->ids[at] * model->hidden;
            memcpy(block->hidden + at * model->hidden, embedded, 4 * (size_t)model->hidden);
        }
        for (int64_t layer = 0; layer < model->num_layers; layer++) run_layer(model, job->cache, layer, block);
        if (writes) answer(job, pass, block);
    }
}

void run_job(Job *job) {
    Block block = {0};
    lay_out(job->model, job->cache->capacity, job->memory, &block);
    job->num_ended = 0;
    for (int64_t number = 0; number < job->num_passes; number++) {
        const Pass *pass = job->passes + number;
        int writes = number == job->num_passes - 1;
        copy_rows(job->model, job->cache, pass);
        if (!writes) run_pass(job, pass, 0, &block);
        for (int64_t step = 0; writes && step < job->max_steps && !job->num_ended; step++)
            run_pass(job, pass, 1, &block);
    }
}

/* A thread that runs jobs while Python does something else: it never needs Python's lock. */
typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Job *job; /* until it is done */
    int is_over;
} Worker;

static void *work(void *given) {
    Worker *worker = given;
    pthread_mutex_lock(&worker->lock);
    while (1) {
        while (!worker->job && !worker->is_over) pthread_cond_wait(&worker->changed, &worker->lock);
        if (worker->is_over) break;
        pthread_mutex_unlock(&worker->lock);
        run_job(worker->job);
        pthread_mutex_lock(&worker->lock);
        worker->job = NULL;
        pthread_cond_signal(&worker->changed);
    }
    pthread_mutex_unlock(&worker->lock);
    return NULL;
}

/* NULL where the system has no further thread. */
Worker *open_worker(void) {
    Worker *worker = calloc(1, sizeof *worker);
    if (!worker) return NULL;
    pthread_mutex_init(&worker->lock, NULL);
    pthread_cond_init(&worker->changed, NULL);
    if (pthread_create(&worker->thread, NULL, work, worker)) {
        free(worker);
        return NULL;
    }
    return worker;
}

/* All that it points to must stay where it is until `wait_for`. */
void start_job(Worker *worker, Job *job) {
    pthread_mutex_lock(&worker->lock);
    worker->job = job;
    pthread_cond_signal(&worker->changed);
    pthread_mutex_unlock(&worker->lock);
}

void wait_for(Worker *worker) {
    pthread_mutex_lock(&worker->lock);
    while (worker->job) pthread_cond_wait(&worker->changed, &worker->lock);
    pthread_mutex_unlock(&worker->lock);
}

void close_worker(Worker *worker) {
    pthread_mutex_lock(&worker->lock);
    worker->is_over = 1;
    pthread_cond_signal(&worker->changed);
    pthread_mutex_unlock(&worker->lock);
    pthread_join(worker->thread, NULL);
    pthread_mutex_destroy(&worker->lock);
    pthread_cond_destroy(&worker->changed);
    free(worker);
}
