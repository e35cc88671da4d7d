// All passes of an EAGLE-3 draft of one Llama layer in one call, see fused_eagle3.py.
//
// Letters: N tokens that the target just computed, B sequences, K passes, H the width of a state.
//
// Products are small_batch_gemm.cpp's, keys are written and attended to as attention.cpp does; what is between them is
// here, rounded to bfloat16 where vLLM's operators round.
//
// Few sequences are drafted by one thread: weights of some MB are read nearly as fast as by two, and nothing waits for
// a core that another process has, at the end of each of some 20 products and attentions.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <omp.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr int64_t ALONE = 4;         // sequences up to which one thread drafts
constexpr int64_t NOT_WRITTEN = -1;  // vLLM's slot of a key that is not kept
constexpr int64_t NOT_DRAFTED = -1;  // in a token's place

using MaybeTensor = std::optional<at::Tensor>;
using BFloat16 = at::BFloat16;

struct Product {
    at::Tensor packed, scales, handler;
    int64_t num_outputs;
};

struct Draft {
    Product combine, qkv, out, gate_up, down, head;
    at::Tensor embeddings, embedding_gain, state_gain, middle_gain, last_gain, rotation;
    at::Tensor token_ids;  // [V] of the target, of the draft's vocabulary
    int64_t layer, num_heads, num_kv_heads, head_size, window, block_size, max_length;
    double epsilon;
    std::string isa, dtype;
    bool split;
};

std::vector<Draft> drafts;  // by their numbers

template <typename Operator>
auto find(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Operator>();
}

at::Tensor multiply(const Product& product, const at::Tensor& x) {
    using Multiply =
        at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, bool, bool);
    static const auto gemm = find<Multiply>("redraft::small_batch_gemm");
    return gemm.call(x, product.packed, product.scales, product.handler, product.num_outputs, false, true);
}

// Write a row's norm [H], rounded before the gain and after it.
void normalise(const float* row, const BFloat16* gain, BFloat16* to, int64_t width, double epsilon) {
    double sum = 0;
    for (int64_t at = 0; at < width; ++at) sum += row[at] * row[at];
    const auto scale = static_cast<float>(1 / std::sqrt(sum / width + epsilon));
    for (int64_t at = 0; at < width; ++at)
        to[at] = static_cast<float>(static_cast<BFloat16>(row[at] * scale)) * static_cast<float>(gain[at]);
}

// Return [R, 2H], the norms of embeddings and of states [R, H].
at::Tensor joined(const Draft& draft, const at::Tensor& token_ids, const at::Tensor& states) {
    const int64_t num = states.size(0), width = states.size(1);
    at::Tensor inputs = at::empty({num, 2 * width}, states.options());
    std::vector<float> row(width);
    const auto write = [&](const BFloat16* from, const at::Tensor& gain, BFloat16* to) {
        for (int64_t at = 0; at < width; ++at) row[at] = from[at];
        normalise(row.data(), gain.const_data_ptr<BFloat16>(), to, width, draft.epsilon);
    };
    const int64_t* ids = token_ids.const_data_ptr<int64_t>();
    const BFloat16* embeddings = draft.embeddings.const_data_ptr<BFloat16>();
    for (int64_t at = 0; at < num; ++at) {
        BFloat16* to = inputs.mutable_data_ptr<BFloat16>() + at * 2 * width;
        write(embeddings + ids[at] * width, draft.embedding_gain, to);
        write(states.const_data_ptr<BFloat16>() + at * width, draft.state_gain, to + width);
    }
    return inputs;
}

// Return the norms [R, H] of residuals to which outputs [R, H] are added in place.
at::Tensor add_and_normalise(const Draft& draft, at::Tensor& residuals, const at::Tensor& outputs, const at::Tensor& gain) {
    const int64_t num = outputs.size(0), width = outputs.size(1);
    at::Tensor normed = at::empty_like(outputs);
    std::vector<float> row(width);
    for (int64_t at = 0; at < num; ++at) {
        BFloat16* residual = residuals.mutable_data_ptr<BFloat16>() + at * width;
        const BFloat16* output = outputs.const_data_ptr<BFloat16>() + at * width;
        for (int64_t of = 0; of < width; ++of) {
            row[of] = static_cast<float>(output[of]) + static_cast<float>(residual[of]);
            residual[of] = row[of];
        }
        BFloat16* to = normed.mutable_data_ptr<BFloat16>() + at * width;
        normalise(row.data(), gain.const_data_ptr<BFloat16>(), to, width, draft.epsilon);
    }
    return normed;
}

// Rotate queries and keys [R, heads, head_size] in place, the first heads of rows [R, heads of queries, keys, values].
void rotate(const Draft& draft, at::Tensor& qkv, const at::Tensor& positions) {
    const int64_t half = draft.head_size / 2, num_heads = draft.num_heads + draft.num_kv_heads;
    for (int64_t at = 0; at < qkv.size(0); ++at) {
        const BFloat16* cosines =
            draft.rotation.const_data_ptr<BFloat16>() + positions.const_data_ptr<int64_t>()[at] * draft.head_size;
        const BFloat16* sines = cosines + half;
        for (int64_t head = 0; head < num_heads; ++head) {
            BFloat16* x = qkv.mutable_data_ptr<BFloat16>() + at * qkv.size(1) + head * draft.head_size;
            for (int64_t of = 0; of < half; ++of) {
                const float first = x[of], second = x[of + half], cosine = cosines[of], sine = sines[of];
                x[of] = first * cosine - second * sine;
                x[of + half] = second * cosine + first * sine;
            }
        }
    }
}

// Tell the draft's layer that the last of each sequence's tokens attend to all before them, and whose keys are written.
void begin(
    const Draft& draft, const at::Tensor& borders, const at::Tensor& lengths, const at::Tensor& blocks,
    const at::Tensor& slots
) {
    using Plan = at::Tensor(
        int64_t, int64_t, int64_t, int64_t, const at::Tensor&, at::ScalarType, const at::Tensor&, bool, int64_t,
        const std::string&, bool, const MaybeTensor&, const std::string&
    );
    using Begin = void(
        at::IntArrayRef, int64_t, bool, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const MaybeTensor&, const MaybeTensor&
    );
    static const auto plan = find<Plan>("_C::get_scheduler_metadata");
    static const auto begin_step = find<Begin>("redraft::begin_step");
    const int64_t num = lengths.size(0);
    const at::Tensor planned = plan.call(
        num, draft.num_heads, draft.num_kv_heads, draft.head_size, lengths, at::kBFloat16, borders, true, draft.window,
        draft.isa, draft.split, std::nullopt, draft.dtype
    );
    begin_step.call({draft.layer}, num, true, borders, lengths, blocks, planned, slots, std::nullopt);
}

// Return what the queries [B] attend to [B, heads * head_size], after keys and values [R] were written.
at::Tensor attend(const Draft& draft, const at::Tensor& queries, const at::Tensor& qkv) {
    using Attend = void(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor&, int64_t);
    static const auto operation = find<Attend>("redraft::attend");
    const int64_t size = draft.head_size, width = draft.num_heads * size, of_keys = draft.num_kv_heads * size;
    const auto heads = [&](const at::Tensor& rows, int64_t from, int64_t num) {
        return rows.narrow(1, from, num * size).view({rows.size(0), num, size});
    };
    at::Tensor outputs = at::empty({queries.size(0), draft.num_heads, size}, queries.options());
    operation.call(
        heads(queries, 0, draft.num_heads), heads(qkv, width, draft.num_kv_heads),
        heads(qkv, width + of_keys, draft.num_kv_heads), outputs, draft.layer
    );
    return outputs.view({-1, width});
}

// Return the chosen tokens [B] of the draft's vocabulary: the likeliest, or drawn by the noise that the target will have.
at::Tensor choose(
    const Draft& draft, const at::Tensor& logits, int64_t pass, const MaybeTensor& seeds, const MaybeTensor& positions,
    const MaybeTensor& temperatures
) {
    if (!seeds) return logits.argmax(1);
    using Draw =
        at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&);
    static const auto draw = find<Draw>("redraft::draw_by_noise");
    return draw.call(logits, *seeds, positions->add(pass), *temperatures, draft.token_ids);
}

// Write the next places [B] of sequences; none is written and attended to beyond the longest that there may be.
void advance(const Draft& draft, at::Tensor& positions, at::Tensor& lengths, const at::Tensor& blocks, at::Tensor& slots) {
    int64_t* position = positions.mutable_data_ptr<int64_t>();
    int64_t* slot = slots.mutable_data_ptr<int64_t>();
    int32_t* length = lengths.mutable_data_ptr<int32_t>();
    for (int64_t at = 0; at < positions.size(0); ++at) {
        const bool fits = position[at] + 1 < draft.max_length;
        position[at] = fits ? position[at] + 1 : 0;
        length[at] = fits ? length[at] + 1 : 1;
        const int32_t* block = blocks.const_data_ptr<int32_t>() + at * blocks.stride(0);
        const int64_t place = position[at] % draft.block_size;
        slot[at] = fits ? block[position[at] / draft.block_size] * draft.block_size + place : NOT_WRITTEN;
    }
}

// How many threads there are to the end of a block.
struct Threads {
    const int before = omp_get_max_threads();
    explicit Threads(int num) { omp_set_num_threads(num); }
    ~Threads() { omp_set_num_threads(before); }
};

std::tuple<at::Tensor, at::Tensor> propose(
    int64_t number, int64_t num_passes, const at::Tensor& token_ids, const at::Tensor& next_token_ids,
    const at::Tensor& target_positions, const at::Tensor& target_states, const at::Tensor& borders,
    const at::Tensor& target_lengths, const at::Tensor& blocks, const at::Tensor& target_slots,
    const MaybeTensor& seeds, const MaybeTensor& first_positions, const MaybeTensor& temperatures, const MaybeTensor& least
) {
    const Draft& draft = drafts.at(number);
    const int64_t num_tokens = token_ids.size(0), num = next_token_ids.size(0);
    const Threads threads(num > ALONE ? omp_get_max_threads() : 1);
    const at::Tensor lasts = borders.narrow(0, 1, num).to(at::kLong).sub_(1);
    at::Tensor ids = at::empty({num_tokens}, lasts.options());
    ids.narrow(0, 0, num_tokens - 1).copy_(token_ids.narrow(0, 1, num_tokens - 1));
    ids.index_copy_(0, lasts, next_token_ids.to(at::kLong));
    at::Tensor states = multiply(draft.combine, target_states);
    at::Tensor qkv = multiply(draft.qkv, joined(draft, ids, states));
    rotate(draft, qkv, target_positions);
    const at::Tensor each = at::arange(num + 1, borders.options());  // borders of one token a sequence
    at::Tensor lengths = target_lengths.clone(), slots = target_slots;
    begin(draft, each, lengths, blocks, slots);
    states = states.index_select(0, lasts);
    at::Tensor attended = attend(draft, qkv.index_select(0, lasts), qkv);
    at::Tensor tokens = at::full({num, num_passes}, NOT_DRAFTED, lasts.options()), positions;
    at::Tensor chances = at::ones({num, num_passes}, at::kFloat), chance = at::ones({num}, at::kFloat);
    at::Tensor goes_on = at::ones({num}, at::kBool), scales = at::ones({num, 1}, at::kFloat);  // of logits, by rows
    if (temperatures) scales = at::where(*temperatures > 0, *temperatures, 1.0).to(at::kFloat).unsqueeze(1);
    if (num_passes == 0) return {tokens, chances};
    for (int64_t pass = 0;; ++pass) {
        at::Tensor hidden = add_and_normalise(draft, states, multiply(draft.out, attended), draft.middle_gain);
        at::Tensor gates = multiply(draft.gate_up, hidden);
        const int64_t width = gates.size(1) / 2;
        hidden = at::silu(gates.narrow(1, 0, width)).mul_(gates.narrow(1, width, width));
        hidden = add_and_normalise(draft, states, multiply(draft.down, hidden), draft.last_gain);
        const at::Tensor logits =  // in float, of which the largest is found three times as fast
            multiply(draft.head, hidden).narrow(1, 0, draft.token_ids.size(0)).to(at::kFloat);
        const at::Tensor chosen = choose(draft, logits, pass, seeds, first_positions, temperatures);
        ids = draft.token_ids.index_select(0, chosen);
        tokens.select(1, pass).copy_(at::where(goes_on, ids, NOT_DRAFTED));
        if (least) {
            const at::Tensor law = at::softmax(logits / scales, 1);
            chance.mul_(law.gather(1, chosen.unsqueeze(1)).squeeze(1));
            chances.select(1, pass).copy_(chance);
            goes_on.logical_and_(chance.ge(*least));
        }
        if (pass + 1 == num_passes || (least && !goes_on.any().item<bool>())) return {tokens, chances};
        if (pass == 0) {
            positions = target_positions.index_select(0, lasts);
            slots = at::empty_like(positions);
        }
        advance(draft, positions, lengths, blocks, slots);
        qkv = multiply(draft.qkv, joined(draft, ids, states));
        rotate(draft, qkv, positions);
        begin(draft, each, lengths, blocks, slots);
        attended = attend(draft, qkv, qkv);
    }
}

// Products, parts and sizes come in the order of a draft's members.
void set_draft(
    int64_t number, at::TensorList products, at::IntArrayRef num_outputs, at::TensorList parts, at::IntArrayRef sizes,
    double epsilon, std::string isa, std::string dtype, bool split
) {
    const auto product = [&](int64_t at) {
        return Product{products.at(3 * at), products.at(3 * at + 1), products.at(3 * at + 2), num_outputs[at]};
    };
    if (number >= static_cast<int64_t>(drafts.size())) drafts.resize(number + 1);
    drafts[number] = {product(0), product(1), product(2), product(3), product(4), product(5), parts.at(0), parts.at(1),
                      parts.at(2), parts.at(3), parts.at(4), parts.at(5), parts.at(6), sizes[0], sizes[1], sizes[2],
                      sizes[3], sizes[4], sizes[5], sizes[6], epsilon, isa, dtype, split};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(redraft, library) {
    library.def(
        "set_draft(int number, Tensor[] products, int[] num_outputs, Tensor[] parts, int[] sizes, float epsilon, "
        "str isa, str dtype, bool split) -> ()",
        set_draft
    );
    library.def(
        "propose(int draft, int num_passes, Tensor token_ids, Tensor next_token_ids, Tensor positions, Tensor states, "
        "Tensor borders, Tensor lengths, Tensor blocks, Tensor slots, Tensor? seeds, Tensor? first_positions, "
        "Tensor? temperatures, Tensor? least) -> (Tensor, Tensor)"
    );
    library.impl("propose", c10::DispatchKey::CPU, propose);
}
