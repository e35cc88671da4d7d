// Keeps a row's likeliest tokens, and draws one by noise that is a function of a request's seed, a position and a token;
// see sampling.py.
//
// Letters: R rows, V tokens.
//
// What top-k and top-p keep is found without sorting a row: tokens are counted by how far they are below the largest
// logit, and only those at the distance at which the limit is reached are sorted.
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
#include <optional>
#include <vector>

namespace {

constexpr int DISTANCES = 1024;  // that are told apart, and all beyond as the last
constexpr float FINENESS = 32;   // distances in a nat

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

// A row's tokens by their distances below its largest logit.
struct Distances {
    std::vector<int16_t> of;

    Distances(const float* logits, int64_t num) : of(num) {
        const float most = logits[likeliest(logits, num)];
        for (int64_t at = 0; at < num; ++at) {
            const float distance = (most - logits[at]) * FINENESS;
            of[at] = static_cast<int16_t>(distance < DISTANCES - 1 ? distance : DISTANCES - 1);  // what is no number too
        }
    }

    // Return the tokens at a distance.
    std::vector<int64_t> at_distance(int16_t distance) const {
        std::vector<int64_t> found;
        for (size_t at = 0; at < of.size(); ++at) {
            if (of[at] == distance) found.push_back(static_cast<int64_t>(at));
        }
        return found;
    }

    void drop_beyond(int16_t distance, float* logits) const {
        for (size_t at = 0; at < of.size(); ++at) {
            logits[at] = of[at] > distance ? -std::numeric_limits<float>::infinity() : logits[at];
        }
    }
};

// Keep the k likeliest tokens, and all that are as likely as the last of them.
void keep_most(float* logits, int64_t num, int64_t k) {
    if (k >= num) return;
    const Distances distances(logits, num);
    std::vector<int64_t> counts(DISTANCES);
    for (const int16_t distance : distances.of) ++counts[distance];
    int16_t last = 0;
    for (; counts[last] < k; ++last) k -= counts[last];
    const std::vector<int64_t> tokens = distances.at_distance(last);
    std::vector<float> values(tokens.size());
    std::ranges::transform(tokens, values.begin(), [&](int64_t token) { return logits[token]; });
    std::ranges::nth_element(values, values.begin() + k - 1, std::greater());
    const float least = values[k - 1];
    distances.drop_beyond(last, logits);
    for (const int64_t token : tokens) {
        if (logits[token] < least) logits[token] = -std::numeric_limits<float>::infinity();
    }
}

// Keep each token that has less than p above it. Of equally likely ones the first is above the others.
void keep_mass(float* logits, const float* probs, int64_t num, double p) {
    if (p >= 1) return;
    const Distances distances(logits, num);
    std::vector<double> masses(DISTANCES);
    for (int64_t at = 0; at < num; ++at) masses[distances.of[at]] += probs[at];
    double above = 0;
    int16_t last = 0;
    for (; last < DISTANCES - 1 && above + masses[last] < p; ++last) above += masses[last];
    std::vector<int64_t> tokens = distances.at_distance(last);
    std::ranges::sort(tokens, [&](int64_t one, int64_t other) {
        return logits[one] != logits[other] ? logits[one] > logits[other] : one < other;
    });
    distances.drop_beyond(last, logits);
    for (const int64_t token : tokens) {
        if (above >= p) logits[token] = -std::numeric_limits<float>::infinity();
        above += probs[token];
    }
}

// Apply top-k and then top-p to logits [R, V] in place.
void keep_likeliest(
    const at::Tensor& logits, const std::optional<at::Tensor>& k, const std::optional<at::Tensor>& p
) {
    const int64_t num_rows = logits.size(0), num = logits.size(1);
    float* rows = logits.mutable_data_ptr<float>();
    const auto each = [&](const auto& keep) {
        at::parallel_for(0, num_rows, 1, [&](int64_t from, int64_t to) {
            for (int64_t at = from; at < to; ++at) keep(at, rows + at * num);
        });
    };
    if (k) {
        each([&](int64_t at, float* row) { keep_most(row, num, k->const_data_ptr<int64_t>()[at]); });
    }
    if (p) {
        const at::Tensor probs = at::softmax(logits, -1);
        each([&](int64_t at, float* row) {
            keep_mass(row, probs.const_data_ptr<float>() + at * num, num, p->const_data_ptr<float>()[at]);
        });
    }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(redraft, library) {
    library.def(
        "draw_by_noise(Tensor logits, Tensor seeds, Tensor positions, Tensor temperatures, Tensor token_ids) -> Tensor"
    );
    library.def("keep_likeliest(Tensor(a!) logits, Tensor? k, Tensor? p) -> ()");
    library.impl("keep_likeliest", c10::DispatchKey::CPU, keep_likeliest);
    library.impl("draw_by_noise", c10::DispatchKey::CPU, draw_by_noise);
}
