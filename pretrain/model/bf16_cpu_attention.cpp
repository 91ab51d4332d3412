// Causal attention within segments in bf16, for CPUs with AVX-512 BF16. Uses AMX if USE_AMX is defined.
//
// As in FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), scores exist only in small blocks. These blocks
// are transposed: keys are in rows, queries in columns. So softmax works on 16 queries per vector, and the next matmuls
// need no transposition.
//
// A matmul C += A x B works on tiles. Tiles are contiguous, with rows of 64 bytes:
//   A: 16 x 32, bf16
//   B: 32 x 16, bf16, with pairs of rows interleaved: the first row is B[0][0], B[1][0], B[0][1], B[1][1], ...
//   C: 16 x 16, fp32
//
// A block is 32 positions, which are two tiles. Names with `padded` are sizes rounded up to whole blocks. Elements
// beyond a tensor are 0.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace {

using bf16 = uint16_t;

constexpr int SIDE = 16;
constexpr int BLOCK = 32;
constexpr int OPERAND = SIDE * BLOCK;  // elements of an A or B tile
constexpr int RESULT = SIDE * SIDE;    // elements of a C tile
constexpr int ROW_BYTES = 64;

// Numbers of blocks computed together. More would not fit into the L2 cache.
constexpr int FORWARD_KEYS = 8;
constexpr int BACKWARD_KEYS = 4;
constexpr int BACKWARD_QUERIES = 8;

constexpr float LOWEST = -3e38f;
constexpr float LOG2_E = 1.44269504f;

struct Sizes {
    int64_t windows, heads, groups, tokens, width;
};

// A tensor (windows, heads or groups, tokens, width). Strides are in elements. The last dimension is contiguous.
struct View {
    void* data;
    int64_t window, head, position;
};

// Returns a mask of the columns from `first` to the width, up to 32.
inline __mmask32 columns(int64_t width, int64_t first) {
    const int64_t left = width - first;
    return left >= BLOCK ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
}

// One head of a View.
struct Rows {
    bf16* data;
    int64_t stride, tokens, width;

    Rows(const View& view, const Sizes& sizes, int64_t window, int64_t head)
        : data(static_cast<bf16*>(view.data) + window * view.window + head * view.head),
          stride(view.position),
          tokens(sizes.tokens),
          width(sizes.width) {}

    // Returns 32 elements of a row. Elements outside of the tensor are 0.
    __m512i load(int64_t row, int64_t column) const {
        if (row >= tokens || column >= width) return _mm512_setzero_si512();
        return _mm512_maskz_loadu_epi16(columns(width, column), data + row * stride + column);
    }
};

template <typename T>
struct Buffer {
    struct Free {
        void operator()(T* data) const { std::free(data); }
    };
    std::unique_ptr<T, Free> data;
    explicit Buffer(int64_t size)
        : data(static_cast<T*>(std::aligned_alloc(ROW_BYTES, (size * sizeof(T) / ROW_BYTES + 1) * ROW_BYTES))) {
        if (!data) throw std::bad_alloc();
    }
    operator T*() const { return data.get(); }
};

#ifdef USE_AMX
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    TileConfig() {
        for (int tile = 0; tile < 8; tile++) row_bytes[tile] = ROW_BYTES, rows[tile] = SIDE;
    }
};

// Configures all tiles for this thread.
struct Tiles {
    Tiles() {
        const TileConfig config;
        asm volatile("" : : "m"(config) : "memory");  // older compilers assume that 8 bytes are read
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
};

// Computes 2 x 2 tiles: c[i][j] = sum over k of a[i][k] x b[j][k]. If `accumulates`, adds it to their old values.
// The steps between tiles are in elements, c_row is in bytes.
inline void multiply(
    float* c00, float* c01, float* c10, float* c11, int64_t c_row, bool accumulates, const bf16* a0, const bf16* a1,
    int64_t a_step, const bf16* b0, const bf16* b1, int64_t b_step, int64_t depth
) {
    asm volatile("" ::: "memory");  // GCC's tile loads don't say that they read memory
    if (accumulates) {
        _tile_loadd(0, c00, c_row);
        _tile_loadd(1, c01, c_row);
        _tile_loadd(2, c10, c_row);
        _tile_loadd(3, c11, c_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k++) {
        // Some compilers' macros need pointers without operators.
        const bf16 *upper = a0 + k * a_step, *lower = a1 + k * a_step;
        const bf16 *left = b0 + k * b_step, *right = b1 + k * b_step;
        _tile_loadd(4, upper, ROW_BYTES);
        _tile_loadd(6, left, ROW_BYTES);
        _tile_loadd(7, right, ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower, ROW_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c00, c_row);
    _tile_stored(1, c01, c_row);
    _tile_stored(2, c10, c_row);
    _tile_stored(3, c11, c_row);
    asm volatile("" ::: "memory");
}

#else
struct Tiles {};

inline void multiply(
    float* c00, float* c01, float* c10, float* c11, int64_t c_row, bool accumulates, const bf16* a0, const bf16* a1,
    int64_t a_step, const bf16* b0, const bf16* b1, int64_t b_step, int64_t depth
) {
    constexpr int ROWS = 8;  // 16 sums fit into the registers
    c_row /= sizeof(float);
    for (int first = 0; first < BLOCK; first += ROWS) {
        const bool is_upper = first < SIDE;
        const bf16* a = (is_upper ? a0 : a1) + first % SIDE * BLOCK;
        float* left = (is_upper ? c00 : c10) + first % SIDE * c_row;
        float* right = (is_upper ? c01 : c11) + first % SIDE * c_row;
        __m512 sums[ROWS][2];
        for (int row = 0; row < ROWS; row++) {
            sums[row][0] = accumulates ? _mm512_loadu_ps(left + row * c_row) : _mm512_setzero_ps();
            sums[row][1] = accumulates ? _mm512_loadu_ps(right + row * c_row) : _mm512_setzero_ps();
        }
        for (int64_t k = 0; k < depth; k++)
            for (int pair = 0; pair < SIDE; pair++) {
                const auto b_left = (__m512bh)_mm512_load_si512(b0 + k * b_step + pair * BLOCK);
                const auto b_right = (__m512bh)_mm512_load_si512(b1 + k * b_step + pair * BLOCK);
                for (int row = 0; row < ROWS; row++) {
                    int32_t both;
                    std::memcpy(&both, a + k * a_step + row * BLOCK + 2 * pair, sizeof(both));
                    const auto a_both = (__m512bh)_mm512_set1_epi32(both);
                    sums[row][0] = _mm512_dpbf16_ps(sums[row][0], a_both, b_left);
                    sums[row][1] = _mm512_dpbf16_ps(sums[row][1], a_both, b_right);
                }
            }
        for (int row = 0; row < ROWS; row++) {
            _mm512_storeu_ps(left + row * c_row, sums[row][0]);
            _mm512_storeu_ps(right + row * c_row, sums[row][1]);
        }
    }
}
#endif

// Transposes 16 x 16 elements of 32 bits.
inline void transpose(__m512i r[SIDE]) {
    __m512i t[SIDE];
    for (int i = 0; i < SIDE; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i even_low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        const __m512i even_high = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        const __m512i odd_high = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        t[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        t[i + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
    for (int i = 0; i < SIDE; i++) r[i] = t[i];
}

// Packs X as A, tiles [positions / 16][width / 32].
void pack_rows(const Rows& x, int64_t padded_tokens, int64_t padded_width, bf16* out) {
    for (int64_t row = 0; row < padded_tokens; row += SIDE)
        for (int64_t column = 0; column < padded_width; column += BLOCK, out += OPERAND)
            for (int i = 0; i < SIDE; i++) _mm512_store_si512(out + i * BLOCK, x.load(row + i, column));
}

// Packs X^T as B, tiles [positions / 16][width / 32].
void pack_transposed_rows(const Rows& x, int64_t begin, int64_t end, int64_t padded_width, bf16* out) {
    for (int64_t row = begin; row < end; row += SIDE)
        for (int64_t column = 0; column < padded_width; column += BLOCK, out += OPERAND) {
            __m512i r[SIDE];
            for (int i = 0; i < SIDE; i++) r[i] = x.load(row + i, column);
            transpose(r);
            for (int i = 0; i < SIDE; i++) _mm512_store_si512(out + i * BLOCK, r[i]);
        }
}

// Interleaves the lower or upper 16 elements of two vectors: a0, b0, a1, b1, ...
template <bool upper>
inline __m512i interleave(__m512i a, __m512i b) {
    const __m512i even = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(a, upper));
    const __m512i odd = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b, upper));
    return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

// Packs X as B, tiles [positions / 32][width / 16].
void pack_pairs(const Rows& x, int64_t padded_tokens, int64_t padded_width, bf16* out) {
    for (int64_t row = 0; row < padded_tokens; row += BLOCK)
        for (int64_t column = 0; column < padded_width; column += BLOCK, out += 2 * OPERAND)
            for (int i = 0; i < SIDE; i++) {
                const __m512i a = x.load(row + 2 * i, column), b = x.load(row + 2 * i + 1, column);
                _mm512_store_si512(out + i * BLOCK, interleave<false>(a, b));
                _mm512_store_si512(out + OPERAND + i * BLOCK, interleave<true>(a, b));
            }
}

// Packs X^T as A, tiles [width / 16][positions / 32].
void pack_transposed(const Rows& x, int64_t padded_tokens, int64_t padded_width, bf16* out) {
    const int64_t blocks = padded_tokens / BLOCK;
    for (int64_t column = 0; column < padded_width; column += BLOCK)
        for (int64_t block = 0; block < blocks; block++) {
            __m512i low[SIDE], high[SIDE];
            for (int i = 0; i < SIDE; i++) {
                const int64_t row = block * BLOCK + 2 * i;
                const __m512i a = x.load(row, column), b = x.load(row + 1, column);
                low[i] = interleave<false>(a, b);
                high[i] = interleave<true>(a, b);
            }
            transpose(low);
            transpose(high);
            bf16* first = out + (column / SIDE * blocks + block) * OPERAND;
            for (int i = 0; i < SIDE; i++) {
                _mm512_store_si512(first + i * BLOCK, low[i]);
                _mm512_store_si512(first + blocks * OPERAND + i * BLOCK, high[i]);
            }
        }
}

// Writes 16 elements of a row, rounded to bf16.
inline void write(const Rows& x, int64_t row, int64_t column, __m512 values) {
    if (row >= x.tokens || column >= x.width) return;
    const auto mask = static_cast<__mmask16>(columns(x.width, column));
    _mm256_mask_storeu_epi16(x.data + row * x.stride + column, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// Writes a tile with the width in its rows and positions in its columns.
inline void write_transposed(const Rows& x, int64_t row, int64_t column, const float* tile, __m512 factor) {
    __m512i r[SIDE];
    for (int i = 0; i < SIDE; i++) r[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(tile + i * SIDE), factor));
    transpose(r);
    for (int i = 0; i < SIDE; i++) write(x, row + i, column, _mm512_castsi512_ps(r[i]));
}

// Returns 2^x, with a relative error of 1e-7, and 0 below 2^-126.
inline __m512 power_of_2(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    // Chebyshev interpolation between -0.5 and 0.5
    __m512 power = _mm512_set1_ps(0.00133909f);
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.00967603f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.05550357f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.24022107f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.69314719f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(1.00000008f));
    const __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // true for NaN
    return _mm512_maskz_scalef_ps(is_normal, power, whole);
}

// The blocks of a window that contain a query and a key of the same segment.
struct Layout {
    int64_t blocks;
    Buffer<int32_t> starts;        // of each query's segment
    Buffer<int32_t> first_keys;    // of each block of queries, the first block of keys
    Buffer<int32_t> last_queries;  // of each block of keys, the last block of queries

    explicit Layout(int64_t tokens)
        : blocks((tokens + BLOCK - 1) / BLOCK), starts(blocks * BLOCK), first_keys(blocks), last_queries(blocks) {}

    // segments: increasing positions in all windows, where segments begin. May contain others, and repeat.
    void fill(const int32_t* segments, int64_t count, int64_t window, int64_t tokens) {
        const int64_t begin = window * tokens;
        const int32_t* next = std::upper_bound(segments, segments + count, begin);
        int32_t start = 0;
        for (int64_t i = 0; i < blocks * BLOCK; i++) {
            for (; next < segments + count && *next <= begin + i; next++) start = *next - begin;
            starts[i] = i < tokens ? start : tokens;
        }
        for (int64_t query = 0; query < blocks; query++) {
            first_keys[query] = starts[query * BLOCK] / BLOCK;
            for (int64_t key = first_keys[query]; key <= query; key++) last_queries[key] = query;
        }
    }

    bool is_partly_hidden(int64_t key, int64_t query) const {
        return key == query || starts[query * BLOCK + BLOCK - 1] > key * BLOCK;
    }
};

// For 16 queries, tells which attend to a key.
struct Visible {
    __m512i queries, starts;
    Visible(const Layout& layout, int64_t query)
        : queries(_mm512_add_epi32(
              _mm512_set1_epi32(query), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
          )),
          starts(_mm512_loadu_si512(layout.starts + query)) {}
    __mmask16 operator()(int64_t key) const {
        const __m512i keys = _mm512_set1_epi32(key);
        return _mm512_mask_cmple_epi32_mask(_mm512_cmple_epi32_mask(keys, queries), starts, keys);
    }
};

struct Pass {
    Sizes sizes;
    float scale;
    const int32_t* segments;
    int64_t segment_count;
    int64_t blocks, padded_tokens, padded_width, width_tiles, width_blocks;

    Pass(const Sizes& sizes, float scale, const int32_t* segments, int64_t segment_count)
        : sizes(sizes),
          scale(scale),
          segments(segments),
          segment_count(segment_count),
          blocks((sizes.tokens + BLOCK - 1) / BLOCK),
          padded_tokens(blocks * BLOCK),
          padded_width((sizes.width + BLOCK - 1) / BLOCK * BLOCK),
          width_tiles(padded_width / SIDE),
          width_blocks(padded_width / BLOCK) {}

    int64_t group(int64_t head) const { return head / (sizes.heads / sizes.groups); }
};

// Runs a Work(pass) per thread, which computes whole heads.
template <typename Work, typename Pass>
void run(const Pass& pass, int threads) {
    const Sizes& sizes = pass.sizes;
    threads = std::min<int64_t>(threads, sizes.windows * sizes.heads);  // each thread's buffers take a head's size
#pragma omp parallel num_threads(threads)
    {
        [[maybe_unused]] const Tiles tiles;
        Layout layout(sizes.tokens);
        Work work(pass);
        int64_t window = -1;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < sizes.windows * sizes.heads; item++) {
            if (window != item / sizes.heads) {
                window = item / sizes.heads;
                layout.fill(pass.segments, pass.segment_count, window, sizes.tokens);
            }
            work(layout, window, item % sizes.heads);
        }
    }
}

struct ForwardPass : Pass {
    View query, key, value, out;
    float* lse;  // (windows, heads, tokens), in units of log 2

    using Pass::Pass;

    struct Work {
        const ForwardPass& pass;
        Buffer<bf16> key_rows, value_columns, query_columns, probabilities;
        Buffer<float> scores, sums;

        explicit Work(const ForwardPass& pass)
            : pass(pass),
              key_rows(pass.padded_tokens * pass.padded_width),
              value_columns(pass.padded_tokens * pass.padded_width),
              query_columns(BLOCK * pass.padded_width),
              probabilities(FORWARD_KEYS * BLOCK * BLOCK),
              scores(FORWARD_KEYS * BLOCK * BLOCK),
              sums(BLOCK * pass.padded_width) {}

        void operator()(const Layout& layout, int64_t window, int64_t head) {
            const Rows query(pass.query, pass.sizes, window, head), out(pass.out, pass.sizes, window, head);
            const Rows key(pass.key, pass.sizes, window, pass.group(head));
            const Rows value(pass.value, pass.sizes, window, pass.group(head));
            float* lse = pass.lse + (window * pass.sizes.heads + head) * pass.sizes.tokens;
            pack_rows(key, pass.padded_tokens, pass.padded_width, key_rows);
            pack_transposed(value, pass.padded_tokens, pass.padded_width, value_columns);
            for (int64_t block = 0; block < pass.blocks; block++) {
                pack_transposed_rows(query, block * BLOCK, (block + 1) * BLOCK, pass.padded_width, query_columns);
                attend(layout, block, out, lse);
            }
        }

        // Computes a block of queries.
        void attend(const Layout& layout, int64_t query, const Rows& out, float* lse) {
            const __m512 scale = _mm512_set1_ps(pass.scale * LOG2_E);
            __m512 most[2], total[2];
            for (int half = 0; half < 2; half++)
                most[half] = _mm512_set1_ps(LOWEST), total[half] = _mm512_setzero_ps();
            const int64_t first = layout.first_keys[query];
            for (int64_t begin = first; begin <= query; begin += FORWARD_KEYS) {
                const int64_t keys = std::min<int64_t>(FORWARD_KEYS, query + 1 - begin);
                __m512 before[2] = {most[0], most[1]};
                for (int64_t key = 0; key < keys; key++) score(layout, begin + key, query, key, scale, most);
                for (int half = 0; half < 2; half++) {
                    const __m512 factor = power_of_2(_mm512_sub_ps(before[half], most[half]));
                    total[half] = _mm512_mul_ps(total[half], factor);
                    for (int64_t tile = half; tile < 2 * pass.width_tiles && begin > first; tile += 2)
                        for (int i = 0; i < SIDE; i++) {
                            float* row = sums + tile * RESULT + i * SIDE;
                            _mm512_store_ps(row, _mm512_mul_ps(_mm512_load_ps(row), factor));
                        }
                    soften(keys, half, most[half], &total[half]);
                }
                for (int64_t tile = 0; tile < pass.width_tiles; tile += 2) {
                    float* c = sums + 2 * tile * RESULT;
                    const bf16* a = value_columns + (tile * pass.blocks + begin) * OPERAND;
                    multiply(
                        c, c + RESULT, c + 2 * RESULT, c + 3 * RESULT, ROW_BYTES, begin > first, a,
                        a + pass.blocks * OPERAND, OPERAND, probabilities, probabilities + OPERAND, 2 * OPERAND, keys
                    );
                }
            }
            for (int half = 0; half < 2; half++) {
                const int64_t row = query * BLOCK + half * SIDE;
                const __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), total[half]);
                for (int64_t tile = 0; tile < pass.width_tiles; tile++)
                    write_transposed(out, row, tile * SIDE, sums + (2 * tile + half) * RESULT, factor);
                alignas(64) float most_of[SIDE], total_of[SIDE];
                _mm512_store_ps(most_of, most[half]);
                _mm512_store_ps(total_of, total[half]);
                for (int i = 0; i < SIDE && row + i < pass.sizes.tokens; i++)
                    lse[row + i] = most_of[i] + std::log2(total_of[i]);
            }
        }

        // Computes the scaled scores of a block of keys, and updates each query's maximum.
        void score(const Layout& layout, int64_t key, int64_t query, int64_t place, __m512 scale, __m512 most[2]) {
            float* block = scores + place * BLOCK * BLOCK;
            const bf16* a = key_rows + 2 * key * pass.width_blocks * OPERAND;
            const int64_t next = pass.width_blocks * OPERAND;
            multiply(
                block, block + SIDE, block + SIDE * BLOCK, block + SIDE * BLOCK + SIDE, 2 * ROW_BYTES, false, a,
                a + next, OPERAND, query_columns, query_columns + next, OPERAND, pass.width_blocks
            );
            const bool is_partly_hidden = layout.is_partly_hidden(key, query);
            for (int half = 0; half < 2; half++) {
                const Visible visible(layout, query * BLOCK + half * SIDE);
                __m512 most_here = most[half];
                for (int i = 0; i < BLOCK; i++) {
                    float* row = block + i * BLOCK + half * SIDE;
                    __m512 x = _mm512_mul_ps(_mm512_load_ps(row), scale);
                    if (is_partly_hidden)
                        x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), visible(key * BLOCK + i), x);
                    _mm512_store_ps(row, x);
                    most_here = _mm512_max_ps(x, most_here);
                }
                most[half] = most_here;
            }
        }

        // Computes unnormalized probabilities, packed as B, and adds them to each query's total.
        void soften(int64_t keys, int half, __m512 most, __m512* total) {
            __m512 sum_0 = *total, sum_1 = _mm512_setzero_ps();
            for (int64_t key = 0; key < keys; key++)
                for (int i = 0; i < SIDE; i++) {
                    const float* rows = scores + (key * BLOCK + 2 * i) * BLOCK + half * SIDE;
                    const __m512 a = power_of_2(_mm512_sub_ps(_mm512_load_ps(rows), most));
                    const __m512 b = power_of_2(_mm512_sub_ps(_mm512_load_ps(rows + BLOCK), most));
                    sum_0 = _mm512_add_ps(sum_0, a);
                    sum_1 = _mm512_add_ps(sum_1, b);
                    const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(b, a);
                    const __m512i turns = _mm512_permutexvar_epi16(TURNS, pair);
                    _mm512_store_si512(probabilities + (2 * key + half) * OPERAND + i * BLOCK, turns);
                }
            *total = _mm512_add_ps(sum_0, sum_1);
        }

        const __m512i TURNS = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17,
            1, 16, 0
        );
    };
};

struct BackwardPass : Pass {
    View grad_out, query, key, value, out, grad_query, grad_key, grad_value;
    const float* lse;
    bool shares_keys;  // grad_key and grad_value are fp32 and have a head for each query head

    using Pass::Pass;

    struct Work {
        const BackwardPass& pass;
        const int64_t size;
        Buffer<bf16> key_rows, key_columns, value_rows, query_columns, query_pairs, grad_out_columns, grad_out_pairs;
        Buffer<bf16> probabilities, grad_scores, grad_score_pairs;
        Buffer<float> sums_query, sums_key, sums_value, lse, delta;
        alignas(64) float score_block[BLOCK * BLOCK];
        alignas(64) float grad_block[BLOCK * BLOCK];

        explicit Work(const BackwardPass& pass)
            : pass(pass),
              size(pass.padded_tokens * pass.padded_width),
              key_rows(size),
              key_columns(size),
              value_rows(size),
              query_columns(size),
              query_pairs(size),
              grad_out_columns(size),
              grad_out_pairs(size),
              probabilities(BACKWARD_KEYS * BACKWARD_QUERIES * BLOCK * BLOCK),
              grad_scores(BACKWARD_KEYS * BACKWARD_QUERIES * BLOCK * BLOCK),
              grad_score_pairs(BACKWARD_KEYS * BACKWARD_QUERIES * BLOCK * BLOCK),
              sums_query(size),
              sums_key(size),
              sums_value(size),
              lse(pass.padded_tokens),
              delta(pass.padded_tokens) {}

        void operator()(const Layout& layout, int64_t window, int64_t head) {
            const Rows query(pass.query, pass.sizes, window, head), grad_out(pass.grad_out, pass.sizes, window, head);
            const Rows key(pass.key, pass.sizes, window, pass.group(head));
            const Rows value(pass.value, pass.sizes, window, pass.group(head));
            const int64_t tokens = pass.padded_tokens, width = pass.padded_width;
            pack_rows(key, tokens, width, key_rows);
            pack_rows(value, tokens, width, value_rows);
            pack_transposed(key, tokens, width, key_columns);
            pack_transposed_rows(query, 0, tokens, width, query_columns);
            pack_transposed_rows(grad_out, 0, tokens, width, grad_out_columns);
            pack_pairs(query, tokens, width, query_pairs);
            pack_pairs(grad_out, tokens, width, grad_out_pairs);
            const float* lse_here = pass.lse + (window * pass.sizes.heads + head) * pass.sizes.tokens;
            // Queries beyond the window get finite values. Their gradients are 0.
            for (int64_t i = 0; i < tokens; i++) lse[i] = i < pass.sizes.tokens ? lse_here[i] : 0.0f;
            multiply_rows(grad_out, Rows(pass.out, pass.sizes, window, head));
            std::fill_n(static_cast<float*>(sums_query), size, 0.0f);
            std::fill_n(static_cast<float*>(sums_key), size, 0.0f);
            std::fill_n(static_cast<float*>(sums_value), size, 0.0f);
            for (int64_t key = 0; key < pass.blocks; key += BACKWARD_KEYS) {
                const int64_t key_end = std::min(key + BACKWARD_KEYS, pass.blocks);
                const int64_t query_end = layout.last_queries[key_end - 1] + 1;
                for (int64_t begin = key; begin < query_end; begin += BACKWARD_QUERIES)
                    add(layout, key, key_end, begin, std::min(begin + BACKWARD_QUERIES, query_end));
            }
            write_query(Rows(pass.grad_query, pass.sizes, window, head));
            write_key(pass.grad_key, window, head, sums_key, pass.scale);
            write_key(pass.grad_value, window, head, sums_value, 1.0f);
        }

        // delta = sum over the width of grad_out x out
        void multiply_rows(const Rows& grad_out, const Rows& out) {
            for (int64_t row = 0; row < pass.padded_tokens; row++) {
                __m512 sum = _mm512_setzero_ps();
                for (int64_t column = 0; column < pass.padded_width; column += BLOCK) {
                    const __m512i a = grad_out.load(row, column), b = out.load(row, column);
                    const __m512i upper = _mm512_set1_epi32(0xffff0000);
                    const auto odd = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, upper)); };
                    const auto even = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
                    sum = _mm512_fmadd_ps(odd(a), odd(b), sum);
                    sum = _mm512_fmadd_ps(even(a), even(b), sum);
                }
                delta[row] = _mm512_reduce_add_ps(sum);
            }
        }

        // Adds what some blocks of keys and queries contribute to all gradients.
        void add(const Layout& layout, int64_t key_begin, int64_t key_end, int64_t query_begin, int64_t query_end) {
            for (int64_t key = key_begin; key < key_end; key++) {
                const int64_t from = std::max(key, query_begin);
                const int64_t to = std::min<int64_t>(layout.last_queries[key] + 1, query_end);
                const int64_t row = (key - key_begin) * 2 * BACKWARD_QUERIES;  // in tiles
                for (int64_t query = from; query < to; query++) {
                    multiply_scores(key, query);
                    const int64_t place = query - query_begin;
                    const int64_t pair = place * BACKWARD_KEYS + key - key_begin;
                    if (layout.is_partly_hidden(key, query))
                        differentiate<true>(layout, key, query, row + place, 2 * pair);
                    else
                        differentiate<false>(layout, key, query, row + place, 2 * pair);
                }
                if (from >= to) continue;
                const int64_t a = (row + from - query_begin) * OPERAND;
                const int64_t next = BACKWARD_QUERIES * OPERAND;
                const int64_t step = pass.width_tiles * OPERAND;
                for (int64_t tile = 0; tile < pass.width_tiles; tile += 2) {
                    const int64_t b = (from * pass.width_tiles + tile) * OPERAND;
                    const int64_t c = (2 * key * pass.width_tiles + tile) * RESULT;
                    const int64_t c_next = c + pass.width_tiles * RESULT;
                    float* v = sums_value;
                    multiply(
                        v + c, v + c + RESULT, v + c_next, v + c_next + RESULT, ROW_BYTES, true, probabilities + a,
                        probabilities + a + next, OPERAND, grad_out_pairs + b, grad_out_pairs + b + OPERAND, step,
                        to - from
                    );
                    float* k = sums_key;
                    multiply(
                        k + c, k + c + RESULT, k + c_next, k + c_next + RESULT, ROW_BYTES, true, grad_scores + a,
                        grad_scores + a + next, OPERAND, query_pairs + b, query_pairs + b + OPERAND, step, to - from
                    );
                }
            }
            for (int64_t query = query_begin; query < query_end; query++) {
                const int64_t from = std::max<int64_t>(layout.first_keys[query], key_begin);
                const int64_t to = std::min(query + 1, key_end);
                if (from >= to) continue;
                const bf16* b =
                    grad_score_pairs + 2 * ((query - query_begin) * BACKWARD_KEYS + from - key_begin) * OPERAND;
                for (int64_t tile = 0; tile < pass.width_tiles; tile += 2) {
                    float* c = sums_query + (query * pass.width_tiles + tile) * 2 * RESULT;
                    const bf16* a = key_columns + (tile * pass.blocks + from) * OPERAND;
                    multiply(
                        c, c + RESULT, c + 2 * RESULT, c + 3 * RESULT, ROW_BYTES, true, a, a + pass.blocks * OPERAND,
                        OPERAND, b, b + OPERAND, 2 * OPERAND, to - from
                    );
                }
            }
        }

        // Computes the scores and the probabilities' gradients of a block.
        void multiply_scores(int64_t key, int64_t query) {
            const int64_t next = pass.width_blocks * OPERAND;
            const int64_t a = 2 * key * next, b = 2 * query * next;
            const auto into = [&](float* c, const bf16* rows, const bf16* columns) {
                multiply(
                    c, c + SIDE, c + SIDE * BLOCK, c + SIDE * BLOCK + SIDE, 2 * ROW_BYTES, false, rows + a,
                    rows + a + next, OPERAND, columns + b, columns + b + next, OPERAND, pass.width_blocks
                );
            };
            into(score_block, key_rows, query_columns);
            into(grad_block, value_rows, grad_out_columns);
        }

        // Computes a block of probabilities and the scores' gradients, packed as A and B. Places are in tiles.
        template <bool is_partly_hidden>
        void differentiate(const Layout& layout, int64_t key, int64_t query, int64_t place, int64_t pair_place) {
            const __m512 scale = _mm512_set1_ps(pass.scale * LOG2_E);
            const int64_t first = query * BLOCK;
            const Visible visible[2] = {Visible(layout, first), Visible(layout, first + SIDE)};
            const __m512 lses[2] = {_mm512_load_ps(lse + first), _mm512_load_ps(lse + first + SIDE)};
            const __m512 deltas[2] = {_mm512_load_ps(delta + first), _mm512_load_ps(delta + first + SIDE)};
            const __m512i low = _mm512_set_epi16(
                47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2,
                33, 1, 32, 0
            );
            const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(SIDE));
            for (int i = 0; i < BLOCK; i += 2) {
                __m512i grad_rows[2];
                for (int j = 0; j < 2; j++) {
                    __m512 p[2], grad[2];
                    for (int half = 0; half < 2; half++) {
                        const int64_t at = (i + j) * BLOCK + half * SIDE;
                        p[half] = power_of_2(_mm512_fmsub_ps(_mm512_load_ps(score_block + at), scale, lses[half]));
                        if (is_partly_hidden)
                            p[half] = _mm512_maskz_mov_ps(visible[half](key * BLOCK + i + j), p[half]);
                        grad[half] =
                            _mm512_mul_ps(p[half], _mm512_sub_ps(_mm512_load_ps(grad_block + at), deltas[half]));
                    }
                    const int64_t tile = place + (i >= SIDE ? BACKWARD_QUERIES : 0);
                    const int64_t at = tile * OPERAND + (i + j) % SIDE * BLOCK;
                    grad_rows[j] = (__m512i)_mm512_cvtne2ps_pbh(grad[1], grad[0]);
                    _mm512_store_si512(grad_scores + at, grad_rows[j]);
                    _mm512_store_si512(probabilities + at, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
                }
                bf16* pairs = grad_score_pairs + pair_place * OPERAND + i / 2 * BLOCK;
                _mm512_store_si512(pairs, _mm512_permutex2var_epi16(grad_rows[0], low, grad_rows[1]));
                _mm512_store_si512(pairs + OPERAND, _mm512_permutex2var_epi16(grad_rows[0], high, grad_rows[1]));
            }
        }

        void write_query(const Rows& grad) {
            const __m512 scale = _mm512_set1_ps(pass.scale);
            for (int64_t query = 0; query < pass.blocks; query++)
                for (int64_t tile = 0; tile < 2 * pass.width_tiles; tile++) {
                    const float* sums = sums_query + (query * 2 * pass.width_tiles + tile) * RESULT;
                    write_transposed(grad, query * BLOCK + tile % 2 * SIDE, tile / 2 * SIDE, sums, scale);
                }
        }

        void write_key(const View& view, int64_t window, int64_t head, const float* sums, float scale) {
            const Rows rows(view, pass.sizes, window, head);
            float* shared = static_cast<float*>(view.data) + window * view.window + head * view.head;
            for (int64_t row = 0; row < pass.sizes.tokens; row++)
                for (int64_t column = 0; column < pass.sizes.width; column += SIDE) {
                    const int64_t tile = row / SIDE * pass.width_tiles + column / SIDE;
                    const __m512 values =
                        _mm512_mul_ps(_mm512_load_ps(sums + tile * RESULT + row % SIDE * SIDE), _mm512_set1_ps(scale));
                    if (pass.shares_keys)
                        _mm512_mask_storeu_ps(
                            shared + row * view.position + column,
                            static_cast<__mmask16>(columns(pass.sizes.width, column)), values
                        );
                    else
                        write(rows, row, column, values);
                }
        }
    };
};

}  // namespace

// views: query, key, value, out
extern "C" void forward(
    const Sizes* sizes, const View* views, float* lse, const int32_t* segments, int64_t segment_count, int64_t threads,
    float scale
) {
    ForwardPass pass(*sizes, scale, segments, segment_count);
    pass.query = views[0], pass.key = views[1], pass.value = views[2], pass.out = views[3], pass.lse = lse;
    run<ForwardPass::Work>(pass, threads);
}

// views: grad_out, query, key, value, out, grad_query, grad_key, grad_value
extern "C" void backward(
    const Sizes* sizes, const View* views, const float* lse, const int32_t* segments, int64_t segment_count,
    int64_t threads, float scale
) {
    BackwardPass pass(*sizes, scale, segments, segment_count);
    pass.grad_out = views[0], pass.query = views[1], pass.key = views[2], pass.value = views[3], pass.out = views[4];
    pass.grad_query = views[5], pass.grad_key = views[6], pass.grad_value = views[7], pass.lse = lse;
    pass.shares_keys = sizes->heads != sizes->groups;
    run<BackwardPass::Work>(pass, threads);
}
