/* The forward of a small Llama, Qwen 2 or Qwen 3 over packed positions of many rows, and a sampled token for each row
 * that is asked for one. The Hugging Face model is the definition: its own tensors are read where they are, and
 * tasks/engines/transformers/check.py compares the log-probs with its forward before any episode.
 *
 * Positions go through all layers BLOCK at a time, so that their activations stay in a core's cache; a position sees all
 * before it in its row, which are in the KV cache or earlier in the block. Linear layers are dot products of rows of the
 * input and rows of the weights, as PyTorch stores them: nothing is packed anew when weights change. Where a sum's terms
 * are does not depend on what shares a block, so neither do the bits of a log-prob on the batch.
 *
 * Letters: P positions, H hidden size, I intermediate size, Q query heads, K key-value heads, D head size, T positions of
 * a row, V vocabulary.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "vectors.h"

#define BLOCK 36
#define CACHED_FLOATS 4608 /* of the input, which stay in the first-level cache while all weights pass */

typedef struct {
    const float *weight, *bias; /* [out, in]; a bias may be missing */
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

typedef struct {
    int64_t num_positions, num_asked;
    const int64_t *ids, *places, *slots; /* [P] */
    const int64_t *asked;                /* which positions get a token after them, rising */
    const double *noise;                 /* of each asked one, in [0, 1) */
    double temperature;                  /* 0: the likeliest */
    int64_t *tokens;                     /* out, of each asked one */
    float *logps;                        /* out, nats */
    float *logits;                       /* out, [asked, V], instead of tokens; may be missing */
} Step;

typedef struct {
    int64_t count, num_asked;
    int64_t places[BLOCK], slots[BLOCK], asked[BLOCK];
    float *hidden, *normed, *query, *key, *value, *gate, *up, *logits; /* a row per position */
    float *scores, *sums; /* the sums are doubles */
} Block;

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

/* to[r][c] = from[r] · weight[c] for R rows and 4·C outputs. Each sum has the same order whatever R and C are. */
#define MAX_ROWS 3
INLINE void tile(const int R, const int C, const float *from, int64_t from_stride, const float *weight, int64_t depth,
                 float *to, int64_t to_stride) {
    Vector sum[MAX_ROWS][8] = {{{0}}};
    int64_t at = 0;
    for (; at + WIDTH <= depth; at += WIDTH) {
        Vector row[MAX_ROWS];
        for (int r = 0; r < R; r++) row[r] = load(from + r * from_stride + at);
        for (int c = 0; c < 4 * C; c++) {
            Vector column = load(weight + c * depth + at);
            for (int r = 0; r < R; r++) sum[r][c] += row[r] * column;
        }
    }
    if (at < depth)
        for (int c = 0; c < 4 * C; c++)
            for (int r = 0; r < R; r++)
                sum[r][c] += load_first(from + r * from_stride + at, (int)(depth - at)) *
                             load_first(weight + c * depth + at, (int)(depth - at));
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            Four sums = sums_of(sum[r][4 * c], sum[r][4 * c + 1], sum[r][4 * c + 2], sum[r][4 * c + 3]);
            memcpy(to + r * to_stride + 4 * c, &sums, sizeof sums);
        }
}

static float dot(const float *one, const float *other, int64_t count) {
    Vector sum = {0};
    int64_t at = 0;
    for (; at + WIDTH <= count; at += WIDTH) sum += load(one + at) * load(other + at);
    if (at < count) sum += load_first(one + at, (int)(count - at)) * load_first(other + at, (int)(count - at));
    Four found = sums_of(sum, sum, sum, sum);
    return found[0];
}

/* to [rows, out] = from [rows, depth] · weight [out, depth]ᵀ + bias */
static void apply(Linear layer, const float *from, float *to, int64_t rows, int64_t depth, int64_t out) {
    int64_t most = CACHED_FLOATS / depth > MAX_ROWS ? CACHED_FLOATS / depth / MAX_ROWS * MAX_ROWS : MAX_ROWS;
    for (int64_t first = 0; first < rows; first += most) {
        int64_t end = first + most < rows ? first + most : rows;
        int64_t column = 0;
        if (end - first == 1)
            for (; column + 8 <= out; column += 8)
                tile(1, 2, from + first * depth, depth, layer.weight + column * depth, depth, to + first * out + column, out);
        for (; column + 4 <= out; column += 4) {
            const float *weight = layer.weight + column * depth;
            int64_t row = first;
            for (; row + 3 <= end; row += 3)
                tile(3, 1, from + row * depth, depth, weight, depth, to + row * out + column, out);
            if (end - row == 2) tile(2, 1, from + row * depth, depth, weight, depth, to + row * out + column, out);
            if (end - row == 1) tile(1, 1, from + row * depth, depth, weight, depth, to + row * out + column, out);
        }
        for (; column < out; column++)
            for (int64_t row = first; row < end; row++)
                to[row * out + column] = dot(from + row * depth, layer.weight + column * depth, depth);
    }
    if (layer.bias)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < out; column++) to[row * out + column] += layer.bias[column];
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

/* scores[r][t] = query r · key of position t · scaling, of R queries */
INLINE void score(const int R, const float *query, const float *keys, int64_t length, int64_t size, float scaling,
                  float *scores, int64_t stride) {
    int64_t at = 0;
    for (; at + 4 <= length; at += 4) tile(R, 1, query, size, keys + at * size, size, scores + at, stride);
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

/* to[r] [size] = Σ weights[r][t] · values[t] · factor[r], of R rows of weights */
INLINE void mix(const int R, const float *weights, int64_t stride, const float *values, int64_t length, int64_t size,
                const float *factor, float *to) {
    int64_t at = 0;
    for (; at + 4 * WIDTH <= size; at += 4 * WIDTH) {
        Vector sum[MAX_ROWS][4] = {{{0}}};
        for (int64_t t = 0; t < length; t++)
            for (int part = 0; part < 4; part++) {
                Vector value = load(values + t * size + at + part * WIDTH);
                for (int r = 0; r < R; r++) sum[r][part] += weights[r * stride + t] * value;
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
INLINE void see(const int R, float *query, const float *keys, const float *values, int64_t length, int64_t size,
                float scaling, float *scores, int64_t stride) {
    float factor[MAX_ROWS];
    score(R, query, keys, length, size, scaling, scores, stride);
    for (int r = 0; r < R; r++) {
        float *own = scores + r * stride;
        factor[r] = 1.0f / exponentiate(own, length, largest_in(own, length));
    }
    mix(R, scores, stride, values, length, size, factor, query);
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

/* What each position sees, in place of its query. */
static void attend(const Model *model, const Cache *cache, int64_t layer, const Block *block) {
    int64_t size = model->head_size, heads = model->key_heads, group = model->query_heads / heads;
    for (int64_t number = 0; number < block->count * heads; number++) {
        int64_t length = block->places[number / heads] + 1, stride = cache->capacity, member = 0;
        int64_t start = (block->slots[number / heads] * heads + number % heads) * stride * size;
        float *query = block->query + number * group * size;
        const float *keys = cache->keys[layer] + start, *values = cache->values[layer] + start;
        for (; member + 2 <= group; member += 2)
            see(2, query + member * size, keys, values, length, size, model->scaling, block->scores, stride);
        if (member < group)
            see(1, query + member * size, keys, values, length, size, model->scaling, block->scores, stride);
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

/* e to the (logit / temperature − largest), in place, with each chunk's sum in `sums`; the sum of all */
static double weigh(float *logits, int64_t count, float temperature, float largest, double *sums) {
    double total = 0;
    for (int64_t at = 0; at < count; at += WIDTH) {
        int rest = count - at < WIDTH ? (int)(count - at) : WIDTH;
        Vector found = exponential(load_first(logits + at, rest) / temperature - largest);
        store_first(logits + at, found, rest);
        double sum = 0;
        for (int lane = 0; lane < rest; lane++) sum += (double)logits[at + lane];
        total += sums[at / WIDTH] = sum;
    }
    return total;
}

/* One token by inverse CDF, as tasks/rollouts/sampling.py has it; the likeliest at temperature 0. */
static int64_t sample(float *logits, int64_t count, double temperature, double noise, double *sums, float *logp) {
    float largest = largest_in(logits, count);
    int64_t token = 0;
    *logp = 0.0f;
    if (temperature == 0) {
        while (token < count - 1 && logits[token] != largest) token++;
        return token;
    }
    largest /= (float)temperature;
    double total = weigh(logits, count, (float)temperature, largest, sums), before = 0, sought = noise * total;
    int64_t chunk = 0, last = (count - 1) / WIDTH;
    while (chunk < last && before + sums[chunk] <= sought) before += sums[chunk++];
    token = chunk * WIDTH;
    int64_t end = token + WIDTH < count ? token + WIDTH : count;
    for (; token < end - 1; token++)
        if ((before += (double)logits[token]) > sought) break;
    *logp = (float)log((double)logits[token] / total);
    return token;
}

/* Final norm, output matrix and a token for the asked positions, which are all that the last layer left. */
static void answer(const Model *model, const Step *step, int64_t first, Block *block) {
    int64_t vocabulary = model->vocabulary;
    normalise(block->hidden, model->last_norm, block->normed, block->count, model->hidden, model->epsilon);
    float *logits = step->logits ? step->logits + first * vocabulary : block->logits;
    apply((Linear){model->head, NULL}, block->normed, logits, block->count, model->hidden, vocabulary);
    for (int64_t at = 0; at < block->count && !step->logits; at++)
        step->tokens[first + at] = sample(logits + at * vocabulary, vocabulary, step->temperature,
                                          step->noise[first + at], (double *)block->sums, step->logps + first + at);
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
        {&block->scores, MAX_ROWS * capacity},        {&block->sums, 2 * (model->vocabulary / WIDTH + 1)},
    };
    int64_t end = 0;
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) {
        *parts[part].array = memory + end;
        end += (parts[part].size + 15) / 16 * 16;
    }
    return end;
}

/* Floats of `memory` that a step needs. */
int64_t memory_of(const Model *model, int64_t capacity) {
    Block block;
    return lay_out(model, capacity, NULL, &block);
}

void run_step(const Model *model, const Cache *cache, const Step *step, float *memory) {
    Block block = {0};
    lay_out(model, cache->capacity, memory, &block);
    int64_t answered = 0;
    for (int64_t first = 0; first < step->num_positions; first += BLOCK) {
        block.count = step->num_positions - first < BLOCK ? step->num_positions - first : BLOCK;
        for (int64_t at = 0; at < block.count; at++) {
            block.places[at] = step->places[first + at];
            block.slots[at] = step->slots[first + at];
            const float *embedded = model->embedding + step->ids[first + at] * model->hidden;
            memcpy(block.hidden + at * model->hidden, embedded, 4 * (size_t)model->hidden);
        }
        for (block.num_asked = 0; answered + block.num_asked < step->num_asked; block.num_asked++) {
            int64_t position = step->asked[answered + block.num_asked] - first;
            if (position >= block.count) break;
            block.asked[block.num_asked] = position;
        }
        for (int64_t layer = 0; layer < model->num_layers; layer++) run_layer(model, cache, layer, &block);
        answer(model, step, answered, &block);
        answered += block.num_asked;
    }
}
