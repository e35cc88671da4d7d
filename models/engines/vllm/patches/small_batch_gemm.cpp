// Products of few rows with weights of 4 or 8 bits, or of any with those of 16 as well, see small_batch_gemm.py.
//
// Outputs are computed in panels of 32, of two vectors of 16 lanes, and inputs come in groups of 32, which share a
// scale s and a least value m: w = s * q + m. A block of rows reads weights once, in the order that they are stored in:
//
//   4 bits: [panel, group, 4, 2, 16] words of 8 integers, 0 to 15; the inputs of a word are 0, 2, 4, 6, 1, 3, 5, 7.
//   8 bits: [panel, group, 16, 2, 16] pairs of integers, -128 to 127, of two inputs side by side.
//   16 bits: [panel, group, 16, 2, 16] pairs of bfloat16.
//   scales: [panel, group, 0 to 2, 32] float16, those of the 8 bits without least values, none of the 16 bits.
//
// Where the processor multiplies pairs of bfloat16 (AVX512_BF16), products with such inputs are of the integers, which
// bfloat16 holds exactly, and a group's sum is scaled: s * sum(q * x) + m * sum(x). Those of a draft's 8 bits have inputs
// of 16 bits, rounded to 1/32767 of a row's largest, so that a pair takes one instruction (AVX512_VNNI) in place of four.
// All others are of the weights, in float32. A row's sums are added in one order, whatever the rows beside it. For more
// rows than a block's, 8 bits are unpacked to 16 once a panel; 4 bits take hardly an instruction more than 16.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16, VECTORS = 2, PANEL = LANES * VECTORS, GROUP = 32, PAIRS = 16;
constexpr int64_t CHUNK = 192;  // rows at most whose inputs stay in the cache while panels are read
// Bytes of a line of the cache, and groups that weights are fetched ahead; beyond the last one that does nothing.
constexpr int64_t LINE = 64, AHEAD = 4;

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Shorts = int16_t __attribute__((vector_size(32)));
using Halves = uint16_t __attribute__((vector_size(32)));

std::atomic<int64_t> limit{0};  // rows up to which these products are used; those of more read floats
std::atomic<bool> invariant{false};  // the target's are used for any number of rows, so that all have the same bits

// The target's forward pass that comes next: how many rows it has, and whether some are of prompts.
struct Step {
    int64_t rows = 0;
    bool reads_prompts = false;
};
Step step;

template <typename Vector>
inline Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
}

inline Floats from_halves(const uint16_t* halves) {
#ifdef __AVX512F__
    return _mm512_cvtph_ps(load<__m256i>(halves));
#else
    const Ints bits = __builtin_convertvector(load<Halves>(halves), Ints);
    const Ints magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    const Floats scaled = reinterpret_cast<Floats>(magnitude) * 0x1p112f;  // the exponents' biases differ by 112
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(scaled) | sign);
#endif
}

// Write a vector's first lanes; of 0 or less none.
template <typename Vector, typename Output>
inline void store_lanes(const Vector& vector, Output* to, int64_t lanes) {
    if (lanes >= LANES)
        std::memcpy(to, &vector, sizeof(vector));
    else if (lanes > 0)
        std::memcpy(to, &vector, lanes * sizeof(Output));
}

inline void store(Floats values, float* to, int64_t lanes) { store_lanes(values, to, lanes); }

inline void store(Floats values, at::BFloat16* to, int64_t lanes) {
    const Ints bits = reinterpret_cast<Ints>(values);
    const Ints nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // ties to even
    const Ints halves = values == values ? nearest : 0x7fff;        // what is no number stays none
    store_lanes(__builtin_convertvector(halves, Shorts), to, lanes);
}

// Rows that are multiplied at once: more make fewer passes over packed weights, but leave no registers for their sums.
constexpr int SMALL_BLOCK = 8;
template <typename Input, bool UNPACKED = false>
constexpr int BLOCK = std::is_same_v<Input, at::BFloat16> && !UNPACKED ? 12 : SMALL_BLOCK;

// Panels of weights of BITS; STORED are the bits that their values lie in, 16 where they were unpacked.
template <int BITS, int STORED = BITS>
struct Panels {
    static constexpr bool UNPACKED = STORED != BITS;
    static constexpr int64_t BYTES = PANEL * GROUP * STORED / 8;  // of a group
    static constexpr int64_t SCALES = BITS == 4 ? 2 * PANEL : BITS == 8 ? PANEL : 0;

    const uint8_t* values;
    const uint16_t* scales;
    int64_t groups;

    const uint8_t* values_at(int64_t group) const { return values + group * BYTES; }
    const uint16_t* scales_at(int64_t group) const { return scales + group * SCALES; }
    Panels from(int64_t number) const { return {values_at(number * groups), scales_at(number * groups), groups}; }
};

template <int BITS, typename Input>
struct Inputs {
    const Input* rows;
    int64_t stride;
    std::vector<float> sums;  // [rows, groups], where products are of integers; [rows] scales of inputs of 16 bits
};

template <int BITS>
void sum_groups(Inputs<BITS, float>&, int64_t) {}  // sums are of weighted products

template <int BITS, int ROWS>
inline void add_group(
    const Panels<BITS>& panel, const Inputs<BITS, float>& inputs, int64_t first, int64_t group,
    Floats (&total)[ROWS][VECTORS]
) {
    const uint8_t* values = panel.values_at(group);
    const uint16_t* scales = panel.scales_at(group);
    const float* x = inputs.rows + first * inputs.stride + group * GROUP;
    for (int vector = 0; vector < VECTORS; ++vector) {
        const Floats scale = from_halves(scales + vector * LANES);
        const auto add = [&](int input, Floats weights) {
            for (int row = 0; row < ROWS; ++row) total[row][vector] += weights * x[row * inputs.stride + input];
        };
        if constexpr (BITS == 4) {
            const Floats least = from_halves(scales + PANEL + vector * LANES);
            for (int word = 0; word < 4; ++word) {
                const Ints words = load<Ints>(values + (word * VECTORS + vector) * 64);
                for (int at = 0; at < 8; ++at) {
                    const Floats integers = __builtin_convertvector((words >> 4 * at) & 15, Floats);
                    add(8 * word + 2 * (at % 4) + at / 4, integers * scale + least);
                }
            }
        } else {
            for (int pair = 0; pair < 16; ++pair) {
                const Shorts pairs = load<Shorts>(values + (pair * VECTORS + vector) * 32);
                const Ints words = __builtin_convertvector(pairs, Ints);
                add(2 * pair, __builtin_convertvector(words << 24 >> 24, Floats) * scale);
                add(2 * pair + 1, __builtin_convertvector(words >> 8, Floats) * scale);
            }
        }
    }
}

#ifdef __AVX512BF16__

using OfBFloat16 = at::BFloat16;

// 128 + q is a bfloat16 whose last bits are q.
inline __m512i with_128(__m512i words) {
    return _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0x000f000f), _mm512_set1_epi32(0x43004300), 0xea);
}

template <int BITS>
void sum_groups(Inputs<BITS, at::BFloat16>& inputs, int64_t num_rows) {
    if (BITS != 4) return;  // others have no least values
    const auto ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    inputs.sums.resize(num_rows * inputs.stride / GROUP);
    at::parallel_for(0, inputs.sums.size(), 4096, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const auto group = load<__m512bh>(inputs.rows + at * GROUP);
            inputs.sums[at] = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), group, ones));
        }
    });
}

// Hand out a group's weights by pairs of inputs, as vectors of pairs of bfloat16, and fetch those of a later one.
template <int BITS, bool FETCH, typename Take>
inline void for_pairs(const uint8_t* values, const Take& take) {
    if constexpr (FETCH) {
        constexpr int64_t BYTES = Panels<BITS>::BYTES;
#pragma GCC unroll 32
        for (int64_t at = 0; at < BYTES; at += LINE) _mm_prefetch(values + AHEAD * BYTES + at, _MM_HINT_T0);
    }
    if constexpr (BITS == 4) {
#pragma GCC unroll 4
        for (int word = 0; word < 4; ++word) {
            const uint8_t* at = values + word * VECTORS * 64;
            const __m512i words[] = {load<__m512i>(at), load<__m512i>(at + 64)};
            take(4 * word, {with_128(words[0]), with_128(words[1])});
            take(4 * word + 1, {with_128(_mm512_srli_epi16(words[0], 4)), with_128(_mm512_srli_epi16(words[1], 4))});
            take(4 * word + 2, {with_128(_mm512_srli_epi16(words[0], 8)), with_128(_mm512_srli_epi16(words[1], 8))});
            take(4 * word + 3, {with_128(_mm512_srli_epi16(words[0], 12)), with_128(_mm512_srli_epi16(words[1], 12))});
        }
    } else if constexpr (BITS == 8) {
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; ++pair) {
            __m512i weights[VECTORS];
            for (int vector = 0; vector < VECTORS; ++vector) {
                const uint8_t* at = values + (pair * VECTORS + vector) * 32;
                const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(at)));
                const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(at + 16)));
                weights[vector] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            }
            take(pair, weights);
        }
    } else {
#pragma GCC unroll 4
        for (int pair = 0; pair < PAIRS; ++pair) {
            const uint8_t* at = values + pair * VECTORS * 64;
            take(pair, {load<__m512i>(at), load<__m512i>(at + 64)});
        }
    }
}

// Unpack a panel, and return it.
template <int BITS>
Panels<BITS, 16> unpack(const Panels<BITS>& panel, uint8_t* to) {
    for (int64_t group = 0; group < panel.groups; ++group)
        for_pairs<BITS, true>(panel.values_at(group), [&](int pair, const __m512i (&weights)[VECTORS]) {
            std::memcpy(to + (group * PAIRS + pair) * sizeof(weights), weights, sizeof(weights));
        });
    return {to, panel.scales, panel.groups};
}

template <int BITS, int STORED, int ROWS>
inline void add_group(
    const Panels<BITS, STORED>& panel, const Inputs<BITS, at::BFloat16>& inputs, int64_t first, int64_t group,
    Floats (&total)[ROWS][VECTORS]
) {
    const uint8_t* values = panel.values_at(group);
    const at::BFloat16* x = inputs.rows + first * inputs.stride + group * GROUP;
    __m512 sum[ROWS][VECTORS];
    for (auto& row : sum)
        for (auto& vector : row) vector = _mm512_setzero_ps();
    for_pairs<STORED, STORED == BITS>(values, [&](int pair, const __m512i (&weights)[VECTORS]) {
        for (int row = 0; row < ROWS; ++row) {
            const auto both = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + row * inputs.stride + 2 * pair));
            for (int vector = 0; vector < VECTORS; ++vector)
                sum[row][vector] = _mm512_dpbf16_ps(sum[row][vector], both, (__m512bh)weights[vector]);
        }
    });
    const uint16_t* scales = panel.scales_at(group);
    for (int vector = 0; vector < VECTORS; ++vector) {
        if constexpr (BITS == 16) {
            for (int row = 0; row < ROWS; ++row) total[row][vector] += sum[row][vector];
            continue;
        }
        const Floats scale = from_halves(scales + vector * LANES);
        if constexpr (BITS == 4) {
            const Floats least = from_halves(scales + PANEL + vector * LANES) - 128 * scale;
            for (int row = 0; row < ROWS; ++row)
                total[row][vector] += least * inputs.sums[(first + row) * panel.groups + group];
        }
        for (int row = 0; row < ROWS; ++row) total[row][vector] += scale * sum[row][vector];
    }
}

#else

using OfBFloat16 = float;

#endif

#ifdef __AVX512VNNI__

inline __m512 widen(const at::BFloat16* from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
}

template <int ROWS>
inline void add_group(
    const Panels<8>& panel, const Inputs<8, int16_t>& inputs, int64_t first, int64_t group,
    Floats (&total)[ROWS][VECTORS]
) {
    const uint8_t* values = panel.values_at(group);
    const int16_t* x = inputs.rows + first * inputs.stride + group * GROUP;
#pragma GCC unroll 16
    for (int64_t at = 0; at < panel.BYTES; at += LINE)
        _mm_prefetch(values + AHEAD * panel.BYTES + at, _MM_HINT_T0);
    __m512i sum[ROWS][VECTORS];
    for (auto& row : sum)
        for (auto& vector : row) vector = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
        __m512i weights[VECTORS];
        for (int vector = 0; vector < VECTORS; ++vector)
            weights[vector] = _mm512_cvtepi8_epi16(load<__m256i>(values + (pair * VECTORS + vector) * 32));
        for (int row = 0; row < ROWS; ++row) {
            const __m512i both = _mm512_set1_epi32(load<int32_t>(x + row * inputs.stride + 2 * pair));
            for (int vector = 0; vector < VECTORS; ++vector)
                sum[row][vector] = _mm512_dpwssd_epi32(sum[row][vector], weights[vector], both);
        }
    }
    for (int vector = 0; vector < VECTORS; ++vector) {
        const Floats scale = from_halves(panel.scales_at(group) + vector * LANES);
        for (int row = 0; row < ROWS; ++row)
            total[row][vector] += scale * (Floats)_mm512_cvtepi32_ps(sum[row][vector]);
    }
}

#endif

// Compute the outputs from `at` on, a panel's, for `num` rows from the first on, 1 to ROWS.
template <int ROWS, int BITS, int STORED, typename Input, typename Output>
void multiply_block(
    const Panels<BITS, STORED>& panel, const Inputs<BITS, Input>& inputs, int64_t first, int64_t num, int64_t at,
    Output* output, int64_t num_outputs
) {
    if constexpr (ROWS > 1) {
        if (num < ROWS) {
            multiply_block<ROWS - 1>(panel, inputs, first, num, at, output, num_outputs);
            return;
        }
    }
    Floats total[ROWS][VECTORS] = {};
    for (int64_t group = 0; group < panel.groups; ++group) add_group(panel, inputs, first, group, total);
    for (int vector = 0; vector < VECTORS; ++vector) {
        const int64_t from = at + vector * LANES, lanes = std::min<int64_t>(LANES, num_outputs - from);
        for (int row = 0; row < ROWS; ++row) {
            if constexpr (std::is_same_v<Input, int16_t>) total[row][vector] *= inputs.sums[first + row];
            store(total[row][vector], output + (first + row) * num_outputs + from, lanes);
        }
    }
}

template <int BITS, typename Input, typename Output>
void multiply_panels(
    const Inputs<BITS, Input>& inputs, const at::Tensor& packed, const at::Tensor& scales, at::Tensor& output
) {
    const int64_t num_rows = output.size(0), num_outputs = output.size(1);
    const auto* halves = static_cast<const uint16_t*>(scales.const_data_ptr());
    const Panels<BITS> panels{packed.const_data_ptr<uint8_t>(), halves, packed.size(1)};
    Output* to = output.mutable_data_ptr<Output>();
    at::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
        // In blocks of about one size, since those of few rows wait for their sums.
        const auto multiply_rows = [&](const auto& panel, int64_t number, int64_t first, int64_t num) {
            constexpr int MOST = BLOCK<Input, std::decay_t<decltype(panel)>::UNPACKED>;
            const int64_t most = BITS == 4 && num > 2 * MOST ? SMALL_BLOCK : MOST, num_blocks = (num + most - 1) / most;
            for (int64_t block = 0, done = 0, until; block < num_blocks; ++block, done = until) {
                until = num * (block + 1) / num_blocks;
                multiply_block<MOST>(panel, inputs, first + done, until - done, number * PANEL, to, num_outputs);
            }
        };
        at::Tensor unpacked;
        const int64_t num_chunks = (num_rows + CHUNK - 1) / CHUNK;
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            const int64_t first = num_rows * chunk / num_chunks, num = num_rows * (chunk + 1) / num_chunks - first;
            for (int64_t number = begin; number < end; ++number) {
                if constexpr (std::is_same_v<Input, at::BFloat16> && BITS == 8)
                    if (num_rows > BLOCK<Input>) {
                        if (!unpacked.defined()) unpacked = at::empty({panels.groups * Panels<16>::BYTES}, at::kByte);
                        auto* bytes = unpacked.mutable_data_ptr<uint8_t>();
                        multiply_rows(unpack(panels.from(number), bytes), number, first, num);
                        continue;
                    }
                multiply_rows(panels.from(number), number, first, num);
            }
        }
    });
}

template <typename Input, typename Output, int BITS>
void multiply(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales, at::Tensor& output) {
    const at::Tensor rows = x.to(c10::CppTypeToScalarType<Input>::value).contiguous();
    Inputs<BITS, Input> inputs{rows.const_data_ptr<Input>(), rows.size(1), {}};
    sum_groups(inputs, rows.size(0));
    multiply_panels<BITS, Input, Output>(inputs, packed, scales, output);
}

// Products of a draft: rows [R, I] in bfloat16, and weights of 8 bits.
void multiply_draft(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales, at::Tensor& output) {
#ifdef __AVX512VNNI__
    const int64_t num_rows = x.size(0), width = x.size(1);
    const at::Tensor rows = x.contiguous();
    std::vector<int16_t> rounded(num_rows * width);
    Inputs<8, int16_t> inputs{rounded.data(), width, std::vector<float>(num_rows)};
    for (int64_t row = 0; row < num_rows; ++row) {
        const at::BFloat16* from = rows.const_data_ptr<at::BFloat16>() + row * width;
        __m512 most = _mm512_setzero_ps();
        for (int64_t at = 0; at < width; at += LANES) most = _mm512_max_ps(_mm512_abs_ps(widen(from + at)), most);
        const float largest = _mm512_reduce_max_ps(most), scale = largest > 0 ? 32767 / largest : 0;
        inputs.sums[row] = largest / 32767;
        for (int64_t at = 0; at < width; at += LANES) {
            const __m512i nearest = _mm512_cvtps_epi32(_mm512_mul_ps(widen(from + at), _mm512_set1_ps(scale)));
            const __m256i words = _mm512_cvtsepi32_epi16(nearest);
            std::memcpy(rounded.data() + row * width + at, &words, sizeof(words));
        }
    }
    multiply_panels<8, int16_t, at::BFloat16>(inputs, packed, scales, output);
#else
    multiply<OfBFloat16, at::BFloat16, 8>(x, packed, scales, output);
#endif
}

template <typename Input, typename Output>
void multiply(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales, at::Tensor& output) {
    if (scales.size(2) == 2)
        multiply<Input, Output, 4>(x, packed, scales, output);
    else if (scales.size(2) == 1)
        multiply<Input, Output, 8>(x, packed, scales, output);
    else if constexpr (std::is_same_v<Input, at::BFloat16>)
        multiply<Input, Output, 16>(x, packed, scales, output);
    else
        TORCH_CHECK_VALUE(false, "weights of 16 bits, wanted a processor that multiplies pairs of bfloat16");
}

void multiply_floats(const at::Tensor& x, const at::Tensor& handler, at::Tensor& output) {
    using Product = void(at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&);
    static const auto product = c10::Dispatcher::singleton().findSchemaOrThrow("_C::onednn_mm", "").typed<Product>();
    product.call(output, x, std::nullopt, handler);
}

at::Tensor small_batch_gemm(
    const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales, const at::Tensor& handler,
    int64_t num_outputs, bool in_step, bool of_draft
) {
    at::Tensor output = at::empty({x.size(0), num_outputs}, x.options());
    const bool reads_floats = x.size(0) > limit || (in_step && step.reads_prompts && x.size(0) == step.rows);
    if (reads_floats && (of_draft || !invariant))
        multiply_floats(x, handler, output);
    else if (of_draft && scales.size(2) == 1)
        multiply_draft(x, packed, scales, output);
    else if (x.scalar_type() == at::kBFloat16)
        multiply<OfBFloat16, at::BFloat16>(x, packed, scales, output);
    else
        multiply<float, float>(x, packed, scales, output);
    return output;
}

void set_limit(int64_t rows) { limit = rows; }

void set_invariant(bool on) { invariant = on; }

void tell_step(int64_t rows, bool reads_prompts) { step = {rows, reads_prompts}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(redraft, library) {
    library.def(
        "small_batch_gemm(Tensor x, Tensor packed, Tensor scales, Tensor handler, int num_outputs, bool in_step, "
        "bool of_draft) -> Tensor"
    );
    library.impl("small_batch_gemm", c10::DispatchKey::CPU, small_batch_gemm);
    library.def("limit_few_rows(int rows) -> ()", set_limit);
    library.def("multiply_all_rows(bool on) -> ()", set_invariant);
    library.def("tell_step_of_few_rows(int rows, bool reads_prompts) -> ()", tell_step);
}
