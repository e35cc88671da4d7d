// Draws tokens by noise that is a function of a request's seed, a position and a token, see sampling.py.
//
// Letters: R rows, V tokens.
//
// The largest logit + temperature * noise of a row is found without a logarithm for each token: a token wins only if its
// uniform number is below exp((its logit - the largest sum so far) / temperature), of which a bound is enough. The few
// that remain are computed in double precision, as `draw_by` there computes all of them.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

constexpr int64_t BLOCK = 64;     // tokens that are looked at together
constexpr double GREEDY = 1e-5;   // vLLM's least temperature that draws
constexpr float LEAST = -64;      // log2 of what no uniform number is below
constexpr float MARGIN = 0.001F;  // of log2, for what a float rounds off
constexpr double STEP = 0x1p-32;  // between two uniform numbers

struct Key {
    uint32_t first, second;
};

// SplitMix64's function of its state.
uint64_t mix(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
    return state ^ (state >> 31);
}

Key key_of(int64_t seed, int64_t position) {
    const uint64_t both = mix(mix(static_cast<uint64_t>(seed)) + static_cast<uint64_t>(position));
    return {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)};
}

// A token's number, 32 bits of it; tokens of one row never share one.
inline uint32_t number_of(Key key, uint32_t token) {
    uint32_t bits = token * 0x9E3779B1U + key.first;
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6BU + key.second;
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35U;
    return bits ^ (bits >> 16);
}

double gumbel(uint32_t number) { return -std::log(-std::log1p(-(number + 0.5) * STEP)); }

struct Row {
    const float* logits;
    const int64_t* token_ids;
    Key key;
    double temperature;
    float most;  // of the logits
    double best = -std::numeric_limits<double>::infinity();
    int64_t winner = 0;

    // Whether one of some tokens may win.
    bool is_worth(int64_t from, int64_t to) const {
        const double scale = 1 / (temperature * std::log(2.0));
        const auto slope = static_cast<float>(scale), shift = static_cast<float>((most - best) * scale) + MARGIN;
        uint32_t found = 0;
#pragma omp simd reduction(| : found)
        for (int64_t at = from; at < to; ++at) {
            const float log2 = std::clamp((logits[at] - most) * slope + shift, LEAST, 1.0F);
            // Of a float whose bits are those of 127 + log2, the value is 2^log2 or above.
            const auto bound = std::bit_cast<float>(static_cast<int32_t>((log2 + 127) * 0x1p23F));
            found |= static_cast<float>(number_of(key, static_cast<uint32_t>(token_ids[at]))) * 0x1p-32F <= bound;
        }
        return found != 0;
    }

    void draw(int64_t from, int64_t to) {
        for (int64_t at = from; at < to; ++at) {
            const double sum = logits[at] + temperature * gumbel(number_of(key, static_cast<uint32_t>(token_ids[at])));
            if (sum > best) best = sum, winner = at;
        }
    }
};

int64_t likeliest(const float* logits, int64_t num) {
    float most = -std::numeric_limits<float>::infinity();
    int64_t block = 0;
    for (int64_t begin = 0; begin < num; begin += BLOCK) {
        const int64_t end = std::min(begin + BLOCK, num);
        float here = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : here)
        for (int64_t at = begin; at < end; ++at) here = std::max(here, logits[at]);
        if (here > most) most = here, block = begin;
    }
    return std::max_element(logits + block, logits + std::min(block + BLOCK, num)) - logits;
}

at::Tensor draw_by_noise(
    const at::Tensor& logits, const at::Tensor& seeds, const at::Tensor& positions, const at::Tensor& temperatures,
    const at::Tensor& token_ids
) {
    const int64_t num_rows = logits.size(0), num = logits.size(1);
    const at::Tensor rows = logits.contiguous();
    at::Tensor winners = at::empty({num_rows}, seeds.options());
    at::parallel_for(0, num_rows, 1, [&](int64_t from, int64_t to) {
        for (int64_t at = from; at < to; ++at) {
            const float* of_row = rows.const_data_ptr<float>() + at * num;
            const int64_t first = likeliest(of_row, num);
            const double temperature = temperatures.const_data_ptr<float>()[at];
            const Key key = key_of(seeds.const_data_ptr<int64_t>()[at], positions.const_data_ptr<int64_t>()[at]);
            Row row{of_row, token_ids.const_data_ptr<int64_t>(), key, temperature, of_row[first]};
            row.winner = first;
            if (temperature >= GREEDY) {
                row.draw(first, first + 1);
                for (int64_t begin = 0; begin < num; begin += BLOCK) {
                    const int64_t end = std::min(begin + BLOCK, num);
                    if (row.is_worth(begin, end)) row.draw(begin, end);
                }
            }
            winners.mutable_data_ptr<int64_t>()[at] = row.winner;
        }
    });
    return winners;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(redraft, library) {
    library.def(
        "draw_by_noise(Tensor logits, Tensor seeds, Tensor positions, Tensor temperatures, Tensor token_ids) -> Tensor"
    );
    library.impl("draw_by_noise", c10::DispatchKey::CPU, draw_by_noise);
}
