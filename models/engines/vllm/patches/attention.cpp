// Attention layers write a step's keys and values and attend in one call, without Python; see attention.py.
//
// What they do is vLLM's: two operators of its own, called by the dispatcher with what a step told once for all layers.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace {

using MaybeTensor = std::optional<at::Tensor>;

struct Step {
    int64_t num_tokens;
    bool causal;
    at::Tensor borders, lengths, blocks, plan;
    MaybeTensor slots, dynamic_causal;
};

struct Layer {
    at::Tensor keys, values;
    std::string isa, dtype;
    double scale, softcap, key_scale, value_scale;
    int64_t window;
    std::shared_ptr<const Step> step;  // none where the step tells nothing of the layer
};

std::vector<Layer> layers;  // of the models in this process, whose forward passes run one after the other
bool warms_up = true;  // the engine, by passes that attend to nothing

Layer& layer_at(int64_t number) {
    TORCH_CHECK_VALUE(number >= 0, "layer ", number, ", wanted 0 or more");
    if (number >= static_cast<int64_t>(layers.size())) layers.resize(number + 1);
    return layers[number];
}

void set_layer(
    int64_t number, const at::Tensor& keys, const at::Tensor& values, std::string isa, std::string dtype, double scale,
    double softcap, double key_scale, double value_scale, int64_t window
) {
    layer_at(number) = {keys, values, isa, dtype, scale, softcap, key_scale, value_scale, window, nullptr};
}

void begin_step(
    at::IntArrayRef numbers, int64_t num_tokens, bool causal, const at::Tensor& borders, const at::Tensor& lengths,
    const at::Tensor& blocks, const at::Tensor& plan, const MaybeTensor& slots, const MaybeTensor& dynamic_causal
) {
    const auto step =
        std::make_shared<const Step>(Step{num_tokens, causal, borders, lengths, blocks, plan, slots, dynamic_causal});
    for (const int64_t number : numbers) layer_at(number).step = step;
}

void end_step(bool to_warm_up) {
    for (Layer& layer : layers) layer.step = nullptr;
    warms_up = to_warm_up;
}

using Write = void(
    const at::Tensor&, const at::Tensor&, at::Tensor&, at::Tensor&, const at::Tensor&, const std::string&, double,
    double, const std::string&
);
using Attend = void(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor&, const at::Tensor&, const at::Tensor&, double,
    bool, const MaybeTensor&, int64_t, const at::Tensor&, double, const at::Tensor&, const MaybeTensor&,
    const MaybeTensor&, double, double, const std::string&
);

template <typename Operator>
auto vllm_operator(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Operator>();
}

void attend(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor& output, int64_t number
) {
    Layer& layer = layer_at(number);
    if (!layer.step) {
        TORCH_CHECK_VALUE(warms_up, "layer ", number, " attends in a step that tells nothing of it");
        return;
    }
    static const auto write = vllm_operator<Write>("_C::cpu_attn_reshape_and_cache");
    static const auto attention = vllm_operator<Attend>("_C::cpu_attention_with_kv_cache");
    const Step& step = *layer.step;
    if (step.slots)
        write.call(
            key, value, layer.keys, layer.values, *step.slots, layer.isa, layer.key_scale, layer.value_scale,
            layer.dtype
        );
    at::Tensor outputs = output.narrow(0, 0, step.num_tokens);
    attention.call(
        query.narrow(0, 0, step.num_tokens), layer.keys, layer.values, outputs, step.borders, step.lengths, layer.scale,
        step.causal, std::nullopt, layer.window, step.blocks, layer.softcap, step.plan, std::nullopt,
        step.dynamic_causal, layer.key_scale, layer.value_scale, layer.dtype
    );
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(redraft, library) {
    library.def("attend(Tensor query, Tensor key, Tensor value, Tensor(a!) output, int layer) -> ()");
    library.impl("attend", c10::DispatchKey::CPU, attend);
    library.def(
        "set_layer(int layer, Tensor keys, Tensor values, str isa, str dtype, float scale, float softcap, "
        "float key_scale, float value_scale, int window) -> ()",
        set_layer
    );
    library.def(
        "begin_step(int[] layers, int num_tokens, bool causal, Tensor borders, Tensor lengths, Tensor blocks, "
        "Tensor plan, Tensor? slots, Tensor? dynamic_causal) -> ()",
        begin_step
    );
    library.def("end_step(bool to_warm_up) -> ()", end_step);
}
